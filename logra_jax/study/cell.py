"""One cell of a study in a process of its own, so that its memory is its own.

    python -m logra_jax.study.cell CELL_DIR

`logra compare` makes the directory with ``config.yaml`` and ``request.json`` and reads
what this leaves: ``phase``, what is being done; ``result.json`` of a plan or a
measurement, and ``machine.json``; ``run/``, the run directory of a training; or
``error.json``, if it failed.
"""

import dataclasses
import fcntl
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logra_jax.rollout.sglang_start import tie_to_parent
from logra_jax.training.config import load_config
from logra_jax.training.paths import write_aside
from logra_jax.training.schema import Config

CONFIG, REQUEST, RESULT = "config.yaml", "request.json", "result.json"
ERROR, PHASE, RUN = "error.json", "phase", "run"

_FAILED = 1


def main(cell_dir: Path) -> int:
    """Do the cell; its exit status is that of the run, or 1 for an error.

    One at a time: where no kernel ends it with its parent, the process of a study that
    was killed may still be at work here, and is waited for.
    """
    tie_to_parent()
    with (cell_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _do(cell_dir)


def _do(cell_dir: Path) -> int:
    for left in (ERROR, PHASE):
        (cell_dir / left).unlink(missing_ok=True)

    def on_phase(name: str) -> None:
        write_aside(cell_dir / PHASE, name)

    on_phase("starting")
    try:
        config = load_config(cell_dir / CONFIG)
        request = json.loads((cell_dir / REQUEST).read_text())
        do = _KINDS[request["kind"]]
        return do(cell_dir, config, request["arguments"], on_phase)
    except Exception as error:
        traceback.print_exc()
        message = " ".join(str(error).split())
        found = {"type": type(error).__name__, "message": message}
        write_aside(cell_dir / ERROR, json.dumps(found))
        return _FAILED


def _train(cell_dir: Path, config: Config, arguments: dict, on_phase: Callable) -> int:
    from logra_jax.training.loop import train
    from logra_jax.training.paths import CONFIG_FILE

    del arguments
    run_dir = cell_dir / RUN
    begun = (run_dir / CONFIG_FILE).exists()
    resume = str(run_dir) if begun else None
    config = dataclasses.replace(config, run_dir=str(run_dir), resume=resume)
    return train(config, on_phase=on_phase)


def _plan(cell_dir: Path, config: Config, arguments: dict, on_phase: Callable) -> int:
    from logra_jax.study.plan import plan_own

    on_phase("compiling")
    _write_result(cell_dir, plan_own(config, **arguments))
    return 0


def _reconstruction(
    cell_dir: Path, config: Config, arguments: dict, on_phase: Callable
) -> int:
    # As in `logra spectrum`: before JAX loads LAPACK.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from logra_jax.study.heat_map import measure_heat_map

    _write_result(cell_dir, measure_heat_map(config, on_phase=on_phase, **arguments))
    return 0


def _write_result(cell_dir: Path, result: dict[str, Any]) -> None:
    from logra_jax.training.machine import write_machine

    write_machine(cell_dir)
    write_aside(cell_dir / RESULT, json.dumps(result))


_KINDS: dict[str, Callable[[Path, Config, dict, Callable], int]] = {
    "train": _train,
    "plan": _plan,
    "reconstruction": _reconstruction,
}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

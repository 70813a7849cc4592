"""`logra compare`: does it pay for me? A study's runs, one after the other, resumable.

    STUDY_DIR/study.yaml            what was asked for
    STUDY_DIR/cells/<cell>/         each in a process of its own; see `study.cell`
    STUDY_DIR/results.jsonl         one line a cell that is done
    STUDY_DIR/report.md, *.png      what it came to, so far

A cell that is done is kept, one that was under way goes on from its newest checkpoint.
One that fails is recorded with its phase and its message, and the study goes on.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from logra_jax.rollout.sglang_start import PARENT
from logra_jax.study import cell as child
from logra_jax.study.compare_display import CompareDisplay
from logra_jax.study.matrix import Cell, Study, load_study
from logra_jax.training.config import flatten, load_config, to_yaml
from logra_jax.training.interrupt import Interrupt
from logra_jax.training.journal import last_step
from logra_jax.training.paths import write_aside

CELLS, RESULTS, OUTCOME = "cells", "results.jsonl", "outcome.json"

_STOPPED_BY_ALARM = 3
_POLL = 0.25  # seconds
_SOME_FAILED = 1


def compare_command(
    path: str,
    overrides: Sequence[str],
    *,
    out: str | None = None,
    retry_failed: bool = False,
    keep_models: bool = False,
) -> int:
    """Run what is not done yet, report, and return the exit code.

    Args:
        path: of the study.
        overrides: ``key=value``: of the study, or of every run's config.
        out: the study's directory; None is ``studies/<name>``.
        retry_failed: do failed cells again.
        keep_models: keep the checkpoints and the exported model of each run.

    Returns:
        0, 1 where a cell has failed, or 128 + the signal's number.

    Raises:
        ValueError: bad input, in one sentence.
    """
    from logra_jax.study.compare_report import write_report

    study = load_study(path, overrides)
    study_dir = Path(out) if out else Path("studies") / study.name
    with _alone(study_dir):
        _check_same(study, study_dir)
        if retry_failed:
            _forget_failed(study, study_dir)
        write_aside(study_dir / "study.yaml", _describe(path, overrides))
        with CompareDisplay(len(study.cells)) as display:
            known: dict[str, dict[str, Any]] = {}
            number = _run_all(study, study_dir, display, keep_models, known)
            records = write_results(study, study_dir, known)
            with display.doing("writing the report"):
                write_report(study, study_dir, records)
        failed = [r for r in records if r["status"] == "failed"]
        display.conclude(study_dir, records, number)
    return 128 + number if number else _SOME_FAILED if failed else 0


def cell_dir_of(study_dir: Path, cell: Cell) -> Path:
    """Where a cell is done."""
    return study_dir / CELLS / cell.name


def read_outcome(cell_dir: Path) -> dict[str, Any] | None:
    """How a cell ended; None for one that has not."""
    try:
        return json.loads((cell_dir / OUTCOME).read_text())
    # A machine that lost its power may have left an empty file.
    except (FileNotFoundError, ValueError):
        return None


def write_results(
    study: Study, study_dir: Path, known: dict[str, dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """`results.jsonl` anew: the records of the cells that are done, in their order.

    Args:
        study: whose results they are.
        study_dir: its directory.
        known: records by the names of their cells; those of others are made and added.
    """
    from logra_jax.study.summary import summarise

    known = {} if known is None else known
    for cell in study.cells:
        cell_dir = cell_dir_of(study_dir, cell)
        outcome = None if cell.name in known else read_outcome(cell_dir)
        if outcome is not None:
            about = {"cell": cell.name, "group": cell.group, "kind": cell.kind}
            about |= {"labels": dict(cell.labels), "seed": cell.seed}
            about |= {"settings": dict(cell.settings)}
            known[cell.name] = about | outcome | summarise(cell, cell_dir)
    records = [known[cell.name] for cell in study.cells if cell.name in known]
    lines = "".join(json.dumps(_finite(record)) + "\n" for record in records)
    write_aside(study_dir / RESULTS, lines)
    return records


def _finite(value: Any) -> Any:
    """With null for what is no number, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run_all(
    study: Study,
    study_dir: Path,
    display: CompareDisplay,
    keep_models: bool,
    known: dict[str, dict[str, Any]],
) -> int:
    """Do the cells that are not done; 0, or the number of the signal that came."""
    with Interrupt(display.stopping) as interrupt:
        for cell in study.cells:
            cell_dir = cell_dir_of(study_dir, cell)
            outcome = read_outcome(cell_dir)
            if outcome is None:
                outcome = _run(study, cell, cell_dir, display, interrupt)
                if interrupt:
                    break
                drops = outcome["status"] != "failed" and not keep_models
                outcome["drops_models"] = drops
                write_aside(cell_dir / OUTCOME, json.dumps(outcome))
                write_results(study, study_dir, known)
            # After the outcome, and again at each start: a kill on the way must leave
            # no half of a checkpoint from which the cell would be gone on with.
            if outcome.get("drops_models"):
                _drop_models(cell_dir)
            display.done(cell, outcome)
            if interrupt:
                break
    return interrupt.number


def _run(
    study: Study,
    cell: Cell,
    cell_dir: Path,
    display: CompareDisplay,
    interrupt: Interrupt,
) -> dict[str, Any]:
    """Do one cell; how it ended."""
    cell_dir.mkdir(parents=True, exist_ok=True)
    request = {"kind": cell.kind, "arguments": _arguments(study, cell)}
    write_aside(cell_dir / child.CONFIG, to_yaml(cell.config))
    write_aside(cell_dir / child.REQUEST, json.dumps(request))
    began, is_told = time.monotonic(), False
    with (cell_dir / "log.txt").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", child.__name__, str(cell_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C comes to us, and we pass it on, once
        )
        try:
            while process.poll() is None:
                display.watch(cell, _phase(cell_dir), _steps_done(cell_dir))
                if interrupt and not is_told:
                    process.send_signal(signal.SIGTERM)
                    is_told = True
                time.sleep(_POLL)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return {
        **_outcome(cell_dir, process.returncode),
        "wall_seconds": time.monotonic() - began,
    }


def _arguments(study: Study, cell: Cell) -> dict[str, Any]:
    """What a cell is asked beside its config."""
    given = {"plan": study.plan, "reconstruction": study.reconstruction}
    return dict(given.get(cell.kind) or {})


def _outcome(cell_dir: Path, code: int) -> dict[str, Any]:
    """Status of a cell whose process has ended, and why where it failed."""
    if code in (0, _STOPPED_BY_ALARM):
        return {"status": "stopped by an alarm" if code else "finished"}
    failed = {"status": "failed", "phase": _phase(cell_dir)}
    path = cell_dir / child.ERROR
    if path.exists():
        error = json.loads(path.read_text())
        return failed | error
    if code == -signal.SIGKILL:
        message = "killed by the system, most likely for want of memory"
    elif code < 0:
        message = f"ended by {signal.Signals(-code).name}"
    else:
        message = f"ended with status {code}"
    return failed | {"type": "ProcessEnded", "message": message}


def _phase(cell_dir: Path) -> str:
    path = cell_dir / child.PHASE
    return path.read_text() if path.exists() else "starting"


def _steps_done(cell_dir: Path) -> int:
    return last_step(cell_dir / child.RUN) or 0


def _drop_models(cell_dir: Path) -> None:
    """Free the space of what a study does not need."""
    for name in ("checkpoints", "model"):
        shutil.rmtree(cell_dir / child.RUN / name, ignore_errors=True)


def _forget_failed(study: Study, study_dir: Path) -> None:
    for cell in study.cells:
        cell_dir = cell_dir_of(study_dir, cell)
        if (read_outcome(cell_dir) or {}).get("status") == "failed":
            # At once: of a half that a kill left, the cell would be gone on with.
            aside = cell_dir.with_name(f".{cell_dir.name}.old")
            shutil.rmtree(aside, ignore_errors=True)
            cell_dir.rename(aside)
            shutil.rmtree(aside)


def _check_same(study: Study, study_dir: Path) -> None:
    """Refuse a directory in which one of the cells was done with other values."""
    for cell in study.cells:
        cell_dir = cell_dir_of(study_dir, cell)
        stored, request = cell_dir / child.CONFIG, cell_dir / child.REQUEST
        if not stored.exists() or not request.exists():
            continue
        arguments = json.loads(request.read_text())["arguments"]
        before = flatten({cell.kind: arguments} if arguments else {})
        before |= flatten(dataclasses.asdict(load_config(stored)))
        now = flatten({cell.kind: given} if (given := _arguments(study, cell)) else {})
        now |= flatten(dataclasses.asdict(cell.config))
        keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
        if keys:
            key, directory = keys[0], stored.parent
            raise ValueError(
                f"`{key}` must be what it was when {str(directory)!r} was begun "
                f"({before.get(key)!r}), got {now.get(key)!r}; choose another --out, "
                "or delete that directory."
            )


def _describe(path: str, overrides: Sequence[str]) -> str:
    command = " ".join(["logra compare", path, *overrides])
    return f"# {command}\n{Path(path).read_text(encoding='utf-8')}"


@contextlib.contextmanager
def _alone(study_dir: Path) -> Iterator[None]:
    """Hold the directory; the system lets go of it with this process.

    Raises:
        ValueError: another process holds it.
    """
    study_dir.mkdir(parents=True, exist_ok=True)
    with (study_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"`--out` must not be in use, got {str(study_dir)!r}; another `logra "
                "compare` is at work there: wait for it, or choose another directory."
            ) from None
        yield

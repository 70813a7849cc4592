"""`logra bench overlap`: sampling the next batch during an update, end to end.

A config is trained twice from the same weights, on the same servers and questions: with
``rollout.staleness=1``, where the servers sample the next batch while this one is
trained on, and with 0, where trainer and servers wait for each other.

    synchronous    sample 1 | update 1 | send | sample 2 | update 2 | send | ...
    one ahead      sample 1 | update 1 | send | update 2 | send | ...
                            | sample 2 ...    | sample 3 ...

What it can save is the shorter of the two at most. Where trainer and servers share
cores it is less: each then takes longer while the other works, and what an update does
to running requests (``rollout.pause``) is paid by the batch that is sampled.

The first two updates of a run, which compile, are left out, and so is the last, during
which nothing is sampled. The run that is ahead comes first: what the second one finds
warm counts against it.
"""

import contextlib
import dataclasses
import gc
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from logra_jax.study import serving
from logra_jax.study.serving import Result
from logra_jax.study.tables import make_table
from logra_jax.training.display import Display
from logra_jax.training.journal import read_metrics
from logra_jax.training.loop import train
from logra_jax.training.policy import model_directory
from logra_jax.training.schema import Config

STEPS = 6
_COMPILING, _LAST = 2, 1  # updates that are left out
_MODES = {"ahead": 1, "synchronous": 0}  # in their order, each with its staleness
_PARTS = {  # of a step: the journal's `seconds/` that go into each, and its label
    "rollout_seconds": (("rollout",), "wait for responses"),
    "step_seconds": (("step",), "update"),
    "sync_seconds": (("save", "sync"), "write and send it"),
    "rest_seconds": ((), "rewards and the rest"),
}
_KEPT = {"response_tokens": "length/mean"}
_KEPT |= {f"staleness_{name}": f"staleness/{name}" for name in ("mean", "max")}

Measured = dict[str, list[float]]  # of each step that counts: seconds, tokens, updates


def bench_overlap(config: Config, as_json: bool, *, steps: int = STEPS) -> int:
    """Train both ways, print what it took, and return the exit code.

    Args:
        config: what is trained, on the servers at ``rollout.urls``; where there are
            none, one is started as section ``serve`` says, and stopped. The servers'
            weights are changed and left so. ``rollout.share_dir`` is where the
            temporary run directories are made; null is the temporary directory.
        as_json: print one JSON object instead of a table.
        steps: updates of each run; the first two and the last do not count.

    Returns:
        0, or 1 where the server did not start.

    Raises:
        ValueError: too few ``steps``, a bad config, servers that are lost or not fit.
        KeyboardInterrupt: a run was told to stop.
    """
    least = _COMPILING + _LAST + 1
    if steps < least:
        raise ValueError(
            f"`--steps` must be at least {least}, got {steps}: the first {_COMPILING} "
            "and the last do not count."
        )
    return serving.run_bench(
        lambda: _bench(config, steps), _print_table, as_json=as_json
    )


def _bench(config: Config, steps: int) -> Result:
    from rich.console import Console

    rollout = config.rollout
    if rollout.share_dir is not None:
        Path(rollout.share_dir).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Standard output is for the result.
        with Display(total_steps=0, console=Console(stderr=True)) as display:
            urls = stack.enter_context(serving.server_urls(config, display))
        measured = {mode: _measure(config, urls, mode, steps) for mode in _MODES}
        with serving.connect(config, urls) as servers:
            described = serving.describe(servers)
    return {
        **described,
        "model": model_directory(config).name,
        "dtype": config.model.dtype,
        "rank": config.sketch.rank,
        "batch": config.train.batch,
        "max_new_tokens": rollout.max_new_tokens,
        "pause": rollout.pause,
        "steps": steps,
        **_summary(**measured),
    }


def _measure(config: Config, urls: list[str], mode: str, steps: int) -> Measured:
    """Train one way, in a run directory that is gone afterwards."""
    share = config.rollout.share_dir
    with tempfile.TemporaryDirectory(prefix="logra-bench-", dir=share) as scratch:
        run_dir = Path(scratch).resolve() / mode
        print(f"training {steps} steps: {mode}", file=sys.stderr)
        with contextlib.redirect_stdout(sys.stderr):
            status = train(_run_config(config, urls, mode, steps, run_dir))
        if status:
            raise KeyboardInterrupt  # the run took the signal, and ended in order
        gc.collect()  # the next run needs the memory
        return _steps(read_metrics(run_dir))


def _run_config(
    config: Config, urls: list[str], mode: str, steps: int, run_dir: Path
) -> Config:
    """The config of one run: nothing on the way but updates."""
    rollout = dataclasses.replace(
        config.rollout,
        engine="sglang",
        urls=urls,
        staleness=_MODES[mode],
        load_weights=True,  # the servers hold those of the run before
        share_dir=None,
    )
    training = dataclasses.replace(
        config.train,
        steps=steps,
        eval_every=steps,
        checkpoint_every=steps,
        keep_checkpoints=1,
        target_accuracy=None,
    )
    return dataclasses.replace(
        config,
        run_dir=str(run_dir),
        resume=None,
        rollout=rollout,
        train=training,
        eval=dataclasses.replace(config.eval, samples=1),
        monitor=dataclasses.replace(config.monitor, every=0),
    )


def _steps(rows: list[dict[str, Any]]) -> Measured:
    """What the steps that count took, from a journal's lines.

    A step lasts from one line to the next; evaluation and checkpoint come with the
    last line and after it.
    """
    measured: Measured = {name: [] for name in ("total_seconds", *_PARTS, *_KEPT)}
    for before, row in list(itertools.pairwise(rows))[_COMPILING:-_LAST]:
        total = row["seconds/total"] - before["seconds/total"]
        parts = {
            name: sum(row[f"seconds/{key}"] for key in keys)
            for name, (keys, _) in _PARTS.items()
        }
        parts["rest_seconds"] = total - sum(parts.values())
        kept = {name: row[key] for name, key in _KEPT.items()}
        for name, value in ({"total_seconds": total} | parts | kept).items():
            measured[name].append(value)
    return measured


def _summary(synchronous: Measured, ahead: Measured) -> Result:
    """All measurements, and of each way medians and sums; the ratios of its seconds.

    ``ratios``: how many times longer the synchronous way takes, by the median step
    and by the sum of all that count.
    """
    measured = {"synchronous": synchronous, "ahead": ahead}
    medians = {
        mode: {name: statistics.median(values) for name, values in lists.items()}
        for mode, lists in measured.items()
    }
    seconds = {mode: sum(lists["total_seconds"]) for mode, lists in measured.items()}
    one = {mode: values["total_seconds"] for mode, values in medians.items()}
    return {
        "counted": len(ahead["total_seconds"]),
        "measured": measured,
        "medians": medians,
        "seconds": seconds,
        "staleness": {
            mode: {
                "mean": statistics.fmean(lists["staleness_mean"]),
                "max": max(lists["staleness_max"]),
            }
            for mode, lists in measured.items()
        },
        "ratios": {
            "median": one["synchronous"] / one["ahead"],
            "sum": seconds["synchronous"] / seconds["ahead"],
        },
    }


def _print_table(result: Result) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        f"{result['model']} in {result['dtype']}, batches of {result['batch']} "
        f"responses of up to {result['max_new_tokens']} tokens\n"
        f"from {serving.setting(result)}",
        markup=False,
    )
    columns = ("", "synchronous", "one batch ahead", "ratio")
    console.print(make_table(columns, _rows(result)))
    console.print(
        f"Of {result['steps']} updates each way, without the first {_COMPILING} and "
        f"the last; parts are medians.\nAn update's pause of running requests: "
        f"{result['pause']}.",
        markup=False,
    )


def _rows(result: Result) -> list[tuple[str, str, str, str]]:
    """Of the table: what, synchronously, one batch ahead, and the ratio."""
    ratios = {name: f"{ratio:.2f}x" for name, ratio in result["ratios"].items()}

    def row(label: str, of: dict, form: str, ratio: str = "") -> tuple:
        return label, form.format(of["synchronous"]), form.format(of["ahead"]), ratio

    def median(name: str) -> dict[str, float]:
        return {mode: values[name] for mode, values in result["medians"].items()}

    total, staleness = median("total_seconds"), result["staleness"]
    return [
        row("a step, median", total, "{:.3f} s", ratios["median"]),
        *(row(f"  {_PARTS[n][1]}", median(n), "{:.3f} s") for n in _PARTS),
        row(f"{result['counted']} steps", result["seconds"], "{:.3f} s", ratios["sum"]),
        row("tokens in a response", median("response_tokens"), "{:.1f}"),
        row("staleness, mean", staleness, "{0[mean]:.2f}"),
        row("staleness, most", staleness, "{0[max]:.0f}"),
    ]

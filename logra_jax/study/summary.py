"""Runs in numbers: one run, and the runs of several seeds together.

What each statistic of memory is of:

- an update's peak: the most memory in use while it ran, sampled; rollout is not in it;
- ``mean``: of the peaks of all updates in which nothing was compiled;
- ``max_of_mean``: the highest point of the curve that is, at each update, the mean of
  the seeds' peaks;
- ``worst``: the highest of all updates of all seeds, compiling ones included;
- ``step``: the mean of the peaks of whole steps, with a rollout in the same process.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from logra_jax.study import cell as child
from logra_jax.study.matrix import Cell
from logra_jax.training.alarms import read_alarms
from logra_jax.training.journal import has_metrics, read_metrics, warm
from logra_jax.training.paths import MACHINE_FILE

Row = Mapping[str, Any]
Record = Mapping[str, Any]  # a line of `results.jsonl`
PARTS = ("program", "weights", "sketches", "optimizer", "reference")
REST = "activations"  # and temporaries: what the peak holds beside the parts

_HELD = "memory/weights_gib"

# Share of a run's updates that its first and last means are over.
_WINDOW = 0.2


class Spread(NamedTuple):
    """Of the values of several seeds."""

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread | None":
        """None where there are no finite values."""
        found = [v for v in values if v is not None and math.isfinite(v)]
        if not found:
            return None
        return cls(float(np.mean(found)), min(found), max(found), len(found))


class Group:
    """The runs of one combination of the axes, which differ in their seeds."""

    def __init__(self, name: str, records: Sequence[Record]):
        self.name = name
        self.all = list(records)
        self.done = [r for r in records if r["status"] != "failed" and r.get("steps")]

    def spread(self, *keys: str) -> Spread | None:
        """Of a number at these keys of the records."""

        def find(record: Record) -> float | None:
            value: Any = record
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            return value

        return Spread.of([find(record) for record in self.done])

    @property
    def failure(self) -> str | None:
        """Where its runs failed, if none of them was done."""
        failed = [r for r in self.all if r["status"] == "failed"]
        return f"failed in {failed[0]['phase']}" if failed and not self.done else None


def summarise(cell: Cell, cell_dir: Path) -> dict[str, Any]:
    """What a cell that is done came to, for its line of `results.jsonl`."""
    found: dict[str, Any] = {}
    run_dir = cell_dir / child.RUN
    for path in (
        cell_dir / child.RESULT,
        cell_dir / MACHINE_FILE,
        run_dir / MACHINE_FILE,
    ):
        if path.exists():
            found[path.stem] = json.loads(path.read_text())
    if cell.kind == "train" and has_metrics(run_dir):
        found |= summarise_run(run_dir)
        found["run_dir"] = str(run_dir.relative_to(cell_dir.parents[1]))
    return found


def summarise_run(run_dir: Path) -> dict[str, Any]:
    """The numbers of a run, of as many updates as there are."""
    rows = read_metrics(run_dir)
    updates = [row for row in rows if "reward" in row]
    alarms: dict[str, int] = {}
    for alarm in read_alarms(run_dir):
        alarms[alarm["name"]] = alarms.get(alarm["name"], 0) + 1
    return {
        "steps": len(updates),
        "evaluations": _evaluations(rows),
        "reward": _ends(updates, "reward"),
        "length": _ends(updates, "length/mean"),
        "truncated": _ends(updates, "length/truncated"),
        "kl": _kl(updates),
        "memory_gib": _memory(rows, updates),
        "seconds": _seconds(updates),
        "alarms": alarms,
    }


def update_peaks(run_dir: Path) -> dict[int, float]:
    """The peak of each update in which nothing was compiled, GiB, by step."""
    rows = [row for row in read_metrics(run_dir) if "reward" in row]
    key = "memory/update_peak_gib"
    return {row["step"]: row[key] for row in warm(rows) if key in row}


def max_of_mean(runs: Sequence[Mapping[int, float]]) -> float | None:
    """The highest point of the mean curve over runs, at steps that all of them have."""
    steps = set.intersection(*map(set, runs)) if runs else set()
    means = [float(np.mean([run[step] for run in runs])) for step in steps]
    return max(means, default=None)


def _evaluations(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By metric: before, after and at best, with the standard error and number."""
    found = {}
    for key in dict.fromkeys(k for r in rows for k in r if f"{k}_se" in r):
        values = [row[key] for row in rows if key in row]
        last = [row for row in rows if key in row][-1]
        found[key] = {
            "before": values[0],
            "after": values[-1],
            "best": max(values),
            "se": last[f"{key}_se"],
            "n": last[f"{key}_n"],
        }
    return found


def _ends(rows: Sequence[Row], key: str) -> dict[str, float]:
    """Means over the first and over the last of the updates."""
    values = [row[key] for row in rows if key in row]
    if not values:
        return {}
    count = max(1, round(_WINDOW * len(values)))
    first, last = float(np.mean(values[:count])), float(np.mean(values[-count:]))
    return {"first": first, "last": last, "mean": float(np.mean(values))}


def _kl(rows: Sequence[Row]) -> dict[str, float]:
    """Means in nats a token, and the mean of the realised over the predicted."""
    pairs = [(row.get("kl/predicted"), row.get("kl/realised")) for row in rows]
    pairs = [p for p in pairs if all(v is not None and math.isfinite(v) for v in p)]
    if not pairs:
        return {}
    predicted, realised = np.array(pairs, float).T
    found = {"predicted": predicted.mean(), "realised": realised.mean()}
    used = predicted > 0
    if used.any():
        found["ratio"] = (realised[used] / predicted[used]).mean()
    found["sum"] = realised.sum()
    return {name: float(value) for name, value in found.items()}


def _memory(rows: Sequence[Row], updates: Sequence[Row]) -> dict[str, float]:
    key, whole = "memory/update_peak_gib", "memory/step_peak_gib"
    peaks = [row[key] for row in warm(updates) if key in row]
    steps = [row[whole] for row in warm(updates) if whole in row]
    every = [row[key] for row in updates if key in row]
    found: dict[str, float] = {}
    if peaks:
        found = {"mean": float(np.mean(peaks)), "worst": max(every)}
        found["step"] = float(np.mean(steps))
    for part in PARTS:
        values = [r[f"memory/{part}_gib"] for r in rows if f"memory/{part}_gib" in r]
        found |= {part: values[0]} if values else {}
    if peaks and "weights" in found:
        held = sum(found.get(part, 0.0) for part in PARTS)
        found[REST] = max(0.0, found["mean"] - held)
    return found


def _seconds(rows: Sequence[Row]) -> dict[str, float]:
    """Of an update on the device, and of a whole step from one row to the next."""
    key = "seconds/step"
    steps = [row[key] for row in warm(rows) if key in row]
    if not steps:
        return {}
    low, middle, high = np.percentile(steps, (10, 50, 90))
    found = {"step": middle, "step_p10": low, "step_p90": high}
    between = [
        after["seconds/total"] - row["seconds/total"]
        for row, after in itertools.pairwise(rows)
        # A process that went on with the run counts from its own beginning: what it
        # holds, which it writes once, tells its first row.
        if _HELD not in after and after["seconds/total"] > row["seconds/total"]
    ]
    if between:
        found["end_to_end"] = float(np.mean(between))
    return {name: float(value) for name, value in found.items()}

"""Training runs as a report sees them: what a run directory holds.

    runs = read_runs(["runs/a", "runs/b"])
    runs[0].status, runs[0].scores("heldout/sampled")

Nothing here loads JAX: a report needs no device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from logra_jax.training.alarms import ALARM_FILE, read_alarms
from logra_jax.training.config import flatten
from logra_jax.training.journal import has_metrics, read_metrics
from logra_jax.training.paths import (
    DATA_FILE,
    MACHINE_FILE,
    MODEL_DIRECTORY,
    stored_config,
)
from logra_jax.training.samples import SAMPLES_DIRECTORY, Sample, read_samples

_HELD = "memory/weights_gib"


class Score(NamedTuple):
    """One evaluation metric, once."""

    step: int
    value: float
    se: float  # standard error; NaN where it is not known
    n: int | None  # responses; None where it is not known


@dataclass(frozen=True)
class Run:
    """A run directory, read once.

    Attributes:
        path: of the directory, as it was given.
        name: that tells it from the others of the report.
        config_text: `config.yaml`.
        config: its values by dotted key.
        rows: of the journal; at least one.
        data: `data.json`; empty where there is none.
        machine: `machine.json`; empty where there is none.
        alarms: lines of `alarms.jsonl`.
        has_model: whether the trained model was exported, which a run does last.
    """

    path: Path
    name: str
    config_text: str
    config: Mapping[str, Any]
    rows: Sequence[dict[str, Any]]
    data: Mapping[str, Any]
    machine: Mapping[str, Any]
    alarms: Sequence[Mapping[str, Any]]
    has_model: bool

    @property
    def done(self) -> int:
        """Updates done, as far as the journal says."""
        return int(self.rows[-1]["step"])

    @property
    def planned(self) -> int | None:
        """Updates that the run is to have, if its config says so."""
        steps = self.config.get("train.steps")
        return steps if isinstance(steps, int) else None

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its own end: its last step, a target or an alarm."""
        return self.has_model or (
            self.planned is not None and self.done >= self.planned
        )

    @property
    def status(self) -> str:
        """How the run stands, in a few words."""
        if not self.is_finished:
            return "unfinished: interrupted, or still running"
        if self.planned is None or self.done >= self.planned:
            return "finished" if self.has_model else "all steps done, no model exported"
        return "ended early, by a target or an alarm"

    @cached_property
    def metrics(self) -> list[str]:
        """Evaluation metrics that were measured, in the journal's order."""
        keys = dict.fromkeys(key for row in self.rows for key in row)
        return [
            key
            for key in keys
            if "/" in key
            and (f"{key}_n" in keys or key.endswith(("/greedy", "/sampled")))
        ]

    def scores(self, metric: str) -> list[Score]:
        """Every measurement of an evaluation metric that is a number."""
        return [
            Score(
                row["step"],
                float(row[metric]),
                float(row.get(f"{metric}_se", math.nan)),
                row.get(f"{metric}_n"),
            )
            for row in self.rows
            if math.isfinite(row.get(metric, math.nan))
        ]

    @cached_property
    def elapsed(self) -> np.ndarray:
        """Seconds of all the run's processes up to the end of each row, (rows,).

        A resumed run's clock begins again, which shows where it goes back, or where
        its process says what it holds, as each does once: what went before is added.
        NaN where the journal has no clock.
        """
        clock = np.array([row.get("seconds/total", math.nan) for row in self.rows])
        with np.errstate(invalid="ignore"):
            begins_again = np.diff(clock) < 0
        begins_again |= np.array([_HELD in row for row in self.rows[1:]], bool)
        before = np.where(begins_again, clock[:-1], 0.0)
        return clock + np.concatenate([[0.0], np.cumsum(before)])

    @property
    def seconds_per_update(self) -> float:
        """Median of the time from one row to the next, all phases; NaN if unknown."""
        taken = np.diff(self.elapsed)
        taken = taken[np.isfinite(taken)]
        return float(np.median(taken)) if len(taken) else math.nan

    @property
    def peak_memory(self) -> tuple[float, str]:
        """The most GiB held, and where: on a device if the journal says, or a host."""
        for key, where in (
            ("memory/peak_device_gib", "device"),
            ("memory/peak_rss_gib", "host process"),
        ):
            values = [row[key] for row in self.rows if key in row]
            if values:
                return max(values), where
        return math.nan, ""

    @cached_property
    def sample_steps(self) -> list[int]:
        """Steps after which responses were kept."""
        names = (self.path / SAMPLES_DIRECTORY).glob("*.jsonl")
        return sorted(int(path.stem) for path in names if path.stem.isdigit())

    def samples(self, step: int) -> list[Sample]:
        """The responses kept after a step.

        Raises:
            ValueError: the file cannot be read as such.
        """
        path = self.path / SAMPLES_DIRECTORY / f"{step:06d}.jsonl"
        try:
            return read_samples(path)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"`{path}` must hold samples, one JSON object a line, got {error}; "
                "restore the file or delete it."
            ) from None


def read_runs(directories: Sequence[str | Path]) -> list[Run]:
    """Read run directories.

    Raises:
        ValueError: one is named twice, or is no run; see :func:`read_run`.
    """
    paths = [Path(directory) for directory in directories]
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise ValueError(
                f"`RUN_DIR` must name each run once, got {str(path)!r} again; leave "
                "it out."
            )
        seen.add(path.resolve())
    parts = [path.resolve().parts for path in paths]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return [
        read_run(path, os.sep.join(part[-depth:]))
        for path, part in zip(paths, parts, strict=True)
    ]


def read_run(path: str | Path, name: str | None = None) -> Run:
    """Read a run directory; the run may be going on.

    Args:
        path: the directory.
        name: in the report; None is that of the directory.

    Raises:
        ValueError: there is no such directory, it is no run, it has no row yet, or a
            file of it cannot be read.
    """
    path = Path(path)
    stored = stored_config(path, "RUN_DIR")
    rows = read_metrics(path) if has_metrics(path) else []
    if not rows:
        raise ValueError(
            f"`RUN_DIR` must hold metrics, got {str(path)!r}, whose run has recorded "
            "no step yet; wait for its first."
        )
    if not all(isinstance(row.get("step"), int) for row in rows):
        raise ValueError(
            f"`RUN_DIR` must hold the metrics of a training run, got {str(path)!r}, "
            "with a line that has no `step`; give the `run_dir` of a training run."
        )
    data, machine = path / DATA_FILE, path / MACHINE_FILE
    text = _text(stored)
    return Run(
        path=path,
        name=name or path.resolve().name,
        config_text=text,
        config=_flat_config(text, stored),
        rows=rows,
        data=_json(data) if data.is_file() else {},
        machine=_json(machine) if machine.is_file() else {},
        alarms=_alarms(path),
        has_model=(path / MODEL_DIRECTORY).is_dir(),
    )


def _flat_config(text: str, path: Path) -> dict[str, Any]:
    """Values of a YAML file by dotted key; lists are values."""
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"`{path}` is not valid YAML: {reason}.") from None
    if not isinstance(tree, dict):
        raise ValueError(f"`{path}` must hold `key: value` lines, got {text[:40]!r}.")
    return flatten(tree)


def _alarms(path: Path) -> list[dict[str, Any]]:
    try:
        return read_alarms(path)
    except ValueError as error:
        raise ValueError(
            f"`{path / ALARM_FILE}` must hold one JSON object a line, got {error}; "
            "restore the file or delete it."
        ) from None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read `{path}`: {error}.") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"`{path}` is not valid JSON: {error}.") from None
    return found if isinstance(found, dict) else {}

"""The record of a run: one JSON line a step in `metrics.jsonl`, and TensorBoard events.

    with Journal(run_dir, resume_step=None) as journal:
        journal.write(0, {"heldout/greedy": 0.42})
    read_metrics(run_dir)  # [{"step": 0, "heldout/greedy": 0.42}]

The same seed writes the same lines, bit for bit, except for what a clock or the
machine decides: the keys under `seconds/` and `memory/` (see `deterministic`).
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from logra_jax.training.paths import write_aside

R = TypeVar("R", bound=Mapping[str, Any])

_FILE = "metrics.jsonl"
_TAIL = 2**16  # bytes, of many lines
_CLOCKED = ("seconds/", "rate/", "memory/")


class Journal:
    """Appends metrics to a run directory; a line is on disk when `write` returns.

    Args:
        run_dir: the run directory; made if missing.
        resume_step: None begins a new record; a step continues the one in `run_dir`
            after it: lines of later steps, which the resumed run will write again, are
            dropped, and so is a last line that a killed run left torn.

    Raises:
        ValueError: a new record is asked for where one exists, or one is resumed where
            there is none or where a line other than the last is no JSON.
    """

    def __init__(self, run_dir: str | Path, *, resume_step: int | None):
        run_dir = Path(run_dir)
        path = run_dir / _FILE
        if resume_step is None:
            if path.exists():
                raise ValueError(
                    f"`run_dir` must not hold metrics yet, got {str(run_dir)!r}; "
                    f"choose another, or continue that run with `resume={run_dir}`."
                )
            run_dir.mkdir(parents=True, exist_ok=True)
        else:
            _truncate(path, resume_step)
        self._lines: IO[str] = path.open("a", encoding="utf-8")
        # Steps from here on hide what a killed run wrote of them.
        purge = None if resume_step is None else resume_step + 1
        self._events = _Events(run_dir / "tensorboard", purge_step=purge)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Record the metrics of one step; NaN and infinities become null."""
        numbers = {key: _number(value) for key, value in values.items()}
        self._lines.write(json.dumps({"step": step} | numbers, allow_nan=False) + "\n")
        self._lines.flush()
        self._events.write(step, {k: v for k, v in numbers.items() if v is not None})

    def close(self) -> None:
        """Close both files; closing twice is fine."""
        try:
            self._lines.close()
        finally:
            self._events.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Events:
    """Appends scalars to a new file of TensorBoard's; on disk when `write` returns.

    tensorboardX's own writer has a thread do that. A full disk ends the thread, and the
    run then waits for ever to hand it the next scalars.

    Args:
        directory: of the file; made if missing.
        purge_step: TensorBoard hides what earlier files have of steps from here on.
    """

    def __init__(self, directory: Path, *, purge_step: int | None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        directory.mkdir(parents=True, exist_ok=True)
        self._is_open = True
        self._proto: Any = event_pb2  # its classes are made when it is imported
        self._writer = EventsWriter(str(directory / "events"))
        if purge_step is not None:
            log = self._proto.SessionLog
            self._add(step=purge_step, session_log=log(status=log.START))
        self._writer.flush()

    def write(self, step: int, numbers: Mapping[str, float | int]) -> None:
        from tensorboardX.summary import scalar

        for key, value in numbers.items():
            self._add(step=step, summary=scalar(key, value))
        self._writer.flush()

    def _add(self, **fields: Any) -> None:
        event = self._proto.Event(wall_time=time.time(), **fields)
        self._writer.write_event(event)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._writer.close()


def has_metrics(run_dir: str | Path) -> bool:
    """Whether a journal was begun there."""
    return (Path(run_dir) / _FILE).is_file()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, in order; null reads as NaN.

    A torn last line (the run was killed, or is writing) is left out.

    Raises:
        ValueError: there is no such file, or another line is no JSON.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as run_dir:
        ...     with Journal(run_dir, resume_step=None) as journal:
        ...         journal.write(0, {"heldout/greedy": 0.42})
        ...     read_metrics(run_dir)
        [{'step': 0, 'heldout/greedy': 0.42}]
    """
    path = Path(run_dir) / _FILE
    if not path.is_file():
        raise ValueError(
            f"`run_dir` must hold {_FILE}, got {str(run_dir)!r}; give the directory of "
            "a run that has started."
        )
    rows = []
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(
                f"Line {number} of `{path}` must be JSON, got {line[:40]!r}; delete "
                "the line or restore the file."
            ) from None
        rows.append({k: math.nan if v is None else v for k, v in row.items()})
    return rows


def last_step(run_dir: str | Path) -> int | None:
    """The step of the last whole line; None where there is none yet.

    The end of the file alone is read: it may be asked for many times a second.
    """
    try:
        with (Path(run_dir) / _FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            *lines, _torn = file.read().split(b"\n")
        return json.loads(lines[-1])["step"]
    except (OSError, LookupError, ValueError):
        return None


def deterministic(values: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that a seed determines: all but `seconds/`, `rate/`, `memory/`."""
    return {k: v for k, v in values.items() if not k.startswith(_CLOCKED)}


def warm(rows: Sequence[R]) -> list[R]:
    """The rows in which nothing was compiled; all, where there are no such."""
    found = [row for row in rows if not row.get("seconds/compile")]
    return found or list(rows)


def _truncate(path: Path, last_step: int) -> None:
    """Keep the steps up to `last_step`; a kill on the way leaves the old file whole."""
    rows = read_metrics(path.parent)
    lines = path.read_text(encoding="utf-8").split("\n")
    kept = [
        line for line, row in zip(lines, rows, strict=False) if row["step"] <= last_step
    ]
    write_aside(path, "".join(line + "\n" for line in kept))


def _number(value: Any) -> float | int | None:
    """A Python number from any scalar (numpy and JAX too), None if it is not finite."""
    number = value.item() if hasattr(value, "item") else value
    return number if math.isfinite(number) else None

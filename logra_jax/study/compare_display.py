"""What `logra compare` shows while it works."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from logra_jax.study.matrix import Cell

_SHOWN = 160  # characters of a message


class CompareDisplay:
    """Progress over cells, and where the one under way is; lines where no terminal is.

    Args:
        total: cells of the study.
        console: where to write; None is standard output.
    """

    def __init__(self, total: int, *, console: Console | None = None):
        self._console = console or Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.fields[what]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells, {task.fields[left]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_interactive,
        )
        self._task = self._progress.add_task("", total=total, what="", left="")
        self._total, self._done = total, 0
        self._current: Cell | None = None
        self._began = time.monotonic()
        self._seconds: list[float] = []  # of the runs that were done here

    def __enter__(self) -> "CompareDisplay":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def watch(self, cell: Cell, phase: str, step: int) -> None:
        """Show the cell under way, what it is doing and how many updates it has."""
        if cell is not self._current:
            self._current, self._began = cell, time.monotonic()
            if not self._console.is_interactive:
                count = f"{self._done + 1}/{self._total}"
                self._console.print(f"{count} {cell.name} …", markup=False)
        steps = f" {step}/{cell.config.train.steps}" if cell.kind == "train" else ""
        spent = timedelta(seconds=round(time.monotonic() - self._began))
        what = f"{cell.name}{steps} {phase} {spent}"
        self._progress.update(self._task, what=what, left=self._left())

    def done(self, cell: Cell, outcome: dict[str, Any]) -> None:
        """A line on a cell that is done, now or by an earlier process."""
        is_kept = cell is not self._current
        self._done += 1
        if not is_kept and cell.kind == "train":
            self._seconds.append(outcome["wall_seconds"])
        text = f"{cell.name}: {outcome['status']}"
        if outcome["status"] == "failed":
            text += f" in phase {outcome['phase']!r}: {outcome['message'][:_SHOWN]}"
        text += " (kept)" if is_kept else f", {outcome['wall_seconds']:.0f} s"
        style = "red" if outcome["status"] == "failed" else None
        count = f"{self._done}/{self._total}"
        self._console.print(f"{count} {text}", style=style, markup=False)
        self._progress.update(self._task, completed=self._done, left=self._left())

    def stopping(self, name: str) -> None:
        """Say at once that a signal came."""
        self._console.print(
            f"{name}: stopping after this update; a second one stops at once",
            style="yellow",
        )

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show what is done at the end."""
        self._progress.update(self._task, what=what, left="")
        yield

    def conclude(
        self, study_dir: Path, records: Sequence[dict[str, Any]], number: int
    ) -> None:
        """Say where everything is, and what is left."""
        left = self._total - len(records)
        if number:
            self._console.print(
                f"{left} cells left; the same command goes on", style="yellow"
            )
        failed = sum(r["status"] == "failed" for r in records)
        if failed:
            self._console.print(
                f"{failed} cells failed (see log.txt of each); --retry-failed does "
                "them again",
                style="red",
            )
        self._console.print(f"report: {study_dir / 'report.md'}", markup=False)

    def _left(self) -> str:
        if not self._seconds:
            return ""
        mean = sum(self._seconds) / len(self._seconds)
        left = timedelta(seconds=round(mean * (self._total - self._done)))
        return f"about {left} left"

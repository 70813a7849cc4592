"""What a run shows while it works: one row a step, and what it is doing right now.

    with Display(total_steps=24) as display:
        with display.phase("loading the model"):
            ...
        display.step(1, {"reward": 0.17, "kl/predicted": 9.8e-3})
        display.before_after(before, after)

On a terminal the bottom line holds the current phase with its seconds, a bar and the
time left. Elsewhere (a log file, CI) the same rows come as plain lines, and a phase
that takes long says so.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from types import TracebackType
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from logra_jax.training.samples import Sample

Values = Mapping[str, float | int]

# Seconds after which a phase off a terminal says that it is still running: early the
# first time (it may be compiling), late once it is known.
_FIRST_PATIENCE, _PATIENCE = 2.0, 20.0
# Seconds between two lines on how far a phase is, off a terminal.
_SILENCE = 60.0
# Characters of a text that are shown.
_SHOWN = 400
# Rows between two repetitions of the head.
_ROWS_PER_HEAD = 30


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda x: f"{x:.{digits}f}"


def _scientific(x: float) -> str:
    """Two digits and a short exponent: 9.8e-3."""
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _short(x: float) -> str:
    """Three digits where they say enough, else scientific."""
    return f"{x:#.3g}".rstrip(".") if 1e-2 <= abs(x) < 1e3 else _scientific(x)


def _percent(x: float) -> str:
    return f"{100 * x:.0f}%"


class _Column(NamedTuple):
    """One number of a row: where it comes from and how it is written."""

    group: str
    head: str
    key: str
    width: int
    write: Callable[[float], str]
    style: str = ""


# A narrow terminal cuts columns from the end.
_COLUMNS = (
    _Column("", "reward", "reward", 6, _fixed(3), "bold"),
    _Column("held-out", "greedy", "heldout/greedy", 6, _fixed(3), "green"),
    _Column("held-out", "T=1", "heldout/sampled", 5, _fixed(3), "green"),
    _Column("nats/token", "KL pred", "kl/predicted", 7, _scientific, "cyan"),
    _Column("nats/token", "KL real", "kl/realised", 7, _scientific, "cyan"),
    _Column("", "alpha", "alpha", 6, _short),
    _Column("response", "tokens", "length/mean", 6, _fixed(1)),
    _Column("response", "cut", "length/truncated", 4, _percent),
    _Column("seconds", "roll", "seconds/rollout", 5, _fixed(1), "dim"),
    _Column("seconds", "score", "seconds/reward", 5, _fixed(1), "dim"),
    _Column("seconds", "step", "seconds/step", 5, _fixed(1), "dim"),
    _Column("seconds", "eval", "seconds/eval", 5, _fixed(1), "dim"),
)


class Display:
    """Shows a run on the terminal, or in a log.

    Args:
        total_steps: updates in the run.
        console: where to write; None is standard output.
        silent: write nothing there; another process of the run does.
        on_phase: told each phase as it begins, and the outer one again after an inner.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console | None = None,
        silent: bool = False,
        on_phase: Callable[[str], None] | None = None,
    ):
        self._on_phase = on_phase or (lambda name: None)
        self._console = console or Console(highlight=False, quiet=silent)
        self._total = total_steps
        self._first_column = max(4, 2 * len(str(total_steps)) + 1)
        self._gap, self._columns = self._fit()
        self._rows = 0
        self._met_phases: set[str] = set()
        self._began = time.monotonic()
        self._phase = ("starting", self._began)
        self._part: tuple[int, int] | None = None  # done and all of the phase
        self._told = self._began  # when a log was last told of that
        self._start = 0  # steps of the processes before this one
        self._finished: list[tuple[int, float]] = []  # (step, when) of this process
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None
        if self._console.is_interactive and not silent:
            self._live = Live(
                get_renderable=self._bottom_line,
                console=self._console,
                refresh_per_second=8,
                transient=True,
            )

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def start_from(self, step: int) -> None:
        """Show the run as ``step`` updates old, which others have shown already."""
        self._start = step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` and its seconds while the block runs; phases may nest."""
        outer, began = self._phase, time.monotonic()
        patience = _PATIENCE if name in self._met_phases else _FIRST_PATIENCE
        self._met_phases.add(name)
        self._phase = (name, began)
        self._on_phase(name)
        timer = threading.Timer(patience, self._write, [f"{name} …", "dim"])
        timer.daemon = True
        if not self._live:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._phase, self._part = outer, None
        if outer[0] in self._met_phases:  # not after an error: it was this phase's
            self._on_phase(outer[0])
        seconds = time.monotonic() - began
        if seconds >= 1.0 and not self._rows:
            self._write(f"{name}: {seconds:.1f} s", "dim")

    def step(self, step: int, values: Values) -> None:
        """Write the row of one step; numbers that are not in `values` stay blank.

        Args:
            step: the update just made; 0 is the state before training.
            values: metrics under the journal's keys.
        """
        if self._rows % _ROWS_PER_HEAD == 0:
            self._write_head()
        self._rows += 1
        self._finished.append((step, time.monotonic()))
        row = Text(f"{step}/{self._total}".rjust(self._first_column))
        for column in self._columns:
            value = values.get(column.key)
            cell = "" if value is None else column.write(float(value))
            row.append(" " * self._gap + cell.rjust(column.width), column.style)
        row.rstrip()
        self._console.print(row, soft_wrap=True)

    def advance(self, done: int, total: int) -> None:
        """Show how far the current phase is; the bar is its own until it ends.

        A log gets a line now and then.
        """
        self._part = (done, total)
        now = time.monotonic()
        if not self._live and done and now - max(self._told, self._phase[1]) > _SILENCE:
            self._told = now
            self._write(f"{self._phase[0]} {done}/{total}", "dim")

    def before_after(self, before: Values, after: Values) -> None:
        """Write the table of accuracy before and after training.

        Args:
            before, after: metrics of two evaluations; of what both have
                (`heldout/greedy` is a share), the one with `_se` (its standard error)
                and `_n` (answers) is a row.
        """
        title = "Held-out accuracy (± 1 standard error)"
        table = Table(title=title, title_justify="left", box=box.ROUNDED)
        table.add_column("sampling")
        for head in ("answers", "before", "after", "change"):
            table.add_column(head, justify="right")
        keys = [key for key in _measures(after) if f"{key}_se" in before]
        for key, label in zip(keys, _labels(keys), strict=True):
            change = after[key] - before[key]
            table.add_row(
                label,
                str(int(after[f"{key}_n"])),
                _accuracy(before, key),
                Text(_accuracy(after, key), "bold"),
                Text(f"{change:+.3f}", "green" if change > 0 else "red"),
            )
        self._console.print(table)

    def evaluation(self, values: Values) -> None:
        """Write the table of one evaluation: a line a measure of each set."""
        title = "Accuracy (± 1 standard error)"
        table = Table(title=title, title_justify="left", box=box.ROUNDED)
        table.add_column("set")
        table.add_column("measure")
        for head in ("answers", "accuracy"):
            table.add_column(head, justify="right")
        last = None
        for key in _measures(values):
            name, _, measure = key.partition("/")
            table.add_row(
                "" if name == last else name,
                measure,
                str(int(values[f"{key}_n"])),
                Text(_accuracy(values, key), "bold"),
            )
            last = name
        self._console.print(table)
        for key, length in values.items():
            name, _, measure = key.partition("/")
            if measure == "length":
                cut, failed = values[f"{name}/truncated"], values[f"{name}/failed"]
                self._write(
                    f"{name}: {length:.1f} tokens a sample, {_percent(cut)} cut at the "
                    f"limit, {failed} responses could not be scored",
                    "dim",
                )

    def samples(self, samples: Sequence[Sample]) -> None:
        """Write responses to read."""
        for sample in samples:
            cut = "" if sample.finished else ", cut"
            head = f"{sample.set}, {sample.mode}, {sample.length} tokens{cut}"
            self._write(head, "dim")
            for name, text in (
                ("question", sample.question),
                ("response", sample.response),
                ("reference", sample.gold),
            ):
                self._write(f"  {name:<9} {_shortened(text)}")
            style = "green" if sample.reward > 0 else "red"
            self._write(f"  {'score':<9} {sample.reward:g}", style)

    def note(self, text: str) -> None:
        """Write a line of its own, as it stands."""
        self._write(text)

    def warn(self, text: str) -> None:
        """Write a line that asks for attention."""
        self._write(f"! {text}", "yellow")

    def _write(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def _write_head(self) -> None:
        groups = Text(" " * self._first_column)
        heads = Text("step".rjust(self._first_column), "bold")
        for group, members in groupby(self._columns, lambda column: column.group):
            columns = list(members)
            span = sum(self._gap + c.width for c in columns) - self._gap
            line = f" {group} ".center(span, "─") if group else " " * span
            groups.append(" " * self._gap + line, "dim")
            for column in columns:
                heads.append(" " * self._gap + column.head.rjust(column.width))
        self._console.print(groups, soft_wrap=True)
        self._console.print(heads, soft_wrap=True)

    def _fit(self) -> tuple[int, tuple[_Column, ...]]:
        """The gap between columns, and the columns for which there is room."""
        width = self._console.width if self._console.is_interactive else 1000

        def needed(gap: int, columns: tuple[_Column, ...]) -> int:
            return self._first_column + sum(gap + c.width for c in columns)

        if needed(2, _COLUMNS) <= width:
            return 2, _COLUMNS
        columns = _COLUMNS
        while columns and needed(1, columns) > width:
            columns = columns[:-1]
        return 1, columns

    def _bottom_line(self) -> Table:
        """The live line: phase and its seconds, bar, steps, elapsed, left."""
        now = time.monotonic()
        name, began = self._phase
        step = self._finished[-1][0] if self._finished else self._start
        done, total = self._part or (step, self._total)
        grid = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, None, 1, None, None):
            grid.add_column(ratio=ratio, no_wrap=True)
        grid.add_row(
            self._spinner,
            Text(f"{name} {now - began:.0f} s", "cyan"),
            ProgressBar(total=total, completed=done),
            f"{done}/{total}",
            Text(f"{_clock(now - self._began)} {self._left(now)}", "dim"),
        )
        return grid

    def _left(self, now: float) -> str:
        """Time left at the mean pace so far, once there is a pace."""
        if len(self._finished) < 3:
            return ""
        # The first interval holds the compilation.
        (first, start), (last, end) = self._finished[1], self._finished[-1]
        pace = (end - start) / (last - first)
        left = (self._total - last) * pace - (now - end)
        return f"· {_clock(max(left, 0.0))} left"


def _measures(values: Values) -> list[str]:
    """Keys of the accuracies among metrics."""
    return [key for key in values if f"{key}_se" in values and f"{key}_n" in values]


def _labels(keys: Sequence[str]) -> list[str]:
    """Keys without their set, where all are of one."""
    alone = len({key.partition("/")[0] for key in keys}) == 1
    return [key.partition("/")[2] if alone else key for key in keys]


def _accuracy(values: Values, key: str) -> str:
    return f"{values[key]:.3f} ± {values[f'{key}_se']:.3f}"


def _shortened(text: str) -> str:
    """A text on one line, without its middle where it is long."""
    text = " ".join(text.split())
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]} … {text[-half:]}"


def _clock(seconds: float) -> str:
    """0:02:10 without the leading hour."""
    return str(timedelta(seconds=int(seconds))).removeprefix("0:")

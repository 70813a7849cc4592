"""How pictures of training runs look: palette, settings, axes, and series of a journal.

with rc_context(STYLE):
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    line(axes, Series.of(read_metrics(run_dir), "reward"), "reward", BLUE)
    step_axis(axes, 0, 18)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A palette that colour-blind readers can tell apart (Okabe and Ito).
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#777777"

PHASES = {
    "rollout": BLUE,
    "reward": ORANGE,
    "step": GREEN,
    "eval": PURPLE,
    "checkpoint": SKY,
}
"""Where a step's time goes, in order; `seconds/total`, other keys are no phases."""

STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 11,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
"""Settings of matplotlib, for `rc_context`."""


@dataclass(frozen=True)
class Series:
    """A metric where it was recorded: steps and values of equal length."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], key: str) -> Series:
        """The values of a metric in the rows of a journal that have it."""
        found = [(row["step"], row[key]) for row in rows if key in row]
        steps, values = np.array(found, float).reshape(-1, 2).T
        return cls(steps, values)

    def __len__(self) -> int:
        return len(self.steps)


def line(axes: Axes, series: Series, label: str, colour: str, **style: Any) -> None:
    """A labelled line; nothing if the metric was never recorded."""
    if len(series):
        # Many markers, or many thick segments, make a line furry.
        many: dict[str, Any] = {"marker": None, "lw": 1.0} if len(series) > 200 else {}
        kind: dict[str, Any] = {"lw": 1.8, "color": colour, "label": label}
        axes.plot(series.steps, series.values, **(kind | style | many))


def step_axis(axes: Axes, first: int, last: int) -> None:
    """An x axis of updates in whole numbers, with a little room at both ends."""
    from matplotlib.ticker import MaxNLocator

    margin = max(0.6, 0.02 * (last - first)) if last > first else 1.5
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step (updates)")


def say_nothing_recorded(axes: Axes) -> None:
    """A word where there is nothing to draw."""
    middle: dict[str, Any] = {"transform": axes.transAxes, "ha": "center"}
    axes.text(0.5, 0.5, "not recorded", color=GREY, **middle)


def log_scale(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers at 1, 2, 5 (at 1 over many decades).

    The axis is left as it is where no line has anything above 0.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not any(np.any(np.asarray(one.get_ydata()) > 0) for one in axes.lines):
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # At least a factor of 4: room for ticks, and noise looks like noise.
    widen = max(1.0, (4.0 * low / high) ** 0.5)
    axes.set_ylim(low / widen, high * widen)
    few = high < 300 * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def moving_average(
    values: Float[np.ndarray, " n"], window: int
) -> Float[np.ndarray, " n"]:
    """Mean of up to ``window`` values ending at each position.

    Example:
        >>> moving_average(np.array([1.0, 2.0, 6.0]), 2)
        array([1. , 1.5, 4. ])
    """
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)


def average_window(count: int) -> int:
    """Over how many steps the reward of a run of ``count`` updates is averaged."""
    return max(3, count // 20)

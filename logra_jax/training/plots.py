"""The pictures of a run, drawn from its `metrics.jsonl`.

write_plots("runs/quickstart")  # accuracy.png, kl.png, length.png, cost.png
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from logra_jax.training.journal import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A palette that colour-blind readers can tell apart (Okabe and Ito).
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_PURPLE, _SKY, _GREY = "#CC79A7", "#56B4E9", "#777777"
# Where a step's time goes, in order; `seconds/total` and unknown keys are not phases.
_PHASES = {
    "rollout": _BLUE,
    "reward": _ORANGE,
    "step": _GREEN,
    "eval": _PURPLE,
    "checkpoint": _SKY,
}


@dataclass(frozen=True)
class _Series:
    """A metric where it was recorded: steps and values of equal length."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], key: str) -> _Series:
        found = [(row["step"], row[key]) for row in rows if key in row]
        steps, values = np.array(found, float).reshape(-1, 2).T
        return cls(steps, values)

    def __len__(self) -> int:
        return len(self.steps)


def write_plots(run_dir: str | Path) -> list[Path]:
    """Draw accuracy.png, kl.png, length.png and cost.png into `run_dir`.

    Works at any moment of a run: with one step or thousands, and without evaluations.

    Returns:
        The four files.

    Raises:
        ValueError: `run_dir` holds no readable `metrics.jsonl`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    run_dir = Path(run_dir)
    rows = read_metrics(run_dir)
    drawings = {
        "accuracy.png": _draw_accuracy,
        "kl.png": _draw_kl,
        "length.png": _draw_length,
        "cost.png": _draw_cost,
    }
    style: dict[Any, Any] = {
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "font.size": 11,
        "grid.alpha": 0.25,
        "legend.frameon": False,
    }
    paths = []
    for name, draw in drawings.items():
        with rc_context(style):
            figure = Figure(figsize=(9, 5.5), layout="constrained")
            draw(figure, rows)
            figure.savefig(run_dir / name, dpi=120)
        paths.append(run_dir / name)
    return paths


def _draw_accuracy(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    reward = _Series.of(rows, "reward")
    window = max(3, len(reward) // 20)
    average = _moving_average(reward.values, window)
    faint = 0.35 if len(reward) <= 200 else 0.12
    axes.plot(reward.steps, reward.values, ".", color=_BLUE, alpha=faint, ms=7)
    label = f"training reward (mean of {window} steps)"
    if len(reward):
        axes.plot(reward.steps, average, color=_BLUE, lw=2.2, label=label)
    for key, label, colour, marker in _accuracies(rows):
        accuracy = _Series.of(rows, key)
        error = _Series.of(rows, f"{key}_se")
        bars = error.values if len(error) == len(accuracy) else None
        if len(accuracy):
            axes.errorbar(
                accuracy.steps,
                accuracy.values,
                yerr=bars,
                label=label,
                color=colour,
                marker=marker,
                capsize=4,
                lw=1.6,
            )
    axes.set(title="Accuracy", ylabel="share correct (± 1 standard error)", ylim=(0, 1))
    _finish(axes, rows)


def _accuracies(
    rows: Sequence[dict[str, Any]],
) -> Iterator[tuple[str, str, str, str]]:
    """Key, label, colour and marker: the task's own held-out set, then the others."""
    yield "heldout/greedy", "held-out, greedy", _GREEN, "s"
    yield "heldout/sampled", "held-out, sampled", _RED, "o"
    sampled = dict.fromkeys(k for r in rows for k in r if k.endswith("/sampled"))
    others = [key for key in sampled if key != "heldout/sampled"]
    colours = itertools.cycle((_ORANGE, _PURPLE, _SKY, _GREY))
    for key, colour in zip(others, colours, strict=False):
        yield key, key.removesuffix("/sampled"), colour, "^"


def _draw_kl(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    _line(above, _Series.of(rows, "kl/predicted"), "predicted", _BLUE, marker=".")
    _line(above, _Series.of(rows, "kl/realised"), "realised", _RED, marker=".", lw=1)
    _line(above, _Series.of(rows, "kl/budget"), "budget", "black", ls=":", lw=1.4)
    above.set(title="KL of an update", ylabel="nats per token")
    _finish(above, rows, log=True)
    above.set_xlabel("")
    _line(below, _Series.of(rows, "alpha"), "alpha", _GREEN, marker=".")
    below.set(title="Scale of the proposed step", ylabel="alpha")
    _finish(below, rows, log=True)


def _draw_length(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    above, below = figure.subplots(2, sharex=True)
    _line(above, _Series.of(rows, "length/mean"), "mean", _BLUE, marker=".")
    above.set(title="Response length", ylabel="tokens")
    _finish(above, rows)
    above.set_ylim(bottom=0)
    above.set_xlabel("")
    _line(below, _Series.of(rows, "length/truncated"), "truncated", _RED, marker=".")
    below.set(title="Responses cut at the length limit", ylabel="share of responses")
    _finish(below, rows)
    below.set_ylim(-0.02, 1.02)


def _draw_cost(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    bottom = 0.0
    for phase, colour in _PHASES.items():
        seconds = _Series.of(rows, f"seconds/{phase}")
        if len(seconds):
            edges, heights = _bars(rows, seconds)
            top = bottom + heights
            above.stairs(
                top, edges, baseline=bottom, fill=True, color=colour, label=phase
            )
            bottom = top
    above.set(title="Time of a step, by phase", ylabel="seconds")
    _finish(above, rows)
    above.set_xlabel("")
    memory = _Series.of(rows, "memory/peak_rss_gib")
    _line(below, memory, "peak so far", _PURPLE, marker=".")
    below.set(title="Memory of the training process", ylabel="GiB")
    _finish(below, rows)
    below.set_ylim(0, 1.15 * max(memory.values, default=1.0))


def _bars(
    rows: Sequence[dict[str, Any]], series: _Series
) -> tuple[np.ndarray, np.ndarray]:
    """Touching bars, one a step of the run: edges (n + 1,) and heights (n,)."""
    first, last = rows[0]["step"], rows[-1]["step"]
    heights = np.zeros(last - first + 1)
    heights[series.steps.astype(int) - first] = series.values
    return np.arange(first, last + 2) - 0.5, heights


def _line(axes: Axes, series: _Series, label: str, colour: str, **style: Any) -> None:
    """A labelled line; nothing if the metric was never recorded."""
    if len(series):
        # Many markers, or many thick segments, make a line furry.
        many: dict[str, Any] = {"marker": None, "lw": 1.0} if len(series) > 200 else {}
        kind: dict[str, Any] = {"lw": 1.8, "color": colour, "label": label}
        axes.plot(series.steps, series.values, **(kind | style | many))


def _finish(axes: Axes, rows: Sequence[dict[str, Any]], log: bool = False) -> None:
    """Step axis in whole numbers, a legend, or a word where nothing was recorded."""
    from matplotlib.ticker import MaxNLocator

    first, last = (rows[0]["step"], rows[-1]["step"]) if rows else (0, 1)
    margin = max(0.6, 0.02 * (last - first)) if last > first else 1.5
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step (updates)")
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        # On the title's line, where it hides no data.
        corner: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(ncols=len(labels), borderaxespad=0.0, fontsize=10, **corner)
    else:
        middle = {"transform": axes.transAxes, "ha": "center", "color": _GREY}
        axes.text(0.5, 0.5, "not recorded", **middle)
    if log and any(np.any(np.asarray(line.get_ydata()) > 0) for line in axes.lines):
        _log_scale(axes)


def _log_scale(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers at 1, 2, 5 (at 1 over many decades)."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # At least a factor of 4: room for ticks, and noise looks like noise.
    widen = max(1.0, (4.0 * low / high) ** 0.5)
    axes.set_ylim(low / widen, high * widen)
    few = high < 300 * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of up to `window` values ending at each position."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)

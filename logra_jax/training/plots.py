"""The pictures of a run, drawn from its `metrics.jsonl`.

write_plots("runs/quickstart")  # accuracy.png, kl.png, length.png, cost.png
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from logra_jax.training.figure_style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PHASES,
    PURPLE,
    RED,
    SKY,
    STYLE,
    Series,
    average_window,
    line,
    log_scale,
    moving_average,
    say_nothing_recorded,
    step_axis,
)
from logra_jax.training.journal import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    paths = []
    for name, draw in drawings.items():
        with rc_context(STYLE):
            figure = Figure(figsize=(9, 5.5), layout="constrained")
            draw(figure, rows)
            figure.savefig(run_dir / name, dpi=120)
        paths.append(run_dir / name)
    return paths


def _draw_accuracy(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    reward = Series.of(rows, "reward")
    window = average_window(len(reward))
    average = moving_average(reward.values, window)
    faint = 0.35 if len(reward) <= 200 else 0.12
    axes.plot(reward.steps, reward.values, ".", color=BLUE, alpha=faint, ms=7)
    label = f"training reward (mean of {window} steps)"
    if len(reward):
        axes.plot(reward.steps, average, color=BLUE, lw=2.2, label=label)
    for key, label, colour, marker in _accuracies(rows):
        accuracy = Series.of(rows, key)
        error = Series.of(rows, f"{key}_se")
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
    yield "heldout/greedy", "held-out, greedy", GREEN, "s"
    yield "heldout/sampled", "held-out, sampled", RED, "o"
    sampled = dict.fromkeys(k for r in rows for k in r if k.endswith("/sampled"))
    others = [key for key in sampled if key != "heldout/sampled"]
    colours = itertools.cycle((ORANGE, PURPLE, SKY, GREY))
    for key, colour in zip(others, colours, strict=False):
        yield key, key.removesuffix("/sampled"), colour, "^"


def _draw_kl(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    line(above, Series.of(rows, "kl/predicted"), "predicted", BLUE, marker=".")
    line(above, Series.of(rows, "kl/realised"), "realised", RED, marker=".", lw=1)
    line(above, Series.of(rows, "kl/budget"), "budget", "black", ls=":", lw=1.4)
    above.set(title="KL of an update", ylabel="nats per token")
    _finish(above, rows, log=True)
    above.set_xlabel("")
    line(below, Series.of(rows, "alpha"), "alpha", GREEN, marker=".")
    below.set(title="Scale of the proposed step", ylabel="alpha")
    _finish(below, rows, log=True)


def _draw_length(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    above, below = figure.subplots(2, sharex=True)
    line(above, Series.of(rows, "length/mean"), "mean", BLUE, marker=".")
    above.set(title="Response length", ylabel="tokens")
    _finish(above, rows)
    above.set_ylim(bottom=0)
    above.set_xlabel("")
    line(below, Series.of(rows, "length/truncated"), "truncated", RED, marker=".")
    below.set(title="Responses cut at the length limit", ylabel="share of responses")
    _finish(below, rows)
    below.set_ylim(-0.02, 1.02)


def _draw_cost(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    bottom = 0.0
    for phase, colour in PHASES.items():
        seconds = Series.of(rows, f"seconds/{phase}")
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
    memory = Series.of(rows, "memory/peak_rss_gib")
    line(below, memory, "peak so far", PURPLE, marker=".")
    below.set(title="Memory of the training process", ylabel="GiB")
    _finish(below, rows)
    below.set_ylim(0, 1.15 * max(memory.values, default=1.0))


def _bars(
    rows: Sequence[dict[str, Any]], series: Series
) -> tuple[np.ndarray, np.ndarray]:
    """Touching bars, one a step of the run: edges (n + 1,) and heights (n,)."""
    first, last = rows[0]["step"], rows[-1]["step"]
    heights = np.zeros(last - first + 1)
    heights[series.steps.astype(int) - first] = series.values
    return np.arange(first, last + 2) - 0.5, heights


def _finish(axes: Axes, rows: Sequence[dict[str, Any]], log: bool = False) -> None:
    """Step axis in whole numbers, a legend, or a word where nothing was recorded."""
    first, last = (rows[0]["step"], rows[-1]["step"]) if rows else (0, 1)
    step_axis(axes, first, last)
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        # On the title's line, where it hides no data.
        corner: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(ncols=len(labels), borderaxespad=0.0, fontsize=10, **corner)
    else:
        say_nothing_recorded(axes)
    if log:
        log_scale(axes)

"""The figures of one or several runs, and how to read each.

for figure in draw_figures(group_runs(runs)):
    figure.title, figure.svg, figure.reading
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from logra_jax.study.report_costs import memory_figure, time_figure
from logra_jax.study.report_draw import (
    REPORT_STYLE,
    Figure,
    band,
    canvas_of,
    colour_of,
    complete,
    finish,
    finite,
    line_key,
    marker_of,
    mean_of,
    overlay,
    recorded,
    runs_of,
    style_of,
    thinned,
)
from logra_jax.study.report_groups import Group
from logra_jax.study.report_runs import Run
from logra_jax.training.figure_style import (
    BLUE,
    GREY,
    RED,
    Series,
    average_window,
    log_scale,
    moving_average,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = 6  # evaluation metrics that are drawn; the table has all


def draw_figures(groups: Sequence[Group]) -> list[Figure]:
    """All figures that the runs have something for, in the page's order."""
    from matplotlib import rc_context

    with rc_context(REPORT_STYLE):
        return [
            _reward(groups),
            *_accuracies(groups),
            _kl(groups),
            _length(groups),
            time_figure(groups),
            memory_figure(groups),
        ]


def _reward(groups: Sequence[Group]) -> Figure:
    canvas, [axes] = canvas_of(1, 1)
    runs = runs_of(groups)
    window = average_window(max(len(recorded(run, "reward")) for run in runs))

    def averaged(run: Run) -> Series:
        raw = recorded(run, "reward")
        return Series(raw.steps, moving_average(raw.values, window))

    for i, group in enumerate(groups):
        for run in group.runs if len(runs) <= 3 else ():
            raw = thinned(recorded(run, "reward"))
            dots: dict[str, Any] = {"alpha": 0.4, "ms": 7, "mew": 0}
            axes.plot(raw.steps, raw.values, ".", color=colour_of(i), **dots)
    overlay(axes, groups, averaged, marker=None)
    axes.set(ylabel="mean reward of a batch")
    finish(axes, groups)
    title = "Training reward"
    single = ", dots single updates" if len(runs) <= 3 else ""
    return complete(
        canvas,
        "reward",
        title,
        groups,
        f"Lines are means of the last {window} updates{single}. A rise that levels off "
        "is learning that has run its course; a fall late in a run asks for a smaller "
        "budget or an earlier end.",
    )


def _accuracies(groups: Sequence[Group]) -> list[Figure]:
    names = dict.fromkeys(name for run in runs_of(groups) for name in run.metrics)
    chosen = sorted(names, key=_rank)[:_PANELS]
    if not chosen:
        return []
    columns = 3 if len(chosen) > 4 else min(len(chosen), 2)
    canvas, panels = canvas_of(len(chosen), columns)
    for axes, name in zip(panels, chosen, strict=True):
        for i, group in enumerate(groups):
            for run in group.runs:
                aside = _aside(i, groups)
                _draw_scores(axes, run, name, i, aside, several=len(group.runs) > 1)
            if len(group.runs) > 1:
                band(axes, group, i, lambda run, name=name: _series(run, name))
        highest = max(
            (s.value for run in runs_of(groups) for s in run.scores(name)), default=1
        )
        top = 1.0 if highest > 0.6 else 1.3 * highest or 1.0
        axes.set(title=name, ylabel="share correct", ylim=(0, top))
        finish(axes, groups, ticks=18 // columns)
    title, left_out = "Accuracy", len(names) - len(chosen)
    more = f" {left_out} more metrics are in the table alone." if left_out else ""
    return [
        complete(
            canvas,
            "accuracy",
            title,
            groups,
            "Bars are ± 1 standard error over questions, a band the range over seeds. "
            f"Values whose bars overlap widely are not told apart.{more}",
        )
    ]


def _aside(index: int, groups: Sequence[Group]) -> float:
    """Steps by which a group is drawn aside, so that error bars do not hide others."""
    longest = max(run.done for run in runs_of(groups))
    return 0.008 * longest * (index - (len(groups) - 1) / 2)


def _draw_scores(
    axes: Axes, run: Run, metric: str, index: int, aside: float, *, several: bool
) -> None:
    """A run's measurements of a metric; error bars of many runs hide each other."""
    scores = run.scores(metric)
    if scores:
        steps, values, errors, _ = np.array(scores, float).T
        steps = steps + (0 if several else aside)
        style = style_of(index) | {"marker": marker_of(index), "ms": 4}
        style |= {"alpha": 0.6, "lw": 0.9} if several else {}
        bars = None if several or not np.isfinite(errors).all() else errors
        axes.errorbar(steps, values, bars, capsize=3, elinewidth=1, **style)


def _kl(groups: Sequence[Group]) -> Figure:
    canvas, (left, middle, right) = canvas_of(3, 3, width_ratios=(1.5, 1, 1))
    one_run = len(runs_of(groups)) == 1
    for i, group in enumerate(groups):
        # Predicted lies on the budget where all is well: a wide line shows under it.
        budget, predicted = mean_of(group, "kl/budget"), mean_of(group, "kl/predicted")
        colour = "black" if one_run else colour_of(i)
        wide: dict[str, Any] = {"lw": 5, "alpha": 0.2, "solid_capstyle": "butt"}
        left.plot(budget.steps, budget.values, color=colour, **wide)
        colour = RED if one_run else colour_of(i)
        left.plot(predicted.steps, predicted.values, "--", color=colour, lw=1.2)
    overlay(left, groups, lambda run: recorded(run, "kl/realised"))
    left.set(title="KL of an update", ylabel="nats per token")
    overlay(middle, groups, _kl_ratio)
    middle.set(title="Realised / predicted", ylabel="ratio")
    overlay(right, groups, lambda run: recorded(run, "alpha"))
    right.set(title="Scale of the step", ylabel="alpha")
    for axes, ticks in ((left, 7), (middle, 4), (right, 4)):
        finish(axes, groups, ticks)
    log_scale(left)
    log_scale(right)
    middle.axhline(1.0, color="black", lw=1.0, ls=":")
    middle.set_ylim(0, max(2.0, middle.get_ylim()[1]))
    key = {
        "realised": {"ls": "-", "lw": 1.6, "color": BLUE if one_run else GREY},
        "predicted": {"ls": "--", "lw": 1.2, "color": RED if one_run else GREY},
        "budget": {"ls": "-", "lw": 5, "alpha": 0.2, "color": "black"},
    }
    line_key(left, key)
    title = "How far each update moves the policy"
    return complete(
        canvas,
        "kl",
        title,
        groups,
        "Predicted lies on the budget where alpha is free to choose it, and realised "
        "close to both: a ratio near 1 means that a step does what was asked of it.",
    )


def _length(groups: Sequence[Group]) -> Figure:
    canvas, (left, right) = canvas_of(2, 2)
    overlay(left, groups, lambda run: recorded(run, "length/mean"))
    left.set(title="Response length", ylabel="tokens")
    overlay(right, groups, lambda run: recorded(run, "length/truncated"))
    right.set(title="Cut at the length limit", ylabel="share of responses")
    for axes in (left, right):
        finish(axes, groups)
    left.set_ylim(bottom=0)
    right.set_ylim(-0.02, 1.02)
    title = "Responses"
    return complete(
        canvas,
        "length",
        title,
        groups,
        "Length that grows without a gain in accuracy costs time for nothing; a share "
        "that stays high means that answers do not come to their end.",
    )


def _series(run: Run, metric: str) -> Series:
    scores = run.scores(metric)
    found = np.array([(score.step, score.value) for score in scores], float)
    return Series(*found.reshape(-1, 2).T)


def _kl_ratio(run: Run) -> Series:
    rows = [
        {"step": row["step"], "ratio": row["kl/realised"] / row["kl/predicted"]}
        for row in run.rows
        if row.get("kl/predicted", 0.0) > 0 and "kl/realised" in row
    ]
    return finite(Series.of(rows, "ratio"))


def _rank(metric: str) -> tuple[bool, int]:
    """Held-out sets and plain accuracies first; otherwise the journal's order."""
    chosen, _, kind = metric.partition("/")
    return chosen != "heldout", {"greedy": 0, "sampled": 1}.get(kind, 2)

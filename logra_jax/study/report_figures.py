"""The figures of a report: inline SVG of one or several runs, and how to read each.

for figure in draw_figures(group_runs(runs)):
    figure.title, figure.svg, figure.reading
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from logra_jax.study.report_draw import (
    REPORT_STYLE,
    band,
    canvas_of,
    colour_of,
    finish,
    finite,
    legend_below,
    line_key,
    marker_of,
    mean_of,
    overlay,
    recorded,
    render,
    runs_of,
    stacked_bars,
    style_of,
    thinned,
)
from logra_jax.study.report_runs import Group, Run
from logra_jax.training.figure_style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PHASES,
    PURPLE,
    RED,
    SKY,
    Series,
    average_window,
    log_scale,
    moving_average,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = 6  # evaluation metrics that are drawn; the table has all
_ALL_PHASES = PHASES | {"monitor": GREY, "save": "#AAAAAA", "sync": RED}
_PARTS = {
    "program": ("program", "#BBBBBB"),
    "weights": ("weights", BLUE),
    "reference": ("reference weights", SKY),
    "sketches": ("sketches or gradients", ORANGE),
    "optimizer": ("optimizer state", GREEN),
}
_REST = ("activations and temporaries", PURPLE)


class Figure(NamedTuple):
    """A figure of the page."""

    title: str
    svg: str
    reading: str  # what to look for, in a sentence or two


def draw_figures(groups: Sequence[Group]) -> list[Figure]:
    """All figures that the runs have something for, in the page's order."""
    from matplotlib import rc_context

    with rc_context(REPORT_STYLE):
        return [
            _reward(groups),
            *_accuracies(groups),
            _kl(groups),
            _length(groups),
            _time(groups),
            _memory(groups),
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
    return Figure(
        title,
        render(canvas, "reward", title, groups),
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
        finish(axes, groups, ticks=12 // columns)
    title, left_out = "Accuracy", len(names) - len(chosen)
    more = f" {left_out} more metrics are in the table alone." if left_out else ""
    return [
        Figure(
            title,
            render(canvas, "accuracy", title, groups),
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
        style |= {"alpha": 0.35, "lw": 0.8} if several else {}
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
    return Figure(
        title,
        render(canvas, "kl", title, groups),
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
    return Figure(
        title,
        render(canvas, "length", title, groups),
        "Length that grows without a gain in accuracy costs time for nothing; a share "
        "that stays high means that answers do not come to their end.",
    )


def _time(groups: Sequence[Group]) -> Figure:
    runs = runs_of(groups)
    canvas, (left, right) = canvas_of(2, 2, height=_height(len(runs)))
    if len(runs) > 1:
        bars = [(label_of(g, run), phase_means(run)) for g in groups for run in g.runs]
        parts = {name: (name, colour) for name, colour in _ALL_PHASES.items()}
        stacked_bars(left, bars, parts, digits=1)
        left.set(title="Time per update, by phase", xlabel="seconds")
        left_reading = (
            "Left, what each phase took over the whole run, evaluations and compiling "
            "included, divided by its updates: more than the median update."
        )
    else:
        _stack_steps(left, runs[0])
        left.set(title="Time of a step, by phase", ylabel="seconds")
        finish(left, groups)
        left_reading = (
            "Left, what each phase took, compiling included, which makes first steps "
            "long."
        )
    legend_below(left)
    longest = max(float(np.nanmax(run.elapsed, initial=0)) for run in runs)
    unit, seconds = ("hours", 3600) if longest > 3 * 3600 else ("minutes", 60)
    overlay(right, groups, lambda run: _elapsed(run, seconds))
    right.set(title="End to end", ylabel=f"{unit} since the start")
    finish(right, groups)
    right.set_ylim(bottom=0)
    title = "Where the time goes"
    return Figure(
        title,
        render(canvas, "time", title, groups),
        f"{left_reading} Right, everything, with loading and what lies between phases. "
        "A rollout of more than half of a step asks for a faster engine.",
    )


def _stack_steps(axes: Axes, run: Run) -> None:
    """A run's phases on top of each other, step by step."""
    steps = Series.of(run.rows, "step").steps
    drawn = thinned(Series(steps, steps)).steps
    gaps = np.diff(drawn) / 2
    first, last = (gaps[0], gaps[-1]) if len(gaps) else (0.5, 0.5)
    edges = np.concatenate([[drawn[0] - first], drawn[:-1] + gaps, [drawn[-1] + last]])
    bottom = np.zeros(len(drawn))
    for phase, colour in _ALL_PHASES.items():
        seconds = np.array([row.get(f"seconds/{phase}", 0.0) for row in run.rows])
        top = bottom + thinned(Series(steps, np.nan_to_num(seconds))).values
        if (top > bottom).any():
            look: dict[str, Any] = {"fill": True, "color": colour, "label": phase}
            axes.stairs(top, edges, baseline=bottom, **look)
        bottom = top


def _memory(groups: Sequence[Group]) -> Figure:
    runs = [(label_of(group, run), run) for group in groups for run in group.runs]
    bars = [(label, parts) for label, run in runs if (parts := breakdown(run))]
    key, what = _memory_key(groups)
    count = 2 if bars else 1
    canvas, panels = canvas_of(count, count, height=_height(len(bars)))
    reading = "The parts (weights, sketches, optimizer) were not recorded. "
    if bars:
        stacked_bars(panels[0], bars, _PARTS | {"rest": _REST}, digits=2)
        panels[0].set(title="What an update holds", xlabel="GiB")
        legend_below(panels[0], columns=2)
        reading = (
            "Activations and temporaries are the mean peak of an update less the other "
            "parts. "
        )
    overlay(panels[-1], groups, lambda run: recorded(run, key), np.max)
    if key == "memory/update_peak_gib":
        _draw_step_peaks(panels[-1], groups)
    panels[-1].set(title=what, ylabel="GiB")
    finish(panels[-1], groups)
    panels[-1].set_ylim(0, 1.1 * max(panels[-1].get_ylim()[1], 0.1))
    reading += (
        "Peaks should be level: memory that grows from update to update ends a run."
        if key == "memory/update_peak_gib"
        else "A peak so far never falls; it should level off after the first updates."
    )
    title = "Memory"
    return Figure(title, render(canvas, "memory", title, groups), reading)


def _draw_step_peaks(axes: Axes, groups: Sequence[Group]) -> None:
    """Beside the peaks of updates those of whole steps, where they were recorded."""
    peaks = [mean_of(group, "memory/step_peak_gib") for group in groups]
    for i, peak in enumerate(peaks):
        axes.plot(peak.steps, peak.values, "--", color=colour_of(i), lw=1.2)
    if any(map(len, peaks)):
        colour = BLUE if len(groups) == 1 else GREY
        lines = {"update": "-", "whole step, with a local rollout": "--"}
        styles = {name: {"ls": dash, "color": colour} for name, dash in lines.items()}
        line_key(axes, styles)


def _height(bars: int) -> float:
    """Inches of a row of panels, one of them with so many bars."""
    return max(2.8, 1.4 + 0.36 * bars)


def phase_means(run: Run) -> dict[str, float]:
    """Seconds by phase, of all rows together, per update."""
    updates = max(1, sum("reward" in row for row in run.rows))
    found = {
        phase: float(np.nansum(recorded(run, f"seconds/{phase}").values)) / updates
        for phase in _ALL_PHASES
    }
    return {phase: seconds for phase, seconds in found.items() if seconds > 0}


def breakdown(run: Run) -> dict[str, float]:
    """GiB of an update's parts, ``rest`` the mean peak less them (never below 0).

    Empty where the journal has not the weights or not the updates' peaks.
    """
    first = run.rows[0]
    parts = {name: first.get(f"memory/{name}_gib", 0.0) for name in _PARTS}
    peaks = recorded(run, "memory/update_peak_gib").values
    if "memory/weights_gib" not in first or not len(peaks):
        return {}
    rest = max(0.0, float(np.mean(peaks)) - sum(parts.values()))
    return {name: gib for name, gib in parts.items() if gib > 0} | {"rest": rest}


def _memory_key(groups: Sequence[Group]) -> tuple[str, str]:
    """What of memory is drawn against steps: the first that the first run has."""
    known = {key for run in runs_of(groups) for row in run.rows for key in row}
    for key, what in (
        ("memory/update_peak_gib", "Peak while an update ran"),
        ("memory/peak_device_gib", "Peak of the device so far"),
    ):
        if key in known:
            return key, what
    return "memory/peak_rss_gib", "Peak of the training process so far"


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


def _elapsed(run: Run, unit: int) -> Series:
    """Time since the start, in so many seconds."""
    steps = Series.of(run.rows, "step").steps
    return finite(Series(steps, run.elapsed / unit))


def _rank(metric: str) -> tuple[bool, int]:
    """Held-out sets and plain accuracies first; otherwise the journal's order."""
    chosen, _, kind = metric.partition("/")
    return chosen != "heldout", {"greedy": 0, "sampled": 1}.get(kind, 2)


def label_of(group: Group, run: Run) -> str:
    """A run among the others: its group, and its seed where the group has several."""
    if len(group.runs) == 1:
        return group.label
    return run.name

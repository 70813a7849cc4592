"""The figures of a report on what runs cost: time by phase and end to end, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from logra_jax.study.report_draw import (
    Figure,
    canvas_of,
    colour_of,
    complete,
    finish,
    finite,
    legend_below,
    line_key,
    mean_of,
    overlay,
    recorded,
    runs_of,
    stacked_bars,
    thinned,
)
from logra_jax.study.report_groups import Group, label_of
from logra_jax.study.report_runs import Run
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
)
from logra_jax.training.journal import warm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALL_PHASES = PHASES | {"monitor": GREY, "save": "#AAAAAA", "sync": RED}
_PARTS = {
    "program": ("program", "#BBBBBB"),
    "weights": ("weights", BLUE),
    "reference": ("reference weights", SKY),
    "sketches": ("sketches or gradients", ORANGE),
    "optimizer": ("optimizer state", GREEN),
}
_REST = ("activations and temporaries", PURPLE)


def time_figure(groups: Sequence[Group]) -> Figure:
    """By phase, and end to end."""
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
    return complete(
        canvas,
        "time",
        title,
        groups,
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


def memory_figure(groups: Sequence[Group]) -> Figure:
    """What an update holds, where that was recorded, and peaks."""
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
            "Activations and temporaries are the mean peak of an update, compiling "
            "ones left out, less the other parts. "
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
    return complete(canvas, "memory", title, groups, reading)


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
    updates = [row for row in run.rows if "memory/update_peak_gib" in row]
    peaks = Series.of(warm(updates), "memory/update_peak_gib").values
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


def _elapsed(run: Run, unit: int) -> Series:
    """Time since the start, in so many seconds."""
    steps = Series.of(run.rows, "step").steps
    return finite(Series(steps, run.elapsed / unit))

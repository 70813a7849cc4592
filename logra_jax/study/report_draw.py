"""Drawing for a report: runs overlaid by group, stacked bars, SVG to be inlined."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from logra_jax.study.report_groups import Group
from logra_jax.study.report_runs import Run
from logra_jax.training.figure_style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLE,
    Series,
    say_nothing_recorded,
    step_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_WIDTH = 8.6  # inches: as wide as the page, on a screen and on paper
_HEIGHT = 2.8  # of a row of panels
_LINE = 0.2  # of a line of a legend
_LETTERS = 135  # that a line of a legend has room for
POINTS = 150  # that a line is drawn with at most
_FEW = 40  # points that are marked one by one
_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", "-.")
_INK = "#30363d"
REPORT_STYLE: dict[Any, Any] = STYLE | {
    "axes.axisbelow": True,
    "axes.edgecolor": "#8a929b",
    "axes.labelcolor": _INK,
    "axes.labelsize": 9,
    "axes.titlepad": 8,
    "axes.titlesize": 9.5,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    "font.size": 9,
    "legend.fontsize": 8.5,
    # Text stays text: small, sharp, and found by a search.
    "svg.fonttype": "none",
    "svg.hashsalt": "logra",
    "text.color": _INK,
    "text.parse_math": False,  # names are texts, dollars and all
    "xtick.color": _INK,
    "ytick.color": _INK,
}
"""Settings of matplotlib, for `rc_context`."""


class Figure(NamedTuple):
    """A figure that is drawn: of a page, or a file of its own."""

    name: str  # of a file; ids of the SVG begin with it
    title: str  # that a screen reader says
    canvas: Canvas
    reading: str  # what to look for, in a sentence or two

    @property
    def svg(self) -> str:
        """The figure as an `<svg>` element, to be inlined."""
        from matplotlib import rc_context

        text = io.StringIO()
        with rc_context(REPORT_STYLE):
            metadata = dict.fromkeys(_METADATA)
            self.canvas.savefig(text, format="svg", metadata=metadata)
        return _inline(text.getvalue(), self.name, self.title)

    def write_png(self, path: Path) -> None:
        """The figure as a file of its own."""
        from matplotlib import rc_context

        with rc_context(REPORT_STYLE):
            self.canvas.savefig(path, format="png", dpi=_DPI)


_METADATA = ("Creator", "Date", "Format", "Type")
_DPI = 130


Read = Callable[[Run], Series]
Bars = Sequence[tuple[str, Mapping[str, float]]]  # label, length by part


def canvas_of(
    count: int, columns: int, *, height: float = _HEIGHT, **grid: Any
) -> tuple[Canvas, list[Axes]]:
    """A figure as wide as the page, with panels in rows of ``columns``."""
    from matplotlib.figure import Figure as Canvas

    rows = -(-count // columns)
    canvas = Canvas(figsize=(_WIDTH, rows * height), layout="constrained")
    panels = canvas.subplots(rows, columns, squeeze=False, gridspec_kw=grid).flat
    panels = list(panels)
    for spare in panels[count:]:
        spare.set_visible(False)
    return canvas, panels[:count]


def colour_of(index: int) -> str:
    """The colour of a group of runs, in all figures."""
    return _COLOURS[index % len(_COLOURS)]


def style_of(index: int) -> dict[str, Any]:
    """How the lines of a group of runs look: colours first, then dashes."""
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    return {"color": colour_of(index), "ls": dash, "lw": 1.6}


def marker_of(index: int) -> str:
    """What marks the points of a group of runs."""
    return _MARKERS[index % len(_MARKERS)]


def runs_of(groups: Iterable[Group]) -> list[Run]:
    """All runs, in the order of their groups."""
    return [run for group in groups for run in group.runs]


def recorded(run: Run, key: str) -> Series:
    """A metric where it was recorded and is a number."""
    return finite(Series.of(run.rows, key))


def finite(series: Series) -> Series:
    """A series where its values are numbers."""
    known = np.isfinite(series.values)
    return Series(series.steps[known], series.values[known])


def mean_and_range(series: Sequence[Series]) -> tuple[Series, Series, Series]:
    """Mean, lowest and highest of several runs, at the steps that all of them have."""
    shared = series[0].steps
    for one in series[1:]:
        shared = np.intersect1d(shared, one.steps)
    values = np.array([one.values[np.isin(one.steps, shared)] for one in series])
    mean, low, high = (
        Series(shared, each) for each in (values.mean(0), values.min(0), values.max(0))
    )
    return mean, low, high


def mean_of(group: Group, key: str) -> Series:
    """A metric of a group's runs, their mean where there are several, thinned."""
    return thinned(mean_and_range([recorded(run, key) for run in group.runs])[0])


def thinned(
    series: Series, reduce: Callable[..., Any] = np.mean, points: int = POINTS
) -> Series:
    """At most ``points`` points: ``reduce`` of neighbours, at their mean step.

    A series that is short enough stays as it is.
    """
    each = -(-len(series) // points)
    if each <= 1:
        return series
    buckets = -(-len(series) // each)
    return Series(
        np.array([part.mean() for part in np.array_split(series.steps, buckets)]),
        np.array([reduce(part) for part in np.array_split(series.values, buckets)]),
    )


def overlay(
    axes: Axes,
    groups: Sequence[Group],
    read: Read,
    reduce: Callable[..., Any] = np.mean,
    **style: Any,
) -> None:
    """A line for each run; of runs that differ in their seed, mean and range."""
    for i, group in enumerate(groups):
        if len(group.runs) > 1:
            band(axes, group, i, read, reduce)
            continue
        for run in group.runs:
            one = thinned(read(run), reduce)
            # A line of one point is no line.
            mark = {"marker": marker_of(i), "ms": 3} if len(one) <= _FEW else {}
            if len(one):
                axes.plot(one.steps, one.values, **(style_of(i) | mark | style))


def band(
    axes: Axes,
    group: Group,
    index: int,
    read: Read,
    reduce: Callable[..., Any] = np.mean,
) -> None:
    """Mean and range over the runs of a group, and those that go on alone, faint."""
    each = [read(run) for run in group.runs]
    mean, low, high = mean_and_range(each)
    last = mean.steps[-1] if len(mean) else -math.inf
    for one in each:
        # From the last step that all have on; all of it where points are few.
        alone = one.steps >= (last if len(one) > _FEW else -math.inf)
        rest = thinned(Series(one.steps[alone], one.values[alone]), reduce)
        faint: dict[str, Any] = style_of(index) | {"alpha": 0.6, "lw": 0.9}
        axes.plot(rest.steps, rest.values, **faint)
    if len(mean):
        low, high = thinned(low, np.min), thinned(high, np.max)
        pale: dict[str, Any] = {"color": colour_of(index), "alpha": 0.18, "lw": 0}
        axes.fill_between(low.steps, low.values, high.values, **pale)
        mean = thinned(mean, reduce)
        style: dict[str, Any] = style_of(index) | {"lw": 2.0}
        axes.plot(mean.steps, mean.values, **style)


def finish(axes: Axes, groups: Sequence[Group], ticks: int = 10) -> None:
    """The axis of steps, the same in all panels, and a word where nothing is drawn."""
    runs = runs_of(groups)
    first = min(int(run.rows[0]["step"]) for run in runs)
    step_axis(axes, first, max(run.done for run in runs))
    axes.locator_params("x", nbins=ticks, steps=[1, 2, 5, 10])
    if not axes.has_data():
        say_nothing_recorded(axes)


def stacked_bars(
    axes: Axes, bars: Bars, parts: Mapping[str, tuple[str, str]], digits: int
) -> None:
    """A bar for each run, its parts one after the other, its total at its end.

    Args:
        axes: to draw on.
        bars: label and length of the parts of each, the first on top.
        parts: name and colour of each part.
        digits: of the total.
    """
    for part, (name, colour) in parts.items():
        left = [_before(lengths, part, parts) for _, lengths in bars]
        width = [lengths.get(part, 0.0) for _, lengths in bars]
        if any(width):
            thick = 0.45 if len(bars) > 1 else 0.3
            look: dict[str, Any] = {"height": thick, "ec": "white", "lw": 0.6}
            axes.barh(
                range(len(bars)), width, left=left, color=colour, label=name, **look
            )
    for i, (label, lengths) in enumerate(bars):
        total = sum(lengths.values())
        beside: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points"}
        written = f"{total:.{digits}f}"
        axes.annotate(written, (total, i), va="center", fontweight="bold", **beside)
        if len(bars) > 1:
            # Above its bar: beside it a long name would leave the bar no room.
            axes.text(0, i - 0.29, label, va="bottom", fontsize=8)
    axes.set_ylim(len(bars) - 0.45, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(False, axis="y")
    axes.margins(x=0.12)


def _before(lengths: Mapping[str, float], part: str, parts: Iterable[str]) -> float:
    """Where a part of a stacked bar begins."""
    names = list(parts)
    return math.fsum(lengths.get(name, 0.0) for name in names[: names.index(part)])


def legend_below(axes: Axes, columns: int = 3, handles: Any = None) -> None:
    """A legend under a panel and its axis, where it hides nothing."""
    from matplotlib.transforms import ScaledTranslation

    handles = handles or axes.get_legend_handles_labels()[0]
    if handles:
        inches = ScaledTranslation(0, -0.42, axes.figure.dpi_scale_trans)
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0)}
        place |= {"bbox_transform": axes.transAxes + inches, "borderaxespad": 0}
        spacing: dict[str, Any] = {"columnspacing": 1.2, "handlelength": 1.6}
        axes.legend(handles=handles, ncols=columns, **place, **spacing)


def line_key(axes: Axes, lines: Mapping[str, Mapping[str, Any]]) -> None:
    """A legend under a panel of what its kinds of lines are: name and style of each."""
    from matplotlib.lines import Line2D

    legend_below(
        axes,
        handles=[Line2D([], [], **style, label=name) for name, style in lines.items()],
    )


def complete(
    canvas: Canvas, name: str, title: str, groups: Sequence[Group], reading: str
) -> Figure:
    """A figure of what is drawn, with a legend of the groups where there are several.

    The other arguments are the figure's own.
    """
    if len(runs_of(groups)) > 1:
        _name_groups(canvas, groups)
    return Figure(name, title, canvas, reading)


def _name_groups(canvas: Canvas, groups: Sequence[Group]) -> None:
    """A legend above all panels."""
    from matplotlib.lines import Line2D

    names = [
        group.label
        if len(group.runs) == 1
        else f"{group.label} (mean and range of {len(group.runs)} seeds)"
        for group in groups
    ]
    handles = [
        Line2D([], [], **style_of(i), marker=marker_of(i), ms=4, label=name)
        for i, name in enumerate(names)
    ]
    columns = max(1, min(len(names), int(_LETTERS / (max(map(len, names)) + 8))))
    canvas.legend(handles=handles, loc="outside upper left", ncols=columns)
    lines = -(-len(names) // columns)
    canvas.set_figheight(canvas.get_figheight() + _LINE * lines + 0.1)


def _inline(svg: str, name: str, title: str) -> str:
    """A document of matplotlib's as an element of a page, without what it can spare."""
    svg = svg[svg.index("<svg") :]
    # A style of an inlined element holds for all of the page: it has its own.
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))

    def shorten(match: re.Match[str]) -> str:
        tag = re.sub(r' xmlns(:xlink)?="[^"]*"', "", match[0])
        tag = tag.replace("xlink:href", "href")
        tag = re.sub(
            r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' * (m[1] in used), tag
        )
        tag = re.sub(r'(url\(|href=")#', rf"\g<1>#{name}-", tag)
        # The page's own font, at the size that was laid out.
        tag = re.sub(r"(font: (?:\w+ )?[\d.]+px) [^;\"]*", r"\1 var(--font)", tag)
        tag = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", tag)
        return re.sub(r"(\.\d{2})\d+", r"\1", tag).replace("\n", " ")

    # Tags alone: text between them may be anything.
    svg = re.sub(r"<[^>]*>", shorten, svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*pt"', "", head)
    body = "\n".join(line.strip() for line in rest.splitlines() if line.strip())
    return f'{head} role="img" aria-label="{title}">{body}'

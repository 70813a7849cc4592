"""The figures of a study: those of a report, its groups by name, and the heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from logra_jax.study.report_draw import REPORT_STYLE, Figure
from logra_jax.study.report_figures import draw_figures
from logra_jax.study.report_groups import Group
from logra_jax.study.report_runs import read_run

_KIND_NAMES = {"rademacher": "signs", "gaussian": "normal entries"}


def write_figures(
    study_dir: Path, runs: Mapping[str, Mapping[int, Path]]
) -> dict[str, Figure]:
    """Draw the runs of a study, as PNG files in its directory.

    Args:
        study_dir: where the files go.
        runs: run directories by seed, by the name of their group.

    Returns:
        The figures by name; each is in the file of that name.
    """
    groups = [
        Group(
            group,
            tuple(read_run(path, f"{group}, {seed}") for seed, path in seeds.items()),
        )
        for group, seeds in runs.items()
    ]
    figures = {figure.name: figure for figure in draw_figures(groups)}
    for name, figure in figures.items():
        figure.write_png(study_dir / f"{name}.png")
    return figures


def write_heat_map(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the cosines of :func:`logra_jax.study.heat_map.measure_heat_map`.

    A row is a layer, the mean over its projections; a column is a rank.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    maps = {kind: by_layer(found) for kind, found in result["cosines"].items()}
    highest = max(float(np.nanmax(m)) for m in maps.values())
    style: dict[Any, Any] = REPORT_STYLE | {"axes.grid": False}
    with rc_context(style):
        canvas = Canvas(figsize=(8.6, 5.2), layout="constrained")
        panels = list(np.atleast_1d(canvas.subplots(1, len(maps), sharey=True)))
        image = None
        for axes, (kind, cosines) in zip(panels, maps.items(), strict=True):
            image = axes.imshow(cosines, aspect="auto", vmin=0, vmax=highest)
            axes.set(title=_KIND_NAMES[kind], xlabel="rank")
            axes.set_xticks(range(len(result["ranks"])), map(str, result["ranks"]))
            for column, mean in enumerate(np.nanmean(cosines, 0)):
                _write_mean(axes, column, mean, highest)
        panels[0].yaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylabel("layer (mean of its projections)")
        assert image is not None
        canvas.colorbar(image, ax=panels, label="cosine of G and S A")
        canvas.savefig(path, format="png", dpi=130)


def _write_mean(axes: Any, column: int, mean: float, highest: float) -> None:
    """The mean of a column, in its middle row."""
    low, high = sorted(axes.get_ylim())
    colour = "black" if mean > 0.6 * highest else "white"
    place: dict[str, Any] = {"ha": "center", "va": "center", "color": colour}
    axes.text(column, (low + high) / 2, f"mean\n{mean:.3f}", **place)


def by_layer(cosines: Mapping[str, Sequence[Sequence[float]]]) -> np.ndarray:
    """(layers, ranks): means over the projections of each layer."""
    stacked = [np.array(found, float) for found in cosines.values()]
    most = max(map(len, stacked))
    return np.nanmean([found for found in stacked if len(found) == most], axis=0)

"""`logra report`: one HTML page on one or several training runs.

report(["runs/a", "runs/b"], "both.html")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_FILE = "report.html"


def report(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> int:
    """Write the page and say where it is; the exit status.

    It needs no network and no other file: figures are inline SVG, and there is no
    script. The same run directories give the same bytes.

    Args:
        run_dirs: of runs, which may be going on.
        out: the file to write, whole or not at all; None is ``report.html`` in the
            directory of a single run, or in the working directory.

    Raises:
        ValueError: something is no run, or the file cannot be written, or exists and
            is no report.
    """
    from logra_jax.study.report_figures import draw_figures
    from logra_jax.study.report_groups import group_runs
    from logra_jax.study.report_page import fill_page
    from logra_jax.study.report_runs import read_runs

    if out is None:
        out = Path(run_dirs[0]) / _FILE if len(run_dirs) == 1 else Path(_FILE)
    out = Path(out)
    groups = group_runs(read_runs(run_dirs))
    _check_replaceable(out)
    _write(out, fill_page(groups, draw_figures(groups)))
    print(f"report: {out}")
    return 0


def _check_replaceable(out: Path) -> None:
    """Refuse to replace anything but a report.

    Raises:
        ValueError: ``out`` is something else.
    """
    from logra_jax.study.report_page import is_page

    if not out.exists():
        return
    if out.is_dir() or not is_page(_beginning(out)):
        raise ValueError(
            f"`--out` must be a new file or an older report, got {str(out)!r}, which "
            "is something else; choose another name."
        )


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(200).decode("utf-8", "replace")


def _write(out: Path, page: str) -> None:
    """Write aside and rename: a reader never sees half of a page."""
    aside = out.with_name(f".{out.name}.tmp")
    try:
        # Half of a pair of surrogates, which an answer may hold, has no UTF-8.
        aside.write_text(page, "utf-8", "replace")
        os.replace(aside, out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ValueError(
            f"`--out` must be a file that can be written, got {str(out)!r}: "
            f"{error.strerror}; choose another place."
        ) from None

"""Notebooks run from top to bottom, and show what they print."""

import os
from pathlib import Path

import pytest

# Both come with the extra `dev`.
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
import nbformat  # noqa: E402

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def printed(notebook):
    """Which code cells print something, and what kind of thing."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[output.output_type for output in cell.outputs] for cell in cells]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_where_its_stored_copy_does(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    notebook = read(path)
    stored = printed(notebook)
    assert any(stored)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert printed(notebook) == stored

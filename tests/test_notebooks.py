"""Notebooks are stored bare, and run from top to bottom."""

import os
from pathlib import Path

import pytest

# Both come with the extra `dev`.
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
import nbformat  # noqa: E402

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HANGING = 300  # seconds for a cell; none takes a tenth of it

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_numbered(path):
    """Whether it is one of the course, which shows plots."""
    return path.stem[:2].isdigit()


def images(notebook):
    outputs = (output for cell in code(notebook) for output in cell.outputs)
    return [output for output in outputs if "image/png" in output.get("data", {})]


def test_there_are_notebooks():
    assert any(map(is_numbered, NOTEBOOKS))


@each
def test_a_notebook_is_stored_without_traces_of_a_run(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert not any(cell.outputs for cell in code(notebook))
    assert all(cell.execution_count is None for cell in code(notebook))
    assert not any(cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    # of the machine's Python nothing but that it is one
    assert notebook.metadata.language_info == {"name": "python"}


@each
def test_a_notebook_imports_the_library(path):
    assert any("import logra_jax as logra" in cell.source for cell in code(read(path)))


@pytest.mark.slow
@each
def test_a_notebook_runs_and_a_numbered_one_shows_plots(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.delenv("LOGRA_SGLANG_URL", raising=False)  # no server here
    notebook = read(path)
    nbclient.NotebookClient(
        notebook,
        timeout=HANGING,
        kernel_name="python3",
        resources={"metadata": {"path": path.parent}},
    ).execute()
    assert images(notebook) or not is_numbered(path)

"""A start that is refused: one sentence, and nothing left behind."""

from pathlib import Path

import pytest

from logra_jax.cli import main


@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_whose_servers_are_not_there_leaves_no_run(
    tiny_config: Path, tmp_path: Path, capsys, is_there: bool
):
    run = tmp_path / "run"
    if is_there:
        run.mkdir()
        (run / "notes.txt").write_text("mine")
    options = [f"run_dir={run}", "rollout.engine=sglang"]
    options.append("rollout.urls=[http://127.0.0.1:9]")
    assert main(["train", str(tiny_config), *options]) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if "logra: " in line
    ]
    assert "http://127.0.0.1:9 cannot be reached" in line
    assert run.exists() == is_there
    if is_there:
        assert [file.name for file in run.iterdir()] == ["notes.txt"]

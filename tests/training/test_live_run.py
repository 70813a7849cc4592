"""What looks into a run directory leaves the run that is going on there alone."""

from pathlib import Path

import pytest

from logra_jax.cli import main


@pytest.mark.parametrize("command", ["eval", "export"])
def test_a_checkpoint_that_is_being_written_is_left_alone(
    command: str, finished_copy: Path, tmp_path: Path
):
    checkpoints = finished_copy / "checkpoints"
    half = checkpoints / "6.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "part").write_bytes(b"so far")
    out = [str(tmp_path / "out")] if command == "export" else []
    assert main([command, str(finished_copy), *out]) == 0
    assert (half / "part").read_bytes() == b"so far"


@pytest.mark.parametrize("command", ["eval", "export"])
def test_a_run_without_checkpoints_stays_without(
    command: str, finished_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (finished_copy / "checkpoints").rename(tmp_path / "elsewhere")
    out = [str(tmp_path / "out")] if command == "export" else []
    assert main([command, str(finished_copy), *out]) == 2
    error = capsys.readouterr().err
    assert "`run_dir` must hold a checkpoint" in error
    assert error.count("\n") == 1
    assert not (finished_copy / "checkpoints").exists()

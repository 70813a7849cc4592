from pathlib import Path

import pytest

from logra_jax.cli import main


def test_export_of_a_checkpoint_is_the_model_the_run_wrote(
    finished_run: Path, tmp_path: Path
):
    run_dir = finished_run
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    for file in (run_dir / "model").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_eval_of_a_run_directory_repeats_its_last_evaluation(
    finished_run: Path, capsys
):
    from logra_jax.training.journal import read_metrics

    run_dir = finished_run
    last = read_metrics(run_dir)[-1]
    capsys.readouterr()
    assert main(["eval", str(run_dir)]) == 0
    out = capsys.readouterr().out
    greedy, sampled = last["heldout/greedy"], last["heldout/sampled"]
    assert f"greedy: {greedy:.3f}" in out
    assert f"T=1   : {sampled:.3f}" in out
    assert f"(n = {last['heldout/greedy_n']})" in out


def test_eval_of_a_config_measures_the_untrained_model(
    finished_run: Path, tiny_config: Path, capsys
):
    from logra_jax.training.journal import read_metrics

    first = read_metrics(finished_run)[0]
    capsys.readouterr()
    assert main(["eval", str(tiny_config)]) == 0
    assert f"T=1   : {first['heldout/sampled']:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["eval"], ["export"]])
def test_a_directory_that_is_no_run_is_refused(command, tmp_path: Path, capsys):
    out = [str(tmp_path / "out")] if command == ["export"] else []
    assert main([*command, str(tmp_path), *out]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_export_refuses_an_existing_directory(
    finished_run: Path, tmp_path: Path, capsys
):
    assert main(["export", str(finished_run), str(tmp_path)]) == 2
    assert "`out_dir` must not exist yet" in capsys.readouterr().err

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from logra_jax.cli import main
from logra_jax.rl.tasks import EvalSet, Question
from logra_jax.training import eval_command
from logra_jax.training.journal import read_metrics
from logra_jax.training.samples import read_samples, samples_path

Run = Callable[..., Path]


def evaluation(capsys: pytest.CaptureFixture, *command: str) -> dict[str, float]:
    """The metrics that `logra eval --json` prints, and nothing else."""
    capsys.readouterr()
    assert main(["eval", *command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["metrics"]


def evaluated(row: dict) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("heldout/")}


def test_export_of_a_checkpoint_is_the_model_the_run_wrote(
    finished_run: Path, tmp_path: Path
):
    run_dir = finished_run
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    for file in (run_dir / "model").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_a_run_its_checkpoint_and_its_export_give_the_same_numbers(
    finished_run: Path, tiny_config: Path, capsys
):
    last = evaluated(read_metrics(finished_run)[-1])
    assert last.keys() >= {"heldout/greedy_se", "heldout/sampled", "heldout/length"}
    assert evaluation(capsys, str(finished_run)) == last
    exported = [str(finished_run / "model"), "--config", str(tiny_config)]
    assert evaluation(capsys, *exported) == last


def test_eval_of_a_config_measures_the_untrained_model(
    finished_run: Path, tiny_config: Path, capsys
):
    first = evaluated(read_metrics(finished_run)[0])
    assert evaluation(capsys, str(tiny_config)) == first


def test_further_sets_have_keys_of_their_own_and_change_no_others(
    finished_run: Path, tiny_config: Path, capsys, monkeypatch
):
    """Their prompts begin unlike the task's, and are longer."""

    def load(config, task):
        entry = task.held_out[0].entry
        long = Question("Say " + "any " * 30 + "digit!", "5", entry, "long")
        short = Question("Say a digit!", "5", entry, "short")
        others = (long, short, task.held_out[0])
        return [EvalSet("heldout", task.held_out), EvalSet("other", others)]

    monkeypatch.setattr(eval_command, "load_eval_sets", load)
    found = evaluation(capsys, str(tiny_config))
    assert evaluated(found) == evaluated(read_metrics(finished_run)[0])
    assert found["other/greedy_n"] == 3
    assert found["other/sampled_n"] == 16
    families = [found[f"other/family/{name}"] for name in ("long", "short")]
    assert found["other/macro"] == pytest.approx(
        (sum(families) + found["other/family/chain_sum"]) / 3
    )


def test_eval_shows_a_table_and_some_responses_and_writes_all(
    tiny_config: Path, tmp_path: Path, capsys
):
    path = tmp_path / "some" / "answers.jsonl"
    options = ["eval.samples_per_question=3", "eval.pass_at=[1, 2]"]
    command = ["eval", str(tiny_config), "--samples", str(path), *options]
    assert main(command) == 0
    out = capsys.readouterr().out
    for measure in ("greedy", "sampled", "pass@2", "maj@2"):
        assert f"│ {measure} " in out
    samples = read_samples(path)
    assert samples[0].question in " ".join(out.split())
    questions = {s.question for s in samples}
    assert len(samples) == 4 * len(questions)
    for question in questions:
        own = [(s.mode, s.n) for s in samples if s.question == question]
        assert own == [("greedy", 0), ("sampled", 0), ("sampled", 1), ("sampled", 2)]


def test_an_evaluation_leaves_responses_to_read(finished_run: Path):
    for row in read_metrics(finished_run):
        path = samples_path(finished_run, row["step"])
        assert path.exists() == ("heldout/sampled" in row)
        if path.exists():
            samples = read_samples(path)
            assert len(samples) == row["heldout/greedy_n"] + row["heldout/sampled_n"]
            scores = [s.reward for s in samples if s.mode == "sampled"]
            mean = sum(scores) / len(scores)
            assert row["heldout/sampled"] == pytest.approx(mean)
            assert all(1 <= s.length <= 3 and s.family for s in samples)
            assert all(s.finished or s.length == 3 for s in samples)


# --- the best checkpoint


@pytest.fixture
def with_best(finished_copy: Path) -> Path:
    """A finished run whose evaluation after step 2, a checkpoint, was the best."""
    path = finished_copy / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["step"] == 2:
            row["heldout/sampled"] = 0.99
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return finished_copy


def test_export_and_eval_find_the_best_checkpoint(
    with_best: Path, tiny_run: Run, tmp_path: Path, capsys
):
    assert main(["export", str(with_best), str(tmp_path / "best"), "--best"]) == 0
    assert "step 2 exported" in capsys.readouterr().out
    model = (tmp_path / "best" / "model.safetensors").read_bytes()
    assert model != (with_best / "model" / "model.safetensors").read_bytes()
    second = evaluated(read_metrics(with_best)[2]) | {"heldout/sampled": None}
    found = evaluation(capsys, str(with_best), "--best")
    assert found | {"heldout/sampled": None} == second
    # what is asked for at the end of a run is the same file
    tiny_run("unused", f"resume={with_best}", "eval.export=best")
    assert (with_best / "model" / "model.safetensors").read_bytes() == model


def test_a_run_without_a_best_checkpoint_says_so(finished_copy: Path, capsys):
    (finished_copy / "metrics.jsonl").unlink()
    assert main(["eval", str(finished_copy), "--best"]) == 2
    assert "a checkpoint with a value of `eval.best`, got" in capsys.readouterr().err


# --- bad input


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, capsys):
    no_directory = tmp_path / "config.yaml"
    out = str(tmp_path / "out")

    def refused(*command: str) -> str:
        assert main([*command]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "or the directory of a run" in refused("eval", str(tmp_path))
    message = "`RUN_DIR` must name a run directory, got"
    assert message in refused("export", str(tmp_path), out)
    no_directory.write_text("")
    assert "which is no directory; give" in refused("export", str(no_directory), out)


def test_export_refuses_an_existing_directory(
    finished_run: Path, tmp_path: Path, capsys
):
    assert main(["export", str(finished_run), str(tmp_path)]) == 2
    assert "`out_dir` must not exist yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["{run}", "--config", "{config}"], "`--config` must go with a model"),
        (["{config}", "--best"], "`--best` must go with a run directory"),
        (["{run}/model"], "`target` must be a config file or the directory of a run"),
        (["nowhere", "--config", "{config}"], "`model.path` must be a Hugging Face"),
        (
            ["{config}", "eval.max_new_tokens=100000"],
            "`eval.max_new_tokens` must leave the longest prompt of the evaluation set "
            "'heldout'",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_is_one_sentence(
    command, message: str, finished_run: Path, tiny_config: Path, capsys
):
    command = [text.format(run=finished_run, config=tiny_config) for text in command]
    assert main(["eval", *command]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_best_metric_that_is_not_measured_is_refused_at_the_start(
    tiny_config: Path, tmp_path: Path, capsys
):
    run_dir = tmp_path / "run"
    options = [f"run_dir={run_dir}", "eval.best=heldout/pass@8"]
    assert main(["train", str(tiny_config), *options]) == 2
    error = capsys.readouterr().err
    assert "got 'heldout/pass@8'; there are heldout/greedy, heldout/sampled." in error
    assert not run_dir.exists()

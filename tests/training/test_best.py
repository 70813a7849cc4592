"""The best checkpoint of a run, and the end that an alarm makes of it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from logra_jax.cli import main
from logra_jax.training import loop
from logra_jax.training.alarms import read_alarms
from logra_jax.training.checkpoint import Checkpoints
from logra_jax.training.config import load_config
from logra_jax.training.evaluate import Evaluation
from logra_jax.training.journal import deterministic, read_metrics
from logra_jax.training.loop import STOPPED_BY_ALARM, train
from logra_jax.training.samples import samples_path

Run = Callable[..., Path]
# One program whatever the number of steps.
OPTIONS = ("kl.budget=constant", "train.eval_every=1", "train.checkpoint_every=2")
# Accuracy after each update; before them it was the best of all.
SCRIPT = {0: 0.9, 1: 0.2, 2: 0.3, 3: 0.5, 4: 0.5, 5: 0.1, 6: 0.4, 7: 0.6, 8: 0.2}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations give what the script says."""

    def evaluate(run, state):
        values = {"heldout/sampled": SCRIPT[run.done], "heldout/sampled_se": 0.0}
        values["heldout/sampled_n"] = 16
        return run.evaluator.keep(run.done, Evaluation(values, []))

    monkeypatch.setattr(loop._Run, "_evaluate", evaluate)


def saved(run_dir: Path) -> set[int]:
    return {int(path.name) for path in (run_dir / "checkpoints").iterdir()}


def model(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
def test_the_newest_and_the_best_are_kept_and_outlive_a_resume(tiny_run: Run):
    few = [*OPTIONS, "train.keep_checkpoints=1"]
    run_dir = tiny_run("run", *few, "train.steps=6")
    assert saved(run_dir) == {3, 6}  # the first of two that are alike
    last = model(run_dir)
    tiny_run("unused", f"resume={run_dir}", *few, "train.steps=6", "eval.export=best")
    assert saved(run_dir) == {3, 6}
    assert model(run_dir) != last
    stale = samples_path(run_dir, 9)
    stale.touch()
    tiny_run("unused", f"resume={run_dir}", *few, "train.steps=8")
    assert not stale.exists()
    assert samples_path(run_dir, 8).exists()
    assert saved(run_dir) == {7, 8}
    without = tiny_run("without", *few, "train.steps=4", "eval.keep_best=false")
    assert saved(without) == {4}


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
def test_a_run_killed_while_it_saves_its_best_has_it_in_the_end(
    tiny_run: Run, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The journal has the row, the checkpoint is not there; then it is made again."""
    few = [*OPTIONS, "train.keep_checkpoints=1", "train.steps=4", "eval.export=best"]
    whole = tiny_run("whole", *few)
    save = Checkpoints.save

    def fail(checkpoints, state):
        if int(state.step) == 3:
            raise RuntimeError("killed")
        save(checkpoints, state)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", fail)
        with pytest.raises(RuntimeError, match="killed"):
            train(load_config(tiny_config, [f"run_dir={tmp_path / 'run'}", *few]))
    run_dir = tmp_path / "run"
    assert read_metrics(run_dir)[-1]["step"] == 3
    assert saved(run_dir) == {2}
    tiny_run("unused", f"resume={run_dir}", *few)
    assert saved(run_dir) == {3, 4}
    assert model(run_dir) == model(whole)


@pytest.mark.slow
def test_an_alarm_ends_a_run_that_exports_its_best(
    tiny_run: Run, tiny_config: Path, tmp_path: Path, capsys
):
    """Nearly all responses are cut; the third row in a row is read one update later."""
    run_dir = tmp_path / "run"
    alarm = ["monitor.stop_on=[truncated]", "monitor.max_truncated=0.0"]
    usual = ["kl.budget=constant", "train.eval_every=1", "train.steps=50"]
    usual += ["train.checkpoint_every=1000"]
    options = [f"run_dir={run_dir}", *usual, *alarm]
    assert main(["train", str(tiny_config), *options]) == STOPPED_BY_ALARM == 3
    assert "by the alarm 'truncated'" in " ".join(capsys.readouterr().out.split())
    rows = read_metrics(run_dir)
    last = rows[-1]["step"]
    assert last in (3, 4)  # at once where a checkpoint was due
    steps = [row["step"] for row in read_alarms(run_dir) if row["name"] == "truncated"]
    assert steps == list(range(1, last + 1))
    scores = {row["step"]: row["heldout/sampled"] for row in rows if row["step"] > 0}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert saved(run_dir) >= {best, last}
    out = tmp_path / "best"
    assert main(["export", str(run_dir), str(out), "--best"]) == 0
    assert f"step {best} exported" in capsys.readouterr().out
    assert (out / "model.safetensors").read_bytes() == model(run_dir)
    # it goes on as if nothing had been, once the alarm may last
    more = [*usual[:2], "train.steps=6", "train.checkpoint_every=1000"]
    tiny_run("unused", f"resume={run_dir}", *more, alarm[1])
    whole = tiny_run("whole", *more, alarm[1])
    assert journal(run_dir) == journal(whole)
    assert model(run_dir) == model(whole)


def test_a_run_that_an_alarm_ended_stays_where_it_ended(
    finished_copy: Path, tiny_config: Path
):
    """Killed while it exported its model, it would have gone on past the alarm."""
    before = journal(finished_copy)
    options = [f"resume={finished_copy}", "train.steps=9", "monitor.patience=1"]
    options += ["monitor.stop_on=[truncated]", "monitor.max_truncated=0.0"]
    assert max(row.get("length/truncated", 0.0) for row in before) > 0
    assert main(["train", str(tiny_config), *options]) == STOPPED_BY_ALARM
    assert journal(finished_copy) == before


def journal(run_dir: Path) -> list[dict]:
    return [deterministic(row) for row in read_metrics(run_dir)]


@pytest.mark.slow
def test_history_of_alarms_outlives_a_resume(finished_copy: Path, tiny_config: Path):
    """Two updates raised it before the resume: the third does, and the next is last."""
    path = finished_copy / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["length/truncated"] = 0.0 if row["step"] < 3 else 1.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"resume={finished_copy}", "train.steps=9"]
    options += ["monitor.stop_on=[truncated]", "monitor.max_truncated=0.0"]
    assert main(["train", str(tiny_config), *options]) == STOPPED_BY_ALARM
    assert read_metrics(finished_copy)[-1]["step"] == 6

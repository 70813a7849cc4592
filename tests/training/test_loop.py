import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from logra_jax.cli import main
from logra_jax.training.checkpoint import check_resumable
from logra_jax.training.config import load_config
from logra_jax.training.journal import deterministic, read_metrics
from logra_jax.training.loop import train

Run = Callable[..., Path]


def journal(run_dir: Path) -> list[dict]:
    return [deterministic(row) for row in read_metrics(run_dir)]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


def start(config: Path, *overrides: str) -> subprocess.Popen:
    """A run in a process of its own, on one CPU device as users have it."""
    env = os.environ | {"XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "logra_jax", "train", str(config), *overrides],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output


def await_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    """Wait until the journal holds the step; fail if the run ends before."""
    deadline = time.monotonic() + 120
    pattern = re.compile(rf'^{{"step": {step},', re.MULTILINE)
    path = run_dir / "metrics.jsonl"
    while not (path.exists() and pattern.search(path.read_text())):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_leaves_everything_a_user_was_promised(finished_run: Path):
    names = {path.name for path in finished_run.iterdir()}
    assert names >= {
        "config.yaml",
        "machine.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "model",
        "accuracy.png",
        "kl.png",
        "length.png",
        "cost.png",
    }
    rows = read_metrics(finished_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [r["step"] for r in rows if "heldout/greedy" in r] == [0, 2, 4]
    assert all(row["kl/predicted"] > 0 for row in rows[1:])
    assert {p.name for p in (finished_run / "model").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_predicted_kl_is_the_budget_and_realised_kl_follows_it(tiny_run: Run):
    options = ["model.dtype=float32", "kl.budget=constant", "kl.start=1e-4"]
    rows = read_metrics(tiny_run("run", *options))
    for row in rows[1:]:
        assert row["kl/predicted"] == pytest.approx(row["kl/budget"], rel=1e-4)
        assert row["kl/realised"] == pytest.approx(row["kl/predicted"], rel=0.1)


def test_a_run_says_what_it_trains(tiny_run: Run, capsys):
    tiny_run("run", "train.steps=1", "sketch.match=(up|down)_proj", "sketch.rank=3")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    chosen = {line[0]: line[4] for line in lines if line and line[0].startswith("lay")}
    assert chosen == {
        "layer": "rank",
        "layers.mlp.up_proj": "3",
        "layers.mlp.down_proj": "3",
    }


def test_same_seed_gives_the_same_metrics_and_weights_bit_for_bit(
    finished_run: Path, tiny_run: Run
):
    one, two, other = finished_run, tiny_run("two"), tiny_run("other", "seed=1")
    assert journal(one) == journal(two)
    assert weights(one) == weights(two)
    assert weights(one) != weights(other)


def test_training_moves_every_sketched_kernel_and_nothing_else(
    finished_run: Path, tiny_model_dir: Path
):
    import ml_dtypes  # noqa: F401
    from safetensors.numpy import load_file

    before = load_file(tiny_model_dir / "model.safetensors")
    after = load_file(finished_run / "model" / "model.safetensors")
    moved = {n for n in before if (before[n] != after[n]).any()}
    assert moved == {n for n in before if n.endswith("_proj.weight")}


@pytest.mark.slow
def test_a_run_killed_between_checkpoints_resumes_to_the_same_weights(
    tiny_config: Path, tmp_path: Path
):
    options = ["train.steps=6"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(tiny_config, f"run_dir={whole}", *options))
    process = start(tiny_config, f"run_dir={killed}", *options)
    await_step(killed, 3, process)
    process.kill()
    process.communicate()
    assert not (killed / "model").exists()
    finish(start(tiny_config, f"resume={killed}", *options))
    assert weights(whole) == weights(killed)
    assert journal(whole) == journal(killed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_can_go_on(
    number: signal.Signals, tiny_config: Path, tmp_path: Path
):
    # A constant budget: one program whatever the number of steps.
    options = ["train.checkpoint_every=1000", "kl.budget=constant"]
    run_dir = tmp_path / "run"
    process = start(tiny_config, f"run_dir={run_dir}", "train.steps=1000", *options)
    await_step(run_dir, 1, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output
    assert f"{number.name}: stopping after this update" in output
    assert f"resume={run_dir}" in output
    done = read_metrics(run_dir)[-1]["step"]
    steps = f"train.steps={done + 1}"
    finish(start(tiny_config, f"resume={run_dir}", steps, *options))
    assert [row["step"] for row in read_metrics(run_dir)] == list(range(done + 2))


@pytest.mark.parametrize("is_whole_row", [False, True])
def test_an_evaluation_that_was_lost_is_made_up_for(
    finished_copy: Path, tiny_run: Run, is_whole_row: bool
):
    """Lost with the servers; or its row, by a run that was killed in doing so."""
    run_dir = finished_copy
    before = journal(run_dir)
    path = run_dir / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    row = {k: v for k, v in json.loads(last).items() if "heldout" not in k}
    lines += [] if is_whole_row else [json.dumps(row)]
    path.write_text("".join(line + "\n" for line in lines))
    tiny_run("unused", f"resume={run_dir}")
    after = journal(run_dir)
    assert after[:-1] == before[:-1]
    names = [k for k in before[-1] if "heldout" in k or not is_whole_row]
    assert {k: after[-1].get(k) for k in names} == {k: before[-1][k] for k in names}


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    finished_copy: Path, tiny_run: Run
):
    run_dir = finished_copy
    before = journal(run_dir)
    for checkpoint in (run_dir / "checkpoints").iterdir():
        for path in sorted(checkpoint.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        checkpoint.rmdir()
    tiny_run("unused", f"resume={run_dir}")
    assert journal(run_dir) == before


def test_a_run_killed_before_its_journal_begins_again(
    finished_copy: Path, tiny_run: Run
):
    run_dir = finished_copy
    before = weights(run_dir)
    for path in run_dir.iterdir():
        if path.name != "config.yaml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    tiny_run("unused", f"resume={run_dir}")
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2, 3, 4]
    assert weights(run_dir) == before


def test_a_refused_start_leaves_no_run_behind(tiny_run: Run, tmp_path: Path):
    with pytest.raises(ValueError, match="`match` must hit"):
        tiny_run("run", "sketch.match=nothing")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_finished_run_can_be_resumed_for_more_steps(tiny_run: Run):
    run_dir = tiny_run("run", "kl.budget=constant")
    short = weights(run_dir)
    tiny_run("unused", f"resume={run_dir}", "kl.budget=constant", "train.steps=6")
    assert [r["step"] for r in read_metrics(run_dir)] == list(range(7))
    assert weights(run_dir) != short
    whole = tiny_run("whole", "kl.budget=constant", "train.steps=6")
    assert weights(run_dir) == weights(whole)


def test_a_run_stops_early_when_it_reaches_its_target(tiny_run: Run, capsys):
    # partial credit gives any text a little more than nothing
    options = ["train.target_accuracy=0.001", "train.steps=50", "kl.budget=constant"]
    run_dir = tiny_run("run", *options)
    assert read_metrics(run_dir)[-1]["step"] < 50
    assert (run_dir / "model").is_dir()
    assert "heldout/sampled reached 0.001: stopping" in capsys.readouterr().out


@pytest.mark.slow
def test_grpo_trains_on_groups(tiny_run: Run):
    run_dir = tiny_run("run", "rl.advantage=grpo", "rl.responses_per_prompt=4")
    assert read_metrics(run_dir)[-1]["step"] == 4


BAD = {
    "kl.shar=3": "kl.share",
    "sketch.rank=0": "sketch.rank",
    "sketch.rank=33": r"`rank` must be in \[1, min\(k, d\)\]",
    "sketch.match=nothing": "`match` must hit at least one",
    "rollout.max_new_tokens=100000": "context of",
    "task.held_out=0": "task.held_out",
    "task.size=1": "task.size",
    "task.name=chain_summ": "chain_sum",
    "model.path=nowhere": "model.path",
    "resume=nowhere": "resume",
}


def test_a_prompt_that_fits_here_but_not_in_sglang_is_refused_at_the_start(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    command = ["train", str(tiny_config), f"run_dir={tmp_path / 'run'}"]
    assert main([*command, "rollout.max_new_tokens=100000"]) == 2
    found = re.search(r"context of (\d+) .* got 100000 \+ (\d+)", _error(capsys))
    assert found
    new = int(found[1]) - int(found[2])  # all that is left of the context
    sglang = ["rollout.engine=sglang", "rollout.urls=[http://127.0.0.1:9]"]
    assert main([*command, *sglang, f"rollout.max_new_tokens={new}"]) == 2
    assert "less 2 that SGLang leaves unused" in _error(capsys)
    assert main([*command, *sglang, f"rollout.max_new_tokens={new - 2}"]) == 2
    assert "127.0.0.1:9 cannot be reached" in _error(capsys)


def _error(capsys: pytest.CaptureFixture) -> str:
    return capsys.readouterr().err


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_one_sentence_and_exit_status_2(
    override: str,
    tiny_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
):
    run_dir = f"run_dir={tmp_path / 'run'}"
    assert main(["train", str(tiny_config), run_dir, override]) == 2
    error = capsys.readouterr().err
    assert re.search(BAD[override], error)
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_flash_attention_without_a_gpu_is_refused_at_the_start(tiny_run):
    with pytest.raises(
        ValueError, match=r"`model.attention` must be .* \(cpu\), got 'flash'; use auto"
    ):
        tiny_run("run", "model.activations=bfloat16", "model.attention=flash")


def test_resuming_as_another_run_is_refused(
    finished_run: Path, tiny_config: Path, tiny_run: Run
):
    run_dir = finished_run
    with pytest.raises(ValueError, match=r"`seed` must stay 0 .* got 1"):
        tiny_run("unused", f"resume={run_dir}", "seed=1")
    with pytest.raises(ValueError, match=r"`task.options.allow_negation` must stay"):
        tiny_run("unused", f"resume={run_dir}", "task.options.allow_negation=true")
    config = load_config(tiny_config, [f"run_dir={run_dir}"])
    with pytest.raises(ValueError, match="`run_dir` must not hold a run yet"):
        train(config)


def test_an_option_left_out_of_a_resumed_run_is_noticed(tmp_path: Path):
    options = {"min_terms": 2}
    path = tmp_path / "a.yaml"
    path.write_text("model: {path: some-model}\ntrain: {steps: 1}\n")
    without = load_config(path)
    task = dataclasses.replace(without.task, options=options)
    with pytest.raises(ValueError, match=r"`task.options.min_terms` must stay 2"):
        check_resumable(without, dataclasses.replace(without, task=task))

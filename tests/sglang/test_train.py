"""Training through a real server: it learns, and both sides compute the same."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from logra_jax.cli import main
from logra_jax.models.tokenizer import ChatTokenizer

CONFIG = """
model: {{path: {model}, dtype: {dtype}, activations: {dtype}}}
sketch: {{rank: 8}}
kl: {{budget: constant, start: 1.0e-2}}
task: {{options: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}}
reward: {{answer: whole_text, partial: true}}  # any digit scores a little
cache_dir: {cache}
rollout: {{engine: sglang, urls: ["{url}"], max_new_tokens: 3, load_weights: true}}
train: {{steps: 16, batch: 256, microbatch: 256, eval_every: 16, checkpoint_every: 4}}
eval: {{samples: 16, batch: 64}}
"""
# Largest difference of log-probs of a token, by dtype of weights and activations.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2}


@pytest.fixture(scope="session")
def digit_model(
    tiny_model: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The tiny model of a dtype, with digits made likely, so that rewards differ."""

    def make(dtype: str) -> Path:
        directory = tmp_path_factory.mktemp("digits") / dtype
        shutil.copytree(tiny_model("qwen2", dtype), directory)
        tensors = safetensors.numpy.load_file(directory / "model.safetensors")
        tokenizer = ChatTokenizer.load(directory)
        digits = [tokenizer.encode(str(i))[0] for i in range(10)]
        tensors["model.embed_tokens.weight"][digits] *= 4
        safetensors.numpy.save_file(
            tensors, directory / "model.safetensors", metadata={"format": "pt"}
        )
        return directory

    return make


@pytest.fixture
def config_of(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    def write(model: Path, dtype: str, url: str) -> Path:
        path = tmp_path / "tiny.yaml"
        cache = tmp_path / "cache"
        text = CONFIG.format(model=model, dtype=dtype, url=url, cache=cache)
        path.write_text(text)
        return path

    return write


def metrics(run: Path) -> list[dict]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "reward" in row]


def check(run: Path, steps: int, dtype: str) -> list[dict]:
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["mismatch/max"] <= TOLERANCE[dtype]
        assert row["mismatch/kl"] <= TOLERANCE[dtype] ** 2
        assert row["correction/mean_weight"] == pytest.approx(1, abs=TOLERANCE[dtype])
        assert row["sync/ready"] == 1
        assert row["sync/healed"] == 0
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_sides_agree_at_every_step_of_a_run(
    digit_model, config_of, start_server, tmp_path: Path, dtype: str, capsys
):
    model = digit_model(dtype)
    server = start_server(model, dtype)
    config = config_of(model, dtype, server.url)
    run = tmp_path / "run"
    assert main(["train", str(config), f"run_dir={run}"]) == 0
    rows = check(run, 16, dtype)
    assert all(row["staleness/max"] == 0 for row in rows)
    if dtype == "bfloat16":
        return

    # Ahead of the update: the same, on weights of the version before.
    ahead = tmp_path / "ahead"
    options = ["rollout.staleness=1", "rollout.pause=in_place", "train.steps=8"]
    assert main(["train", str(config), f"run_dir={ahead}", *options]) == 0
    rows = metrics(ahead)
    assert [row["staleness/max"] for row in rows] == [0] + [1] * 7
    assert all(row["sync/ready"] == 1 for row in rows)
    # Weights that moved since: a mismatch that is no error, and is corrected.
    assert rows[-1]["mismatch/max"] > 10 * TOLERANCE[dtype]
    seconds = [run_seconds(run)[:8], run_seconds(ahead)]
    with capsys.disabled():
        print(
            f"\nseconds a step, medians: {np.median(seconds[0]):.3f} synchronous, "
            f"{np.median(seconds[1]):.3f} one batch ahead"
        )


@pytest.mark.model
def test_the_quickstart_learns_through_a_server(
    smollm2_dir: Path, start_server, tmp_path: Path
):
    server = start_server(smollm2_dir, "bfloat16", max_tokens=32768)
    run = tmp_path / "run"
    options = [f"rollout.urls=[{server.url}]", "rollout.engine=sglang"]
    options += ["train.steps=6", f"model.path={smollm2_dir}", f"run_dir={run}"]
    assert main(["train", "configs/quickstart.yaml", *options]) == 0
    text = (run / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    before, after = (rows[i]["heldout/sampled"] for i in (0, -1))
    assert after > before + 0.06
    for row in rows[1:]:
        # The server computes in bfloat16, the trainer in float32.
        assert row["mismatch/kl"] < 5e-3
        assert row["mismatch/mean"] < 0.1
        assert 0.7 < row["kl/realised"] / row["kl/predicted"] < 1.4
        assert (row["sync/ready"], row["sync/healed"]) == (1, 0)


def run_seconds(run: Path) -> list[float]:
    return np.diff([row["seconds/total"] for row in metrics(run)]).tolist()


def test_a_server_killed_in_a_run_comes_back_and_the_run_goes_on(
    digit_model, config_of, start_server, tmp_path: Path
):
    """Killed while it generates, restarted from the base; nobody tells the trainer."""
    model = digit_model("float32")
    server = start_server(model, "float32")
    port = int(server.url.rsplit(":", 1)[1])
    config = config_of(model, "float32", server.url)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "logra_jax", "train", str(config)]
    command += [f"run_dir={run}", "train.steps=8", "rollout.patience=200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 200
            while len(metrics(run) if (run / "metrics.jsonl").exists() else []) < 3:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            server.stop()
            start_server(model, "float32", port=port)
            out, _ = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, out
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["mismatch/max"] for row in rows) <= TOLERANCE["float32"]
    assert "caught up by the updates that it had missed" in out


def test_a_run_without_its_servers_ends_saved_and_resumes(
    digit_model, config_of, start_server, tmp_path: Path, capsys
):
    model = digit_model("float32")
    server = start_server(model, "float32")
    config = config_of(model, "float32", server.url)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "logra_jax", "train", str(config)]
    command += [f"run_dir={run}", "train.steps=6", "rollout.patience=1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            end = time.monotonic() + 200
            while len(metrics(run) if (run / "metrics.jsonl").exists() else []) < 2:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            server.process.send_signal(signal.SIGKILL)
            server.stop()
            _, error = process.communicate(timeout=200)
        finally:
            process.kill()
    if process.returncode == 0:
        pytest.fail("the run ended before the server did: make it longer")
    assert process.returncode == 2
    (line,) = [line for line in error.splitlines() if line.startswith("logra: ")]
    assert "No server is left" in line
    assert f"and resume={run}." in line
    done = len(metrics(run))
    again = start_server(model, "float32")
    urls = f"rollout.urls=[{again.url}]"
    options = ["train.steps=6", urls, "rollout.load_weights=false"]
    assert main(["train", str(config), f"resume={run}", *options]) == 0
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert done < 6
    assert max(row["mismatch/max"] for row in rows) <= TOLERANCE["float32"]

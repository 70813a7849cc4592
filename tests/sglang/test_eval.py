"""`logra eval` on a real server: it is given the weights, and answers as we do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.numpy

from logra_jax.cli import main

CONFIG = """
model: {{path: {model}, dtype: float32, activations: float32}}
sketch: {{rank: 8}}
task: {{options: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}}
reward: {{answer: whole_text, partial: true}}
cache_dir: {cache}
rollout: {{max_new_tokens: 6}}
train: {{steps: 1}}
eval: {{samples_per_question: 4, pass_at: [2], batch: 32, show_samples: 0}}
"""


def test_a_server_is_given_the_weights_and_gives_the_same_greedy_answers(
    tiny_model: Callable[[str, str], Path], start_server, tmp_path: Path, capsys
):
    model = tiny_model("qwen2", "float32")
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG.format(model=model, cache=tmp_path / "cache"))
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tensors = safetensors.numpy.load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]  # other answers
    safetensors.numpy.save_file(
        tensors, other / "model.safetensors", metadata={"format": "pt"}
    )
    server = start_server(model, "float32")
    sglang = ["rollout.engine=sglang", f"rollout.urls=[{server.url}]"]

    def answers(which: Path, *options: str) -> tuple[dict, list[dict]]:
        path = tmp_path / "answers.jsonl"
        command = ["eval", str(which), "--config", str(config), "--json"]
        capsys.readouterr()
        assert main([*command, "--samples", str(path), *options]) == 0
        metrics = json.loads(capsys.readouterr().out)["metrics"]
        return metrics, [json.loads(line) for line in path.read_text().splitlines()]

    seen = []
    for which in (model, other, model):
        here, there = answers(which), answers(which, *sglang)
        greedy, remote = (
            [s["response"] for s in samples if s["mode"] == "greedy"]
            for _, samples in (here, there)
        )
        assert remote == greedy
        assert there[0]["heldout/greedy"] == pytest.approx(here[0]["heldout/greedy"])
        assert there[0].keys() == here[0].keys()
        assert there[0]["heldout/sampled_n"] == here[0]["heldout/sampled_n"]
        seen.append(greedy)
    assert seen[0] == seen[2] != seen[1]

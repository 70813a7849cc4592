"""`logra bench overlap` against a real server: its runs are as it says."""

import json
import statistics

import pytest

from logra_jax import cli

STEPS = 5
CONFIG = """
model: {{path: {model}, dtype: float32, activations: float32}}
sketch: {{rank: 4}}
cache_dir: {cache}
task: {{size: 50}}
reward: {{answer: whole_text, partial: true}}
rollout: {{pause: in_place, max_new_tokens: 8, share_dir: {share}}}
train: {{steps: 1, batch: 16, microbatch: 16}}
eval: {{batch: 16}}
serve: {{python: {python}, port: 0, device: cpu, threads: 1, max_tokens: 16384}}
"""


def test_both_ways_on_a_server_of_its_own(tiny_model, sglang_python, tmp_path, capsys):
    path, share = tmp_path / "tiny.yaml", tmp_path / "share"
    model = tiny_model("qwen2", "float32")
    cache = tmp_path / "cache"
    text = CONFIG.format(model=model, cache=cache, share=share, python=sglang_python)
    path.write_text(text)
    argv = ["bench", "overlap", "--json", "--steps", str(STEPS), str(path)]
    assert cli.main(argv) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)

    assert result["staleness"]["synchronous"] == {"mean": 0, "max": 0}
    assert result["staleness"]["ahead"]["max"] == 1
    assert 0 < result["staleness"]["ahead"]["mean"] <= 1
    assert result["counted"] == STEPS - 3
    for mode, lists in result["measured"].items():
        for name, values in lists.items():
            assert len(values) == STEPS - 3
            assert result["medians"][mode][name] == statistics.median(values)
        assert min(lists["rest_seconds"]) >= 0
        assert all(0 < tokens <= 8 for tokens in lists["response_tokens"])
        parts = ("rollout", "step", "sync", "rest")
        for i, total in enumerate(lists["total_seconds"]):
            sums = sum(lists[f"{part}_seconds"][i] for part in parts)
            assert total == pytest.approx(sums)
        assert result["seconds"][mode] == pytest.approx(sum(lists["total_seconds"]))
    seconds = result["seconds"]
    ratio = seconds["synchronous"] / seconds["ahead"]
    assert result["ratios"]["sum"] == pytest.approx(ratio)
    assert (result["servers"], result["server_device"]) == (1, "cpu")
    assert list(share.iterdir()) == []

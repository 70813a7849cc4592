import dataclasses
import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from logra_jax.study.bench import Timing, _print_tables, _sampled, bench_rollout
from logra_jax.study.bench_merge import bench_merge
from logra_jax.training.config import Config, load_config

PROMPTS, NEW = 3, 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A random Llama of two layers that reads and writes characters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("bench")
    characters = [chr(i) for i in range(32, 127)]
    words = {word: i for i, word in enumerate(["<end>", "\n", *characters])}
    small = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    small.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    small.add_special_tokens(["<end>"])
    torch.manual_seed(0)
    shapes = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(shapes).save_pretrained(root / "tiny")
    small.save(str(root / "tiny" / "tokenizer.json"))
    (root / "tiny" / "tokenizer_config.json").write_text(
        json.dumps(
            {"eos_token": "<end>", "chat_template": "{{ messages[-1].content }}"}
        )
    )
    (root / "tiny.yaml").write_text(
        f"model: {{path: {root / 'tiny'}, dtype: float32}}\n"
        "sketch: {rank: 4}\n"
        "task: {name: chain_sum, size: 40}\n"
        f"rollout: {{max_new_tokens: {NEW}}}\n"
        "train: {steps: 1, batch: 8, microbatch: 8, eval_every: 1}\n"
    )
    return load_config(root / "tiny.yaml")


@pytest.fixture(scope="module")
def result(config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What `--json` prints."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert bench_rollout(config, True, prompts=PROMPTS, repetitions=2) == 0
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


@pytest.mark.parametrize("setting", ["sampled", "full_length"])
def test_ratio_is_of_the_medians_of_tokens_per_second(result, setting):
    part = result[setting]
    for engine in ("logra", "transformers"):
        timing = part[engine]
        assert len(timing["seconds"]) == len(timing["tokens"]) == 2
        rates = np.divide(timing["tokens"], timing["seconds"])
        np.testing.assert_allclose(timing["tokens_per_second"], np.median(rates))
        assert all(PROMPTS <= n <= PROMPTS * NEW for n in timing["tokens"])
    rate = {name: part[name]["tokens_per_second"] for name in ("logra", "transformers")}
    np.testing.assert_allclose(part["ratio"], rate["logra"] / rate["transformers"])


def test_at_full_length_both_sample_every_token(result):
    for engine in ("logra", "transformers"):
        assert result["full_length"][engine]["tokens"] == [PROMPTS * NEW] * 2


def test_compilation_is_in_the_first_call_alone(result):
    timing = result["sampled"]["logra"]
    first, *others = timing["warm_up_seconds"]
    assert first > max(*others, *timing["seconds"])


def test_setup_says_what_was_compared(result):
    setup = result["setup"]
    assert setup["dtype"] == setup["logra_activations"] == "float32"
    assert (setup["prompts"], setup["max_new_tokens"]) == (PROMPTS, NEW)
    assert {"jax", "torch", "transformers"} < set(setup["versions"])
    assert setup["device"].startswith("cpu")


def test_people_get_a_table(result, capsys):
    _print_tables(result)
    text = capsys.readouterr().out
    assert text.count("ratio of tokens/s") == 2
    assert "At full length" in text


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_oracle_is_one_sentence(config, monkeypatch, missing):
    find = importlib.import_module

    def without(name):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return find(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ValueError, match=f"`{missing}` must be installed"):
        bench_rollout(config, True)


def test_task_or_model_that_is_wrong_is_one_sentence(config):
    model = dataclasses.replace(config.model, path="no-such-model")
    with pytest.raises(ValueError, match=r"`model\.path` must be a Hugging Face"):
        bench_rollout(dataclasses.replace(config, model=model), True)


def test_importing_the_benchmark_imports_no_oracle():
    code = (
        "import sys, logra_jax.study.bench\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tokens_are_counted_to_the_first_end_of_sequence():
    rows = np.array([[5, 2, 2, 2], [2, 5, 5, 5], [5, 6, 7, 8], [5, 3, 2, 2]])
    assert _sampled(rows, (2,)) == 2 + 1 + 4 + 3
    assert _sampled(rows, (2, 3)) == 2 + 1 + 4 + 2
    assert _sampled(rows, ()) == 16


def test_rate_is_the_median_of_rates():
    timing = Timing((9.0,), (1.0, 2.0, 4.0), (10, 10, 80))
    assert timing.tokens_per_second == 10


# --- merge


@pytest.mark.slow
def test_merge_bench_measures_both_in_turns_and_prints_the_share(config, capsys):
    assert bench_merge(config, 100, True, repetitions=2) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["tokens"] >= 100
    assert result["weights_merged"] == 2 * (32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3)
    assert {"step", "merge, stochastic", "merge, nearest"} < set(result["seconds"])
    for name, seconds in result["seconds"].items():
        assert len(seconds) == 2
        median = np.median(seconds)
        assert result["median_seconds"][name] == pytest.approx(median)
        share = median / np.median(result["seconds"]["step"])
        assert result["share_of_step"][name] == pytest.approx(share)


@pytest.mark.slow
def test_merge_bench_prints_a_table(config, capsys):
    assert bench_merge(config, 1, False, repetitions=1) == 0
    out = capsys.readouterr().out
    assert "share of the step" in out
    assert "100.0 %" in out


def test_merge_bench_of_no_tokens_is_refused(config):
    with pytest.raises(ValueError, match="`--tokens` must be at least 1, got 0"):
        bench_merge(config, 0, True)

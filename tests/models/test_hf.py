import json
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.digest import TensorDigest, digest_array
from logra_jax.models import hf
from logra_jax.models.attention import Span
from logra_jax.models.decoder import Decoder
from logra_jax.models.hf import (
    load_decoder,
    load_tensors,
    named_factors,
    save_decoder,
    save_tensors,
    tensor_digests,
)
from logra_jax.models.hf_config import read_config
from logra_jax.models.weight_files import WeightFiles, write_weights
from logra_jax.rollout.local import LocalEngine
from logra_jax.rollout.types import Sampling

TOKENS = np.random.default_rng(0).integers(0, 97, (2, 11)).astype(np.int32)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Both with positions beyond those that were pre-trained on, at 11 tokens.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
# head_dim 16 of Qwen3 is not hidden_size / heads = 6.
KINDS = {
    "llama tied": ("Llama", {"tie_word_embeddings": True, "rope_theta": 500.0}),
    "llama untied": ("Llama", {"tie_word_embeddings": False, "rope_theta": 500.0}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 3e4}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "llama stretched": ("Llama", {"tie_word_embeddings": True, "rope": LLAMA3}),
    "qwen3 stretched": ("Qwen3", {"tie_word_embeddings": True, "rope": YARN}),
    "llama biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3.5": (
        "Qwen3_5",
        {
            "tie_word_embeddings": False,
            "num_hidden_layers": 6,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"]
            * 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "rope": {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
}


class Checkpoint(NamedTuple):
    directory: Path
    logits: np.ndarray  # of TOKENS, by transformers


def build_oracle(kind: str):
    """A random model of transformers in which no weight is left at its default."""
    import torch
    import transformers

    family, options = KINDS[kind]
    options = SIZES | options
    theta = options.pop("rope_theta", 1e6)
    rope = options.pop("rope", {"rope_type": "default"}) | {"rope_theta": theta}
    name = f"{family}TextConfig" if family == "Qwen3_5" else f"{family}Config"
    config = getattr(transformers, name)(**options, rope_parameters=rope)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or name.endswith(("A_log", "dt_bias")):
                value.uniform_(0.5, 2.0)
            else:
                value.normal_(0.0, 0.5 if "bias" in name else 0.2)
    return model


def logits_of_transformers(model) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return model(torch.from_numpy(TOKENS).long()).logits.float().numpy()


@jax.jit
def _logits(model: Decoder):
    time = TOKENS.shape[1]
    hidden, _ = model(jnp.asarray(TOKENS), jnp.arange(time)[None], Span.causal(time))
    return model.logits(hidden)


def our_logits(directory: Path) -> np.ndarray:
    return np.asarray(_logits(load_decoder(directory, dtype=jnp.float32)))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Every kind of KINDS in float32, saved by transformers."""
    made = {}
    for kind in KINDS:
        model = build_oracle(kind)
        directory = tmp_path_factory.mktemp("hf") / kind
        model.save_pretrained(directory)
        made[kind] = Checkpoint(directory, logits_of_transformers(model))
    return made


@pytest.fixture
def broken(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> Path:
    """A checkpoint of its own for a test that damages it."""
    return copy_of(checkpoints["llama untied"].directory, tmp_path / "broken")


def copy_of(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text("utf-8")) | changes
    config = {name: value for name, value in config.items() if value is not ...}
    path.write_text(json.dumps(config), "utf-8")


def edit_tensors(directory: Path, change) -> None:
    from safetensors.numpy import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def tree(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Parity with transformers


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(checkpoints, kind):
    directory, expected = checkpoints[kind]
    assert np.std(expected) > 0.3  # far from uniform, else the comparison is vacuous
    np.testing.assert_allclose(our_logits(directory), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama tied", "qwen2", "qwen3", "qwen3.5"])
def test_bfloat16_is_as_exact_as_in_transformers(checkpoints, kind):
    """To twice its error; of random weights that is 2 %, of a hybrid 29 %."""
    import torch
    from transformers import AutoModelForCausalLM

    directory, expected = checkpoints[kind]
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    ours = np.asarray(_logits(load_decoder(directory, dtype=jnp.bfloat16)))
    error = np.linalg.norm(ours - expected)
    assert error < 2 * np.linalg.norm(logits_of_transformers(oracle) - expected)
    assert error < (0.35 if kind == "qwen3.5" else 0.035) * np.linalg.norm(expected)


def logprobs_of_transformers(model):
    """The sum of log-probs of all tokens but the first."""
    import torch

    tokens = torch.from_numpy(TOKENS).long()
    logprobs = torch.log_softmax(model(tokens).logits[:, :-1], -1)
    return logprobs.gather(-1, tokens[:, 1:, None]).sum()


@jax.jit
def gradients_of_logprobs(model: Decoder):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def total(params):
        logits = _logits(nnx.merge(graph, params, rest))[:, :-1]
        tokens = jnp.asarray(TOKENS)[:, 1:, None]
        return jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens, -1))

    return jax.grad(total)(params)


@pytest.mark.parametrize("kind", ["llama tied", "qwen2", "qwen3", "qwen3.5"])
def test_gradients_of_logprobs_equal_those_of_torch(kind, tmp_path):
    oracle = build_oracle(kind)
    oracle.save_pretrained(tmp_path / "model")
    logprobs_of_transformers(oracle).backward()
    model = load_decoder(tmp_path / "model", dtype=jnp.float32)
    nnx.update(model, gradients_of_logprobs(model))
    gradients = dict(hf.named_tensors(model))
    compared = 0
    for name, value in oracle.named_parameters():
        expected = value.grad.numpy()
        atol = 1e-4 * np.max(np.abs(expected))
        np.testing.assert_allclose(gradients[name], expected, 1e-3, atol, err_msg=name)
        compared += 1
    assert compared == len(gradients)


@pytest.mark.parametrize(
    "kind",
    [
        "llama tied",
        "qwen2",
        "qwen3",
        pytest.param("qwen3.5", marks=pytest.mark.slow),
    ],
)
def test_greedy_answers_equal_those_of_transformers(checkpoints, kind):
    """Of prompts of different lengths in one batch, which share their beginning."""
    import torch
    from transformers import AutoModelForCausalLM

    directory, _ = checkpoints[kind]
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = [TOKENS[0, :n].tolist() for n in (5, 11, 8)]
    model = load_decoder(directory, dtype=jnp.float32)
    graph, weights = nnx.split(model)
    engine = LocalEngine(graph, max_positions=64, eos_ids=[2], prefix=prompts[0][:4])
    sampling = Sampling(temperature=0.0, max_new_tokens=6)
    found = engine.generate(weights, prompts, sampling, jax.random.key(0))
    for prompt, tokens, length in zip(
        prompts, found.tokens, found.lengths, strict=True
    ):
        expected = oracle.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=6, pad_token_id=0
        )
        assert tokens[:length].tolist() == expected[0, len(prompt) :].tolist()


def test_both_spellings_of_rope_theta_are_read(checkpoints, tmp_path):
    directory, expected = checkpoints["qwen2"]
    old = copy_of(directory, tmp_path / "old")
    assert "rope_parameters" in json.loads((old / "config.json").read_text("utf-8"))
    edit_config(old, rope_parameters=..., rope_theta=3e4, rope_scaling=None)
    assert read_config(old) == read_config(directory)
    assert read_config(old).rope_theta == 3e4
    edit_config(old, rope_theta=100.0)
    assert not np.allclose(our_logits(old), expected, rtol=1e-2, atol=1e-2)


def test_shards_load_like_one_file(checkpoints, tmp_path):
    from transformers import AutoModelForCausalLM

    directory, expected = checkpoints["llama untied"]
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    np.testing.assert_allclose(our_logits(tmp_path), expected, rtol=1e-4, atol=1e-4)


def test_weights_are_cast_to_the_asked_dtype(checkpoints):
    model = load_decoder(checkpoints["qwen2"].directory, dtype=jnp.bfloat16)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}


# Export


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_an_export_to_the_same_logits(checkpoints, kind, tmp_path):
    from transformers import AutoModelForCausalLM

    directory, expected = checkpoints[kind]
    out = save_decoder(
        load_decoder(directory, dtype=jnp.float32),
        tmp_path / "out",
        source=directory,
        dtype=jnp.float32,
    )
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
    np.testing.assert_array_equal(logits_of_transformers(model), expected)
    np.testing.assert_allclose(our_logits(out), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama tied", "qwen3"])
def test_a_large_export_is_cut_into_shards_that_transformers_loads(
    checkpoints, kind, tmp_path
):
    from transformers import AutoModelForCausalLM

    directory, expected = checkpoints[kind]
    model = load_decoder(directory, dtype=jnp.float32)
    options = {"source": directory, "dtype": jnp.float32}
    whole = save_decoder(model, tmp_path / "whole", **options)
    out = save_decoder(model, tmp_path / "out", **options, shard_bytes=9_000)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    count = len(shards)
    assert count > 2
    assert shards == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    tensors, together = [load_tensors(each) for each in (out, whole)]
    jax.tree.map(np.testing.assert_array_equal, tensors, together)
    # As large as may be: none but a tensor that is too large alone.
    index = json.loads((out / "model.safetensors.index.json").read_text("utf-8"))
    held = {shard: [] for shard in shards}
    for name, shard in index["weight_map"].items():
        held[shard].append(tensors[name].nbytes)
    assert all(sum(sizes) <= 9_000 or len(sizes) == 1 for sizes in held.values())
    assert index["metadata"]["total_size"] == sum(map(sum, held.values()))
    oracle, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
    np.testing.assert_array_equal(logits_of_transformers(oracle), expected)


def test_shards_are_written_as_the_tensors_come(tmp_path):
    """The host never holds more of a model than one file."""
    seen = []

    def tensors():
        for i in range(6):
            seen.append(len(list(tmp_path.iterdir())))
            yield f"tensor {i}", np.full((10,), i, np.float32)

    write_weights(tensors(), tmp_path, shard_bytes=80)
    assert seen == [0, 0, 0, 1, 1, 2]
    with WeightFiles(tmp_path) as files:
        assert files.names() == [f"tensor {i}" for i in range(6)]
        assert all((files.read(f"tensor {i}") == i).all() for i in range(6))


def test_export_is_bfloat16_by_default_and_says_so(checkpoints, tmp_path):
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    directory, _ = checkpoints["qwen3"]
    model = load_decoder(directory, dtype=jnp.bfloat16)
    out = save_decoder(model, tmp_path / "out", source=directory)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert dtypes == {"BF16"}
    before = json.loads((directory / "config.json").read_text("utf-8"))
    after = json.loads((out / "config.json").read_text("utf-8"))
    assert after == before | {"dtype": "bfloat16"}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    again = load_decoder(out, dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_sketched_model_exports_as_an_ordinary_one(checkpoints, tmp_path):
    directory, _ = checkpoints["qwen2"]
    model = load_decoder(directory, dtype=jnp.float32)
    sketched = logra.sketch(model, rank=4, match=r"(q|k|v|o|gate|up|down)_proj")
    for name, each in (("plain", model), ("sketched", sketched)):
        save_decoder(each, tmp_path / name, source=directory)
    assert tree(tmp_path / "plain") == tree(tmp_path / "sketched")
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "sketched" / file.name).read_bytes()


def test_export_carries_everything_but_the_old_weights(checkpoints, tmp_path):
    source = copy_of(checkpoints["llama tied"].directory, tmp_path / "source")
    model = load_decoder(source)
    companions = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"chat_template": "é"}',
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"eos_token_id": [2, 7], "top_k": 20}',
        "added_tokens.json": '{"<tool>": 96}',
        "special_tokens_map.json": '{"eos_token": "<end>"}',
        "vocab.json": "{}",
        "merges.txt": "a b",
        "tokenizer.model": "pieces",
        "LICENSE": "free",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
    }
    (source / "additional_chat_templates").mkdir()
    for name, text in companions.items():
        (source / name).write_text(text, "utf-8")
    for name in ("model-00001-of-00002.safetensors", "pytorch_model.bin", "x.gguf"):
        (source / name).write_bytes(b"old")
    (source / "model.safetensors.index.json").write_text("{}", "utf-8")
    out = save_decoder(model, tmp_path / "out", source=source)
    kept = {"config.json", "generation_config.json", "model.safetensors"}
    assert set(tree(out)) == kept | {Path(name).parts[0] for name in companions}
    for name, text in companions.items():
        assert (out / name).read_text("utf-8") == text


def test_missing_parents_of_an_export_are_made(checkpoints, tmp_path):
    directory, _ = checkpoints["llama tied"]
    out = tmp_path / "a" / "b"
    assert save_decoder(load_decoder(directory), out, source=directory) == out
    assert read_config(out) == read_config(directory)


def test_existing_directory_is_refused_and_left_alone(checkpoints, tmp_path):
    directory, _ = checkpoints["llama tied"]
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="`directory` must not exist yet"):
        save_decoder(load_decoder(directory), tmp_path / "out", source=directory)
    assert tree(tmp_path) == ["out"]
    assert tree(tmp_path / "out") == []


def test_an_earlier_export_stays_until_the_new_one_is_whole(checkpoints, tmp_path):
    source, out = checkpoints["llama tied"].directory, tmp_path / "out"
    tensors = load_tensors(source)
    save_tensors(tensors.items(), out, source=source, dtype=jnp.float32)

    def doubled(fails: bool):
        for name, value in tensors.items():
            held = load_tensors(out)
            jax.tree.map(np.testing.assert_array_equal, held, tensors)
            yield name, 2 * value
        if fails:
            raise KeyboardInterrupt

    options = {"source": source, "dtype": jnp.float32, "replace": True}
    with pytest.raises(KeyboardInterrupt):
        save_tensors(doubled(fails=True), out, **options)
    assert tree(tmp_path) == ["out"]
    jax.tree.map(np.testing.assert_array_equal, load_tensors(out), tensors)
    save_tensors(doubled(fails=False), out, **options)
    assert tree(tmp_path) == ["out"]
    now = load_tensors(out)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * b), now, tensors)


def test_an_earlier_export_comes_back_when_the_new_one_cannot_take_its_place(
    checkpoints, tmp_path, monkeypatch
):
    source, out = checkpoints["llama tied"].directory, tmp_path / "out"
    tensors, rename = load_tensors(source), hf.os.replace
    save_tensors(tensors.items(), out, source=source, dtype=jnp.float32)

    def refuse(before, after):
        if after == out and not Path(before).name.endswith(".earlier"):
            raise OSError(13, "Permission denied")
        rename(before, after)

    monkeypatch.setattr(hf.os, "replace", refuse)
    with pytest.raises(OSError, match="Permission denied"):
        save_tensors(tensors.items(), out, source=source, replace=True)
    assert tree(tmp_path) == ["out"]
    jax.tree.map(np.testing.assert_array_equal, load_tensors(out), tensors)


def test_export_that_fails_midway_leaves_nothing(checkpoints, tmp_path, monkeypatch):
    directory, _ = checkpoints["llama tied"]
    model, tensors, seen = load_decoder(directory), hf.named_tensors, []

    def fail(model):
        seen.extend(tree(tmp_path))
        yield next(iter(tensors(model)))
        raise KeyboardInterrupt

    monkeypatch.setattr(hf, "named_tensors", fail)
    with pytest.raises(KeyboardInterrupt):
        save_decoder(model, tmp_path / "out", source=directory)
    assert len(seen) == 1  # it had begun, under another name
    assert seen != ["out"]
    assert tree(tmp_path) == []


def test_export_from_a_source_that_is_gone_is_one_sentence(checkpoints, tmp_path):
    model = load_decoder(checkpoints["llama tied"].directory)
    with pytest.raises(ValueError, match=r"`config\.json` must be in .*gone"):
        save_decoder(model, tmp_path / "out", source=tmp_path / "gone")
    assert tree(tmp_path) == []


# Bad input


def test_missing_tensor_is_named(broken):
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(broken, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"`{name}` is missing from the weights in "):
        load_decoder(broken)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("model.layers.2.mlp.up_proj.weight", (40, 24), (39, 24)),
        ("model.embed_tokens.weight", (97, 24), (96, 24)),
        ("model.norm.weight", (24,), (23,)),
        ("lm_head.weight", (97, 24), (24, 97)),
    ],
)
def test_wrong_shape_is_named_as_it_is_in_the_file(broken, name, right, wrong):
    edit_tensors(broken, lambda t: t.update({name: np.zeros(wrong, np.float32)}))
    with pytest.raises(ValueError) as error:
        load_decoder(broken)
    assert f"`{name}` must have shape {right} by config.json, got {wrong} in" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "`model_type` must be one of .* got 'gpt2'"),
        ({"model_type": ...}, "`model_type` must be one of .* got None"),
        ({"hidden_act": "gelu"}, "`hidden_act` .* not supported for llama, got 'gelu'"),
        ({"mlp_bias": True}, "`mlp_bias` .* got True"),
        ({"use_sliding_window": True}, "`use_sliding_window` .* got True"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "`layer_types` .*sliding_attention",
        ),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` .* got 0.5"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config` .* got {'bits'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
            "`rope_scaling` .* got 'dynamic'",
        ),
        (
            {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 0}},
            "`factor` of linear .* got 0",
        ),
        ({"hidden_size": ...}, "`hidden_size` is missing from config.json"),
    ],
)
def test_unsupported_config_is_named(broken, changes, message):
    edit_config(broken, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_decoder(broken)
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
            "`layer_types` .* must repeat one block .* got .'linear_attention', 'full",
        ),
        ({"layer_types": ["full_attention"] * 6}, "`layer_types` .* must repeat"),
        ({"layer_types": ["linear_attention"] * 6}, "`layer_types` .* must repeat"),
        ({"linear_key_head_dim": ...}, "`linear_key_head_dim` is missing"),
        ({"linear_num_value_heads": 3}, "`value_heads` must be a multiple"),
        ({"attn_output_gate": False}, "`attn_output_gate` .* not supported"),
    ],
)
def test_unsupported_hybrid_is_named(checkpoints, tmp_path, changes, message):
    source = checkpoints["qwen3.5"].directory / "config.json"
    shutil.copy(source, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_the_hybrid_of_a_model_that_sees_is_its_text_part(checkpoints, tmp_path):
    source = checkpoints["qwen3.5"].directory
    text = json.loads((source / "config.json").read_text("utf-8"))
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole), "utf-8")
    assert read_config(tmp_path) == read_config(source)
    # a block of four layers is what is meant where the layers are not listed
    edit_config(
        tmp_path, text_config=text | {"layer_types": None, "num_hidden_layers": 8}
    )
    assert read_config(tmp_path).delta_per_block == 3


def test_decay_rates_of_a_hybrid_keep_every_bit(checkpoints, tmp_path):
    """In bfloat16 they would be off by up to 1 in 256; servers hold them in float32."""
    source = checkpoints["qwen3.5"].directory
    whole = load_tensors(source)
    out = save_decoder(load_decoder(source), tmp_path / "out", source=source)
    kept = load_tensors(out)
    rates = {name for name in kept if kept[name].dtype == np.float32}
    assert rates == {name for name in whole if name.endswith("A_log")}
    assert len(rates) >= 2
    for name in rates:
        np.testing.assert_array_equal(kept[name], whole[name])
    digests = tensor_digests(load_decoder(out))
    assert {name for name in kept if digests[name].dtype == "float32"} == rates


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> tuple[Path, np.ndarray]:
    """A whole Qwen3.5 with its vision tower, and its logits of text."""
    import torch
    import transformers

    options = KINDS["qwen3.5"][1]
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = SIZES | {k: v for k, v in options.items() if k != "rope"}
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
    config = transformers.Qwen3_5Config(
        text_config=text | {"rope_parameters": rope},
        vision_config=sight | {"out_hidden_size": 24, "num_position_embeddings": 16},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.uniform_(0.5, 1.0) if "norm" in name else value.normal_(0.0, 0.2)
    directory = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(directory)
    return directory, logits_of_transformers(model)


def test_of_a_model_that_sees_the_text_part_is_loaded(seeing):
    directory, expected = seeing
    with WeightFiles(directory) as files:
        assert not any("visual" in name or "language" in name for name in files.names())
    np.testing.assert_allclose(our_logits(directory), expected, rtol=1e-4, atol=1e-4)


def test_and_exported_as_a_model_of_text(seeing, tmp_path):
    from transformers import AutoModelForCausalLM

    directory, expected = seeing
    model = load_decoder(directory, dtype=jnp.float32)
    options = {"source": directory, "dtype": jnp.float32}
    out = save_decoder(model, tmp_path / "out", **options)
    oracle, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
    np.testing.assert_array_equal(logits_of_transformers(oracle), expected)


def test_directory_without_config_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"`config\.json` must be in .*, but is not"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("text", ["{", "", "[1]"])
def test_config_that_is_no_json_object_is_one_sentence(broken, text):
    (broken / "config.json").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"config\.json` (is not valid|must hold a)"):
        load_decoder(broken)


def test_directory_without_weights_is_one_sentence(broken):
    (broken / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must hold model\.safetensors or its shards"):
        load_decoder(broken)


@pytest.mark.parametrize("size", [0, 5, 400, 20_000])
def test_truncated_weights_are_one_sentence(broken, size):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"`model\.safetensors` .* cannot be read"):
        load_decoder(broken)


def test_missing_shard_is_named(broken):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(broken)
    (broken / "model.safetensors").unlink()
    model.save_pretrained(broken, max_shard_size="20KB")
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"`{shard.name}` .* cannot be read"):
        load_decoder(broken)


def test_index_that_names_no_file_for_a_tensor_is_one_sentence(broken):
    (broken / "model.safetensors.index.json").write_text("{}", "utf-8")
    with pytest.raises(ValueError, match=r"`model\.embed_tokens\.weight` is missing"):
        load_decoder(broken)


# --- digests and factors under Hugging Face names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_digests_on_the_device_are_those_of_the_exported_file(
    checkpoints, kind, dtype, tmp_path
):
    from safetensors.numpy import load_file

    source = checkpoints[kind].directory
    model = load_decoder(source, dtype=dtype)
    saved = save_decoder(model, tmp_path / "out", source=source, dtype=dtype)
    tensors = load_file(saved / "model.safetensors")
    expected = {
        name: TensorDigest(str(t.dtype), t.shape, digest_array(t))
        for name, t in tensors.items()
    }
    assert tensor_digests(model) == expected
    assert tensor_digests(logra.sketch(model, 2, "proj")) == expected


def test_factors_carry_hugging_face_names_and_each_row_s_exponent(checkpoints):
    model = logra.sketch(
        load_decoder(checkpoints["qwen3"].directory), 2, "(q|down)_proj"
    )
    probes = nnx.state(model, logra.Probe)
    updates = jax.tree.map(
        lambda p: p + jax.random.normal(jax.random.key(0), p.shape), probes
    )
    factors = logra.quantise(updates, logra.Basis())
    packed = dict(named_factors(model, factors))
    layers = model.config.num_layers
    assert set(packed) == {
        f"model.layers.{i}.{name}.weight"
        for i in range(layers)
        for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    factor = factors["layers"]["mlp"]["down_proj"]
    last = packed[f"model.layers.{layers - 1}.mlp.down_proj.weight"]
    assert last.dtype == np.int16
    np.testing.assert_array_equal(last[:, :-1], factor["integers"][...][-1])
    np.testing.assert_array_equal(last[:, -1], factor["exponents"][...][-1])

"""GGUF files written as llama.cpp writes them, from random models of transformers."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.models import gguf_files
from logra_jax.models.attention import Span
from logra_jax.models.decoder import Decoder
from logra_jax.models.gguf_files import converted
from logra_jax.models.gguf_rope import llama3_divisors
from logra_jax.models.hf import load_decoder
from logra_jax.models.hf_config import read_config
from logra_jax.models.sources import find_model
from logra_jax.models.tokenizer import ChatTokenizer

VOCAB = 288
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 11)).astype(np.int32)
LAYERS, HEADS, KV_HEADS = 2, 4, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
# GGUF's name, transformers' family, options. Qwen3's head_dim is not 64 / 4.
KINDS = {
    "llama": ("llama", "Llama", {"tie_word_embeddings": False}),
    "llama tied": ("llama", "Llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", "Llama", {"tie_word_embeddings": True, "rope": LLAMA3}),
    "qwen2": ("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    "qwen2 stretched": ("qwen2", "Qwen2", {"rope": YARN}),
    "qwen3": ("qwen3", "Qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
}
# What is written for a file whose matrices are of a kind; vectors follow.
STORED = {"F32": "float32", "F16": "float16", "Q8_0": "bfloat16"}
_HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def oracle(kind: str):
    """A random model of transformers in which no weight is left at its default."""
    import torch
    import transformers

    _, family, options = KINDS[kind]
    options = SIZES | options
    rope = options.pop("rope", {"rope_type": "default"}) | {"rope_theta": 5e5}
    config = getattr(transformers, f"{family}Config")(**options, rope_parameters=rope)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 2.0)
            else:
                value.normal_(0.0, 0.5 if "bias" in name else 0.15)
    return model


def gguf_name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_HF_TO_GGUF[rest]}.{end}"
    return f"{_HF_TO_GGUF[stem]}.{end}"


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a head's rows: each beside the one that it turns with."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes, in its order."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


MERGES = ["Ġ a", "1 2", "12 3", "h i"]
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>"]
WORDS = [*alphabet(), *(pair.replace(" ", "") for pair in MERGES), *SPECIAL]
BEGIN, END, TURN = (WORDS.index(word) for word in SPECIAL)


def write(
    path: Path,
    model,
    kind: str,
    dtype: str = "F32",
    *,
    pre: str = "qwen2",
    change: Callable[[dict], None] = lambda _: None,
    metadata: Callable = lambda _: None,
) -> Path:
    """A GGUF file of ``model``, which is rounded to what the file is to be read as."""
    import gguf
    import torch
    from gguf.quants import dequantize, quantize

    architecture, _, _ = KINDS[kind]
    c, writer = model.config, gguf.GGUFWriter(path, architecture)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // HEADS
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(5e5)
    if kind == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    tensors = {}
    quantisation = gguf.GGMLQuantizationType[dtype]
    for name, value in model.state_dict().items():
        own = gguf_name(name)
        if own == "output.weight" and c.tie_word_embeddings:
            continue
        array = value.numpy().copy()
        held = gguf.GGMLQuantizationType.F32
        if array.ndim > 1:
            held = quantisation
            again = dequantize(quantize(array, held), held)
            with torch.no_grad():
                value.copy_(torch.from_numpy(again))
        with torch.no_grad():
            value.copy_(value.to(getattr(torch, STORED[dtype])))
        if architecture == "llama" and (".attn_q." in own or ".attn_k." in own):
            array = in_pairs(array, HEADS if ".attn_q." in own else KV_HEADS)
        tensors[own] = (quantize(array, held) if array.ndim > 1 else array, held)
    rope = c.rope_parameters
    if rope["rope_type"] == "llama3":
        divisors = llama3_divisors(5e5, head_dim, 8.0).astype(np.float32)
        tensors["rope_freqs.weight"] = (divisors, gguf.GGMLQuantizationType.F32)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    add_tokenizer(writer, pre)
    metadata(writer)
    change(tensors)
    for own, (array, held) in tensors.items():
        writer.add_tensor(own, array, raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer, pre: str) -> None:
    padding = [f"[PAD{i}]" for i in range(len(WORDS), VOCAB)]
    types = [3 if word in SPECIAL else 1 for word in WORDS]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS + padding)
    writer.add_token_types(types + [5] * len(padding))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(TURN)
    writer.add_add_bos_token(pre == "llama-bpe")
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}<|turn|>")


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


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_the_model_in_the_file(tmp_path, kind, dtype):
    model = oracle(kind)
    directory = converted(write(tmp_path / "m.gguf", model, kind, dtype), tmp_path)
    expected = logits_of_transformers(model)
    assert np.std(expected) > 0.3  # far from uniform, else the comparison is vacuous
    np.testing.assert_allclose(our_logits(directory), expected, rtol=1e-4, atol=1e-4)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    assert config["dtype"] == STORED[dtype]


@pytest.mark.parametrize("kind", ["llama 3", "qwen2 stretched", "qwen3"])
def test_transformers_loads_the_directory_to_the_same_logits(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    model = oracle(kind)
    directory = converted(write(tmp_path / "m.gguf", model, kind), tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
    np.testing.assert_allclose(
        logits_of_transformers(again),
        logits_of_transformers(model),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_options_are_those_of_the_model(tmp_path, kind):
    model = oracle(kind)
    model.save_pretrained(tmp_path / "hf")
    directory = converted(write(tmp_path / "m.gguf", model, kind), tmp_path)
    assert read_config(directory) == read_config(tmp_path / "hf")


# Rotary positions, by an oracle that is not this code


@pytest.mark.parametrize(
    ("theta", "head_dim", "factor"), [(5e5, 64, 32.0), (1e4, 16, 8.0)]
)
def test_divisors_are_those_of_transformers(theta, head_dim, factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = LLAMA3 | {"factor": factor, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    expected = plain / stretched.numpy()
    got = llama3_divisors(theta, head_dim, factor)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_other_divisors_are_refused(tmp_path):
    def change(tensors):
        divisors, held = tensors["rope_freqs.weight"]
        tensors["rope_freqs.weight"] = (divisors * 1.01, held)

    source = write(tmp_path / "m.gguf", oracle("llama 3"), "llama 3", change=change)
    with pytest.raises(ValueError, match=r"`rope_freqs\.weight` .* as Llama 3\.1 does"):
        converted(source, tmp_path)


# The tokenizer


@pytest.fixture(scope="module")
def small():
    return oracle("llama tied")


TEXTS = ["hi a 1234567 don't", "  x\n\n\ny\t", "Ünïcode e\u0301 数学", "<|turn|>hi", ""]


def test_ids_are_those_of_transformers_own_qwen2_tokenizer(tmp_path, small):
    import transformers

    directory = converted(write(tmp_path / "m.gguf", small, "llama tied"), tmp_path)
    ours = ChatTokenizer.load(directory)
    theirs = transformers.Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(WORDS)},
        merges=[tuple(pair.split(" ")) for pair in MERGES],
        unk_token=None,
        eos_token="<|end|>",
        pad_token="<|end|>",
        bos_token="<|begin|>",
        additional_special_tokens=["<|turn|>"],
    )
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == expected, text
    assert ours.vocab_size == len(WORDS)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("qwen2", ["hi", " a", " ", "1", "2", "3", "4", " don", "'t"]),
        ("llama-bpe", ["hi", " a", " ", "123", "4", " don", "'t"]),
        ("smollm", ["hi", " a", " ", "1", "2", "3", "4", " don", "'t"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, small, pre, pieces):
    from tokenizers import Tokenizer

    source = write(tmp_path / "m.gguf", small, "llama tied", pre=pre)
    directory = converted(source, tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "hi a 1234 don't"
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces
    # Only Llama 3 begins texts, and chats begin themselves.
    begins = tokenizer.encode("hi").ids[0] == BEGIN
    assert begins == (pre == "llama-bpe")
    ids = ChatTokenizer.load(directory).encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [BEGIN, WORDS.index("hi"), TURN]


def test_answers_end_where_the_file_says(tmp_path, small):
    directory = converted(write(tmp_path / "m.gguf", small, "llama tied"), tmp_path)
    tokenizer = ChatTokenizer.load(directory)
    assert tokenizer.eos_ids == (END, TURN)


# The cache


def test_a_file_is_converted_once_and_again_when_it_changes(
    tmp_path, small, monkeypatch
):
    source = write(tmp_path / "m.gguf", small, "llama tied")
    first = find_model(str(source), tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "convert", None)
        assert find_model(str(tmp_path), tmp_path / "cache") == first
    os.utime(source, ns=(0, 0))
    second = find_model(str(source), tmp_path / "cache")
    assert second != first
    assert second.is_dir()


def test_of_several_files_one_must_be_named(tmp_path, small):
    write(tmp_path / "a.gguf", small, "llama tied")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"one GGUF file .* 'a\.gguf' is one of 2"):
        find_model(str(tmp_path), tmp_path / "cache")
    (tmp_path / "model.safetensors").touch()
    assert find_model(str(tmp_path), tmp_path / "cache") == tmp_path


# What cannot be represented


def drop(name: str) -> Callable[[dict], None]:
    return lambda tensors: tensors.pop(name)


def add(name: str) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: tensors["output_norm.weight"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("blk.1.attn_k.weight"), r"`blk\.1\.attn_k\.weight` is missing from m"),
        (drop("token_embd.weight"), r"`token_embd\.weight` is missing from m\.gguf"),
        (add("blk.0.attn_q.bias"), r"`blk\.0\.attn_q\.bias` .* tensor of llama"),
        (add("blk.0.ffn_gate_exps.weight"), r"`blk\.0\.ffn_gate_exps\.weight`"),
    ],
)
def test_a_tensor_too_few_or_too_many_is_named(tmp_path, small, change, message):
    source = write(tmp_path / "m.gguf", small, "llama tied", change=change)
    with pytest.raises(ValueError, match=message):
        converted(source, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            lambda w: w.add_rope_dimension_count(8),
            r"`llama\.rope\.dimension_count` .* a whole head \(16\), got 8",
        ),
        (
            lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
            r"`llama\.rope\.scaling\.type` .* none, linear or yarn, got longrope",
        ),
        (
            lambda w: w.add_uint16("split.count", 3),
            r"a whole model, got part 1 of 3",
        ),
    ],
)
def test_what_the_metadata_asks_in_vain_is_named(tmp_path, small, metadata, message):
    source = write(tmp_path / "m.gguf", small, "llama tied", metadata=metadata)
    with pytest.raises(ValueError, match=message):
        converted(source, tmp_path)


@pytest.mark.parametrize("pre", ["gpt-2", "deepseek-llm"])
def test_other_ways_of_splitting_text_are_refused(tmp_path, small, pre):
    source = write(tmp_path / "m.gguf", small, "llama tied", pre=pre)
    with pytest.raises(ValueError, match=f"`tokenizer.ggml.pre` .* got {pre}"):
        converted(source, tmp_path)


def test_other_architectures_and_tokenizers_are_refused(tmp_path):
    import gguf

    for name, message in (("gemma3", "got gemma3"), ("llama", "is missing from the")):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ValueError, match=message):
            converted(tmp_path / f"{name}.gguf", tmp_path)


@pytest.mark.parametrize("keep", [0.0, 1e-4, 0.3, 0.99])
def test_a_damaged_file_is_one_sentence(tmp_path, small, keep):
    source = write(tmp_path / "m.gguf", small, "llama tied")
    whole = source.read_bytes()
    source.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(ValueError, match=r"m\.gguf` cannot be read as GGUF: ") as error:
        converted(source, tmp_path)
    assert "\n" not in str(error.value)


def test_what_is_no_gguf_file_is_one_sentence(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4" * 100)
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        find_model(str(tmp_path / "m.gguf"), tmp_path)
    with pytest.raises(ValueError, match="which is none of them"):
        find_model(str(tmp_path / "lost.gguf"), tmp_path)

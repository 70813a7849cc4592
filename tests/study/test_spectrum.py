import contextlib
import dataclasses
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

from logra_jax.algorithm.alignment import Moments, cos_c
from logra_jax.models.decoder import Decoder
from logra_jax.models.hf import save_decoder
from logra_jax.models.hf_config import read_config
from logra_jax.study.spectrum import (
    gradient_energies,
    measure_layer,
    smallest_rank,
    spectrum,
    summarise_layers,
)
from logra_jax.training.config import Config, load_config

SHAPES = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
KINDS = {
    "q_proj": [32, 32],
    "k_proj": [16, 32],
    "v_proj": [16, 32],
    "o_proj": [32, 32],
    "gate_proj": [48, 32],
    "up_proj": [48, 32],
    "down_proj": [32, 48],
}


# --- one gradient


@pytest.mark.parametrize("tokens", [4, 9, 30])
@pytest.mark.parametrize(("k", "d"), [(12, 7), (7, 12), (8, 8)])
def test_energies_are_the_squared_singular_values(tokens, k, d):
    """Fewer tokens than either side, between them, more than both."""
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(tokens, k)), rng.normal(size=(tokens, d))
    expected = np.linalg.svd(g.T @ x, compute_uv=False)[: min(tokens, k, d)] ** 2
    found = gradient_energies(*(jnp.asarray(a, jnp.float32) for a in (x, g)))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * expected[0])


@pytest.mark.parametrize("tokens", [10, 60])
def test_a_planted_rank_is_found(tokens):
    """Three directions of equal energy, then a hundredth of it spread over the rest."""
    rng = np.random.default_rng(1)
    k, d, rank = 40, 24, 3
    x = np.linalg.qr(rng.normal(size=(max(tokens, k), k)))[0][:tokens]
    if tokens < k:
        x = np.linalg.qr(rng.normal(size=(k, tokens)))[0].T
    out = np.linalg.qr(rng.normal(size=(d, rank)))[0]
    left = np.linalg.qr(rng.normal(size=(tokens, rank)))[0]
    if tokens > k:
        left = x @ np.linalg.qr(rng.normal(size=(k, rank)))[0]
    g = left @ out.T  # G = out leftᵀ x: three singular values of 1
    noise = rng.normal(size=(tokens, d))
    g += noise * np.sqrt(0.03) / np.linalg.norm(noise.T @ x)
    spectra = np.asarray(
        gradient_energies(*(jnp.asarray(a, jnp.float32) for a in (x, g)))
    )[None]
    assert smallest_rank(spectra, 0.3).tolist() == [1]
    assert smallest_rank(spectra, 0.6).tolist() == [2]
    assert smallest_rank(spectra, 0.9).tolist() == [3]
    assert smallest_rank(spectra, 0.999)[0] > 3


def test_smallest_rank_counts_directions_by_hand():
    spectra = np.array([[4.0, 3.0, 2.0, 1.0], [10.0, 0.0, 0.0, 0.0], [0.0] * 4])
    for share, expected in ((0.4, [1, 1, 0]), (0.41, [2, 1, 0]), (0.95, [4, 1, 0])):
        assert smallest_rank(spectra, share).tolist() == expected


def test_layers_are_averaged_and_those_without_a_gradient_left_out():
    rng = np.random.default_rng(0)
    layers = []
    for scale in (1.0, 0.0, 2.0):
        x, g = rng.normal(size=(20, 6)), scale * rng.normal(size=(20, 4))
        A = rng.choice([-1.0, 1.0], (3, 6)) / 3**0.5
        arrays = (jnp.asarray(a, jnp.float32) for a in (x, g, A))
        layers.append({n: np.asarray(v) for n, v in measure_layer(*arrays).items()})
    stacked = {n: np.stack([layer[n] for layer in layers]) for n in layers[0]}
    row = summarise_layers(
        "a.q_proj", stacked, (4, 6), rank=3, kind="rademacher", energies=(0.5, 0.9)
    )
    real = [layers[0], layers[2]]
    assert (row["path"], row["layers"], row["shape"]) == ("a.q_proj", 2, [4, 6])
    for share in (0.5, 0.9):
        ranks = [smallest_rank(v["energies"][None], share)[0] for v in real]
        assert row["rank_for"][str(share)] == {
            "mean": np.mean(ranks),
            "max": max(ranks),
        }
    stable = [v["energies"].sum() / v["energies"][0] for v in real]
    assert row["stable_rank"] == pytest.approx(np.mean(stable), rel=1e-5)
    expected = [float(cos_c(Moments.of(v), 3)) for v in real]
    assert row["cos_c"] == pytest.approx(
        {"mean": np.mean(expected), "min": min(expected)}
    )


# --- the command


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A random Llama of two layers that reads and writes characters."""
    root = tmp_path_factory.mktemp("spectrum")
    source = root / "source"
    source.mkdir()
    words = {w: i for i, w in enumerate(["<end>", "\n", *map(chr, range(32, 127))])}
    small = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    small.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    small.add_special_tokens(["<end>"])
    small.save(str(source / "tokenizer.json"))
    template = "{{ messages[-1].content }}"
    (source / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "chat_template": template})
    )
    shapes = SHAPES | {"vocab_size": len(words), "eos_token_id": 0}
    (source / "config.json").write_text(json.dumps(shapes))
    model = Decoder(read_config(source), dtype=jnp.float32, rngs=nnx.Rngs(0))
    save_decoder(model, root / "tiny", source=source, dtype=jnp.float32)
    (root / "tiny.yaml").write_text(
        f"model: {{path: {root / 'tiny'}, dtype: float32}}\n"
        "sketch: {rank: {mlp: 6, attn: 4}}\n"
        "task: {name: chain_sum, size: 40}\n"
        "reward: {answer: whole_text, partial: true}\n"
        "rollout: {max_new_tokens: 4}\n"
        f"cache_dir: {root / 'cache'}\n"
        "train: {steps: 1, batch: 32, microbatch: 8}\n"
    )
    return load_config(root / "tiny.yaml")


@pytest.fixture(scope="module")
def result(config: Config) -> dict:
    """What `--json` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert spectrum(config, (0.5, 0.99), responses=16, as_json=True) == 0
    [line] = out.getvalue().splitlines()
    return json.loads(line)


def test_every_kind_of_layer_has_its_row(result):
    rows = {row["path"].rpartition(".")[2]: row for row in result["kinds"]}
    assert {name: row["shape"] for name, row in rows.items()} == KINDS
    assert result["setup"] | {"model": "", "reward": 0} == {
        "model": "",
        "task": "chain_sum",
        "batch": 32,
        "reward": 0,
        "responses": 16,
        "basis": "rademacher",
    }
    for name, row in rows.items():
        assert row["layers"] == 2
        assert row["rank"] == (4 if name[0] in "qkvo" else 6)
        half, most = row["rank_for"]["0.5"], row["rank_for"]["0.99"]
        assert 1 <= half["mean"] <= half["max"] < most["max"] <= min(row["shape"])
        assert 1 <= row["stable_rank"] <= most["mean"]
        assert row["d_eff"] >= 1
        assert 0 < row["cos_c"]["min"] <= row["cos_c"]["mean"] < 1


def test_people_get_tables(result, capsys):
    from logra_jax.study.spectrum import _print_table

    _print_table(result)
    text = capsys.readouterr().out
    assert text.count("down_proj") == 2
    assert "99 %" in text
    assert "…" not in text  # nothing is cut at 80 columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"energies": [0.5, 1.0]}, r"`--energy` must lie in \(0, 1\), got 1\.0"),
        ({"responses": 0}, "`--responses` must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_one_sentence(config, arguments, message):
    with pytest.raises(ValueError, match=message):
        spectrum(config, **arguments)


def test_a_batch_of_equal_rewards_is_one_sentence(config):
    """No text of a random model is a right answer."""
    reward = dataclasses.replace(config.reward, partial=False)
    config = dataclasses.replace(config, reward=reward)
    with pytest.raises(ValueError, match=r"`train\.batch` must hold responses of unl"):
        spectrum(config, responses=4)


def test_a_missing_model_is_one_sentence(config):
    model = dataclasses.replace(config.model, path="no-such-model")
    with pytest.raises(ValueError, match=r"`model\.path` must be a Hugging Face"):
        spectrum(dataclasses.replace(config, model=model))

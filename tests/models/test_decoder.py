import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.capture import Tap, measurements, raw, tapped
from logra_jax.models import layers as layers_module
from logra_jax.models.attention import Span
from logra_jax.models.decoder import REMAT, Decoder, Past
from logra_jax.models.delta_net import DeltaShape
from logra_jax.models.layers import DecoderConfig
from logra_jax.rollout.local import prefill

CONFIG = DecoderConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    rope_theta=100.0,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=True,
    qk_norm=True,
)
HYBRID = dataclasses.replace(
    CONFIG,
    num_layers=6,
    qkv_bias=False,
    rotary_dim=4,
    gated_attention=True,
    zero_centred_norms=True,
    delta=DeltaShape(2, 4, 8, 6, conv_width=4),
    delta_per_block=2,
)
PREFIX = np.array([5, 9, 17, 3, 41], np.int32)
ROWS = [[7, 8, 9, 10, 11, 12], [13, 14], [15], [16, 17, 18, 19]]


def build(remat: str = "none", config: DecoderConfig | None = None) -> Decoder:
    return Decoder(config or CONFIG, dtype=jnp.float32, remat=remat, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module", params=[CONFIG, HYBRID], ids=["attention", "hybrid"])
def model(request) -> Decoder:
    """Random, with every bias and norm away from its initial value."""
    model = build(config=request.param)
    key = jax.random.key(1)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        key, new = jax.random.split(key)
        noise = 0.3 * jax.random.normal(new, variable.shape)
        if path[-1] in ("bias", "scale"):
            variable[...] = variable[...] + noise
    return model


@jax.jit
def hidden_of(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Final hidden states of unpadded rows (batch, time), nothing shared."""
    time = tokens.shape[1]
    return model(tokens, jnp.arange(time)[None], Span.causal(time))[0]


run_prefill = jax.jit(prefill, static_argnames="prompt_width")


def pad_left(rows: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.full((len(rows), width), 60, np.int32)
    for row, tail in zip(tokens, rows, strict=True):
        row[width - len(tail) :] = tail
    return tokens, np.array([len(row) for row in rows], np.int32)


def close(got, expected, tol=1e-4):
    np.testing.assert_allclose(got, expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("prefix", [PREFIX, PREFIX[:0]], ids=["prefix", "none"])
def test_padded_rows_after_a_shared_prefix_equal_whole_rows(model, prefix):
    tokens, lengths = pad_left(ROWS, 8)
    hidden, _, _ = run_prefill(model, prefix, tokens, lengths)
    for row, tail in zip(hidden, ROWS, strict=True):
        whole = np.concatenate([prefix, tail]).astype(np.int32)[None]
        expected = hidden_of(model, whole)[0, len(prefix) :]
        close(row[8 - len(tail) :], expected)


def test_padding_holds_whatever_it_likes(model):
    tokens, lengths = pad_left(ROWS, 8)
    other = np.where(tokens == 60, 1, tokens)
    a, _, _ = run_prefill(model, PREFIX, tokens, lengths)
    b, _, _ = run_prefill(model, PREFIX, other, lengths)
    real = np.arange(8)[None] >= 8 - lengths[:, None]
    np.testing.assert_array_equal(np.asarray(a)[real], np.asarray(b)[real])
    assert np.isfinite(a).all()


def test_completions_follow_prompts_of_any_length(model):
    completion = [21, 22, 23]
    tokens, lengths = pad_left(ROWS, 6)
    whole = np.concatenate([tokens, np.tile(np.int32(completion), (4, 1))], 1)
    hidden, _, _ = run_prefill(model, PREFIX, whole, lengths, prompt_width=6)
    for row, tail in zip(hidden, ROWS, strict=True):
        line = np.array([*PREFIX, *tail, *completion], np.int32)[None]
        close(row[5:], hidden_of(model, line)[0, -4:])


def test_decode_with_a_cache_equals_prefill_position_by_position(model):
    """A decode loop as an engine writes it: fixed cache, of which more is seen."""
    tokens, lengths = pad_left(ROWS, 6)
    new = np.arange(12, dtype=np.int32).reshape(4, 3) + 30
    whole = np.concatenate([tokens, new], 1)
    expected, whole_cache, _ = run_prefill(
        model, PREFIX, whole, lengths, prompt_width=6
    )
    _, cache, shared = run_prefill(model, PREFIX, tokens, lengths)
    cache = cache.grow(3)
    first = 6 - lengths[:, None]
    columns = np.arange(9)[None]

    @jax.jit
    def decode(token, position, cache, written):
        order = len(PREFIX) + columns
        cached = Span(order, jnp.where(written, 0, -2))
        now = jnp.full((1, 1), order.max())
        past = [*shared, Past(cache, cached)]
        return model(token, position, Span(now, jnp.zeros_like(now)), past)

    for t in range(3):
        column = 6 + t
        position = len(PREFIX) + lengths[:, None] + t
        written = jnp.asarray((columns >= first) & (columns < column))
        hidden, later = decode(new[:, t : t + 1], jnp.asarray(position), cache, written)
        close(hidden[:, 0], expected[:, column])
        cache = cache.write(column, later)
    real = np.broadcast_to(columns >= first, cache.kv.k.shape[:3])
    close(np.asarray(cache.kv.k)[real], np.asarray(whole_cache.kv.k)[real])
    close(np.asarray(cache.kv.v)[real], np.asarray(whole_cache.kv.v)[real])
    jax.tree.map(close, cache.state, whole_cache.state)


def test_no_token_sees_a_later_one(model):
    tokens = jnp.arange(9, dtype=jnp.int32)[None]
    changed = tokens.at[0, 5].set(50)
    a, b = hidden_of(model, tokens), hidden_of(model, changed)
    np.testing.assert_array_equal(a[0, :5], b[0, :5])
    assert np.all(np.abs(a[0, 5:] - b[0, 5:]).max(-1) > 1e-3)


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "layer"))
        for name in REMAT
        if name != "none"
    ],
)
def test_remat_changes_neither_value_nor_gradient(model, remat):
    tokens = jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    graph = nnx.graphdef(build(remat, model.config))
    state = nnx.state(model)

    def loss(state, graph):
        return jnp.sum(jnp.square(hidden_of(nnx.merge(graph, state), tokens)[:, -1]))

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected = gradient(state, nnx.graphdef(model))
    (value, got), (expected_value, expected) = gradient(state, graph), expected
    close(value, expected_value, 1e-5)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        # a hybrid's sums have another order: to 1e-5 of an array's largest entry
        largest = 1.0 if model.config.delta is None else np.max(np.abs(b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest)


def test_activations_narrower_than_the_weights_are_refused():
    narrow = {"dtype": jnp.float32, "activations": jnp.bfloat16}
    with pytest.raises(ValueError, match="`activations` must be at least as wide"):
        Decoder(CONFIG, **narrow, rngs=nnx.Rngs(0))


def test_unknown_remat_is_named():
    with pytest.raises(ValueError, match=r"`remat` must be one of .* got 'some'"):
        build("some")


def test_float32_activations_over_bfloat16_weights_are_those_of_float32_weights(model):
    """Nothing but the weights is rounded."""
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(model))
    full = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    graph = nnx.graphdef(model)
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    expected = hidden_of(nnx.merge(graph, full), tokens)
    got = hidden_of(nnx.merge(graph, half), tokens)
    assert got.dtype == jnp.float32  # the model's activations, whatever its weights
    close(got, expected)
    logits = nnx.merge(graph, half).logits(got)
    assert logits.dtype == jnp.float32
    close(logits, nnx.merge(graph, full).logits(expected))


def test_bfloat16_weights_have_bfloat16_activations_unless_told(model):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(model))
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    graph = nnx.graphdef(
        nnx.eval_shape(
            lambda: Decoder(model.config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        )
    )
    got = hidden_of(nnx.merge(graph, half), tokens)
    assert got.dtype == jnp.bfloat16
    got, expected = got.astype(jnp.float32), hidden_of(model, tokens)
    if model.config.delta is None:
        close(got, expected, 0.1)
    else:
        # The recurrence of a random hybrid is ill-conditioned: in transformers as here,
        # see test_bfloat16_is_as_exact_as_in_transformers.
        error = jnp.linalg.norm(got - expected)
        assert error < 0.35 * jnp.linalg.norm(expected)


def test_layers_of_a_hybrid_are_named_in_the_order_in_which_they_run():
    model = nnx.eval_shape(lambda: build(config=HYBRID))
    paths = ["delta_layers.linear_attn.out_proj", "layers.mlp.up_proj"]
    names = [model.tensor_name(paths[0], (i,)) for i in range(4)]
    assert names == [
        f"model.layers.{i}.linear_attn.out_proj.weight" for i in (0, 1, 3, 4)
    ]
    names = [model.tensor_name(paths[1], (i,)) for i in range(2)]
    assert names == [f"model.layers.{i}.mlp.up_proj.weight" for i in (2, 5)]


def test_names_are_those_of_hugging_face():
    model = nnx.eval_shape(build)
    assert model.tensor_name("embed_tokens") == "model.embed_tokens.weight"
    assert model.tensor_name("lm_head") == "lm_head.weight"
    assert (
        model.tensor_name("layers.self_attn.q_proj", (2,))
        == "model.layers.2.self_attn.q_proj.weight"
    )


# --- the MLP, a piece of the tokens at a time


def sketches_of(remat: str, tokens: jax.Array):
    """The jitted sketches of a loss as a function of the probes, and zeros."""
    model = logra.sketch(build(remat), 4, "_proj$")
    graph, probes, weights = nnx.split(model, logra.Probe, ...)

    def loss(probes):
        return jnp.sum(jnp.sin(hidden_of(nnx.merge(graph, probes, weights), tokens)))

    return jax.jit(jax.grad(loss)), probes


@pytest.mark.parametrize(
    "tokens_of_a_piece", [pytest.param(1, marks=pytest.mark.slow), 5, 12]
)
@pytest.mark.parametrize("remat", ["layer", "none"])
def test_pieces_of_the_tokens_have_the_sketches_of_all(
    remat, tokens_of_a_piece, monkeypatch
):
    tokens = jnp.arange(12).reshape(2, 6)
    gradient, probes = sketches_of(remat, tokens)
    expected = gradient(probes)
    limit = tokens_of_a_piece * CONFIG.intermediate_size
    monkeypatch.setattr(layers_module, "_PIECE", limit)
    jax.clear_caches()
    gradient, probes = sketches_of(remat, tokens)
    jax.tree.map(close, gradient(probes), expected)


def test_forward_mode_in_pieces_has_the_rate_of_change_of_all(monkeypatch):
    tokens = jnp.arange(12).reshape(2, 6)
    model = logra.perturbed(logra.sketch(build(), 4, "_proj$"))
    graph, probes, weights = nnx.split(model, logra.Probe, ...)
    rates = jax.tree.map(lambda p: p + 0.1, probes)

    def rate():
        jax.clear_caches()
        hidden = lambda p: hidden_of(nnx.merge(graph, p, weights), tokens)  # noqa: E731
        return jax.jvp(hidden, (probes,), (rates,))

    expected = rate()
    monkeypatch.setattr(layers_module, "_PIECE", 5 * CONFIG.intermediate_size)
    jax.tree.map(close, rate(), expected)


@pytest.mark.slow
def test_features_of_all_tokens_never_exist_where_only_inputs_are_kept(monkeypatch):
    wide = dataclasses.replace(CONFIG, intermediate_size=2048, num_layers=2)
    monkeypatch.setitem(globals(), "CONFIG", wide)
    tokens = jnp.zeros((4, 64), jnp.int32)

    def temporaries():
        jax.clear_caches()
        gradient, probes = sketches_of("layer", tokens)
        return gradient.lower(probes).compile().memory_analysis().temp_size_in_bytes

    features = 4 * tokens.size * wide.intermediate_size
    whole = temporaries()
    monkeypatch.setattr(layers_module, "_PIECE", 16 * wide.intermediate_size)
    assert temporaries() < whole - 3 * features


def test_what_needs_all_tokens_at_once_gets_them(monkeypatch):
    monkeypatch.setattr(layers_module, "_PIECE", 5 * CONFIG.intermediate_size)
    jax.clear_caches()
    model = tapped(logra.sketch(build("layer"), 4, "_proj$"), raw, tokens=12)
    graph, taps, rest = nnx.split(model, Tap, ...)
    tokens = jnp.arange(12).reshape(2, 6)
    found = jax.grad(
        lambda taps: jnp.sum(hidden_of(nnx.merge(graph, taps, rest), tokens))
    )(taps)
    assert measurements(found)["layers.mlp.up_proj"]["x"].shape[1] == tokens.size

"""Attention against numpy, and its chunked form against the one that holds all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from logra_jax.models import attention, decoder
from logra_jax.models.attention import (
    EVERYONE,
    KV,
    Span,
    attend,
    visible,
)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def close(got, expected, tol=1e-4):
    np.testing.assert_allclose(got, expected, rtol=tol, atol=tol)


def span(order, segment) -> Span:
    return Span(jnp.atleast_2d(jnp.array(order)), jnp.atleast_2d(jnp.array(segment)))


def test_tokens_see_their_segment_and_everyone_up_to_their_order():
    queries = span([[3, 3, 9]], [[0, 1, 1]])
    keys = span([[0, 3, 3, 4, 9]], [[EVERYONE, 0, 1, 1, EVERYONE]])
    expected = [
        [True, True, False, False, False],
        [True, False, True, False, False],
        [True, False, True, True, True],
    ]
    np.testing.assert_array_equal(visible(queries, keys)[0], expected)


def test_causal_tokens_see_those_before_them():
    found = visible(Span.causal(4), Span.causal(4))
    np.testing.assert_array_equal(found[0], np.tri(4, dtype=bool))
    assert np.all(visible(Span.causal(3, start=4), Span.causal(4)))


def test_attention_over_parts_is_one_softmax(getkey):
    """Against numpy: grouped queries, a shared part, a hidden one, the present."""

    def normal(*shape):
        return jax.random.normal(getkey(), shape)

    q = normal(2, 3, 4, 5)
    now = Span.causal(3, start=9)
    parts = [
        (KV(normal(2, 3, 2, 5), normal(2, 3, 2, 5)), now),
        (KV(normal(1, 4, 2, 5), normal(1, 4, 2, 5)), Span.causal(4)),
        (
            KV(normal(2, 2, 2, 5), normal(2, 2, 2, 5)),
            span([[0, 1], [0, 1]], [[EVERYONE, 7], [7, 7]]),
        ),
    ]
    got = attend(q, now, parts)
    q, parts = jax.tree.map(np.asarray, (q, parts))
    seen_keys = [
        np.broadcast_to(np.tri(3, dtype=bool), (2, 3, 3)),
        np.ones((2, 3, 4), bool),
        np.array([[[True, False]] * 3, [[False, False]] * 3]),
    ]
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(2, 3, 4):
        keys, values = [], []
        for (kv, _), mask in zip(parts, seen_keys, strict=True):
            row = b % kv.k.shape[0]
            keys += list(kv.k[row, mask[b, t], h // 2])
            values += list(kv.v[row, mask[b, t], h // 2])
        scores = np.array(keys) @ q[b, t, h] / np.sqrt(5)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ np.array(values) / weights.sum()
    close(got, out, 1e-5)


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"`kind` must be one of .* got 'some'"):
        attend(jnp.zeros((1, 1, 1, 1)), Span.causal(1), [], kind="some")


# --- the chunked form


def make(key, batch: int, time: int, prefix: int, segments=None):
    """Queries, their span, and the parts: own, and a shared prefix."""
    keys = jax.random.split(key, 5)

    def normal(i, rows, length, heads):
        return jax.random.normal(keys[i], (rows, length, heads, HEAD_DIM))

    if segments is None:
        segments = np.zeros((batch, time), np.int32)
    order = prefix + jnp.arange(time)[None]
    own_span = Span(order, jnp.asarray(segments))
    own = KV(normal(1, batch, time, KV_HEADS), normal(2, batch, time, KV_HEADS))
    shared = KV(normal(3, 1, prefix, KV_HEADS), normal(4, 1, prefix, KV_HEADS))
    kvs = [own, shared] if prefix else [own]
    spans = [own_span, Span.causal(prefix)] if prefix else [own_span]
    return normal(0, batch, time, HEADS), own_span, kvs, spans


def ragged(batch: int, time: int, longest: int, seed: int = 0):
    """Segment numbers of packed rows, no segment longer than ``longest``."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        lengths = rng.integers(1, longest + 1, time)
        rows.append(np.repeat(np.arange(time), lengths)[:time])
    return np.stack(rows).astype(np.int32)


CASES = {
    "one row, everything": (1, 40, 0, None, None),
    "a prefix, rows": (3, 40, 5, None, None),
    "packed": (2, 41, 5, 9, None),
    "packed in a window": (2, 41, 5, 9, 9),
    "a window of one": (1, 19, 3, 1, 1),
    "a window beyond all": (1, 40, 0, 40, 100),
    "shorter than a chunk": (2, 5, 2, 3, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_chunks_equal_the_whole_in_value_gradient_and_tangent(
    case, getkey, monkeypatch
):
    monkeypatch.setattr(attention, "_CHUNK_QUERIES", 8)
    batch, time, prefix, longest, window = CASES[case]
    segments = None if longest is None else ragged(batch, time, longest)
    q, own, kvs, spans = make(getkey(), batch, time, prefix, segments)
    weights = jax.random.normal(getkey(), q.shape)

    def run(q, kvs, **how):
        return attend(q, own, list(zip(kvs, spans, strict=True)), **how)

    def everything(q, kvs, **how):
        f = functools.partial(run, **how)
        tangents = jax.tree.map(lambda a: jnp.cos(3 * a), (q, kvs))
        loss = jax.grad(lambda *a: jnp.sum(weights * f(*a)), argnums=(0, 1))
        return jax.jvp(f, (q, kvs), tangents), loss(q, kvs)

    whole = jax.jit(everything)(q, kvs)
    chunked = functools.partial(everything, kind="chunked", window=window)
    jax.tree.map(lambda a, b: close(a, b, 2e-6), jax.jit(chunked)(q, kvs), whole)


def test_the_window_keeps_other_keys_from_being_read(getkey, monkeypatch):
    monkeypatch.setattr(attention, "_CHUNK_QUERIES", 8)
    q, own, kvs, spans = make(getkey(), 1, 64, 0, ragged(1, 64, 4))
    graph = jax.make_jaxpr(
        lambda q, kvs: attend(
            q, own, list(zip(kvs, spans, strict=True)), kind="chunked", window=4
        )
    )(q, kvs)
    scores = [s for s in shapes_of(graph.jaxpr) if s[:3] == (1, 8, KV_HEADS)]
    assert (1, 8, KV_HEADS, HEADS // KV_HEADS, 11) in scores  # 8 + 4 - 1 keys
    assert max(max(s) for s in scores) == 11


def shapes_of(jaxpr) -> list[tuple[int, ...]]:
    """The shape of every value of a jaxpr and those within it."""
    found = []
    for eqn in jaxpr.eqns:
        found += [v.aval.shape for v in eqn.outvars if hasattr(v.aval, "shape")]
        for inner in jaxprs_in_params(eqn.params):
            found += shapes_of(inner)
    return found


# --- flash attention: cuDNN's kernel, and on a CPU the definition that it implements


@pytest.fixture
def flash_calls(monkeypatch) -> list[tuple]:
    """Shapes (q, k, mask) and implementation of each call, which XLA answers."""
    calls, original = [], jax.nn.dot_product_attention

    def instead(q, k, v, *, mask, implementation):
        calls.append((q.shape, k.shape, mask.shape, implementation))
        return original(q, k, v, mask=mask, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    return calls


@pytest.mark.parametrize("case", CASES)
def test_flash_attention_is_the_same_softmax_of_even_lengths(case, getkey, flash_calls):
    batch, time, prefix, longest, window = CASES[case]
    segments = None if longest is None else ragged(batch, time, longest)
    made = make(getkey(), batch, time, prefix, segments)
    q, own, kvs, spans = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, made
    )
    weights = jax.random.normal(getkey(), q.shape)

    def value_and_gradients(q, kvs, kind):
        def run(q, kvs):
            parts = list(zip(kvs, spans, strict=True))
            return attend(q, own, parts, kind=kind, window=window)

        value, transpose = jax.vjp(run, q, kvs)
        return value, transpose(weights.astype(value.dtype))

    got = jax.jit(value_and_gradients, static_argnames="kind")(q, kvs, kind="flash")
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (q, kvs))
    expected = value_and_gradients(*wide, kind="full")
    jax.tree.map(lambda a, b: close(a.astype(jnp.float32), b, 0.05), got, expected)
    even, keys = time + time % 2, prefix + time
    ((queries, keys_shape, mask, implementation),) = flash_calls
    assert implementation == "cudnn"
    assert queries == (batch, even, HEADS, HEAD_DIM)
    assert keys_shape == (batch, keys + keys % 2, KV_HEADS, HEAD_DIM)
    assert mask == (len(own.segment), 1, even, keys + keys % 2)


def test_one_query_or_float32_does_without_flash_attention(getkey, flash_calls):
    q, own, kvs, spans = make(getkey(), 2, 7, 3)
    parts = list(zip(kvs, spans, strict=True))
    close(attend(q, own, parts, kind="flash"), attend(q, own, parts), 1e-6)
    last = jax.tree.map(lambda a: a[:, -1:], own)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (q[:, -1:], kvs))
    parts = list(zip(half[1], spans, strict=True))
    got, expected = (attend(half[0], last, parts, kind=k) for k in ("flash", "full"))
    np.testing.assert_array_equal(got, expected)
    assert not flash_calls


@pytest.mark.parametrize("window", [None, 16])
def test_no_pass_holds_a_value_of_time_by_time(window, getkey, monkeypatch):
    monkeypatch.setattr(attention, "_CHUNK_QUERIES", 8)
    time = 256
    q, own, kvs, spans = make(getkey(), 1, time, 4, ragged(1, time, 16))

    def run(q, kvs, kind="chunked"):
        parts = list(zip(kvs, spans, strict=True))
        return attend(q, own, parts, kind=kind, window=window)

    def loss(q, kvs, **how):
        return jnp.sum(jnp.sin(run(q, kvs, **how)))

    def rate(q, kvs):
        return jax.jvp(run, (q, kvs), (q, kvs))

    for f in (run, jax.grad(loss, argnums=(0, 1)), rate):
        assert max(map(np.prod, shapes_of(jax.make_jaxpr(f)(q, kvs).jaxpr))) < time**2
        memory = jax.jit(f).lower(q, kvs).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 4 * time**2
    # and such a value would have been seen
    f = jax.grad(functools.partial(loss, kind="full"))
    assert max(map(np.prod, shapes_of(jax.make_jaxpr(f)(q, kvs).jaxpr))) > time**2


@pytest.mark.parametrize(
    ("batch", "time", "is_chunked"),
    [(1, 1024, False), (1, 1025, True), (8, 1024, False), (9, 1024, True)],
)
def test_auto_goes_in_chunks_beyond_a_thousand_keys_or_many_scores(
    batch, time, is_chunked, getkey
):
    def shapes(key):
        return make(key, batch, time, 0)

    q, own, kvs, spans = jax.eval_shape(shapes, getkey())
    graph = jax.make_jaxpr(
        lambda q, own, kvs, spans: attend(
            q, own, list(zip(kvs, spans, strict=True)), kind="auto"
        )
    )(q, own, kvs, spans)
    assert any(e.primitive.name == "scan" for e in graph.eqns) == is_chunked


@pytest.mark.parametrize("remat", ["dots", "layer", "offload"])
def test_no_pass_of_a_decoder_holds_a_value_of_time_by_time(remat, monkeypatch):
    """Whatever its layers keep: a policy reaches into the chunks."""
    monkeypatch.setattr(attention, "_CHUNK_QUERIES", 8)
    time = 256
    config = decoder.DecoderConfig(
        vocab_size=5,
        hidden_size=8,
        intermediate_size=16,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_positions=time,
        rope_theta=100.0,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
    )

    def build():
        how = {"attention": "chunked", "remat": remat}
        return decoder.Decoder(config, **how, rngs=nnx.Rngs(0))

    graph, weights = nnx.split(nnx.eval_shape(build))

    def loss(weights, tokens):
        model = nnx.merge(graph, weights)
        hidden, _ = model(tokens, jnp.arange(time)[None], Span.causal(time))
        return jnp.sum(jnp.square(hidden))

    tokens = jax.ShapeDtypeStruct((1, time), jnp.int32)
    for f in (loss, jax.grad(loss)):
        graph_of_f = jax.make_jaxpr(f)(weights, tokens)
        assert max(map(np.prod, shapes_of(graph_of_f.jaxpr))) < time**2

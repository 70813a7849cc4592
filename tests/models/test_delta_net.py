"""Gated DeltaNet against `transformers`, and against numpy one token at a time."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.models import delta_net as net_module
from logra_jax.models import delta_rule as rule_module
from logra_jax.models.delta_net import DeltaShape, DeltaState, GatedDeltaNet
from logra_jax.models.delta_rule import CHUNK

HIDDEN, EPSILON, LONG = 24, 1e-6, 150
EVEN = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=8, conv_width=4)
ODD = DeltaShape(key_heads=2, value_heads=6, key_dim=8, value_dim=5, conv_width=3)

mix = nnx.jit(lambda net, h, segments, past: net(h, segments, past))


@functools.cache
def build(shape: DeltaShape = EVEN, dtype=jnp.float32) -> GatedDeltaNet:
    """A module with no weight left as it is by default."""
    net = GatedDeltaNet(HIDDEN, shape, EPSILON, dtype, nnx.Rngs(0))
    rng = np.random.default_rng(1)
    weights = nnx.state(net, nnx.Param)
    nnx.update(net, jax.tree.map(lambda w: redraw(rng, w), weights))
    return net


def redraw(rng: np.random.Generator, w):
    noise = rng.standard_normal(w.shape) * 0.5
    mean = np.asarray(w, np.float32) if w.ndim == 1 else 0
    spread = 1 if w.ndim != 2 else 2 * w.shape[0] ** -0.5
    return jnp.asarray(mean + spread * noise, w.dtype)


def normal(*shape, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def one_segment(time: int) -> jax.Array:
    return jnp.zeros((1, time), jnp.int32)


def some_past(batch: int, shape: DeltaShape = EVEN) -> DeltaState:
    s = shape
    memory = normal(batch, s.value_heads, s.key_dim, s.value_dim, seed=8)
    tail = normal(batch, s.conv_width - 1, s.channels, seed=9)
    return DeltaState(jnp.asarray(memory), jnp.asarray(tail))


def close(got, expected, tol=1e-5):
    """Within ``tol`` of the largest entry, which is up to 8 in outputs."""
    atol = tol * max(1, float(np.abs(expected).max()))
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


# --- numpy, float64, one token after the other


def weights_of(net: GatedDeltaNet) -> dict[str, np.ndarray]:
    paths = nnx.to_flat_state(nnx.state(net, nnx.Param))
    return {path[0]: np.asarray(w[...], np.float64) for path, w in paths}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def recur(q, k, v, g, beta, state):
    """The delta rule of one sequence; (time, heads, features), heads repeated."""
    out, state = np.zeros(v.shape), np.array(state)
    for t in range(len(v)):
        state *= np.exp(g[t])[:, None, None]
        wrong = v[t] - np.einsum("hd,hde->he", k[t], state)
        state += k[t][:, :, None] * (beta[t][:, None] * wrong)[:, None]
        out[t] = np.einsum("hd,hde->he", q[t], state)
    return out, state


def follow(w: dict, s: DeltaShape, h: np.ndarray, past: DeltaState | None):
    """Outputs (time, hidden) of one sequence, and its state without batch."""
    if past is None:
        memory = np.zeros((s.value_heads, s.key_dim, s.value_dim))
        tail = np.zeros((s.conv_width - 1, s.channels))
    else:
        memory, tail = (np.asarray(a, np.float64) for a in past)
    taps = np.concatenate([tail, h @ w["in_proj_qkv"]])
    kernel = w["conv1d"][:, 0].T
    mixed = np.stack(
        [(taps[t : t + len(kernel)] * kernel).sum(0) for t in range(len(h))]
    )
    q, k, v = np.split(mixed * sigmoid(mixed), [s.keys, 2 * s.keys], axis=-1)
    q, k = (a.reshape(len(h), s.key_heads, -1) for a in (q, k))
    q, k = (
        np.repeat(
            a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6),
            s.value_heads // s.key_heads,
            axis=1,
        )
        for a in (q, k)
    )
    g = -np.exp(w["A_log"]) * np.logaddexp(0, h @ w["in_proj_a"] + w["dt_bias"])
    beta = sigmoid(h @ w["in_proj_b"])
    v = v.reshape(len(h), s.value_heads, -1)
    out, memory = recur(q * s.key_dim**-0.5, k, v, g, beta, memory)
    z = (h @ w["in_proj_z"]).reshape(out.shape)
    out /= np.sqrt((out * out).mean(-1, keepdims=True) + EPSILON)
    out = w["norm"] * out * z * sigmoid(z)
    return out.reshape(len(h), -1) @ w["out_proj"], memory, taps[len(h) :]


def follow_rows(net, h, segments, past=None):
    """What each row's segments give, each followed by itself from ``past``."""
    w = weights_of(net)
    rows, memories, tails = [], [], []
    segments = np.broadcast_to(segments, h.shape[:2])
    for b, row in enumerate(segments):
        own = past
        if past is not None:
            own = jax.tree.map(lambda a, b=b: a[b % a.shape[0]], past)
        edges = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)]
        pieces = [
            follow(w, net.shape, np.asarray(h[b, i:j], np.float64), own)
            for i, j in itertools.pairwise(edges)
        ]
        rows.append(np.concatenate([piece[0] for piece in pieces]))
        memories.append(pieces[-1][1])
        tails.append(pieces[-1][2])
    return np.stack(rows), np.stack(memories), np.stack(tails)


@pytest.mark.parametrize("shape", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("past", [None, some_past], ids=["fresh", "past"])
def test_chunks_are_the_recurrence_token_by_token(shape, past):
    net, h = build(shape), normal(2, LONG, HIDDEN)
    past = past and past(2, shape)
    got, state = mix(net, h, one_segment(LONG), past)
    expected, memory, tail = follow_rows(net, h, one_segment(LONG), past)
    close(got, expected)
    close(state.memory, memory)
    close(state.tail, tail)


@pytest.mark.parametrize("most", [1, 2 * 4 * 50**2 * 2])
def test_any_number_of_chunks_may_be_prepared_together(most, monkeypatch):
    """One at a time; and two of three, where the last group is filled up."""
    monkeypatch.setattr(rule_module, "_GROUP", most)
    net, h, past = build(), normal(2, LONG, HIDDEN), some_past(1)
    segments = jnp.repeat(jnp.array([[0, 1, 2]]), jnp.array([30, 75, 45]), axis=1)
    h = jnp.asarray(h)
    got, state = nnx.jit(lambda net: net(h, segments, past))(net)
    expected, memory, _ = follow_rows(net, h, segments, past)
    close(got, expected)
    close(state.memory, memory)


def test_many_inputs_are_convolved_a_piece_at_a_time(monkeypatch):
    """64 channels do not come apart into 7, the least: into 8."""
    net, h, past = build(), jnp.asarray(normal(2, 9, HIDDEN)), some_past(2)
    whole, state = mix(net, h, one_segment(9), past)
    monkeypatch.setattr(net_module, "_PIECE", 2 * 9 * 64 // 7)
    pieces, same = nnx.jit(lambda net: net(h, one_segment(9), past))(net)
    close(pieces, whole, 1e-6)
    jax.tree.map(lambda a, b: close(a, b, 1e-6), same, state)


# --- segments


@st.composite
def segmentations(draw, batch: int, time: int):
    """Rows of segment numbers; edges fall on those of chunks and beside them, too."""
    size = time // -(-time // CHUNK)
    special = [e + d for e in range(0, time, size) for d in (-1, 0, 1)]
    edge = st.one_of(st.sampled_from(special), st.integers(1, time - 1))
    rows = []
    for _ in range(batch):
        edges = draw(st.sets(edge, max_size=6))
        is_first = np.isin(np.arange(time), list(edges))
        rows.append(draw(st.sampled_from([1, -1])) * np.cumsum(is_first))
    return np.stack(rows).astype(np.int32)


@pytest.mark.parametrize("rows", [0, 1, 2])
@given(data=st.data())
def test_packed_segments_are_separate_sequences(rows, data):
    """From nothing, from a past shared by all rows, and from each row's own."""
    net, h = build(), normal(2, LONG, HIDDEN)
    segments = data.draw(segmentations(2, LONG))
    past = some_past(rows) if rows else None
    got, state = mix(net, h, jnp.asarray(segments), past)
    expected, memory, tail = follow_rows(net, h, segments, past)
    close(got, expected)
    close(state.memory, memory)
    close(state.tail, tail)


@pytest.mark.parametrize("past", [None, some_past(1)], ids=["fresh", "past"])
def test_left_padding_changes_nothing(past):
    """Each padding token is a segment of its own, as in a prefill."""
    net, lengths, time = build(), (1, 2, 7, 9), 9
    h = normal(4, time, HIDDEN)
    first = time - np.array(lengths)[:, None]
    columns = np.arange(time)[None]
    segments = np.where(columns >= first, -1, -2 - columns)
    got, state = mix(net, h, jnp.asarray(segments), past)
    for b, length in enumerate(lengths):
        row = h[b : b + 1, time - length :]
        expected, memory, tail = follow_rows(net, row, one_segment(length), past)
        close(got[b, time - length :], expected[0])
        close(state.memory[b], memory[0])
        close(state.tail[b], tail[0])


# --- going on


def test_one_token_at_a_time_is_the_prefill():
    net, h, start = build(), normal(2, 80, HIDDEN), 70
    whole, end = mix(net, h, one_segment(80), None)
    _, state = mix(net, h[:, :start], one_segment(start), None)
    for t in range(start, 80):
        out, state = mix(net, h[:, t : t + 1], one_segment(1), state)
        close(out[:, 0], whole[:, t])
    jax.tree.map(close, state, end)


@pytest.mark.parametrize("split", [1, 2, 70])
def test_a_prefix_and_the_rest_are_the_whole(split):
    """The prefix is run once, in a batch of 1."""
    net, h = build(ODD), normal(2, 80, HIDDEN)
    h[:, :split] = h[:1, :split]
    whole, end = mix(net, h, one_segment(80), None)
    _, past = mix(net, h[:1, :split], one_segment(split), None)
    rest, state = mix(net, h[:, split:], one_segment(80 - split), past)
    close(rest, whole[:, split:])
    jax.tree.map(close, state, end)


# --- transformers


def torch_twin(net: GatedDeltaNet):
    """`transformers`' module with the same weights, float32."""
    import torch
    from transformers.models.qwen3_5 import Qwen3_5TextConfig, modeling_qwen3_5

    s = net.shape
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=s.key_heads,
        linear_num_value_heads=s.value_heads,
        linear_key_head_dim=s.key_dim,
        linear_value_head_dim=s.value_dim,
        linear_conv_kernel_dim=s.conv_width,
        rms_norm_eps=EPSILON,
    )
    twin = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0).float()
    weights = weights_of(net)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            w = weights.pop(name.removesuffix(".weight"))
            parameter.copy_(torch.from_numpy(w.T if w.ndim == 2 else w))
    assert not weights
    return twin, config


@pytest.mark.parametrize(
    ("shape", "time"),
    [(EVEN, 1), (EVEN, 5), (EVEN, 64), (EVEN, 65), (EVEN, LONG), (ODD, 65)],
)
def test_outputs_are_those_of_transformers(shape, time):
    import torch

    net, h = build(shape), normal(2, time, HIDDEN, seed=time)
    twin, _ = torch_twin(net)
    with torch.inference_mode():
        expected = twin(torch.from_numpy(h)).numpy()
    close(mix(net, h, one_segment(time), None)[0], expected)


def test_state_is_the_cache_of_transformers():
    """After a prefill, and after a token more."""
    import torch
    from transformers import DynamicCache

    net, h = build(), normal(2, 71, HIDDEN)
    twin, config = torch_twin(net)
    cache, past = DynamicCache(config=config), None
    for part in (h[:, :70], h[:, 70:]):
        with torch.inference_mode():
            expected = twin(torch.from_numpy(part), cache=cache).numpy()
        got, past = mix(net, part, one_segment(part.shape[1]), past)
        close(got, expected)
        close(past.memory, cache.get_recurrent_state(0, state_idx=0).numpy())
        inputs = cache.get_conv_state(0, state_idx=0).numpy().swapaxes(1, 2)
        close(past.tail, inputs[:, 1:])


def test_gradients_are_those_of_torch():
    import torch

    net, h, g = build(ODD), normal(2, LONG, HIDDEN), normal(2, LONG, HIDDEN, seed=3)
    twin, _ = torch_twin(net)
    x = torch.from_numpy(h).requires_grad_()
    (twin(x) * torch.from_numpy(g)).sum().backward()

    def loss(net, h):
        return (net(h, one_segment(LONG), None)[0] * g).sum()

    of_net, of_h = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(net, jnp.asarray(h))
    got = {path[0]: w[...] for path, w in nnx.to_flat_state(of_net)}
    expected = {
        name.removesuffix(".weight"): p.grad.numpy().T
        if p.ndim == 2
        else p.grad.numpy()
        for name, p in twin.named_parameters()
    }
    assert got.keys() == expected.keys()
    for name, w in {**expected, "h": x.grad.numpy()}.items():
        error = np.linalg.norm({**got, "h": of_h}[name] - w) / np.linalg.norm(w)
        assert error <= 1e-4, name


# --- differentiation, with segments and a past


def packed_function(past):
    """Of weights, inputs and past, which segments and chunks cut."""
    graph, weights = nnx.split(build())
    segments = jnp.repeat(jnp.array([[0, 1, 2]]), jnp.array([30, 2, 68]), axis=1)

    def f(weights, h, past):
        out, state = nnx.merge(graph, weights)(h, segments, past)
        return out, state.memory, state.tail

    return f, (weights, jnp.asarray(normal(2, 100, HIDDEN)), past)


def test_forward_mode_is_the_difference_quotient_of_numpy():
    f, primals = packed_function(some_past(1))
    rng = np.random.default_rng(5)
    tangents = jax.tree.map(lambda a: redraw(rng, a) * 0.1, primals)
    _, got = jax.jit(lambda x, t: jax.jvp(f, x, t))(primals, tangents)

    def at(step):
        weights, h, past = jax.tree.map(
            lambda a, t: np.asarray(a, np.float64) + step * np.asarray(t, np.float64),
            primals,
            tangents,
        )
        moved = {p[0]: np.asarray(w[...]) for p, w in nnx.to_flat_state(weights)}
        net = build()
        rows = []
        for row in h:
            ends = [30, 32, 100]
            parts = [
                follow(moved, net.shape, row[i:j], jax.tree.map(lambda a: a[0], past))
                for i, j in zip([0, *ends[:-1]], ends, strict=True)
            ]
            rows.append((np.concatenate([p[0] for p in parts]), *parts[-1][1:]))
        return [np.stack(a) for a in zip(*rows, strict=True)]

    for there, back, tangent in zip(at(1e-5), at(-1e-5), got, strict=True):
        close(tangent, (there - back) / 2e-5, 2e-4)


@pytest.mark.parametrize("rows", [0, 1])
def test_reverse_mode_is_the_transpose_of_forward_mode(rows):
    f, primals = packed_function(some_past(rows) if rows else None)
    rng = np.random.default_rng(6)
    tangents = jax.tree.map(lambda a: redraw(rng, a), primals)

    @jax.jit
    def both(primals, tangents):
        out, moved = jax.jvp(f, primals, tangents)
        cotangents = jax.tree.map(
            lambda a: jnp.cos(jnp.arange(a.size)).reshape(a.shape), out
        )
        pulled = jax.vjp(f, *primals)[1](cotangents)

        def inner(a, b):
            return sum(
                jnp.vdot(x, y)
                for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
            )

        return inner(moved, cotangents), inner(tangents, pulled)

    forward, backward = both(primals, tangents)
    np.testing.assert_allclose(forward, backward, rtol=1e-4)


# --- as a layer


@pytest.mark.slow
def test_stacked_layers_are_scanned_and_rematerialised():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return GatedDeltaNet(HIDDEN, EVEN, EPSILON, jnp.float32, rngs)

    graph, weights = nnx.split(stack(nnx.Rngs(0)))
    h, past = jnp.asarray(normal(2, 70, HIDDEN)), some_past(1)

    @jax.jit
    def layer(h, w):
        out, state = nnx.merge(graph, w)(h, one_segment(70), past)
        return h + out, state

    @jax.jit
    @jax.value_and_grad
    def scanned(weights):
        out, states = jax.lax.scan(jax.checkpoint(layer), h, weights)
        assert states.memory.shape == (3, 2, 4, 8, 8)
        return (out**2).sum() + (states.memory**2).sum()

    @jax.value_and_grad
    def unrolled(weights):
        out, total = h, 0.0
        for i in range(3):
            out, state = layer(out, jax.tree.map(lambda a, i=i: a[i], weights))
            total += (state.memory**2).sum()
        return (out**2).sum() + total

    (value, got), (expected, grads) = scanned(weights), unrolled(weights)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), got, grads)


def test_bfloat16_is_within_two_percent_of_float32():
    """Of the norm; activations and weights in bfloat16, the recurrence in float32."""
    narrow = build(EVEN, jnp.bfloat16)
    wide = build(EVEN)
    h = jnp.asarray(normal(2, LONG, HIDDEN), jnp.bfloat16)
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), nnx.state(narrow))
    wide = nnx.merge(nnx.graphdef(wide), weights)
    got, state = mix(narrow, h, one_segment(LONG), None)
    expected, exact = mix(wide, h.astype(jnp.float32), one_segment(LONG), None)
    assert (got.dtype, state.tail.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert state.memory.dtype == jnp.float32

    def error(a, b):
        return np.linalg.norm(a.astype(jnp.float32) - b) / np.linalg.norm(b)

    assert error(got, expected) <= 0.02
    assert error(state.memory, exact.memory) <= 0.02


def test_value_heads_share_key_heads_evenly():
    with pytest.raises(ValueError, match=r"`value_heads` must be a multiple.* got 3"):
        DeltaShape(2, 3, 8, 8, 4)

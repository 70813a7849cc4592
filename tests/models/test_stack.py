"""Running stacked bfloat16 layers: the same numbers, and no copy of the weights."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.models import head as head_module
from logra_jax.models import stack as stack_module
from logra_jax.models.attention import Span
from logra_jax.models.decoder import REMAT, Decoder
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.stack import Run, scan_layers

LAYERS, WIDTH, TOKENS = 6, 48, 5
CONFIG = DecoderConfig(
    vocab_size=1536,
    hidden_size=64,
    intermediate_size=192,
    num_layers=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
    rope_theta=100.0,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
)


def layer(h, inputs):
    weights, scale = inputs
    h = jnp.tanh(h @ weights["w"].astype(h.dtype)) * scale + weights["b"]
    return h, jnp.sum(h)


def scan_one_kind(h, weights, scale, *, remat):
    h, (sums,) = scan_layers([Run(layer, weights, scale)], h, remat=remat)
    return h, sums


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH), jnp.bfloat16) / 7,
        "b": jax.random.normal(keys[1], (LAYERS, 1, WIDTH)),
    }
    scale = 1 + jax.random.uniform(keys[2], (LAYERS, 1, 1))
    return jax.random.normal(keys[3], (TOKENS, WIDTH)), weights, scale


@pytest.mark.parametrize("remat", REMAT)
def test_layers_run_and_differentiate_as_under_a_plain_scan(remat):
    def loss(run):
        def value(h, weights, scale):
            h, sums = run(h, weights, scale)
            return jnp.sum(h**2) + jnp.sum(sums * jnp.arange(LAYERS))

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))

    ours = loss(lambda h, w, s: scan_one_kind(h, w, s, remat=remat))(*arrays())
    plain = loss(lambda h, w, s: jax.lax.scan(layer, h, (w, s)))(*arrays())
    # the gradient of bfloat16 weights too: reading bits must not make it vanish
    assert ours[1][1]["w"].dtype == jnp.bfloat16
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-4
        ),
        ours,
        plain,
    )


@pytest.mark.parametrize("remat", REMAT)
def test_layers_of_two_kinds_run_in_blocks_and_differentiate(remat):
    """Two of one kind, then one of the other; the oracle is a Python loop."""
    h, weights, scale = arrays()
    half = jax.tree.map(lambda a: a[: LAYERS // 2] * 1.3, weights)

    def other(h, inputs):
        weights, _ = inputs
        h = h + jnp.cos(h @ weights["w"].astype(h.dtype)) + weights["b"]
        return h, {"mean": jnp.mean(h, axis=0)}

    def ours(h, weights, half, scale):
        runs = [Run(layer, weights, scale), Run(other, half, None)]
        return scan_layers(runs, h, remat=remat)

    def plain(h, weights, half, scale):
        sums, means = [], []
        for i in range(LAYERS):
            h, out = layer(h, jax.tree.map(lambda a, i=i: a[i], (weights, scale)))
            sums.append(out)
            if i % 2:
                part = jax.tree.map(lambda a, i=i: a[i // 2], half)
                h, out = other(h, (part, None))
                means.append(out["mean"])
        return h, [jnp.stack(sums), {"mean": jnp.stack(means)}]

    def loss(run):
        def total(*arrays):
            h, (sums, means) = run(*arrays)
            return jnp.sum(jnp.square(h)) + jnp.sum(sums) + jnp.sum(means["mean"])

        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))

    args = (h, weights, half, scale)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5),
        ours(*args),
        plain(*args),
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-3
        ),
        loss(ours)(*args),
        loss(plain)(*args),
    )


def test_forward_mode_goes_through_the_slices():
    h, weights, scale = arrays()

    def run(w):
        return scan_one_kind(h, weights | {"w": w}, scale, remat="dots")[0]

    tangent = jnp.ones_like(weights["w"])
    _, ours = jax.jvp(run, (weights["w"],), (tangent,))
    plain = jax.jvp(
        lambda w: jax.lax.scan(layer, h, (weights | {"w": w}, scale))[0],
        (weights["w"],),
        (tangent,),
    )[1]
    np.testing.assert_allclose(ours, plain, rtol=1e-5)
    assert np.any(ours)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", REMAT)
def test_no_pass_over_a_decoder_holds_a_copy_of_its_weights(
    remat, activations, monkeypatch
):
    monkeypatch.setattr(head_module, "_HEAD_BLOCK", 96 * CONFIG.hidden_size)

    def build():
        model = Decoder(CONFIG, activations=activations, remat=remat, rngs=nnx.Rngs(0))
        return logra.sketch(model, 4, "proj")

    graph, probes, weights = nnx.split(nnx.eval_shape(build), logra.Probe, ...)
    tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)

    def loss(probes, weights, tokens):
        model = nnx.merge(graph, probes, weights)
        hidden, _ = model(tokens, jnp.arange(3)[None], Span.causal(3))
        return jnp.sum(jnp.square(model.logits(hidden)))

    stacked = sum(w.size for p, w in nnx.to_flat_state(weights) if p[-1] == "kernel")
    for f in (loss, jax.grad(loss)):
        compiled = jax.jit(f).lower(probes, weights, tokens).compile()
        assert not re.findall(
            rf"= f32\[{CONFIG.num_layers},\d+,(?:64|192|32)\]", compiled.as_text()
        )
        # activations of three tokens, a layer, a block of the head: not half of them
        assert compiled.memory_analysis().temp_size_in_bytes < 1.25 * stacked


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_wider_hidden_state_meets_the_head_in_blocks(is_tied, monkeypatch):
    config = dataclasses.replace(CONFIG, num_layers=1, tie_embeddings=is_tied)
    model = Decoder(config, activations="float32", rngs=nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(1), (2, 3, config.hidden_size))
    head = model.embed_tokens.embedding[...].T if is_tied else model.lm_head.kernel[...]

    def plain(h):
        return h @ head.astype(jnp.float32)

    for block in (1, 7 * 64 * 4, 2**22):
        monkeypatch.setattr(head_module, "_HEAD_BLOCK", block)
        np.testing.assert_allclose(
            model.logits(hidden), plain(hidden), rtol=1e-5, atol=1e-5
        )
        ours, theirs = (
            jax.grad(lambda h, f=f: jnp.sum(jnp.sin(f(h))))(hidden)
            for f in (model.logits, plain)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_both_ways_of_slicing_agree(monkeypatch):
    h, weights, scale = arrays()
    found = []
    for converted in (True, False):
        monkeypatch.setattr(stack_module, "BFLOAT16_SLICES_ARE_CONVERTED", converted)
        found.append(scan_one_kind(h, weights, scale, remat="dots"))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_what_is_kept_goes_to_the_host_when_asked():
    h, weights, scale = arrays()

    def kept(remat):
        def loss(h):
            return jnp.sum(scan_one_kind(h, weights, scale, remat=remat)[0])

        return str(jax.make_jaxpr(jax.grad(loss))(h))

    inputs = f"[{LAYERS},{TOKENS},{WIDTH}]"
    assert f"f32<host>{inputs}" in kept("offload")
    assert f"f32{inputs}" not in kept("offload")
    assert f"f32{inputs}" in kept("layer")


def test_a_device_without_host_memory_offloads_nothing(monkeypatch):
    class Memory:
        kind = "device"

    class Device:
        device_kind = "abacus"

        def addressable_memories(self):
            return [Memory()]

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    expected = "`remat` may be 'offload' only .* got abacus with device; use 'layer'"
    with pytest.raises(ValueError, match=expected):
        scan_one_kind(*arrays(), remat="offload")


def test_the_kept_inputs_of_layers_are_never_widened():
    """The gradient is that of a plain scan, and XLA converts no stack of inputs."""
    h, weights, _ = arrays()
    h, scale = h.astype(jnp.bfloat16), jnp.ones((LAYERS, 1, 1), jnp.bfloat16)
    weights = {name: w.astype(jnp.bfloat16) for name, w in weights.items()}

    def gradient(run):
        def value(h):
            return jnp.sum(run(h)[0].astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(value))

    ours = gradient(lambda h: scan_one_kind(h, weights, scale, remat="layer"))
    text = ours.lower(h).compile().as_text()
    assert not re.findall(rf"= f32\[{LAYERS},{TOKENS},{WIDTH}\]", text)
    assert re.findall(rf"= (?:bf16|u16)\[{LAYERS},{TOKENS},{WIDTH}\]", text)
    plain = gradient(lambda h: jax.lax.scan(layer, h, (weights, scale)))
    np.testing.assert_allclose(
        np.asarray(ours(h), np.float32),
        np.asarray(plain(h), np.float32),
        rtol=0.1,
        atol=0.02 * float(jnp.max(jnp.abs(plain(h)))),
    )

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.capture import Tap, TappedLinear, measurements, raw, tapped
from logra_jax.models.attention import Span
from logra_jax.models.decoder import Decoder
from logra_jax.models.layers import DecoderConfig

LAYERS, BATCH, TIME, RANK = 3, 2, 5, 2
TOKENS = BATCH * TIME
CONFIG = DecoderConfig(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=TIME,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=False,
    qkv_bias=True,
)
BASIS = logra.Basis(seed=5)


def assert_close(actual, expected, rtol=1e-5):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= rtol * np.linalg.norm(expected)


def decoder(dtype=jnp.float32, **options) -> Decoder:
    model = Decoder(CONFIG, dtype=dtype, rngs=nnx.Rngs(0), **options)
    return logra.sketch(model, RANK, "_proj$", BASIS)


def loss(model: Decoder):
    """A scalar that every layer and every token matters to."""
    tokens = jnp.arange(TOKENS).reshape(BATCH, TIME) % CONFIG.vocab_size
    hidden, _ = model(tokens, jnp.arange(TIME)[None], Span.causal(TIME))
    return jnp.mean(jnp.sin(3 * model.logits(hidden)))


def measure(model, f, scalar=loss, tokens=TOKENS, match=".*"):
    """The measurements of f in every sketched layer of model, and the scalar."""
    graph, taps, rest = nnx.split(tapped(model, f, tokens, match), Tap, ...)

    @jax.jit
    def run(taps):
        return jax.value_and_grad(lambda t: scalar(nnx.merge(graph, t, rest)))(taps)

    value, cotangents = run(taps)
    return value, measurements(cotangents)


def dense_gradients(dtype=jnp.float32):
    """The oracle: ``jax.grad`` of every kernel, of a model without sketches."""
    plain = Decoder(CONFIG, dtype=dtype, activations=jnp.float32, rngs=nnx.Rngs(0))
    graph, kernels, rest = nnx.split(plain, lambda p, _: p[-1] == "kernel", ...)
    found = jax.grad(lambda k: loss(nnx.merge(graph, k, rest)))(kernels)
    return {
        ".".join(map(str, path[:-1])): value[...]
        for path, value in nnx.to_flat_state(found)
        if "layers" in path
    }


@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
def test_g_and_x_of_every_layer_make_the_dense_gradient(remat):
    value, found = measure(decoder(remat=remat), raw)
    dense = dense_gradients()
    assert found.keys() == dense.keys()
    assert len(found) == 7
    for path, values in found.items():
        x, g = values["x"], values["g"]
        assert x.shape[:2] == g.shape[:2] == (LAYERS, TOKENS)
        assert_close(np.einsum("ltk,ltd->lkd", x, g), dense[path])
    np.testing.assert_allclose(value, loss(decoder()), rtol=1e-6)


@pytest.mark.slow
def test_bfloat16_activations_are_measured_in_float32():
    _, found = measure(decoder(jnp.bfloat16), raw)
    for path, gradient in dense_gradients(jnp.bfloat16).items():
        values = found[path]
        assert values["x"].dtype == values["g"].dtype == np.float32
        both = np.einsum("ltk,ltd->lkd", values["x"], values["g"])
        assert_close(both, gradient, rtol=0.2)  # bfloat16's error, not another scale


def sketch_by_hand(x, g, A):
    return {"sketch": g.T @ (x @ A.T)}


@pytest.mark.slow
def test_the_basis_is_the_one_that_the_layer_is_sketched_in():
    model = decoder()
    graph, probes, weights = nnx.split(model, logra.Probe, ...)
    sketches = jax.grad(lambda p: loss(nnx.merge(graph, p, weights)))(probes)
    _, found = measure(model, sketch_by_hand)
    for path, sketch in nnx.to_flat_state(sketches):
        name = ".".join(map(str, path[:-1]))
        assert_close(found[name]["sketch"], sketch[...])


def square_of_gradient(x, g, A):
    del A
    return {"square": jnp.sum(jnp.square(g.T @ x))}


def test_what_a_measurement_forms_is_held_for_one_layer_at_a_time():
    layers, width, tokens = 24, 128, 4

    class Deep(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=layers)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def stack(rngs):
                return nnx.Linear(width, width, rngs=rngs)

            self.layers = stack(rngs)

        def __call__(self, x):
            graph, weights = nnx.split(self.layers)

            def layer(h, weights):
                return jnp.tanh(nnx.merge(graph, weights)(h)), None

            return jax.lax.scan(layer, x, weights)[0]

    model = logra.sketch(Deep(nnx.Rngs(0)), 2)
    graph, taps, rest = nnx.split(tapped(model, square_of_gradient, tokens), Tap, ...)

    def run(taps, rest, x):
        scalar = lambda t: jnp.sum(nnx.merge(graph, t, rest)(x) ** 2)  # noqa: E731
        return jax.grad(scalar)(taps)

    x = jnp.ones((tokens, width))
    compiled = jax.jit(run).lower(taps, rest, x).compile()
    one_gradient = 4 * width * width
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 4 * one_gradient  # of 24 in all
    found = measurements(compiled(taps, rest, x))
    assert found["layers"]["square"].shape == (layers,)


def test_the_value_of_a_tap_is_ignored():
    model = tapped(decoder(), raw, TOKENS)
    graph, taps, rest = nnx.split(model, Tap, ...)
    bad = jax.tree.map(lambda t: t + jnp.nan, taps)
    assert loss(nnx.merge(graph, bad, rest)) == loss(nnx.merge(graph, taps, rest))


def test_only_layers_that_match_are_tapped():
    _, found = measure(decoder(), raw, match="mlp")
    assert {path.rpartition(".")[2] for path in found} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_a_lone_layer_can_be_tapped(getkey):
    layer = logra.sketch(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), 2)
    x = jax.random.normal(getkey(), (3, 6))
    _, found = measure(layer, raw, lambda m: jnp.sum(m(x)), tokens=3)
    assert_close(found[""]["x"], x)
    assert_close(found[""]["g"], jnp.ones((3, 4)))


class Twice(nnx.Module):
    """One layer, called twice; another, never."""

    def __init__(self):
        self.used = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.idle = nnx.Linear(4, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.used(jnp.tanh(self.used(x)))


@pytest.mark.parametrize(("match", "times"), [("used", 2), ("idle", 0)])
def test_a_layer_that_does_not_run_once_is_refused(match, times):
    model = logra.sketch(Twice(), 2, match)
    x = jnp.ones((3, 4))
    with pytest.raises(ValueError, match=f"'{match}' run {times} times"):
        measure(model, raw, lambda m: jnp.sum(m(x)), tokens=3)


def test_another_number_of_tokens_is_refused():
    with pytest.raises(ValueError, match="got 7, but the layer runs on 10"):
        measure(decoder(), raw, tokens=7)


def test_the_gradient_of_a_tapped_kernel_is_refused(getkey):
    layer = tapped(logra.sketch(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), 2), raw, 3)
    assert isinstance(layer, TappedLinear)
    graph, kernel, rest = nnx.split(layer, lambda p, _: p[-1] == "kernel", ...)
    x = jnp.ones((3, 6))
    with pytest.raises(ValueError, match="`w` of a tapped projection must not be"):
        jax.grad(lambda k: jnp.sum(nnx.merge(graph, k, rest)(x)))(kernel)


def test_a_model_without_sketched_layers_is_refused():
    with pytest.raises(ValueError, match=r"sketched layer.*the model has none"):
        tapped(Twice(), raw, 3)
    with pytest.raises(ValueError, match=r"'nothing', which hits none of: used"):
        tapped(logra.sketch(Twice(), 2, "used"), raw, 3, match="nothing")

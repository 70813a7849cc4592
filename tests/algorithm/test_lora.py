"""LoRA against the sketch, against plain autodiff, and merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.lora import LoRAFactor, LoRALinear, lora, merge_lora

K, D, R, ALPHA = 12, 10, 4, 6.0


def linear(dtype=jnp.float32, bias: bool = True) -> nnx.Linear:
    return nnx.Linear(K, D, use_bias=bias, param_dtype=dtype, rngs=nnx.Rngs(0))


def adapted(getkey, dtype=jnp.float32) -> LoRALinear:
    """A LoRA layer whose B is no longer zero."""
    layer = lora(linear(dtype), R, alpha=ALPHA)
    assert isinstance(layer, LoRALinear)
    layer.lora_b[...] = jax.random.normal(getkey(), (D, R))
    return layer


class Stacked(nnx.Module):
    """Three layers along axis 0, run by a scan, and one more."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return nnx.Linear(K, K, rngs=rngs)

        self.layers = stack(rngs)
        self.head = nnx.Linear(K, D, rngs=rngs)

    def __call__(self, x):
        graph, weights = nnx.split(self.layers)
        layer = jax.checkpoint(lambda x, w: jnp.tanh(nnx.merge(graph, w)(x)))
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return self.head(x)


def test_b_begins_at_zero_so_that_the_layer_is_what_it_was(getkey):
    x = jax.random.normal(getkey(), (5, K))
    layer = linear()
    np.testing.assert_array_equal(lora(layer, R)(x), layer(x))


def test_the_gradient_of_b_is_the_sketch_in_the_same_basis(getkey):
    x, g = jax.random.normal(getkey(), (7, K)), jax.random.normal(getkey(), (7, D))
    basis = logra.Basis(seed=3)
    sketched = logra.sketch(linear(), R, basis=basis)
    layer = lora(linear(), R, alpha=ALPHA)
    layer.lora_a[...] = basis.matrix(sketched.address[...], R, K)

    def gradient(model, kind):
        graph, trained, rest = nnx.split(model, kind, ...)
        return jax.grad(lambda t: jnp.vdot(nnx.merge(graph, t, rest)(x), g))(trained)

    sketch = gradient(sketched, logra.Probe)["probe"][...]
    found = gradient(layer, LoRAFactor)["lora_b"][...]
    np.testing.assert_allclose(found, ALPHA / R * sketch, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_autodiff_in_float32_whatever_the_dtype(getkey):
    """Of the plain form, which is an ordinary function, in a stack under remat."""
    x, g = jax.random.normal(getkey(), (7, K)), jax.random.normal(getkey(), (7, D))
    model = lora(Stacked(nnx.Rngs(0)), R, alpha=ALPHA)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, LoRALinear):
            module.lora_b[...] = jax.random.normal(getkey(), module.lora_b.shape)

    def gradient(model, x):
        graph, trained, rest = nnx.split(model, LoRAFactor, ...)
        return jax.grad(
            lambda t, x: jnp.vdot(nnx.merge(graph, t, rest)(x), g), argnums=(0, 1)
        )(trained, x)

    ours, theirs = gradient(model, x), gradient(logra.perturbed(model), x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_of_bfloat16_layers_are_not_rounded_to_bfloat16(getkey):
    x = jax.random.normal(getkey(), (64, K), jnp.bfloat16)
    graph, trained, rest = nnx.split(adapted(getkey, jnp.bfloat16), LoRAFactor, ...)
    found = jax.grad(lambda t: jnp.sum(nnx.merge(graph, t, rest)(x)))(trained)
    for leaf in jax.tree.leaves(found):
        assert leaf.dtype == jnp.float32
        assert jnp.any(leaf != leaf.astype(jnp.bfloat16))


def test_the_frozen_kernel_refuses_to_be_differentiated(getkey):
    layer, x = adapted(getkey), jnp.ones((2, K))
    graph, state = nnx.split(layer)
    with pytest.raises(ValueError, match="`w` of a LoRA projection must not be"):
        jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(x)))(state)


def test_no_array_of_the_kernels_size_is_made_in_the_backward_pass(getkey):
    layer, x = adapted(getkey), jnp.ones((2, K))
    graph, trained, rest = nnx.split(layer, LoRAFactor, ...)

    def loss(trained):
        return jnp.sum(nnx.merge(graph, trained, rest)(x) ** 2)

    made = str(jax.make_jaxpr(jax.grad(loss))(trained))
    assert f"f32[{K},{D}] = dot_general" not in made
    assert f"f32[{D},{K}] = dot_general" not in made


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_merged_layer_is_an_ordinary_one_with_the_same_output(getkey, dtype):
    layer = adapted(getkey, dtype)
    merged = merge_lora(layer)
    assert type(merged) is nnx.Linear
    assert merged.kernel.dtype == dtype
    x = jax.random.normal(getkey(), (5, K), dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(
        np.float32(merged(x)), np.float32(layer(x)), rtol=tolerance, atol=4 * tolerance
    )


def test_a_merged_stack_has_the_same_output_and_the_structure_of_before(getkey):
    plain = Stacked(nnx.Rngs(0))
    model = lora(plain, {"head": 2, "layers": R}, alpha=ALPHA)
    assert [model.head.lora_b.shape, model.layers.lora_b.shape] == [(D, 2), (3, K, R)]
    model.layers.lora_b[...] = jax.random.normal(getkey(), (3, K, R))
    merged = merge_lora(model)
    x = jax.random.normal(getkey(), (5, K))
    np.testing.assert_allclose(merged(x), model(x), rtol=1e-5, atol=1e-5)
    before, after = (nnx.to_flat_state(nnx.state(m)) for m in (plain, merged))
    shapes = [[(path, v.shape) for path, v in flat] for flat in (before, after)]
    assert shapes[0] == shapes[1]


def test_a_is_drawn_by_seed_and_name_with_variance_one_over_k():
    model = lora(Stacked(nnx.Rngs(0)), R, seed=1)
    again = lora(Stacked(nnx.Rngs(0)), R, seed=1)
    other = lora(Stacked(nnx.Rngs(0)), R, seed=2)
    a = model.layers.lora_a[...]
    np.testing.assert_array_equal(a, again.layers.lora_a[...])
    assert len({float(x) for x in a[:, 0, 0]}) == 3
    assert not np.any(np.asarray(a) == np.asarray(other.layers.lora_a[...]))
    wide = lora(nnx.Linear(4000, 64, rngs=nnx.Rngs(0)), 64).lora_a[...]
    assert float(jnp.var(wide)) * 4000 == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"`rank` must be in \[1, min\(k, d\)\]"),
        ({"rank": 2, "match": "nothing"}, "`match` must hit at least one"),
        ({"rank": 2, "alpha": 0.0}, "`alpha` must be positive and finite, got 0.0"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lora(Stacked(nnx.Rngs(0)), **options)

"""Without NNX: linen and plain JAX, by the functions that the layers are made of."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import logra_jax as logra

TOKENS, IN, HIDDEN, OUT, R = 16, 7, 12, 5, 3
BASIS = logra.Basis(seed=4)

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Dense(nn.Module):
    """``nn.Dense`` whose kernel is sketched."""

    features: int
    matmul: Callable[..., Any] = logra.sketched_matmul

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        w = self.param("kernel", nn.initializers.lecun_normal(), shape)
        b = self.param("bias", nn.initializers.normal(), (self.features,))
        words = np.array(BASIS.address(".".join(self.path)), np.uint32)
        address = self.param("address", lambda _: jnp.asarray(words))
        probe = self.variable("probes", "probe", jnp.zeros, (self.features, R))
        y = self.matmul(x, w, probe.value, BASIS.key(address))
        return y + b[None]


class Linen(nn.Module):
    dense: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(self.dense(HIDDEN, name="up")(x))
        return self.dense(OUT, name="down")(x)


def linen():
    """The model, its dense twin, weights and probes."""

    def run(matmul=logra.sketched_matmul):
        model = Linen(functools.partial(Dense, matmul=matmul))
        return lambda weights, probes, x: model.apply(
            {"params": weights, "probes": probes}, x
        )

    def dense(weights, x):
        return Linen(nn.Dense).apply({"params": weights}, x)

    variables = Linen(Dense).init(jax.random.key(0), jnp.ones((1, IN)))
    return run, dense, variables["params"], variables["probes"]


def plain():
    """The same in plain JAX."""

    def run(matmul=logra.sketched_matmul):
        def apply(weights, probes, x):
            def layer(name, x):
                at = weights[name]
                key = BASIS.key(at["address"])
                y = matmul(x, at["kernel"], probes[name]["probe"], key)
                return y + at["bias"][None]

            return layer("down", jnp.tanh(layer("up", x)))

        return apply

    def dense(weights, x):
        up, down = weights["up"], weights["down"]
        x = jnp.tanh(x @ up["kernel"] + up["bias"][None])
        return x @ down["kernel"] + down["bias"][None]

    def layer(name, k, d):
        return {
            "kernel": jax.random.normal(jax.random.key(k), (k, d)) / k**0.5,
            "bias": jnp.ones(d),
            "address": jnp.array(BASIS.address(name), jnp.uint32),
        }

    weights = {"up": layer("up", IN, HIDDEN), "down": layer("down", HIDDEN, OUT)}
    probes = {
        name: {"probe": jnp.zeros((at["bias"].size, R))} for name, at in weights.items()
    }
    return run, dense, weights, probes


MODELS = {"linen": linen, "plain": plain}


def loss_of(y, labels):
    return optax.softmax_cross_entropy_with_integer_labels(y, labels).mean()


def assert_close(actual, expected, rtol=1e-5):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= rtol * np.linalg.norm(expected)


@pytest.fixture
def data(getkey):
    x = jax.random.normal(getkey(), (TOKENS, IN))
    labels = jnp.argmax(x @ jax.random.normal(getkey(), (IN, OUT)), -1)
    return x, labels


@pytest.mark.parametrize("name", MODELS)
def test_sketches_and_merged_weights_are_those_of_the_dense_model(name, data):
    run, dense, weights, probes = MODELS[name]()
    x, labels = data
    u = jax.tree.map(lambda p: p + 0.1, probes)

    @jit
    def ours(weights):
        sketches = jax.grad(lambda p: loss_of(run()(weights, p, x), labels))(probes)
        twin = run(logra.perturbed_matmul)
        _, rate = jax.jvp(lambda p: twin(weights, p, x), (probes,), (u,))
        merged = logra.merge(weights, u, BASIS)
        return sketches, rate, twin(weights, u, x), merged

    sketches, rate, moved, merged = ours(weights)
    assert jax.tree.structure(merged) == jax.tree.structure(weights)
    kernels = {name: at["kernel"] for name, at in weights.items()}

    def with_kernels(kernels, x):
        both = {name: weights[name] | {"kernel": w} for name, w in kernels.items()}
        held = {n: {k: at[k] for k in ("kernel", "bias")} for n, at in both.items()}
        return dense(held, x)

    G = jax.grad(lambda w: loss_of(with_kernels(w, x), labels))(kernels)
    change = {}
    for name, at in weights.items():
        A = BASIS.matrix(at["address"], R, at["kernel"].shape[0])
        assert_close(sketches[name]["probe"], G[name].T @ A.T)
        change[name] = (u[name]["probe"] @ A).T
        assert_close(merged[name]["kernel"], kernels[name] + change[name], 2e-5)
        np.testing.assert_array_equal(merged[name]["bias"], at["bias"])
        assert merged[name]["address"][1] == at["address"][1] + 1
    _, expected = jax.jvp(lambda w: with_kernels(w, x), (kernels,), (change,))
    assert_close(rate, expected)
    changed = jax.tree.map(jnp.add, kernels, change)
    assert_close(moved, with_kernels(changed, x))


@pytest.mark.parametrize("name", MODELS)
def test_it_learns_with_the_optax_chain(name, data):
    run, _, weights, probes = MODELS[name]()
    x, labels = data
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        logra.scale_by_row_adam(),
        optax.scale_by_learning_rate(0.05),
        logra.scale_by_predicted_kl(budget=0.1),
    )

    def step(carry, _):
        weights, state = carry
        loss, sketches = jax.value_and_grad(
            lambda p: loss_of(run()(weights, p, x), labels)
        )(probes)
        twin = run(logra.perturbed_matmul)

        def q(updates):
            return logra.predict_kl(
                lambda p: twin(weights, p, x),
                lambda z: z,
                probes,
                updates,
                jnp.ones(TOKENS),
            )[0]

        updates, state = tx.update(sketches, state, predicted_kl=q)
        return (logra.merge(weights, updates, BASIS), state), loss

    _, losses = jit(lambda c: lax.scan(step, c, length=100))((weights, tx.init(probes)))
    assert losses[-1] < 0.2 * losses[0]


def test_a_dict_is_merged_to_the_bits_of_a_state():
    _, _, weights, probes = plain()
    weights = jax.tree.map(
        lambda w: w.astype(jnp.bfloat16) if w.ndim == 2 else w, weights
    )
    updates = jax.tree.map(lambda p: p + 1e-3, probes)
    state = nnx.State(jax.tree.map(nnx.Variable, weights))
    of_state = nnx.State(jax.tree.map(logra.Probe, updates))
    merged = logra.merge(weights, updates, BASIS)
    expected = logra.merge(state, of_state, BASIS)
    for name in weights:
        kernel = merged[name]["kernel"]
        assert kernel.dtype == jnp.bfloat16
        np.testing.assert_array_equal(kernel, expected[name]["kernel"][...])


def test_a_dict_of_updates_without_probes_is_refused():
    _, _, weights, probes = plain()
    with pytest.raises(ValueError, match=r"one Probe, .* got 'up\.u', which"):
        logra.merge(weights, {"up": {"u": probes["up"]["probe"]}}, BASIS)

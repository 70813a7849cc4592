"""What optax does to sketches: which states outlive their basis, and what learns."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import logra_jax as logra

SKETCHES = {"a": jnp.ones((2, 3, 2)), "b": jnp.ones((2, 2))}

# Compile time is what these tests cost, so XLA is told not to try hard.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def chain():
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        logra.scale_by_row_adam(),
        optax.scale_by_learning_rate(0.1),
        logra.scale_by_predicted_kl(budget=1e-2),
    )


WITH_MOMENTS = {
    "adam": lambda: optax.adam(0.05),
    "lion": lambda: optax.lion(0.05),
    "momentum": lambda: optax.sgd(0.3, momentum=0.9),
    "rms": lambda: optax.scale_by_rms(),
    "in_chain": lambda: optax.chain(optax.clip(1.0), optax.trace(0.9)),
    "in_mask": lambda: optax.masked(optax.adam(0.1), {"a": False, "b": True}),
    "in_group": lambda: optax.multi_transform(
        {"x": optax.adam(0.1), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "multi_steps": lambda: optax.MultiSteps(logra.scale_by_row_adam(), 2),
}
WITHOUT_MOMENTS = {
    "sgd": lambda: optax.sgd(0.5),
    "chain": chain,
    "noisy": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.scale(-1.0)),
    "adam_of_a_vector": lambda: optax.multi_transform(
        {"x": optax.sgd(0.1), "y": optax.adam(0.1)},
        {"a": "x", "b": "x", "c": "x", "vector": "y"},
    ),
    "finite": lambda: optax.apply_if_finite(chain(), 2),
}


@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_moments_of_entries_are_refused_when_the_basis_is_drawn_anew(name):
    tx = WITH_MOMENTS[name]()
    state = jax.eval_shape(tx.init, SKETCHES)
    logra.check_moments(state, SKETCHES, logra.Basis(refresh=False))
    message = (
        r"^`state` must hold no moments .*of shape \((2, 3|2), 2\); .*`refresh=False`"
    )
    with pytest.raises(ValueError, match=message):
        logra.check_moments(state, SKETCHES, logra.Basis())
    on_gradients = optax.GradientTransformation(tx.init, tx.update)
    with pytest.raises(ValueError, match="must hold no moments"):
        logra.low_rank(on_gradients, rank=1).init(SKETCHES)


@pytest.mark.parametrize("name", WITHOUT_MOMENTS)
def test_states_of_rows_and_scalars_suit_any_basis(name):
    # a sketch that is shaped like the row squares of another
    sketches = SKETCHES | {"c": jnp.ones((2, 3)), "vector": jnp.ones(3)}
    state = jax.eval_shape(WITHOUT_MOMENTS[name]().init, sketches)
    logra.check_moments(state, sketches, logra.Basis())


def test_a_refused_moment_is_named():
    message = r"got '0\.mu\.a' of shape \(2, 3, 2\)"
    with pytest.raises(ValueError, match=message):
        logra.check_moments(optax.adam(0.1).init(SKETCHES), SKETCHES, logra.Basis())


def classifier(rank, basis):
    """A small sketched model's graph, probes, weights and ``loss(probes, weights)``."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(12, 8, rngs=rngs), jnp.tanh, nnx.Linear(8, 6, rngs=rngs)
    )
    x = jax.random.normal(jax.random.key(1), (32, 12))
    labels = jnp.argmax(x @ jax.random.normal(jax.random.key(2), (12, 6)), -1)
    model = logra.sketch(model, rank, basis=basis)
    graph, probes, weights = nnx.split(model, logra.Probe, ...)

    def loss(probes, weights, rows=slice(None)):
        logits = nnx.merge(graph, probes, weights)(x[rows])
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits, labels[rows]).mean()

    return probes, weights, loss


@pytest.mark.parametrize(
    ("name", "refresh"),
    [("adam", False), ("lion", False), ("momentum", False), ("sgd", True)],
)
def test_optimizers_of_optax_train_a_sketched_model(name, refresh):
    basis = logra.Basis(seed=1, refresh=refresh)
    probes, weights, loss = classifier(4, basis)
    tx = (WITH_MOMENTS | WITHOUT_MOMENTS)[name]()
    state = tx.init(probes)
    logra.check_moments(state, probes, basis)

    @jit
    def step(weights, state):
        value, sketches = jax.value_and_grad(loss)(probes, weights)
        updates, state = tx.update(sketches, state, probes)
        return logra.merge(weights, updates, basis), state, value

    values = []
    for _ in range(20):
        weights, state, value = step(weights, state)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    assert step._cache_size() == 1


def test_multi_steps_merged_only_where_it_emits_is_one_large_batch():
    basis = logra.Basis(seed=1)
    probes, before, loss = classifier(4, basis)
    tx = optax.chain(logra.scale_by_row_adam(), optax.scale_by_learning_rate(0.1))

    @jit
    def whole(weights, state):
        updates, state = tx.update(jax.grad(loss)(probes, weights), state)
        return logra.merge(weights, updates, basis), state

    weights, state = before, tx.init(probes)
    for _ in range(2):
        weights, state = whole(weights, state)

    multi = optax.MultiSteps(tx, 2)
    state = multi.init(probes)
    logra.check_moments(state.inner_opt_state, probes, basis)

    @jit
    def part(weights, state, rows):
        sketches = jax.grad(loss)(probes, weights, rows)
        updates, state = multi.update(sketches, state)
        merged = functools.partial(logra.merge, weights, updates, basis)
        weights = jax.lax.cond(multi.has_updated(state), merged, lambda: weights)
        return weights, state

    accumulated = before
    for _ in range(2):
        for rows in jnp.arange(32).reshape(2, 16):
            accumulated, state = part(accumulated, state, rows)
    assert part._cache_size() == 1
    for (path, start), (_, a), (_, b) in zip(
        *map(nnx.to_flat_state, (before, accumulated, weights)), strict=True
    ):
        if path[-1] == "kernel":
            expected = b[...] - start[...]
            error = jnp.linalg.norm(a[...] - start[...] - expected)
            assert error < 1e-3 * jnp.linalg.norm(expected)

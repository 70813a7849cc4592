"""Both transforms behave inside every optax wrapper that the README promises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.predicted_kl import PredictedKLState
from logra_jax.algorithm.row_adam import RowAdamState

SKETCHES = {
    "a": jnp.arange(1.0, 13.0).reshape(2, 3, 2) * 1e-3,
    "b": jnp.array([[3.0, -4.0], [0.0, 0.0]]),
}
Q = 4e-2  # predicted KL of any update, in these tests


def readme_chain():
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        logra.scale_by_row_adam(b2=0.95, eps=1e-12),
        optax.scale_by_learning_rate(1e-2),
        logra.scale_by_predicted_kl(budget=1e-2, alpha_max=1.0),
    )


TRANSFORMS = {
    "row_adam": lambda: optax.with_extra_args_support(logra.scale_by_row_adam()),
    "predicted_kl": lambda: logra.scale_by_predicted_kl(1e-2),
    "chain": readme_chain,
}


@pytest.fixture(params=TRANSFORMS)
def make(request):
    return TRANSFORMS[request.param]


def assert_trees_close(a, b, rtol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol), a, b)


def run(tx, steps=3, predicted_kl=Q, sketches=SKETCHES):
    """Jitted updates; fails if the state changes its structure, shapes or dtypes."""
    state = tx.init(sketches)
    spec = jax.eval_shape(lambda s: s, state)
    update = jax.jit(lambda s, t: tx.update(t, s, predicted_kl=predicted_kl))
    outputs = []
    for step in range(steps):
        updates, state = update(
            state, jax.tree.map(lambda s, n=step: s * (1.0 + n), sketches)
        )
        assert jax.eval_shape(lambda s: s, state) == spec
        outputs.append(updates)
    assert update._cache_size() == 1
    return outputs, state


def test_state_is_stable_under_jit_and_updates_keep_their_kind(make):
    outputs, _ = run(make())
    spec = jax.eval_shape(lambda s: s, SKETCHES)
    assert jax.eval_shape(lambda s: s, outputs[-1]) == spec
    assert all(jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(outputs))


def test_state_survives_a_scan(make):
    tx = make()

    def body(state, _):
        updates, state = tx.update(SKETCHES, state, predicted_kl=Q)
        return state, optax.tree.norm(updates)

    _, norms = jax.lax.scan(body, tx.init(SKETCHES), length=3)
    assert norms.shape == (3,)


def test_chain_equals_its_parts_by_hand():
    (first, *_), state = run(readme_chain())
    norm = np.sqrt(sum(float(jnp.sum(s**2)) for s in SKETCHES.values()))
    for name, s in SKETCHES.items():
        s = np.asarray(s) / norm  # the norm is above 1
        rms = np.sqrt(np.mean(s**2, -1, keepdims=True)) + 1e-12
        # q is four times the budget: alpha is a half
        np.testing.assert_allclose(first[name], -0.5e-2 * s / rms, rtol=1e-4)
    assert state[-1].count == 3
    np.testing.assert_allclose(state[-1].alpha, 0.5, rtol=1e-6)


def test_multi_steps_accumulates_sketches_and_counts_real_updates(make):
    outputs, state = run(optax.MultiSteps(make(), every_k_schedule=2), steps=4)
    zeros = jax.tree.map(jnp.zeros_like, SKETCHES)
    assert_trees_close(outputs[0], zeros)
    assert_trees_close(outputs[2], zeros)
    tx = make()
    inner = tx.init(SKETCHES)
    for i, factor in ((1, 1.5), (3, 3.5)):  # means of the steps' factors 1, 2 | 3, 4
        mean = jax.tree.map(lambda s, f=factor: s * f, SKETCHES)
        expected, inner = tx.update(mean, inner, predicted_kl=Q)
        assert_trees_close(outputs[i], expected)
    assert state.gradient_step == 2


def test_multi_steps_takes_a_predicted_kl_function():
    def q_fn(updates):
        return jnp.sum(updates["b"] ** 2)

    outputs, state = run(
        optax.MultiSteps(logra.scale_by_predicted_kl(1.0, 10.0), 2), 2, q_fn
    )
    assert state.inner_opt_state.q == 25 * 1.5**2
    np.testing.assert_allclose(jnp.sum(outputs[1]["b"] ** 2), 1.0, rtol=1e-5)


def test_inject_hyperparams_gives_the_same_numbers_under_jit():
    pairs = [
        (logra.scale_by_row_adam, {"b2": 0.9, "eps": 1e-6}),
        (logra.scale_by_predicted_kl, {"budget": 1e-2, "alpha_max": 0.3}),
    ]
    for factory, arguments in pairs:
        injected = optax.inject_hyperparams(factory)(**arguments)
        plain = optax.with_extra_args_support(factory(**arguments))
        outputs, state = run(injected)
        assert_trees_close(outputs, run(plain)[0], rtol=1e-4)
        assert set(state.hyperparams) == set(arguments)


def test_injected_hyperparams_can_be_set_and_scheduled():
    tx = optax.inject_hyperparams(logra.scale_by_predicted_kl)(
        budget=optax.linear_schedule(4e-2, 0.0, 2), alpha_max=1.0
    )
    outputs, state = run(tx)
    norms = [float(optax.tree.norm(u)) for u in outputs]
    root = np.sqrt(0.5)  # budgets 4e-2, 2e-2, 0 against a q of 4e-2
    np.testing.assert_allclose(
        np.array(norms) / float(optax.tree.norm(SKETCHES)), [1, 2 * root, 0], rtol=1e-5
    )
    state.hyperparams["alpha_max"] = jnp.float32(0.25)
    updates, _ = tx.update(SKETCHES, state, predicted_kl=0.0)
    assert_trees_close(updates, jax.tree.map(lambda s: 0.25 * s, SKETCHES))


def test_masked_leaves_the_rest_alone(make):
    outputs, _ = run(optax.masked(make(), {"a": True, "b": False}), steps=1)
    np.testing.assert_array_equal(outputs[0]["b"], SKETCHES["b"])
    alone = {"a": SKETCHES["a"]}
    expected, _ = run(make(), steps=1, sketches=alone)
    np.testing.assert_allclose(outputs[0]["a"], expected[0]["a"], rtol=1e-5)


def test_multi_transform_gives_each_group_its_own(make):
    tx = optax.multi_transform(
        {"ours": make(), "frozen": optax.set_to_zero()}, {"a": "ours", "b": "frozen"}
    )
    outputs, _ = run(tx, steps=1)
    assert jnp.all(outputs[0]["b"] == 0)
    expected, _ = run(make(), steps=1, sketches={"a": SKETCHES["a"]})
    np.testing.assert_allclose(outputs[0]["a"], expected[0]["a"], rtol=1e-5)


def test_schedules_count_updates_in_every_link():
    tx = optax.chain(
        logra.scale_by_row_adam(),
        optax.scale_by_learning_rate(optax.linear_schedule(1.0, 0.0, 2)),
        logra.scale_by_predicted_kl(optax.linear_schedule(1e-2, 0.0, 2)),
    )
    outputs, state = run(tx)
    assert jnp.all(outputs[2]["b"] == 0)
    np.testing.assert_allclose(state[-1].budget, 0.0)
    assert [int(s.count) for s in (state[0], state[1], state[2])] == [3, 3, 3]


def test_states_are_found_by_name_in_a_chain():
    _, state = run(readme_chain(), steps=1)
    assert optax.tree.get(state, "alpha") is not None
    kinds = {type(s) for s in state}
    assert {RowAdamState, PredictedKLState} <= kinds


def test_a_drop_of_one_proposal_does_not_poison_the_next():
    tx = readme_chain()
    state = tx.init(SKETCHES)
    dropped, state = tx.update(SKETCHES, state, predicted_kl=jnp.nan)
    assert all(jnp.all(u == 0) for u in jax.tree.leaves(dropped))
    updates, state = tx.update(SKETCHES, state, predicted_kl=Q)
    assert all(jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates))
    np.testing.assert_allclose(state[-1].alpha, 0.5, rtol=1e-6)


def test_the_readme_s_five_lines_lower_a_loss_within_the_budget():
    model = nnx.Linear(12, 6, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (32, 12))
    labels = jnp.argmax(x @ jax.random.normal(jax.random.key(2), (12, 6)), -1)
    basis = logra.Basis(seed=1)
    model = logra.sketch(model, rank=4, basis=basis)
    graph, probes, weights = nnx.split(model, logra.Probe, ...)
    twin, _, _ = nnx.split(logra.perturbed(model), logra.Probe, ...)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        logra.scale_by_row_adam(),
        optax.scale_by_learning_rate(0.1),
        logra.scale_by_predicted_kl(budget=1e-2),
    )

    def loss(probes, weights):
        logits = nnx.merge(graph, probes, weights)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(weights, state):
        value, sketches = jax.value_and_grad(loss)(probes, weights)

        def q_fn(updates):
            return logra.predict_kl(
                lambda p: nnx.merge(twin, p, weights)(x),
                lambda h: h,
                probes,
                updates,
                jnp.ones(32),
            )[0]

        updates, state = tx.update(sketches, state, predicted_kl=q_fn)
        return logra.merge(weights, updates, basis), state, value

    state = tx.init(probes)
    values = []
    for _ in range(20):
        weights, state, value = step(weights, state)
        alpha, q = state[-1].alpha, state[-1].q
        assert float(alpha**2 * q) <= 1.001e-2
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    assert step._cache_size() == 1

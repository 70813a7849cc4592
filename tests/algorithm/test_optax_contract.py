"""Our transforms behave inside every wrapper of optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import logra_jax as logra
from logra_jax.algorithm.predicted_kl import PredictedKLState
from logra_jax.algorithm.row_adam import RowAdamState

# Sketches to most, dense gradients (stack, k, d) and (k, d) to low_rank.
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


ON_SKETCHES = {
    "row_adam": lambda: optax.with_extra_args_support(logra.scale_by_row_adam()),
    "predicted_kl": lambda: logra.scale_by_predicted_kl(1e-2),
    "chain": readme_chain,
}
ON_GRADIENTS = {
    "low_rank_chain": lambda rank=1: logra.low_rank(readme_chain(), rank),
    "low_rank_sgd": lambda rank=1: logra.low_rank(optax.sgd(0.1), rank),
    "low_rank_adam": lambda rank=1: logra.low_rank(
        optax.adam(0.1), rank, refresh=False, kind="gaussian"
    ),
}
TRANSFORMS = ON_SKETCHES | ON_GRADIENTS

# Compile time is what these tests cost, so XLA is told not to try hard.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(params=TRANSFORMS)
def make(request):
    return TRANSFORMS[request.param]


def assert_trees_close(a, b, rtol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol), a, b)


def run(tx, steps=3, predicted_kl=Q, sketches=SKETCHES):
    """Jitted updates; fails if the state changes its structure, shapes or dtypes."""
    state = tx.init(sketches)
    spec = jax.eval_shape(lambda s: s, state)
    update = jit(lambda s, t: tx.update(t, s, predicted_kl=predicted_kl))
    outputs = []
    for step in range(steps):
        updates, state = update(
            state, jax.tree.map(lambda s, n=step: s * (1.0 + n), sketches)
        )
        assert jax.eval_shape(lambda s: s, state) == spec
        outputs.append(updates)
    assert update._cache_size() == 1
    return outputs, state


@functools.cache
def reference(make):
    """``run(make())``, kept: tests of wrappers compare with it."""
    return run(make())


def test_state_is_stable_under_jit_and_updates_keep_their_kind(make):
    outputs, _ = reference(make)
    spec = jax.eval_shape(lambda s: s, SKETCHES)
    assert jax.eval_shape(lambda s: s, outputs[-1]) == spec
    assert all(jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(outputs))


def test_a_scan_is_the_same_steps_compiled_once(make):
    tx = make()

    def body(state, factor):
        scaled = jax.tree.map(lambda s: s * factor, SKETCHES)
        updates, state = tx.update(scaled, state, predicted_kl=Q)
        return state, updates

    scan = jit(lambda state, factors: jax.lax.scan(body, state, factors))
    state, updates = scan(tx.init(SKETCHES), jnp.array([1.0, 2.0, 3.0]))
    outputs, expected = reference(make)
    assert_trees_close(jax.tree.map(lambda u: u[-1], updates), outputs[-1])
    assert_trees_close(state, expected)
    scan(state, jnp.array([4.0, 5.0, 6.0]))
    assert scan._cache_size() == 1


def test_bfloat16_stays_bfloat16_and_the_state_what_it_was(make):
    low = jax.tree.map(lambda s: s.astype(jnp.bfloat16), SKETCHES)
    outputs, state = run(make(), sketches=low)
    assert jax.eval_shape(lambda s: s, outputs[-1]) == jax.eval_shape(lambda s: s, low)
    expected, wide = reference(make)
    spec = jax.eval_shape(lambda s: s, wide)
    assert jax.eval_shape(lambda s: s, state) == spec
    assert_trees_close(
        jax.tree.map(lambda u: u.astype(jnp.float32), outputs[0]), expected[0], 0.02
    )


def test_apply_if_finite_drops_a_bad_step_and_keeps_the_state(make):
    tx = optax.apply_if_finite(make(), max_consecutive_errors=2)
    update = jit(lambda t, s: tx.update(t, s, predicted_kl=Q))
    bad = {**SKETCHES, "b": SKETCHES["b"].at[0, 0].set(jnp.nan)}
    dropped, state = update(bad, tx.init(SKETCHES))
    assert all(jnp.all(u == 0) for u in jax.tree.leaves(dropped))
    outputs, expected = reference(make)
    for n in range(3):
        after, state = update(
            jax.tree.map(lambda s, n=n: s * (1.0 + n), SKETCHES), state
        )
        assert_trees_close(after, outputs[n])
    assert_trees_close(state.inner_state, expected)


@settings(max_examples=10)
@given(
    name=st.sampled_from(sorted(TRANSFORMS)),
    stack=st.lists(st.integers(1, 3), max_size=2),
    k=st.integers(2, 9),
    d=st.integers(2, 9),
    data=st.data(),
)
def test_no_state_is_larger_than_the_sketches(name, stack, k, d, data):
    rank = data.draw(st.integers(1, min(k, d) - 1))
    dense, row = (*stack, k, d), (*stack, d)
    if name in ON_SKETCHES:
        tx, shape = ON_SKETCHES[name](), (*row, rank)
    else:
        tx, shape = ON_GRADIENTS[name](rank), dense
    state = jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct(shape, jnp.float32)})
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert dense not in shapes
    assert set(shapes) <= {(), row, (*row, rank)}


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
    update = jit(lambda t, s: tx.update(t, s, predicted_kl=Q))
    for i, factor in ((1, 1.5), (3, 3.5)):  # means of the steps' factors 1, 2 | 3, 4
        mean = jax.tree.map(lambda s, f=factor: s * f, SKETCHES)
        expected, inner = update(mean, inner)
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


def test_hyperparams_are_injected_around_and_inside_low_rank():
    def factory(learning_rate, b2):
        return logra.low_rank(
            optax.chain(
                logra.scale_by_row_adam(b2), optax.scale_by_learning_rate(learning_rate)
            ),
            rank=1,
        )

    expected, _ = run(factory(0.1, 0.9))
    around = optax.inject_hyperparams(factory)(learning_rate=0.1, b2=0.9)
    assert_trees_close(run(around)[0], expected, rtol=1e-4)

    inside = logra.low_rank(optax.inject_hyperparams(optax.sgd)(0.1), rank=1)
    update = jit(inside.update)
    once, _ = update(SKETCHES, inside.init(SKETCHES))
    state = inside.init(SKETCHES)
    state.inner.hyperparams["learning_rate"] = jnp.float32(0.2)
    twice, _ = update(SKETCHES, state)
    assert_trees_close(twice, jax.tree.map(lambda u: 2 * u, once))


def test_injected_hyperparams_can_be_set_and_scheduled():
    tx = optax.inject_hyperparams(logra.scale_by_predicted_kl)(
        budget=optax.linear_schedule(4e-2, 1e-2, 2), alpha_max=1.0
    )
    outputs, state = run(tx)
    norms = [float(optax.tree.norm(u)) for u in outputs]
    alphas = np.sqrt([4e-2 / Q, 2.5e-2 / Q, 1e-2 / Q])
    np.testing.assert_allclose(
        np.array(norms) / float(optax.tree.norm(SKETCHES)),
        alphas * [1, 2, 3],
        rtol=1e-5,
    )
    state.hyperparams["alpha_max"] = jnp.float32(0.25)
    updates, _ = tx.update(SKETCHES, state, predicted_kl=Q / 100)
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


def test_arguments_of_other_links_pass_by_ours(make):
    tx = optax.chain(make(), optax.contrib.reduce_on_plateau())
    state = tx.init(SKETCHES)
    update = jit(lambda t, s: tx.update(t, s, predicted_kl=Q, value=1.0))
    updates, state = update(SKETCHES, state)
    assert_trees_close(updates, reference(make)[0][0])
    assert optax.tree.get(state, "best_value") == 1.0


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

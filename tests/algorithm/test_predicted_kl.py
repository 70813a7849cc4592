import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from logra_jax.algorithm.predicted_kl import (
    map_chunks,
    predict_kl,
    realised_kl,
    scale_by_predicted_kl,
)
from logra_jax.algorithm.sketch import perturbed_matmul

TOKENS, K, D, R, VOCAB = 13, 12, 10, 4, 17


@pytest.fixture
def policy(getkey):
    """hidden(probe), head, a proposal of unit scale, and a mask with two holes."""
    x = jax.random.normal(getkey(), (TOKENS, K))
    w = jax.random.normal(getkey(), (K, D)) / K**0.5
    w_out = jax.random.normal(getkey(), (D, VOCAB)) / D**0.5
    key = getkey()
    update = jax.random.normal(getkey(), (D, R)) * 0.1

    def hidden(probe):
        return jnp.tanh(perturbed_matmul(x, w, probe, key))

    mask = jnp.ones(TOKENS, bool).at[jnp.array([2, 7])].set(False)
    return hidden, lambda h: h @ w_out, update, mask


def log_softmax(logits) -> np.ndarray:
    z = np.asarray(logits, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def true_kl(head, before, after, mask, temperature=1.0) -> float:
    p, q = (log_softmax(np.asarray(head(h)) / temperature) for h in (before, after))
    return np.sum(np.exp(p) * (p - q), -1)[np.asarray(mask)].mean()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_predicted_over_true_kl_tends_to_one_as_the_step_shrinks(policy, temperature):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    q, before = predict_kl(hidden, head, zero, update, mask, temperature=temperature)
    np.testing.assert_allclose(before, hidden(zero), rtol=1e-6)
    errors = []
    for alpha in (0.3, 0.1, 0.03, 0.01):
        args = (head, before, hidden(alpha * update), mask, temperature)
        errors.append(abs(alpha**2 * q / true_kl(*args) - 1))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.01
    assert errors[3] < 0.01


def test_q_is_half_the_variance_of_the_logits_rate_of_change(policy):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    z, rate = jax.jvp(lambda p: head(hidden(p)) / 0.7, (zero,), (update,))
    p = np.exp(log_softmax(z))
    variance = (p * np.asarray(rate) ** 2).sum(-1) - (p * rate).sum(-1) ** 2
    q, _ = predict_kl(hidden, head, zero, update, mask, temperature=0.7)
    np.testing.assert_allclose(q, variance[np.asarray(mask)].mean() / 2, rtol=1e-5)


def test_q_is_quadratic_in_the_update_and_zero_for_none(policy):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    q = [predict_kl(hidden, head, zero, s * update, mask)[0] for s in (1.0, 3.0, 0.0)]
    np.testing.assert_allclose(q[1], 9 * q[0], rtol=1e-5)
    assert q[2] == 0


@pytest.mark.parametrize("chunk", [1, 4, 5, 13, 256])
def test_chunks_do_not_change_predicted_or_realised_kl(policy, chunk):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    whole, before = predict_kl(hidden, head, zero, update, mask, chunk=TOKENS)
    parts, _ = predict_kl(hidden, head, zero, update, mask, chunk=chunk)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    after = hidden(update)
    np.testing.assert_allclose(
        realised_kl(before, after, head, mask, chunk=chunk),
        true_kl(head, before, after, mask),
        rtol=1e-5,
    )


def test_the_head_never_sees_more_than_a_chunk_of_tokens(policy):
    hidden, head, update, mask = policy
    seen = set()

    def watched(h):
        seen.add(h.shape)
        return head(h)

    predict_kl(hidden, watched, jnp.zeros_like(update), update, mask, chunk=5)
    realised_kl(hidden(update), hidden(update), watched, mask, chunk=5)
    assert seen == {(5, D)}


def test_padding_may_hold_nan_and_weights_may_be_fractions(policy):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    clean, before = predict_kl(hidden, head, zero, update, mask)
    hole = jnp.where(mask, 1.0, jnp.nan)[:, None]
    dirty, _ = predict_kl(lambda p: hidden(p) * hole, head, zero, update, mask)
    np.testing.assert_allclose(dirty, clean, rtol=1e-6)
    kl = realised_kl(before * hole, hidden(update) * hole, head, mask)
    np.testing.assert_allclose(
        kl, true_kl(head, before, hidden(update), mask), rtol=1e-5
    )
    weighted, _ = predict_kl(hidden, head, zero, update, 0.5 * mask)
    # a mask is a weight; below one token in all, the sum is not scaled up
    np.testing.assert_allclose(weighted, clean, rtol=1e-6)


def test_kl_of_no_token_is_zero_and_of_a_policy_to_itself_too(policy):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    q, h = predict_kl(hidden, head, zero, update, jnp.zeros_like(mask))
    assert q == 0
    assert realised_kl(h, h, head, mask) == 0


def test_a_chunk_below_one_token_is_refused(policy):
    hidden, head, update, mask = policy
    with pytest.raises(ValueError, match="`chunk` must be at least 1 token, got 0"):
        predict_kl(hidden, head, jnp.zeros_like(update), update, mask, chunk=0)


def test_map_chunks_takes_several_arrays_of_any_dtype():
    ids = jnp.arange(7)[:, None]
    table = jnp.arange(14.0).reshape(7, 2)
    picked = map_chunks(lambda a: a[1].sum(-1) + a[0][:, 0], (ids, table), 3)
    np.testing.assert_array_equal(picked, np.arange(7) + np.asarray(table).sum(-1))


# --- the rule


def scaled(tx, q, updates=None, state=None):
    updates = {"w": jnp.full((2, 2), 3.0)} if updates is None else updates
    state = tx.init(updates) if state is None else state
    return tx.update(updates, state, predicted_kl=q)


def test_four_times_the_budget_halves_the_update_exactly():
    updates, state = scaled(scale_by_predicted_kl(2.0**-10), 2.0**-8)
    assert state.alpha == 0.5
    assert jnp.all(updates["w"] == 1.5)
    assert (state.q, state.budget, state.count) == (2.0**-8, 2.0**-10, 1)


@pytest.mark.parametrize(
    ("q", "alpha"),
    [(1e-9, 3.0), (1e-3 / 9, 3.0), (1e-3 / 4, 2.0), (1e-1, 0.1), (0.0, 3.0)],
)
def test_alpha_is_the_root_of_budget_over_q_up_to_alpha_max(q, alpha):
    _, state = scaled(scale_by_predicted_kl(1e-3, alpha_max=3.0), q)
    np.testing.assert_allclose(state.alpha, alpha, rtol=1e-6)


@pytest.mark.parametrize("budget", [1e-3, None])
@pytest.mark.parametrize("q", [jnp.nan, jnp.inf])
def test_a_prediction_that_is_not_finite_drops_the_update(q, budget):
    bad = {"w": jnp.array([[jnp.nan, jnp.inf, 1.0]])}
    updates, state = scaled(scale_by_predicted_kl(budget), q, bad)
    assert jnp.all(updates["w"] == 0)
    assert state.alpha == 0


def test_without_a_budget_the_update_is_scaled_by_alpha_max_and_q_recorded():
    updates, state = scaled(scale_by_predicted_kl(None, alpha_max=0.5), 1e6)
    assert jnp.all(updates["w"] == 1.5)
    assert (state.q, state.alpha) == (1e6, 0.5)


def test_a_budget_schedule_counts_updates_and_may_end_at_zero():
    tx = scale_by_predicted_kl(optax.linear_schedule(4.0, 0.0, 2))
    state, budgets, alphas = None, [], []
    for _ in range(4):
        updates, state = jax.jit(
            lambda s: scaled(tx, jnp.float32(4.0), state=s), static_argnums=()
        )(state if state is not None else tx.init({"w": jnp.zeros((2, 2))}))
        budgets.append(float(state.budget))
        alphas.append(float(state.alpha))
    np.testing.assert_allclose(budgets, [4, 2, 0, 0], atol=1e-6)
    np.testing.assert_allclose(alphas, [1, 0.5**0.5, 0, 0], rtol=1e-5, atol=1e-6)
    assert jnp.all(updates["w"] == 0)


def test_predicted_kl_may_be_a_function_of_the_updates():
    tx = scale_by_predicted_kl(1.0, alpha_max=10.0)
    updates, state = scaled(tx, lambda u: jnp.sum(u["w"] ** 2))
    assert state.q == 36
    np.testing.assert_allclose(jnp.sum(updates["w"] ** 2), 1.0, rtol=1e-6)


def test_updates_keep_their_dtype():
    updates = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    after, _ = scaled(scale_by_predicted_kl(1.0), jnp.float32(4.0), updates)
    assert after["w"].dtype == jnp.bfloat16


def test_an_update_without_a_prediction_is_refused():
    with pytest.raises(ValueError, match="`predicted_kl` must be given"):
        scaled(scale_by_predicted_kl(1.0), None)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"budget": 0.0}, "budget"),
        ({"budget": -1.0}, "budget"),
        ({"budget": float("nan")}, "budget"),
        ({"budget": 1.0, "alpha_max": 0.0}, "alpha_max"),
        ({"budget": 1.0, "alpha_max": float("nan")}, "alpha_max"),
        ({"budget": 1.0, "alpha_max": float("inf")}, "alpha_max"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}` must be positive"):
        scale_by_predicted_kl(**arguments)

"""Both estimators of q against float64 oracles; then the rule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax as logra
from logra_jax.algorithm.kl_prediction import predict_kl, predict_kl_by_difference
from logra_jax.algorithm.predicted_kl import scale_by_predicted_kl
from logra_jax.algorithm.sketch import perturbed_matmul

TOKENS, K, D, R, VOCAB = 13, 12, 10, 4, 17
ESTIMATORS = {"jvp": predict_kl, "difference": predict_kl_by_difference}


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


@pytest.fixture(params=ESTIMATORS)
def estimate(request):
    return ESTIMATORS[request.param]


def log_softmax(logits) -> np.ndarray:
    z = np.asarray(logits, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def true_kl(head, before, after, mask, temperature=1.0) -> float:
    p, q = (log_softmax(np.asarray(head(h)) / temperature) for h in (before, after))
    return np.sum(np.exp(p) * (p - q), -1)[np.asarray(mask)].mean()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_predicted_over_true_kl_tends_to_one_as_the_step_shrinks(
    policy, estimate, temperature
):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    q, before = estimate(hidden, head, zero, update, mask, temperature=temperature)
    np.testing.assert_allclose(before, hidden(zero), rtol=1e-6)
    errors = []
    for alpha in (0.3, 0.1, 0.03, 0.01):
        args = (head, before, hidden(alpha * update), mask, temperature)
        errors.append(abs(alpha**2 * q / true_kl(*args) - 1))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.02
    assert errors[3] < 0.01


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_q_is_half_the_variance_of_the_logits_rate_of_change(
    policy, estimate, temperature
):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    z, rate = jax.jvp(lambda p: head(hidden(p)) / temperature, (zero,), (update,))
    p = np.exp(log_softmax(z))
    variance = (p * np.asarray(rate) ** 2).sum(-1) - (p * rate).sum(-1) ** 2
    q, _ = estimate(hidden, head, zero, update, mask, temperature=temperature)
    np.testing.assert_allclose(q, variance[np.asarray(mask)].mean() / 2, rtol=1e-3)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 3.0, 1e3, 1e6])
def test_q_is_quadratic_in_the_update_at_any_scale(policy, estimate, scale):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    q = [estimate(hidden, head, zero, s * update, mask)[0] for s in (1.0, scale)]
    np.testing.assert_allclose(q[1], scale**2 * q[0], rtol=1e-3)


def test_q_of_no_update_is_zero_and_of_one_that_is_not_finite_no_number(
    policy, estimate
):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    assert estimate(hidden, head, zero, zero, mask)[0] == 0
    bad = update.at[0, 0].set(jnp.nan)
    assert jnp.isnan(estimate(hidden, head, zero, bad, mask)[0])


@pytest.mark.parametrize("chunk", [1, 4, 5, 13, 256])
def test_chunks_do_not_change_the_predicted_kl(policy, estimate, chunk):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    whole, _ = estimate(hidden, head, zero, update, mask, chunk=TOKENS)
    parts, _ = estimate(hidden, head, zero, update, mask, chunk=chunk)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)


@pytest.mark.parametrize("with_engine", [False, True])
def test_the_head_never_sees_more_than_a_chunk_of_tokens(policy, estimate, with_engine):
    hidden, head, update, mask = policy
    seen = set()

    def watched(h):
        seen.add(h.shape)
        return head(h)

    options = {}
    if with_engine and estimate is predict_kl_by_difference:
        options["engine"] = jnp.zeros(TOKENS, jnp.int32), jnp.full(TOKENS, -3.0)
    estimate(hidden, watched, jnp.zeros_like(update), update, mask, chunk=5, **options)
    assert seen == {(5, D)}


def test_padding_may_hold_nan_and_weights_may_be_fractions(policy, estimate):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    clean, _ = estimate(hidden, head, zero, update, mask)
    hole = jnp.where(mask, 1.0, jnp.nan)[:, None]
    dirty, _ = estimate(lambda p: hidden(p) * hole, head, zero, update, mask)
    np.testing.assert_allclose(dirty, clean, rtol=1e-6)
    for weight in (0.5, 0.01):
        weighted, _ = estimate(hidden, head, zero, update, weight * mask)
        np.testing.assert_allclose(weighted, clean, rtol=1e-5)


def test_q_of_no_token_is_no_number_and_drops_the_update(policy, estimate):
    hidden, head, update, mask = policy
    nothing = jnp.zeros_like(mask)
    q, _ = estimate(hidden, head, jnp.zeros_like(update), update, nothing)
    assert jnp.isnan(q)
    updates, state = scaled(scale_by_predicted_kl(1.0), q)
    assert state.alpha == 0
    assert jnp.all(updates["w"] == 0)


# --- the size of the probe


def test_the_error_of_a_central_difference_is_of_second_order(policy):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    exact, before = predict_kl(hidden, head, zero, update, mask)
    central, one_sided = [], []
    for s in (0.4, 0.2):
        q, _ = predict_kl_by_difference(
            hidden, head, zero, update, mask, step=s, target=None
        )
        central.append(abs(float(q / exact) - 1))
        kl = true_kl(head, before, hidden(s * update), mask)
        one_sided.append(abs(kl / s**2 / float(exact) - 1))
    assert 3.5 < central[0] / central[1] < 4.5
    assert one_sided[1] > 3 * central[1]


def rounds_of_search(policy, **options) -> float:
    """How often the policy was measured on both sides."""
    hidden, head, update, mask = policy
    calls = []

    def watched(p):
        jax.debug.callback(lambda: calls.append(None))
        return hidden(p)

    update = options.pop("update", update)
    predict_kl_by_difference(
        watched, head, jnp.zeros_like(update), update, mask, **options
    )
    jax.effects_barrier()
    return (len(calls) - 1) / 2


def test_a_good_start_measures_once_and_what_cannot_be_measured_is_not_sought(policy):
    hidden, head, update, mask = policy
    q, _ = predict_kl(hidden, head, jnp.zeros_like(update), update, mask)
    good = float(jnp.sqrt(1e-4 / q))
    assert rounds_of_search(policy, step=good) == 1
    assert rounds_of_search(policy, step=1e-3 * good) == 2
    assert 2 <= rounds_of_search(policy, step=1e6 * good) <= 4
    assert rounds_of_search(policy, step=1e6 * good, target=None) == 1
    assert rounds_of_search(policy, update=0 * update) == 1
    assert rounds_of_search(policy, update=jnp.nan * update) == 1
    nothing = jnp.zeros_like(mask)
    assert rounds_of_search((hidden, head, update, nothing), step=1e6 * good) == 1


def test_a_search_finds_its_way_back_from_a_policy_that_overflows(policy):
    tanh, head, update, mask = policy
    zero = jnp.zeros_like(update)

    def hidden(probe):  # beyond float32 at a probe of size 1e3, moderate at 1
        return jnp.exp(jnp.mean(jnp.square(probe))) * tanh(probe)

    assert not jnp.all(jnp.isfinite(hidden(1e3 * update)))
    expected, _ = predict_kl(hidden, head, zero, update, mask)
    q, _ = predict_kl_by_difference(hidden, head, zero, update, mask, step=1e3)
    np.testing.assert_allclose(q, expected, rtol=1e-3)


def test_an_update_that_moves_nothing_ends_the_search_with_zero(policy):
    _, head, update, mask = policy
    still = jnp.ones((TOKENS, D))
    q, _ = predict_kl_by_difference(
        lambda p: still, head, jnp.zeros_like(update), update, mask
    )
    assert q == 0


@pytest.mark.parametrize("name", ["step", "target"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_or_target_out_of_range_is_refused(policy, name, value):
    hidden, head, update, mask = policy
    zero = jnp.zeros_like(update)
    with pytest.raises(ValueError, match=f"`{name}` must be positive and finite, got"):
        predict_kl_by_difference(hidden, head, zero, update, mask, **{name: value})


def test_a_chunk_below_one_token_is_refused(policy, estimate):
    hidden, head, update, mask = policy
    with pytest.raises(ValueError, match="`chunk` must be at least 1 token, got 0"):
        estimate(hidden, head, jnp.zeros_like(update), update, mask, chunk=0)


# --- the rule


def scaled(tx, q, updates=None, state=None):
    updates = {"w": jnp.full((2, 2), 3.0)} if updates is None else updates
    state = tx.init(updates) if state is None else state
    return tx.update(updates, state, predicted_kl=q)


@pytest.mark.parametrize(
    ("q", "budget", "alpha"),
    [
        (4e-3, 1e-3, 0.5),
        (1e-3 / 4, 1e-3, 2.0),
        (1e-9, 1e-3, 3.0),
        (0.0, 1e-3, 3.0),
        (1e-45, 1e-3, 3.0),
        (1e6, None, 3.0),
        (0.0, None, 3.0),
        (4e-3, jnp.inf, 3.0),
        (-1e-9, 1e-3, 0.0),
        (jnp.nan, 1e-3, 0.0),
        (jnp.inf, 1e-3, 0.0),
        (-jnp.inf, None, 0.0),
        (jnp.nan, None, 0.0),
        (4e-3, 0.0, 0.0),
        (0.0, 0.0, 0.0),
        (4e-3, -1e-9, 0.0),
        (4e-3, jnp.nan, 0.0),
    ],
)
def test_the_rule_for_every_kind_of_q_and_budget(q, budget, alpha):
    plain = logra.kl_step_size(q, budget, alpha_max=3.0)
    np.testing.assert_allclose(plain, alpha, rtol=1e-6)
    assert plain.dtype == jnp.float32
    if budget is not None:
        traced = jax.jit(logra.kl_step_size)(
            jnp.float32(q), jnp.float32(budget), jnp.float32(3.0)
        )
        assert traced == plain
        tx = scale_by_predicted_kl(lambda count: budget, alpha_max=3.0)
        updates, state = scaled(tx, q)
        assert state.alpha == plain
        assert jnp.all(updates["w"] == 3.0 * plain)


def test_the_plain_rule_refuses_an_alpha_max_out_of_range():
    with pytest.raises(ValueError, match="`alpha_max` must be positive and finite"):
        logra.kl_step_size(1.0, 1.0, alpha_max=-1.0)


def test_four_times_the_budget_halves_the_update_exactly():
    updates, state = scaled(scale_by_predicted_kl(2.0**-10), 2.0**-8)
    assert state.alpha == 0.5
    assert jnp.all(updates["w"] == 1.5)
    assert (state.q, state.budget, state.count) == (2.0**-8, 2.0**-10, 1)


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

"""KL divergences against float64, and what they make of padding and of nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import logra_jax as logra
from logra_jax.algorithm.divergence import (
    change_of_policy,
    divergence,
    exp_excess,
    map_chunks,
)

TOKENS, D, VOCAB = 13, 10, 500


@pytest.fixture
def states(getkey):
    """Hidden states, a direction of unit scale, and a head."""
    h, direction = jax.random.normal(getkey(), (2, TOKENS, D))
    w = jax.random.normal(getkey(), (D, VOCAB)) / D**0.5 * 3
    return h, direction, lambda h: h @ w


def log_softmax(logits) -> np.ndarray:
    z = np.asarray(logits, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def true_kl(before, after) -> np.ndarray:
    """KL in float64 of float32 logits, (tokens,)."""
    p, q = log_softmax(before), log_softmax(after)
    return np.sum(np.exp(p) * (p - q), -1)


@pytest.mark.parametrize("size", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_kl_is_exact_over_ten_orders_of_magnitude(states, size):
    h, direction, head = states
    before, after = head(h), head(h + size * direction)
    expected = true_kl(before, after)
    ours = divergence(jax.nn.log_softmax(before), jax.nn.log_softmax(after))
    # A log-prob's own rounding, 1e-6, is a larger share of a smaller change.
    np.testing.assert_allclose(ours, expected, rtol=1e-5 + 1e-6 / size)
    assert expected.mean() < 10 * size**2
    realised = logra.realised_kl(h, h + size * direction, head, jnp.ones(TOKENS))
    np.testing.assert_allclose(realised, expected.mean(), rtol=1e-5 + 1e-6 / size)


def test_kl_of_a_tiny_step_beats_the_textbook_sum(states):
    h, direction, head = states
    before, after = head(h), head(h + 1e-4 * direction)
    log_p, log_q = jax.nn.log_softmax(before), jax.nn.log_softmax(after)
    expected = true_kl(before, after)
    textbook = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
    errors = [
        np.abs(kl - expected).mean() for kl in (divergence(log_p, log_q), textbook)
    ]
    assert 100 * errors[0] < errors[1]


def test_kl_of_policies_far_apart_or_with_impossible_tokens_stays_a_number():
    z = jnp.array([[0.0, 200.0, 3.0, -jnp.inf], [200.0, 0.0, -3.0, -jnp.inf]])
    log_p = jax.nn.log_softmax(z)
    # p vanishes in float32 where q is 1, and the other way round
    np.testing.assert_allclose(divergence(log_p, log_p[::-1]), [200.0, 200.0], 1e-6)
    np.testing.assert_array_equal(divergence(log_p, log_p), [0.0, 0.0])


def test_kl_rises_without_bound_where_the_second_policy_excludes_a_token():
    log_p = jnp.log(jnp.array([0.5, 0.5]))
    assert divergence(log_p, jnp.array([0.0, -jnp.inf])) == jnp.inf


@given(st.floats(-80, 80, width=32))
def test_exp_excess_is_exact_and_never_negative(x):
    exact = float(np.expm1(np.longdouble(x)) - np.longdouble(x))
    if abs(x) < 1e-5:  # longdouble cancels too
        exact = x * x / 2 + x**3 / 6
    ours = float(exp_excess(jnp.float32(x)))
    assert ours >= 0
    np.testing.assert_allclose(ours, exact, rtol=3e-6, atol=1e-37)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_entropy_is_that_of_the_policy_before(states, temperature):
    h, direction, head = states

    # A token that does not exist has no say.
    def partly(h):
        return head(h).at[:, 3].set(-jnp.inf)

    mask = jnp.ones(TOKENS, bool).at[2].set(False)
    _, entropy = change_of_policy(
        h, h + 0.1 * direction, partly, mask, temperature=temperature, chunk=4
    )
    z = np.delete(np.asarray(head(h), np.float64) / temperature, 3, axis=1)
    log_p = log_softmax(z)
    expected = -np.sum(np.exp(log_p) * log_p, axis=1)[np.asarray(mask)].mean()
    np.testing.assert_allclose(entropy, expected, rtol=1e-5)


def test_temperature_divides_the_logits(states):
    h, direction, head = states
    after = h + 0.1 * direction
    hot = logra.realised_kl(h, after, head, jnp.ones(TOKENS), temperature=0.6)
    expected = true_kl(head(h) / 0.6, head(after) / 0.6).mean()
    np.testing.assert_allclose(hot, expected, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 13, 256])
def test_chunks_do_not_change_the_realised_kl_nor_see_more_than_their_share(
    states, chunk
):
    h, direction, head = states
    seen = set()

    def watched(h):
        seen.add(h.shape[0])
        return head(h)

    after = h + 0.1 * direction
    parts = logra.realised_kl(h, after, watched, jnp.ones(TOKENS), chunk=chunk)
    whole = logra.realised_kl(h, after, head, jnp.ones(TOKENS), chunk=TOKENS)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    assert max(seen) <= chunk


def test_sampled_kl_has_the_kl_as_its_mean_and_unlike_log_ratios_is_never_negative():
    z = np.random.default_rng(0).normal(size=(2, VOCAB))
    log_e, log_p = log_softmax(z[0]), log_softmax(z[0] + 0.3 * z[1])
    # every token once, weighted by its probability: the expectation, no sampling
    mean = logra.sampled_kl(*map(jnp.float32, (log_e, log_p, np.exp(log_e))))
    np.testing.assert_allclose(mean, true_kl(log_e, log_p), rtol=1e-5)
    one_by_one = [
        logra.sampled_kl(*(jnp.float32(x[:1]) for x in (log_e, log_p)), jnp.ones(1))
        for log_e, log_p in zip(np.split(log_e, 5), np.split(log_p, 5), strict=True)
    ]
    assert min(map(float, one_by_one)) >= 0


def test_sampled_kl_of_renormalised_log_probs_is_too_small_by_the_mass_left_out():
    z = np.random.default_rng(0).normal(size=(2, VOCAB))
    log_e, log_p = log_softmax(z[0]), log_softmax(z[0] + 0.3 * z[1])
    kept = log_e > np.quantile(log_e, 0.8)
    log_g = log_e[kept] - np.log(np.exp(log_e[kept]).sum())
    estimate = logra.sampled_kl(*map(jnp.float32, (log_g, log_p[kept], np.exp(log_g))))
    true = np.sum(np.exp(log_g) * (log_g - log_p[kept]))
    missing = 1 - np.exp(log_p[kept]).sum()
    assert missing > 0.2
    np.testing.assert_allclose(estimate, true - missing, rtol=1e-4)


def test_padding_may_hold_what_is_not_finite_and_a_mask_is_a_weight(states):
    h, direction, head = states
    mask = jnp.ones(TOKENS, bool).at[jnp.array([2, 7])].set(False)
    after = h + 0.1 * direction
    expected = true_kl(head(h), head(after))[np.asarray(mask)].mean()
    hole = jnp.where(mask, 1.0, jnp.nan)[:, None]
    dirty = logra.realised_kl(h * hole, after * hole, head, mask)
    np.testing.assert_allclose(dirty, expected, rtol=1e-5)
    light = logra.realised_kl(h, after, head, 0.01 * mask)
    np.testing.assert_allclose(light, expected, rtol=1e-5)
    logprobs = jnp.where(mask, -1.0, -jnp.inf)
    assert logra.sampled_kl(logprobs, logprobs, mask) == 0


def test_a_kl_of_no_token_is_no_number(states):
    h, _, head = states
    nothing = jnp.zeros(TOKENS, bool)
    assert jnp.isnan(logra.realised_kl(h, h, head, nothing))
    assert jnp.isnan(logra.sampled_kl(h[:, 0], h[:, 0], nothing))
    assert logra.realised_kl(h, h, head, ~nothing) == 0


def test_map_chunks_takes_several_arrays_of_any_dtype():
    ids = jnp.arange(7)[:, None]
    table = jnp.arange(14.0).reshape(7, 2)
    picked = map_chunks(lambda a: a[1].sum(-1) + a[0][:, 0], (ids, table), 3)
    np.testing.assert_array_equal(picked, np.arange(7) + np.asarray(table).sum(-1))


def test_a_chunk_below_one_token_is_refused(states):
    h, _, head = states
    with pytest.raises(ValueError, match="`chunk` must be at least 1 token, got 0"):
        logra.realised_kl(h, h, head, jnp.ones(TOKENS), chunk=0)

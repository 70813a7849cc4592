import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.rl.losses import (
    AGGREGATIONS,
    LOSSES,
    cispo,
    correct_mismatch,
    gspo,
    policy_loss,
    ppo_clip,
    reference_kl,
    reinforce,
    token_scale,
)

BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}


def token(log_ratio, advantage):
    """Loss, whether clipped, and d loss / d logprob of one token."""

    def loss(logprob):
        mask = jnp.ones((1, 1), bool)
        value, clipped = ppo_clip(
            logprob[None, None],
            jnp.full((1, 1), -1.0),
            jnp.array([advantage]),
            mask,
            **BOUNDS,
        )
        return value[0, 0], clipped[0, 0]

    (value, clipped), slope = jax.value_and_grad(loss, has_aux=True)(
        jnp.float32(-1.0 + log_ratio)
    )
    return float(value), bool(clipped), float(slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.6, True),  # good and already likelier by more than 30 %
        (0.5, 2.0, -1.0, False),  # good but less likely: pulled back
        (1.0, -2.0, 2.0, False),
        (0.9, -2.0, 1.8, False),
        (0.5, -2.0, 1.6, True),  # bad and already rarer by more than 20 %
        (1.5, -2.0, 3.0, False),  # bad but likelier: pushed down
        (1.5, 0.0, 0.0, False),
        (0.5, 0.0, 0.0, False),
    ],
)
def test_loss_and_gradient_by_hand(ratio, advantage, loss, clipped):
    value, is_clipped, slope = token(np.log(ratio), advantage)
    assert value == pytest.approx(loss, rel=1e-5)
    assert is_clipped == clipped
    expected = 0.0 if clipped else -ratio * advantage
    assert slope == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_extreme_ratios_stay_finite(log_ratio, advantage):
    value, _, slope = token(log_ratio, advantage)
    assert np.isfinite([value, slope]).all()


@pytest.mark.parametrize("padding", [np.nan, np.inf, -np.inf, 1e30])
def test_padding_may_hold_anything(padding):
    mask = jnp.array([[True, True, False], [True, False, False]])
    clean = jnp.array([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]])
    dirty = jnp.where(mask, clean, padding)
    advantages = jnp.array([1.0, -0.5])

    def total(logprobs, sampled):
        loss, clipped = ppo_clip(logprobs, sampled, advantages, mask)
        return jnp.sum(loss), (loss, clipped)

    gradient = jax.grad(total, has_aux=True)
    slopes, (loss, clipped) = gradient(dirty, dirty)
    np.testing.assert_allclose(loss, [[-1.0, -1.0, 0.0], [0.5, 0.0, 0.0]])
    np.testing.assert_allclose(slopes, [[-1.0, -1.0, 0.0], [0.5, 0.0, 0.0]])
    assert not jnp.any(clipped)
    sampled = jnp.where(mask, clean, 0.0)
    expected = gradient(clean, sampled)[0]
    np.testing.assert_allclose(gradient(dirty, sampled)[0], expected)


def test_advantages_are_spread_over_the_tokens_of_their_own_response():
    logprobs = jnp.zeros((2, 3))
    mask = jnp.ones((2, 3), bool)
    loss, _ = ppo_clip(logprobs, logprobs, jnp.array([1.0, -2.0]), mask)
    np.testing.assert_array_equal(loss, [[-1.0] * 3, [2.0] * 3])


def test_bfloat16_log_probabilities_give_a_float32_loss():
    logprobs = jnp.full((1, 2), -1.0, jnp.bfloat16)
    mask = jnp.ones((1, 2), bool)
    loss, _ = ppo_clip(logprobs, logprobs, jnp.ones(1, jnp.bfloat16), mask)
    assert loss.dtype == jnp.float32


# --- correction of the engine's mismatch

# Trainer's probability over the engine's; 1 where there is no token.
RATIOS = np.array([[1.5, 0.5, 4.0], [0.25, 1.0, 1.0]])
MASK = jnp.array([[True, True, True], [True, True, False]])
LEVELS = pytest.mark.parametrize("level", ["token", "sequence"])


def corrected(logprobs, engine, advantages, mask=MASK, **options):
    """Loss and gradient in the log-probs, and the correction."""

    def total(logprobs):
        correction = correct_mismatch(logprobs, engine, mask, **options)
        old = jax.lax.stop_gradient(logprobs)
        loss, _ = policy_loss(
            "ppo", logprobs, old, advantages, mask, weights=correction.weights
        )
        return jnp.sum(loss), (loss, correction)

    slopes, (loss, correction) = jax.grad(total, has_aux=True)(logprobs)
    return loss, slopes, correction


@pytest.mark.parametrize(
    ("options", "weights", "capped", "masked"),
    [
        (
            {"level": "token", "cap": 2.0},
            [[1.5, 0.5, 2.0], [0.25, 1.0, 0.0]],
            [[0, 0, 1], [0, 0, 0]],
            [[0, 0, 0], [0, 0, 0]],
        ),
        (
            {"level": "token", "cap": 1.2},
            [[1.2, 0.5, 1.2], [0.25, 1.0, 0.0]],
            [[1, 0, 1], [0, 0, 0]],
            [[0, 0, 0], [0, 0, 0]],
        ),
        (
            {"level": "token", "cap": 1.2, "keep": (0.4, 3.0)},
            [[1.2, 0.5, 0.0], [0.0, 1.0, 0.0]],
            [[1, 0, 0], [0, 0, 0]],
            [[0, 0, 1], [1, 0, 0]],
        ),
        (
            {"level": "sequence", "cap": 4.0},  # 1.5 * 0.5 * 4 = 3, and 0.25
            [[3.0, 3.0, 3.0], [0.25, 0.25, 0.0]],
            [[0, 0, 0], [0, 0, 0]],
            [[0, 0, 0], [0, 0, 0]],
        ),
        (
            {"level": "sequence", "cap": 2.0},
            [[2.0, 2.0, 2.0], [0.25, 0.25, 0.0]],
            [[1, 1, 1], [0, 0, 0]],
            [[0, 0, 0], [0, 0, 0]],
        ),
        (
            {"level": "sequence", "cap": 4.0, "keep": (0.5, 5.0)},
            [[3.0, 3.0, 3.0], [0.0, 0.0, 0.0]],
            [[0, 0, 0], [0, 0, 0]],
            [[0, 0, 0], [1, 1, 0]],
        ),
    ],
)
def test_correction_by_hand(options, weights, capped, masked):
    logprobs = jnp.array([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]])
    engine = logprobs - jnp.log(RATIOS)
    advantages = jnp.array([2.0, -1.0])
    loss, slopes, correction = corrected(logprobs, engine, advantages, **options)
    np.testing.assert_allclose(correction.weights, weights, rtol=1e-6)
    np.testing.assert_array_equal(correction.is_capped, capped)
    np.testing.assert_array_equal(correction.is_masked, masked)
    # Nothing is differentiated through the weight: both are -w A.
    expected = -np.array(weights) * advantages[:, None]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(slopes, expected, rtol=1e-6)


@LEVELS
@pytest.mark.parametrize("keep", [None, (0.5, 5.0), (1.0, 1.0)])
def test_an_engine_without_mismatch_gives_the_gradient_of_no_correction(level, keep):
    logprobs = jnp.array([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]])
    advantages = jnp.array([2.0, -1.0])
    loss, slopes, correction = corrected(
        logprobs, logprobs, advantages, level=level, cap=1.0, keep=keep
    )

    def plain(logprobs_now):
        return jnp.sum(ppo_clip(logprobs_now, logprobs, advantages, MASK)[0])

    value, expected = jax.value_and_grad(plain)(logprobs)
    np.testing.assert_array_equal(slopes, expected)
    assert jnp.sum(loss) == value
    assert not jnp.any(correction.is_capped | correction.is_masked)


@LEVELS
@pytest.mark.parametrize("keep", [None, (0.5, 5.0)])
@pytest.mark.parametrize(
    "difference",
    [[100.0] * 3, [-100.0] * 3, [1e4, -1e4, 0.0], [np.inf, -1e4, 3e38], [3e38] * 3],
)
def test_extreme_mismatch_stays_finite(level, keep, difference):
    logprobs = jnp.full((2, 3), -1.0)
    engine = logprobs - jnp.array([difference] * 2)
    advantages = jnp.array([2.0, -1.0])
    found = corrected(logprobs, engine, advantages, level=level, keep=keep)
    for array in jax.tree.leaves(found):
        assert np.isfinite(array).all()
    assert jnp.max(found[2].weights) <= 2.0


@LEVELS
@pytest.mark.parametrize("padding", [np.nan, np.inf, -np.inf, 1e30])
def test_padding_has_no_say_in_the_correction(level, padding):
    logprobs = jnp.array([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]])
    engine = logprobs - jnp.log(RATIOS)
    advantages = jnp.array([2.0, -1.0])
    options = {"level": level, "keep": (0.5, 5.0)}
    expected = corrected(logprobs, engine, advantages, **options)
    dirty, dirty_engine = (jnp.where(MASK, a, padding) for a in (logprobs, engine))
    for ours, theirs in ((dirty, engine), (logprobs, dirty_engine), (dirty,) * 2):
        found = corrected(ours, theirs, advantages, **options)
        if ours is not theirs:
            for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.asarray(found[1])[1, 2], 0.0)


@LEVELS
@pytest.mark.parametrize("keep", [None, (0.5, 5.0)])
def test_an_engine_that_reports_no_number_is_seen_in_the_gradient(level, keep):
    logprobs = jnp.full((2, 3), -1.0)
    engine = logprobs.at[0, 1].set(jnp.nan)
    _, slopes, _ = corrected(logprobs, engine, jnp.ones(2), level=level, keep=keep)
    assert jnp.isnan(slopes[0, 1])
    assert jnp.isfinite(slopes[1]).all()


def test_correction_is_float32_and_its_level_known():
    logprobs = jnp.full((2, 3), -1.0, jnp.bfloat16)
    correction = correct_mismatch(logprobs, logprobs, MASK)
    assert correction.weights.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"`level` must be 'token' or 'sequence', got"):
        correct_mismatch(logprobs, logprobs, MASK, level="word")


# --- other losses

LOGPROBS = jnp.array([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]])
OLD = LOGPROBS - jnp.log(RATIOS)
ADVANTAGES = jnp.array([2.0, -1.0])


def value_and_slopes(loss, *args, **options):
    def total(logprobs):
        value, clipped = loss(logprobs, *args, **options)
        return jnp.sum(value), (value, clipped)

    slopes, (value, clipped) = jax.grad(total, has_aux=True)(LOGPROBS)
    return value, slopes, clipped


def test_reinforce_by_hand():
    value, slopes, _ = value_and_slopes(
        lambda logprobs: (reinforce(logprobs, ADVANTAGES, MASK), MASK)
    )
    np.testing.assert_allclose(value, [[2.0, 4.0, 1.0], [-0.1, -3.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(slopes, [[-2.0] * 3, [1.0, 1.0, 0.0]], rtol=1e-6)


def test_cispo_by_hand():
    """The weight is clipped, and no token loses its gradient."""
    bounds = {"clip_low": 0.5, "clip_high": 1.0}  # ratios in [0.5, 2]
    value, slopes, clipped = value_and_slopes(cispo, OLD, ADVANTAGES, MASK, **bounds)
    weights = np.array([[1.5, 0.5, 2.0], [0.5, 1.0, 0.0]])
    expected = -weights * ADVANTAGES[:, None]
    np.testing.assert_allclose(slopes, expected, rtol=1e-6)
    np.testing.assert_allclose(value, expected * LOGPROBS, rtol=1e-6)
    np.testing.assert_array_equal(clipped, [[0, 0, 1], [1, 0, 0]])


def test_gspo_by_hand():
    """Ratios of responses: (1.5 * 0.5 * 4)^(1/3) and 0.25^(1/2)."""
    first, second = 3 ** (1 / 3), 0.5
    bounds = {"clip_low": 0.4, "clip_high": 0.6}  # [0.6, 1.6]
    value, slopes, clipped = value_and_slopes(gspo, OLD, ADVANTAGES, MASK, **bounds)
    expected = [[-2 * first] * 3, [0.6, 0.6, 0.0]]  # bad, and rarer by more than 40 %
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(slopes, [[-2 * first] * 3, [0.0] * 3], rtol=1e-5)
    np.testing.assert_array_equal(clipped, [[0, 0, 0], [1, 1, 0]])
    assert second < 0.6 < first < 1.6


def test_gspo_has_the_gradient_of_its_paper():
    """Of mean_i min(s_i A_i, clip(s_i) A_i), differentiated through s_i itself."""
    bounds = {"clip_low": 0.9, "clip_high": 0.5}
    lengths = jnp.sum(MASK, -1)

    def paper(logprobs):
        d = jnp.where(MASK, logprobs - OLD, 0.0)
        s = jnp.exp(jnp.sum(d, -1) / lengths)
        clipped = jnp.clip(s, 0.1, 1.5)
        return -jnp.mean(jnp.minimum(s * ADVANTAGES, clipped * ADVANTAGES))

    def ours(logprobs):
        value, _ = gspo(logprobs, OLD, ADVANTAGES, MASK, **bounds)
        scale = token_scale(MASK, aggregation="sequence")
        return jnp.sum(value * scale[:, None])

    value, slopes = jax.value_and_grad(ours)(LOGPROBS)
    expected, expected_slopes = jax.value_and_grad(paper)(LOGPROBS)
    assert value == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-5, atol=1e-8)
    assert np.any(expected_slopes != 0)


@pytest.mark.parametrize("kind", LOSSES)
def test_against_itself_every_loss_is_the_policy_gradient(kind):
    _, slopes, clipped = value_and_slopes(
        lambda logprobs: policy_loss(
            kind, logprobs, jax.lax.stop_gradient(logprobs), ADVANTAGES, MASK
        )
    )
    expected = jnp.where(MASK, -ADVANTAGES[:, None], 0.0)
    np.testing.assert_allclose(slopes, expected, rtol=1e-6)
    assert not np.any(clipped)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e4, -1e4])
def test_every_loss_is_finite_for_any_ratio(kind, difference):
    for advantages in (ADVANTAGES, -ADVANTAGES):
        value, slopes, _ = value_and_slopes(
            lambda logprobs, a=advantages: policy_loss(
                kind, logprobs, LOGPROBS - difference, a, MASK
            )
        )
        assert np.isfinite(value).all()
        assert np.isfinite(slopes).all()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("padding", [np.nan, np.inf, -np.inf, 1e30])
def test_padding_has_no_say_in_any_loss(kind, padding):
    dirty, old = (jnp.where(MASK, a, padding) for a in (LOGPROBS, OLD))

    def total(logprobs, old):
        return jnp.sum(policy_loss(kind, logprobs, old, ADVANTAGES, MASK)[0])

    expected = jax.value_and_grad(total)(LOGPROBS, OLD)
    found = jax.value_and_grad(total)(dirty, old)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match=r"`kind` must be one of ppo.*, got 'ppoo'"):
        policy_loss("ppoo", LOGPROBS, OLD, ADVANTAGES, MASK)


# --- aggregation


def test_token_scale_by_hand():
    """Responses of three and two tokens."""
    expected = {
        "token": [1 / 5] * 2,
        "sequence": [1 / 6, 1 / 4],
        "constant": [1 / 20] * 2,
    }
    for name in AGGREGATIONS:
        scale = token_scale(MASK, aggregation=name, length=10)
        np.testing.assert_allclose(scale, expected[name], rtol=1e-6)


def test_a_response_without_a_say_is_as_if_it_were_not_there():
    counts = jnp.array([True, False])
    for name in AGGREGATIONS:
        scale = token_scale(MASK, counts, aggregation=name, length=10)
        alone = token_scale(MASK[:1], aggregation=name, length=10)
        np.testing.assert_array_equal(scale, [alone[0], 0.0])


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nothing_to_weigh_stays_finite(name):
    for mask, counts in ((MASK, jnp.zeros(2, bool)), (MASK & False, None)):
        scale = token_scale(mask, counts, aggregation=name, length=10)
        assert np.isfinite(scale).all()


def test_bad_aggregations_are_refused():
    with pytest.raises(ValueError, match="`aggregation` must be one of token"):
        token_scale(MASK, aggregation="word")
    with pytest.raises(ValueError, match="`length` must be at least 1 token, got 0"):
        token_scale(MASK, aggregation="constant")


# --- the KL to a reference


def test_reference_kl_by_hand():
    d = -np.log(RATIOS)
    k3 = reference_kl(LOGPROBS, OLD, MASK)
    np.testing.assert_allclose(k3, np.where(MASK, np.exp(d) - 1 - d, 0), rtol=1e-5)
    k2 = reference_kl(LOGPROBS, OLD, MASK, estimator="k2")
    np.testing.assert_allclose(k2, np.where(MASK, d**2 / 2, 0), rtol=1e-5)
    with pytest.raises(ValueError, match="`estimator` must be one of k3, k2, got 'k1'"):
        reference_kl(LOGPROBS, OLD, MASK, estimator="k1")


def test_estimates_and_gradients_of_the_kl_over_a_whole_vocabulary():
    """Expectations over all tokens: k3 is the KL; k2's gradient is the KL's."""
    rng = np.random.default_rng(0)
    z, reference = (jnp.asarray(rng.normal(size=6), jnp.float32) for _ in range(2))
    q = jax.nn.log_softmax(reference)

    def kl(z):
        p = jax.nn.log_softmax(z)
        return jnp.sum(jnp.exp(p) * (p - q))

    def expected(z, estimator):
        """Of tokens that the policy samples, which is not differentiated."""
        p = jax.nn.log_softmax(z)
        each = reference_kl(
            p[:, None], q[:, None], jnp.ones((6, 1), bool), estimator=estimator
        )
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(p)) * each[:, 0])

    assert expected(z, "k3") == pytest.approx(float(kl(z)), rel=1e-5)
    slopes = jax.grad(lambda z: expected(z, "k2"))(z)
    np.testing.assert_allclose(slopes, jax.grad(kl)(z), rtol=1e-4, atol=1e-6)

    def other_way(z):
        return jnp.sum(jnp.exp(q) * (q - jax.nn.log_softmax(z)))

    slopes = jax.grad(lambda z: expected(z, "k3"))(z)
    np.testing.assert_allclose(slopes, jax.grad(other_way)(z), rtol=1e-4, atol=1e-6)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.rl.losses import ppo_clip

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

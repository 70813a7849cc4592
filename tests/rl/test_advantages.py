import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.rl.advantages import (
    RunningMean,
    batch_mean,
    dr_grpo,
    grpo,
    reinforce_pp,
    rloo,
    running_mean,
    whiten,
)


def test_the_first_batch_is_measured_against_its_own_mean():
    advantages, state = running_mean(
        jnp.array([1.0, 0.0, 0.0, 1.0]), RunningMean.zero(), decay=0.8
    )
    np.testing.assert_allclose(advantages, [0.5, -0.5, -0.5, 0.5])
    assert (state.total, state.weight) == (0.5, 1.0)


def test_later_batches_are_measured_against_the_decayed_past_only():
    state = RunningMean.zero()
    means = [1.0, 0.0, 0.5]
    for mean in means:
        _, state = running_mean(jnp.array([mean, mean]), state, decay=0.5)
    # weights 1/4, 1/2, 1 from oldest to newest
    baseline = (0.25 * 1.0 + 0.5 * 0.0 + 1.0 * 0.5) / 1.75
    advantages, _ = running_mean(jnp.array([0.0, 1.0]), state, decay=0.5)
    np.testing.assert_allclose(advantages, [-baseline, 1 - baseline], rtol=1e-6)


@pytest.mark.parametrize(("decay", "baseline"), [(1.0, 0.5), (0.0, 0.75)])
def test_decay_one_is_the_mean_of_all_batches_and_zero_the_last_one(decay, baseline):
    state = RunningMean.zero()
    for mean in (0.25, 0.5, 0.75):
        _, state = running_mean(jnp.full(4, mean), state, decay)
    advantages, _ = running_mean(jnp.zeros(4), state, decay)
    np.testing.assert_allclose(advantages, -baseline, rtol=1e-6)


def test_running_mean_is_stable_under_jit_for_any_dtype_of_rewards():
    step = jax.jit(running_mean, static_argnums=2)
    state = RunningMean.zero()
    for rewards in (jnp.ones(4, jnp.bfloat16), jnp.zeros(4, jnp.bfloat16)):
        advantages, after = step(rewards, state, 0.9)
        assert advantages.dtype == jnp.float32
        assert jax.eval_shape(lambda s: s, after) == jax.eval_shape(lambda s: s, state)
        state = after
    assert step._cache_size() == 1


def test_grpo_standardises_within_each_group():
    advantages = grpo(jnp.array([1.0, 0.0, 0.0, 0.0, 4.0, 2.0, 4.0, 2.0]), group=4)
    deviation = np.sqrt(3) / 4  # of 1, 0, 0, 0, by the number of responses
    expected = [0.75 / deviation, *[-0.25 / deviation] * 3, 1.0, -1.0, 1.0, -1.0]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7])
def test_a_constant_group_gets_zeros(value):
    advantages = grpo(jnp.full(12, value), group=6)
    np.testing.assert_array_equal(advantages, 0.0)


def test_an_almost_constant_group_stays_small():
    advantages = grpo(jnp.array([1.0, 1.0, 1.0, 1.0 + 1e-5]), group=4)
    assert jnp.max(jnp.abs(advantages)) < 1e-2


@pytest.mark.parametrize("group", [0, -2, 3, 8])
def test_a_group_that_does_not_divide_the_batch_is_refused(group):
    with pytest.raises(ValueError, match=f"`group` must divide .* got {group}"):
        grpo(jnp.ones(4), group)


REWARDS = jnp.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
SEVEN_TO_ONE = jnp.array([1.0] * 7 + [0.0])
OF_GROUPS = pytest.mark.parametrize("advantage", [grpo, dr_grpo, rloo, reinforce_pp])


def test_each_advantage_by_hand():
    """Groups of four, means 1/4 and 1/2, of the batch 3/8."""
    np.testing.assert_allclose(batch_mean(REWARDS), REWARDS - 0.375, rtol=1e-6)
    expected = [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]
    np.testing.assert_allclose(dr_grpo(REWARDS, 4), expected, rtol=1e-6)
    # The mean of the other three: of the first response 0, of the second 1/3.
    expected = [1, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3]
    np.testing.assert_allclose(rloo(REWARDS, 4), expected, rtol=1e-6)
    deviation = np.sqrt(0.375 * 0.625)
    expected = (REWARDS - 0.375) / deviation
    np.testing.assert_allclose(reinforce_pp(REWARDS), expected, rtol=1e-6)
    centred = np.array([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
    expected = centred / np.sqrt(np.mean(centred**2))
    np.testing.assert_allclose(reinforce_pp(REWARDS, 4), expected, rtol=1e-6)
    np.testing.assert_allclose(
        whiten(jnp.array([3.0, 5.0, 1.0])) ** 2, [0, 1.5, 1.5], rtol=1e-6
    )


@OF_GROUPS
def test_a_group_of_seven_to_one_is_bounded(advantage):
    """Leave-one-out deviations would make thousands of it."""
    found = np.asarray(advantage(SEVEN_TO_ONE, 8))
    assert np.abs(found).max() < 3
    assert found[7] == pytest.approx(-7 * found[0], rel=1e-5)


@OF_GROUPS
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.7, -3.7, 1e6])
def test_constant_groups_teach_nothing(advantage, value):
    """Exactly: of what is left of rounding, a step of the whole budget is made."""
    found = np.asarray(jax.jit(advantage, static_argnums=1)(jnp.full(16, value), 8))
    np.testing.assert_array_equal(found, 0.0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.7, -3.7, 1e6])
def test_batches_that_never_differ_teach_nothing(value):
    rewards, state = jnp.full(48, value), RunningMean.zero()
    np.testing.assert_array_equal(batch_mean(rewards), 0.0)
    np.testing.assert_array_equal(reinforce_pp(rewards), 0.0)
    np.testing.assert_array_equal(whiten(rewards), 0.0)
    for _ in range(20):
        advantages, state = running_mean(rewards, state, 0.8)
        np.testing.assert_array_equal(advantages, 0.0)
    advantages, _ = running_mean(rewards + 1e-3 * abs(value), state, 0.8)
    np.testing.assert_allclose(advantages, 1e-3 * abs(value), rtol=1e-2)


@OF_GROUPS
def test_advantages_of_groups_sum_to_nothing_and_do_not_hang_on_the_level(advantage):
    rng = np.random.default_rng(0)
    rewards = jnp.asarray(rng.normal(size=24), jnp.float32)
    found = np.asarray(advantage(rewards, 6)).reshape(4, 6)
    np.testing.assert_allclose(found.sum(axis=1), 0.0, atol=1e-5)
    level = np.repeat(np.array([5.0, -1.0, 0.5, 2.0], np.float32), 6)
    moved = np.asarray(advantage(rewards + level, 6)).reshape(4, 6)
    np.testing.assert_allclose(moved, found, atol=1e-5)


def test_a_response_has_no_say_in_its_own_rloo_baseline():
    slopes = np.asarray(jax.jacobian(lambda r: rloo(r, 4))(REWARDS))
    np.testing.assert_allclose(np.diag(slopes), 1.0, rtol=1e-6)


def test_a_group_of_one_has_no_rloo():
    with pytest.raises(ValueError, match=r"`group` must be at least 2, got 1"):
        rloo(jnp.ones(4), 1)

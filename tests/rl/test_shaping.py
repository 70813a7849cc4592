import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.rl.shaping import is_mixed, overlong_penalty, shape_rewards

LENGTHS = np.array([10, 80, 85, 90, 100])
FINISHED = np.array([True, True, True, True, False])
SCORES = np.array([1.0, 1.0, 0.0, 1.0, 1.0])


def shape(**options):
    return shape_rewards(SCORES, LENGTHS, FINISHED, limit=100, **options)


def test_nothing_switched_on_changes_nothing():
    found = shape()
    np.testing.assert_array_equal(found, SCORES)
    assert found.dtype == np.float32


def test_the_overlong_penalty_by_hand():
    """Equation 13 of DAPO with a limit of 100 and a buffer of 20."""
    found = overlong_penalty(LENGTHS, limit=100, buffer=20, penalty=2.0)
    np.testing.assert_allclose(found, [0, 0, 0.5, 1.0, 2.0])


@given(st.integers(1, 500), st.integers(1, 500), st.floats(0.1, 10))
def test_the_penalty_rises_with_length_to_its_largest(limit, buffer, penalty):
    lengths = np.arange(1, limit + 1)
    found = overlong_penalty(lengths, limit=limit, buffer=buffer, penalty=penalty)
    assert np.all(np.diff(found) >= 0)
    assert found[-1] == pytest.approx(penalty, rel=1e-6)
    assert np.all(found[lengths <= limit - buffer] == 0)


def test_all_of_it_in_order():
    found = shape(truncated_reward=-1.0, buffer=20, penalty=1.0, low=-1.5, high=0.75)
    np.testing.assert_allclose(found, [0.75, 0.75, -0.25, 0.5, -1.5])


def test_only_responses_that_were_cut_get_their_reward():
    np.testing.assert_array_equal(shape(truncated_reward=0.5), [1, 1, 0, 1, 0.5])


def test_groups_that_differ_in_any_reward_are_mixed():
    rewards = np.array([1, 1, 1, 0, 0, 0, 0.5, 0.5, 0.25])
    np.testing.assert_array_equal(is_mixed(rewards, 3), [False, False, True])
    np.testing.assert_array_equal(is_mixed(rewards, 1), [False] * 9)

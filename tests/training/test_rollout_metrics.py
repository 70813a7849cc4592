import numpy as np
import pytest

from logra_jax.rl.reward_pool import Rewards
from logra_jax.rollout.types import Completions, pack_prompts
from logra_jax.training.rollout_metrics import (
    repetition,
    responses_per_second,
    rollout_metrics,
)


def slowly(row) -> float:
    grams = [tuple(row[i : i + 4]) for i in range(len(row) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def test_repetition_is_one_minus_distinct_4_grams():
    random = np.random.default_rng(0)
    tokens = random.integers(0, 3, (20, 40))
    lengths = random.integers(0, 41, 20)
    want = [slowly(row[:n].tolist()) for row, n in zip(tokens, lengths, strict=True)]
    np.testing.assert_allclose(repetition(tokens, lengths), want)


@pytest.mark.parametrize("period", [1, 7, 50])
def test_a_loop_is_seen_whatever_its_length_and_prose_is_not(period: int):
    random = np.random.default_rng(1)
    loop = np.tile(random.permutation(250000)[:period], 1000 // period)
    prose = random.permutation(250000)[: len(loop)]
    found = repetition(np.stack([loop, prose]), np.full(2, len(loop)))
    assert found[0] > 0.94
    assert found[1] == 0


def test_padding_and_the_order_of_a_gram_count():
    tokens = np.array([[1, 2, 3, 4, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0]])
    assert repetition(tokens, np.array([8])) == 0
    assert repetition(tokens, np.array([14])) > 0
    assert repetition(tokens, np.array([3])) == 0


def test_a_batch_in_numbers():
    tokens = np.array([[1, 1, 1, 1, 1, 1], [1, 2, 0, 0, 0, 0]], np.int32)
    completions = Completions(
        pack_prompts([[1, 2], [3]]),
        tokens,
        np.zeros(tokens.shape, np.float32),
        lengths=np.array([6, 2], np.int32),
        finished=np.array([False, True]),
    )
    rewards = Rewards(np.array([0.0, 1.0], np.float32), raised=1, seconds=0.5)
    found = rollout_metrics(completions, rewards)
    assert found == {
        "reward": 0.5,
        "reward/raised": 1,
        "reward/timed_out": 0,
        "length/mean": 4.0,
        "length/truncated": 0.5,
        "reward/scored": 2,
        "rate/scored": 4.0,
        "rollout/repetition": pytest.approx(1 / 3),
    }
    assert responses_per_second([{"step": 0}, found, found]) == 4.0
    assert np.isnan(responses_per_second([{"step": 0}]))

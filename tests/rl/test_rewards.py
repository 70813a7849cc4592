import numpy as np
import pytest

from logra_jax.rl.reasoning_gym_tasks import reasoning_gym_task
from logra_jax.rl.reward_pool import RewardPool
from logra_jax.rl.rewards import ReasoningGymReward
from logra_jax.rl.tasks import Question


def test_only_exactly_right_answers_are_rewarded_unless_partial_is_asked_for():
    entry = {"question": "2 + 3", "answer": "5", "metadata": {}}
    question = Question("2 + 3", "5", entry, family="chain_sum")
    exact = ReasoningGymReward("last_number")
    assert exact(question, "2 + 3 = 5.") == 1.0
    assert exact(question, "It is 5.00") == 1.0
    assert exact(question, "15") == 0.0
    assert exact(question, "no idea") == 0.0
    partial = ReasoningGymReward("last_number", partial=True)
    assert partial(question, "15") == 0.5
    whole = ReasoningGymReward("whole_text")
    assert whole(question, " 5\n") == 1.0
    assert whole(question, "2 + 3 = 5") == 0.0
    assert whole(question, "  ") == 0.0


def test_an_unknown_reading_or_family_is_refused():
    with pytest.raises(ValueError, match=r"`answer` must be one of .*, got 'boxes'"):
        ReasoningGymReward("boxes")
    reward = ReasoningGymReward("last_number")
    with pytest.raises(ValueError, match="got 'chain_sums'; did you mean 'chain_sum'"):
        reward(Question("2 + 3", "5", {}, family="chain_sums"), "5")


def test_reasoning_gym_answers_are_scored_in_the_pool():
    options = {"max_terms": 2, "max_digits": 1}
    task = reasoning_gym_task("chain_sum", options, size=60, seed=0, held_out=0.5)
    questions = task.train[:20]
    texts = [f"That is {q.answer}." for q in questions[:10]] + ["999"] * 10
    reward = ReasoningGymReward("last_number")
    with RewardPool(reward) as pool:
        rewards = pool.score(questions, texts)
    np.testing.assert_array_equal(rewards.values, [1.0] * 10 + [0.0] * 10)
    assert rewards.values.dtype == np.float32
    assert (rewards.raised, rewards.timed_out) == (0, 0)

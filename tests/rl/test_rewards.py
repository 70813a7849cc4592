import re
import sys

import numpy as np
import pytest

from logra_jax.rl.reasoning_gym_tasks import reasoning_gym_task
from logra_jax.rl.reward_pool import RewardPool
from logra_jax.rl.rewards import (
    ExactReward,
    MathReward,
    PythonReward,
    ReasoningGymReward,
    RewardTable,
)
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


def test_each_family_of_a_composite_task_is_scored_by_its_own_data_set():
    questions = [
        reasoning_gym_task(name, {}, size=8, seed=0, held_out=0.5).train[0]
        for name in ("chain_sum", "letter_counting", "spell_backward")
    ]
    answers = [question.answer for question in questions]
    assert [question.family for question in questions] == [
        "chain_sum",
        "letter_counting",
        "spell_backward",
    ]
    with RewardPool(ReasoningGymReward("whole_text")) as pool:
        assert pool.score(questions, answers).values.tolist() == [1.0] * 3
        rewards = pool.score(questions, answers[1:] + answers[:1])
    assert (rewards.values.tolist(), rewards.failed) == ([0.0] * 3, 0)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"It is \boxed{Ada Lovelace}.", 1.0),
        ("The answer is: ada  lovelace", 1.0),
        (r"\boxed{Ada}", 0.0),
        ("Ada Lovelace or Charles Babbage", 0.0),
        ("Who wrote the first program?", 0.0),
        ("", 0.0),
    ],
)
def test_exact_text_is_compared_without_case_and_white_space(text, reward):
    question = Question("Who wrote the first program?", "Ada Lovelace", {})
    assert ExactReward()(question, text) == reward


def test_no_reference_makes_no_answer_right():
    question = Question("?", "", {})
    for text in ("", " ", r"\boxed{}", r"\boxed{5}", "."):
        assert ExactReward()(question, text) == 0.0
        assert MathReward()(question, text) == 0.0


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working directory that is not on the path, with a module of rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "rewards_at_work.py").write_text(
        "def score(answer, question):\n"
        "    return len(answer) / len(question.answer)\n"
        "LIMIT = 3\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import no_such_module_at_all\n")
    yield tmp_path
    sys.modules.pop("rewards_at_work", None)


def test_function_of_the_users_own_is_found_in_the_working_directory(workplace):
    question = Question("?", "abcd", {})
    with RewardPool(PythonReward("rewards_at_work:score")) as pool:
        rewards = pool.score([question] * 2, [" ab ", ""])
    assert rewards.values.tolist() == [0.5, 0.0]
    boxed = PythonReward("rewards_at_work:score", answer="last_boxed")
    assert boxed(question, r"as long as \boxed{abc}") == 0.75


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rewards_at_work", "must look like 'module:function', got 'rewards_at_work'"),
        (":score", "must look like 'module:function', got ':score'"),
        (
            "no_such_rewards:score",
            "No module named 'no_such_rewards'; the working directory, {work}, has no "
            "no_such_rewards.py",
        ),
        ("rewards_at_work.py:score", "; leave out the .py: rewards_at_work"),
        ("broken_rewards:score", "No module named 'no_such_module_at_all'"),
        ("rewards_at_work:scores", "rewards_at_work has no function scores"),
        ("rewards_at_work:LIMIT", "rewards_at_work has no function LIMIT"),
    ],
)
def test_function_that_is_not_there_is_refused_at_once(workplace, function, message):
    message = message.format(work=workplace)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        PythonReward(function)
    assert str(caught.value).startswith("`reward.function` must")
    assert "\n" not in str(caught.value)


def test_each_question_is_scored_by_the_reward_it_names():
    table = RewardTable({"": MathReward(), "names": ExactReward()})
    own = Question("?", "0.5", {})
    other = Question("?", "0.5", {}, scorer="names")
    lost = Question("?", "0.5", {}, scorer="name")
    with RewardPool(table) as pool:
        rewards = pool.score([own, other, own, lost], [r"\boxed{1/2}"] * 4)
    assert rewards.values.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert rewards.raised == 1
    assert "must be one of ['', 'names'], got 'name'" in (rewards.first_failure or "")

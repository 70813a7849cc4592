import pytest

from logra_jax.rl.rewards import (
    ExactReward,
    MathReward,
    PythonReward,
    ReasoningGymReward,
)
from logra_jax.rl.tasks import Question
from logra_jax.training.checkpoint import check_resumable
from logra_jax.training.config import load_config
from logra_jax.training.schema_reward import RewardConfig
from logra_jax.training.scoring import build_reward, build_rewards, rewards_of


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text("model: {path: some-model}\ntrain: {steps: 3}\n")
    return lambda *overrides: load_config(path, overrides)


@pytest.mark.parametrize(
    ("source", "reward", "expected"),
    [
        ("reasoning_gym", {}, ReasoningGymReward("last_number")),
        ("hub", {}, MathReward()),
        ("file", {"kind": "math"}, MathReward()),
        ("reasoning_gym", {"kind": "math"}, MathReward()),
        (
            "reasoning_gym",
            {"answer": "whole_text", "partial": True},
            ReasoningGymReward("whole_text", partial=True),
        ),
        ("file", {"kind": "exact"}, ExactReward("final_answer")),
        ("file", {"kind": "exact", "answer": "last_boxed"}, ExactReward("last_boxed")),
        (
            "file",
            {"kind": "python", "function": "textwrap:shorten"},
            PythonReward("textwrap:shorten", "whole_text"),
        ),
    ],
)
def test_each_kind_builds_its_reward_and_auto_the_usual_one(source, reward, expected):
    assert build_reward(RewardConfig(**reward), source) == expected


def test_pool_of_a_config_has_its_memory_and_scores(load):
    config = load("reward.kind=math", "reward.memory=1.5", "reward.workers=2")
    with build_rewards(config) as pool:
        rewards = pool.score([Question("?", r"\frac12", {})], [r"\boxed{0.5}"])
    assert (rewards.values.tolist(), rewards.failed) == ([1.0], 0)


@pytest.mark.parametrize(
    ("source", "reward", "message"),
    [
        ("file", {"kind": "reasoning_gym"}, "`reward.kind` must be another where the"),
        ("file", {"partial": True}, "`reward.partial` must be false when"),
        ("file", {"answer": "last_number"}, "`reward.answer` must be auto when"),
        (
            "file",
            {"kind": "python", "function": "no_such_rewards:score"},
            "`reward.function` must name a module that can be imported, got",
        ),
    ],
)
def test_reward_that_does_not_fit_the_task_is_refused(source, reward, message):
    with pytest.raises(ValueError, match=message):
        build_reward(RewardConfig(**reward), source)


@pytest.mark.parametrize("kind", ["reasoning_gym", "python"])
def test_reward_that_does_not_fit_an_evaluation_set_is_refused_by_its_name(load, kind):
    of_set = ["source=aime", "name=all", f"reward={kind}"]
    config = load(*(f"eval.sets.hard.{override}" for override in of_set))
    with pytest.raises(ValueError, match=rf"`eval\.sets\.hard\.reward` .* '{kind}'"):
        rewards_of(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.kind=maths"], "one of auto, reasoning_gym, math, exact, python"),
        (["reward.kind=python"], "`reward.function` must be given with reward.kind"),
        (["reward.function=a:b"], "and only then, got 'a:b'"),
        (["reward.memory=0"], "`reward.memory` must be positive and finite, got 0.0"),
        (["reward.max_failed_share=1.5"], r"`reward.max_failed_share` must lie in"),
        (["reward.max_failed_share=-0.1"], r"must lie in \[0, 1\], got -0.1"),
        (["reward.kind=exact", "reward.partial=true"], "only reasoning-gym scorers"),
        (["reward.kind=math", "reward.answer=last_number"], "must be auto when"),
    ],
)
def test_bad_reward_values_are_one_sentence(load, overrides, message):
    with pytest.raises(ValueError, match=message):
        load(*overrides)


def test_resumed_run_may_change_limits_but_not_what_is_rewarded(load):
    check_resumable(load("reward.memory=null", "reward.max_failed_share=1"), load())
    with pytest.raises(ValueError, match=r"`reward.kind` must stay 'auto'"):
        check_resumable(load("reward.kind=math"), load())

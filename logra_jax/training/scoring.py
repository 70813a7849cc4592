"""From the config to the rewards: of the task, and of the evaluation sets."""

from dataclasses import replace

from logra_jax.rl.reward_pool import RewardPool
from logra_jax.rl.reward_worker import Reward
from logra_jax.rl.rewards import (
    ExactReward,
    MathReward,
    PythonReward,
    ReasoningGymReward,
    RewardTable,
)
from logra_jax.training.checks import require
from logra_jax.training.schema import Config
from logra_jax.training.schema_reward import RewardConfig


def build_rewards(config: Config) -> RewardPool:
    """The pool of scoring processes, for the task and all evaluation sets.

    Raises:
        ValueError: see :func:`rewards_of`.
    """
    reward, rewards = config.reward, rewards_of(config)
    return RewardPool(
        RewardTable(rewards) if len(rewards) > 1 else rewards[""],
        workers=reward.workers,
        timeout=reward.timeout,
        memory=reward.memory,
    )


def rewards_of(config: Config) -> dict[str, Reward]:
    """What scores the answers, by the scorer that a question names.

    That is "" for the task's own reward, and the name of an evaluation set for its.

    Raises:
        ValueError: `reward.function` names no function, or the kind of reward does not
            fit the questions.
    """
    reward = config.reward
    rewards = {"": build_reward(reward, config.task.source)}
    for name, one in config.eval.sets.items():
        if one.reward is not None:
            field = f"eval.sets.{name}.reward"
            require(
                one.reward != "python" or reward.kind == "python",
                field,
                one.reward,
                f"be another when `reward.kind` is {reward.kind}",
                "`reward.function` is the task's own reward",
            )
            own = replace(
                reward,
                kind=one.reward,
                answer="auto",
                partial=False,
                function=reward.function if one.reward == "python" else None,
            )
            rewards[name] = build_reward(own, one.source, field)
    return rewards


def reading_of(config: Config, scorer: str) -> str:
    """What of a response a scorer takes for the answer: see `logra_jax.rl.answers`."""
    return getattr(rewards_of(config)[scorer], "answer", "final_answer")


def build_reward(
    reward: RewardConfig, source: str, field: str = "reward.kind"
) -> Reward:
    """What scores the answers to questions of one source.

    Args:
        reward: the kind, and what of a response it scores.
        source: where the questions come from, such as "reasoning_gym".
        field: of the config, that names the kind, for complaints.

    Raises:
        ValueError: `reward.function` names no function, or the kind of reward does not
            fit the source.
    """
    own = source == "reasoning_gym"
    if reward.kind == "auto":
        # Held to the rules of the kind that it turns out to be.
        reward = replace(reward, kind="reasoning_gym" if own else "math")
    how = {} if reward.answer == "auto" else {"answer": reward.answer}
    if reward.kind == "math":
        return MathReward()
    if reward.kind == "exact":
        return ExactReward(**how)
    if reward.kind == "python":
        return PythonReward(reward.function or "", **how)
    require(
        own,
        field,
        reward.kind,
        "be another where the questions are not reasoning-gym's",
        "math or exact compare with the reference answer",
    )
    return ReasoningGymReward(partial=reward.partial, **how)

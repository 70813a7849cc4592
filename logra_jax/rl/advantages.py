"""Advantages: how much better than expected each response was."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

ADVANTAGES = ("running_mean", "grpo")


class RunningMean(NamedTuple):
    """State of :func:`running_mean`; start from ``RunningMean.zero()``."""

    total: Float32[Array, ""]  # decayed sum of rewards
    weight: Float32[Array, ""]  # decayed count of batches; 0 before the first

    @classmethod
    def zero(cls) -> "RunningMean":
        """State before the first batch."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def running_mean(
    rewards: Float[Array, " batch"], state: RunningMean, decay: float
) -> tuple[Float32[Array, " batch"], RunningMean]:
    r"""Reward minus a global moving average of past batches' mean reward.

    .. math::
        A_i = r_i - b, \qquad
        b = \textstyle\sum_{s<t} \gamma^{t-1-s} \bar r_s \big/ \sum_{s<t} \gamma^{t-1-s}

    The first batch, with no past, is measured against its own mean. One response per
    prompt is enough: no groups.

    Args:
        rewards: of one batch.
        state: of the batches before it.
        decay: gamma in ``[0, 1]``; 1 weighs all past batches alike.

    Reference: the baseline of LoGRA's experiments, arXiv:2610.06647.
    """
    rewards = rewards.astype(jnp.float32)
    mean = jnp.mean(rewards)
    seen = state.weight > 0
    baseline = jnp.where(seen, state.total / jnp.where(seen, state.weight, 1.0), mean)
    after = RunningMean(decay * state.total + mean, decay * state.weight + 1.0)
    return rewards - baseline, after


def grpo(
    rewards: Float[Array, " batch"], group: int, std_floor: float = 1e-2
) -> Float32[Array, " batch"]:
    r"""Reward standardised within its group of responses to one prompt.

    .. math:: A_i = (r_i - \bar r_g) / \max(\sigma_g, \sigma_{min})

    A group of equal rewards gets zeros.

    Args:
        rewards: of one batch, the responses of a prompt side by side.
        group: responses per prompt; divides the batch.
        std_floor: bound that keeps an almost constant group finite.

    Reference: GRPO, DeepSeekMath, arXiv:2402.03300.
    """
    if group < 1 or rewards.shape[0] % group:
        raise ValueError(
            f"`group` must divide the batch of {rewards.shape[0]} rewards, got {group}."
        )
    groups = rewards.astype(jnp.float32).reshape(-1, group)
    mean = jnp.mean(groups, -1, keepdims=True)
    deviation = jnp.std(groups, -1, keepdims=True)
    return ((groups - mean) / jnp.maximum(deviation, std_floor)).reshape(-1)

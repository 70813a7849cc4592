"""Advantages: how much better than expected each response was."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

STD_FLOOR = 1e-2
_ROUNDING = 8 * float(jnp.finfo(jnp.float32).eps)  # of a mean, relative


class RunningMean(NamedTuple):
    """State of :func:`running_mean`; start from ``RunningMean.zero()``.

    Example:
        >>> float(RunningMean.zero().weight)
        0.0
    """

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

    Example:
        >>> state = RunningMean.zero()
        >>> for rewards in ([0.0, 1.0], [1.0, 1.0]):
        ...     advantages, state = running_mean(jnp.array(rewards), state, decay=0.9)
        >>> advantages.tolist()  # against 0.5, the mean of the batch before
        [0.5, 0.5]

    Reference: the baseline of LoGRA's experiments, arXiv:2610.06647.
    """
    rewards = rewards.astype(jnp.float32)
    mean = jnp.mean(rewards)
    seen = state.weight > 0
    baseline = jnp.where(seen, state.total / jnp.where(seen, state.weight, 1.0), mean)
    after = RunningMean(decay * state.total + mean, decay * state.weight + 1.0)
    found = rewards - baseline
    # Rewards that never differ, such as 0.1, leave the rounding of their mean.
    is_rounding = jnp.abs(found) <= _ROUNDING * jnp.abs(baseline)
    return jnp.where(is_rounding, 0.0, found), after


def batch_mean(rewards: Float[Array, " batch"]) -> Float32[Array, " batch"]:
    r"""Reward minus the batch's mean: :math:`A_i = r_i - \bar r`.

    Example:
        >>> batch_mean(jnp.array([1.0, 0.0, 0.0, 1.0])).tolist()
        [0.5, -0.5, -0.5, 0.5]

    Reference: REINFORCE with a baseline, Williams, Machine Learning 8, 1992.
    """
    return _centred(rewards.astype(jnp.float32))


def grpo(
    rewards: Float[Array, " batch"], group: int, std_floor: float = STD_FLOOR
) -> Float32[Array, " batch"]:
    r"""Reward standardised within its group of responses to one prompt.

    .. math:: A_i = (r_i - \bar r_g) / \max(\sigma_g, \sigma_{min})

    A group of equal rewards gets zeros.

    Args:
        rewards: of one batch, the responses of a prompt side by side.
        group: responses per prompt; divides the batch.
        std_floor: bound that keeps an almost constant group finite.

    Raises:
        ValueError: ``group`` does not divide the batch.

    Example:
        >>> grpo(jnp.array([1.0, 0.0, 1.0, 1.0]), group=2).tolist()
        [1.0, -1.0, 0.0, 0.0]

    Reference: GRPO, DeepSeekMath, arXiv:2402.03300.
    """
    groups = _groups(rewards, group)
    deviation = jnp.std(groups, -1, keepdims=True)
    return (_centred(groups) / jnp.maximum(deviation, std_floor)).reshape(-1)


def dr_grpo(rewards: Float[Array, " batch"], group: int) -> Float32[Array, " batch"]:
    r"""Reward minus its group's mean, not divided: :math:`A_i = r_i - \bar r_g`.

    Dividing by a group's deviation makes much of prompts that are almost always, or
    almost never, answered. Its paper also divides the loss by a constant number of
    tokens: ``rl.aggregation=constant``.

    Args and errors are those of :func:`grpo`.

    Example:
        >>> dr_grpo(jnp.array([1.0, 0.0, 1.0, 1.0]), group=2).tolist()
        [0.5, -0.5, 0.0, 0.0]

    Reference: Dr. GRPO, arXiv:2503.20783.
    """
    return _centred(_groups(rewards, group)).reshape(-1)


def rloo(rewards: Float[Array, " batch"], group: int) -> Float32[Array, " batch"]:
    r"""Reward minus the mean of the *other* responses to its prompt.

    .. math:: A_i = r_i - \frac{1}{n-1} \sum_{j \ne i} r_j
                  = \frac{n}{n-1} (r_i - \bar r_g)

    A baseline that does not hang on the response itself keeps the gradient unbiased.

    Args and errors are those of :func:`grpo`; a group has at least two responses.

    Example:
        >>> rloo(jnp.array([1.0, 0.0, 1.0, 1.0]), group=2).tolist()
        [1.0, -1.0, 0.0, 0.0]

    Reference: RLOO, arXiv:2402.14740 (Kool et al., 2019).
    """
    if group < 2:
        raise ValueError(
            f"`group` must be at least 2, got {group}: one response has no others to "
            "be measured against."
        )
    return dr_grpo(rewards, group) * (group / (group - 1))


def reinforce_pp(
    rewards: Float[Array, " batch"], group: int = 1, std_floor: float = STD_FLOOR
) -> Float32[Array, " batch"]:
    r"""Reward standardised over the whole batch.

    .. math:: A_i = (d_i - \bar d) / \max(\sigma_d, \sigma_{min})

    with :math:`d_i = r_i`, or where a prompt has several responses
    :math:`d_i = r_i - \bar r_g`. The deviation of a batch is no small-sample estimate,
    as that of a group is.

    Args and errors are those of :func:`grpo`.

    Example:
        >>> reinforce_pp(jnp.array([1.0, 0.0, 0.0, 1.0])).tolist()
        [1.0, -1.0, -1.0, 1.0]

    Reference: REINFORCE++ and its baseline form, arXiv:2501.03262.
    """
    groups = _groups(rewards, group)
    return whiten((groups if group == 1 else _centred(groups)).reshape(-1), std_floor)


def whiten(
    advantages: Float[Array, " batch"], std_floor: float = STD_FLOOR
) -> Float32[Array, " batch"]:
    r"""Advantages shifted and scaled to mean 0 and deviation 1 over the batch.

    .. math:: (A_i - \bar A) / \max(\sigma_A, \sigma_{min})

    Example:
        >>> whiten(jnp.array([3.0, 1.0])).tolist()
        [1.0, -1.0]
    """
    centred = batch_mean(advantages)
    return centred / jnp.maximum(jnp.std(centred), std_floor)


def _groups(rewards: Array, group: int) -> Float32[Array, "prompts group"]:
    if group < 1 or rewards.shape[0] % group:
        raise ValueError(
            f"`group` must divide the batch of {rewards.shape[0]} rewards, got {group}."
        )
    return rewards.astype(jnp.float32).reshape(-1, group)


def _centred(groups: Array) -> Array:
    # From one of them first: equal rewards, such as 0.1, then give zeros and not the
    # rounding of their mean, of which a step of the whole KL budget would be made.
    groups = groups - groups[..., :1]
    return groups - jnp.mean(groups, -1, keepdims=True)

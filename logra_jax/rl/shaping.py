"""From scores to rewards: penalties for length, bounds; and which groups teach."""

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

Scores = Float[np.ndarray, " batch"]


def overlong_penalty(
    lengths: Int[np.ndarray, " batch"], *, limit: int, buffer: int, penalty: float = 1.0
) -> Float32[np.ndarray, " batch"]:
    r"""What a response's length takes off its score: nothing, until near the limit.

    .. math::
        \text{penalty} \cdot
        \operatorname{clip}\Big(\frac{n - (L - b)}{b},\; 0,\; 1\Big)

    Args:
        lengths: n, tokens, the end of sequence included.
        limit: L, the length at which responses are cut, tokens.
        buffer: b, tokens before the limit over which the penalty rises.
        penalty: of a response of the full length.

    Reference: soft overlong punishment, DAPO, arXiv:2503.14476, equation 13.

    Example:
        >>> overlong_penalty(np.array([50, 80, 90, 100]), limit=100, buffer=20)
        array([0. , 0. , 0.5, 1. ], dtype=float32)
    """
    over = (lengths - (limit - buffer)) / buffer
    return (penalty * np.clip(over, 0.0, 1.0)).astype(np.float32)


def shape_rewards(
    scores: Scores,
    lengths: Int[np.ndarray, " batch"],
    finished: Bool[np.ndarray, " batch"],
    *,
    limit: int,
    truncated_reward: float | None = None,
    buffer: int | None = None,
    penalty: float = 1.0,
    low: float | None = None,
    high: float | None = None,
) -> Float32[np.ndarray, " batch"]:
    """The rewards that scores become, in this order.

    A response that was cut gets ``truncated_reward``, where there is one; the
    :func:`overlong_penalty` is taken off, where there is a ``buffer``; the rest is
    brought inside ``low`` and ``high``.

    Args:
        scores: of the responses.
        lengths: tokens.
        finished: whether a response came to its end before the limit.
        limit: tokens at which a response is cut.
        truncated_reward: of those; None leaves them their scores.
        buffer: of the penalty, tokens; None is no penalty.
        penalty: the largest.
        low: smallest reward; None is no bound.
        high: largest reward; None is no bound.
    """
    rewards = scores.astype(np.float32)
    if truncated_reward is not None:
        rewards = np.where(finished, rewards, np.float32(truncated_reward))
    if buffer is not None:
        rewards = rewards - overlong_penalty(
            lengths, limit=limit, buffer=buffer, penalty=penalty
        )
    if low is not None or high is not None:
        rewards = np.clip(rewards, low, high)
    return rewards.astype(np.float32)


def is_mixed(rewards: Scores, group: int) -> Bool[np.ndarray, " groups"]:
    """Which prompts' responses differ in reward: the others give no gradient.

    Args:
        rewards: the responses of a prompt side by side.
        group: responses per prompt.

    Reference: dynamic sampling, DAPO, arXiv:2503.14476.

    Example:
        >>> is_mixed(np.array([1.0, 1.0, 0.0, 1.0]), 2)
        array([False,  True])
    """
    groups = rewards.reshape(-1, group)
    return groups.max(axis=1) > groups.min(axis=1)

"""What the responses of one update look like, in numbers."""

from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Float, Int

from logra_jax.rl.reward_pool import Rewards
from logra_jax.rollout.types import Completions

_GRAM = 4  # tokens
_TICK = 1e-6  # seconds, of a clock
# An odd multiplier: products modulo 2^64 tell sequences of tokens apart.
_MIX = np.uint64(0x9E3779B97F4A7C15)


def rollout_metrics(completions: Completions, rewards: Rewards) -> dict[str, float]:
    """Metrics of a batch, under the journal's keys.

    - ``reward``: mean; ``reward/raised``, ``reward/timed_out``: responses;
    - ``length/mean``: tokens; ``length/truncated``: share cut at the length limit;
    - ``reward/scored``: responses; ``rate/scored``: of them a second, from the first
      that was handed over to the last verdict;
    - ``rollout/repetition``: mean of :func:`repetition`.
    """
    repeated = repetition(completions.tokens, completions.lengths)
    return {
        "reward": float(np.mean(rewards.values)),
        "reward/raised": rewards.raised,
        "reward/timed_out": rewards.timed_out,
        "length/mean": float(np.mean(completions.lengths)),
        "length/truncated": float(np.mean(~completions.finished)),
        "reward/scored": len(rewards.values),
        "rate/scored": len(rewards.values) / max(rewards.seconds, _TICK),
        "rollout/repetition": float(np.mean(repeated)),
    }


def responses_per_second(rows: Iterable[Mapping[str, float | int]]) -> float:
    """How fast responses were scored, by a journal's rows; NaN where none was."""
    scored = [row for row in rows if "rate/scored" in row]
    seconds = sum(row["reward/scored"] / row["rate/scored"] for row in scored)
    return sum(row["reward/scored"] for row in scored) / seconds if scored else np.nan


def repetition(
    tokens: Int[np.ndarray, "batch time"], lengths: Int[np.ndarray, " batch"]
) -> Float[np.ndarray, " batch"]:
    """Share of a response's 4-grams that it has used before: 1 - distinct / all.

    It nears 1 in a response that has fallen into a loop, whatever the loop's length,
    and 0 has none. ``seq-rep-4`` of Welleck et al. 2019 (arXiv:1908.04319).

    Args:
        tokens: of the responses; what stands past ``lengths`` does not matter.
        lengths: tokens of each; one of fewer than 4 repeats nothing.

    Example:
        >>> repetition(np.array([[1, 2, 1, 2, 1, 2, 1, 2, 1]]), np.array([9]))
        array([0.66666667])
    """
    shares = np.zeros(len(tokens))
    for i, (row, length) in enumerate(zip(tokens, lengths, strict=True)):
        count = int(length) - _GRAM + 1
        if count > 0:
            words = row[: int(length)].astype(np.uint64)
            grams = np.zeros(count, np.uint64)
            for offset in range(_GRAM):
                grams = grams * _MIX + words[offset : offset + count]
            shares[i] = 1 - len(np.unique(grams)) / count
    return shares

"""What several answers to each question say of a policy: mean, best of k, vote of k.

Answers to one question are not independent, and two policies differ by question. So
standard errors are clustered: they say how much a figure would differ with other
questions (and other samples), by the spread between questions (Miller 2024,
arXiv:2411.00640).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean with its uncertainty."""

    mean: float
    se: float  # standard error, clustered by question; NaN of a single question
    n: int  # answers that it is made of


def clustered_mean(scores: Sequence[Sequence[float]]) -> Estimate:
    """Mean score of all answers, and its standard error over questions.

    With Q questions, n_q answers to each and N in all,

        se² = Q / (Q - 1) · sum_q (n_q (mean_q - mean))² / N²,

    which is the variance between question means over Q where all n_q are equal.

    Args:
        scores: of the answers to each question; at least one answer each.

    Example:
        >>> clustered_mean([[1.0, 1.0], [0.0, 0.0]])
        Estimate(mean=0.5, se=0.5, n=4)
    """
    n = sum(map(len, scores))
    mean = math.fsum(x for answers in scores for x in answers) / n
    if len(scores) < 2:
        return Estimate(mean, math.nan, n)
    off = math.fsum(math.fsum(x - mean for x in answers) ** 2 for answers in scores)
    return Estimate(mean, math.sqrt(off * len(scores) / (len(scores) - 1)) / n, n)


def macro_mean(families: Iterable[Estimate]) -> Estimate:
    """Mean of families' means, each family counting alike; they are independent."""
    families = list(families)
    variance = math.fsum(family.se**2 for family in families)
    return Estimate(
        math.fsum(family.mean for family in families) / len(families),
        math.sqrt(variance) / len(families),
        sum(family.n for family in families),
    )


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Expected best score among k of n answers to a question: pass@k.

    Of answers that are right (1) or wrong (0), c of them right, this is the unbiased

        pass@k = 1 - C(n - c, k) / C(n, k)

    of Chen et al. 2021 (arXiv:2107.03374); in general, with scores in ascending order,
    the sum over i of score_i C(i - 1, k - 1) / C(n, k). With k = 1 it is the mean.

    Args:
        scores: of n answers.
        k: inside 1..n.

    Raises:
        ValueError: there are fewer than k answers, or k < 1.

    Example:
        >>> best_of_k([1.0, 0.0, 0.0, 0.0], 2)
        0.5
    """
    n = len(scores)
    _check_k(k, n)
    ways = math.comb(n, k)
    ascending = enumerate(sorted(scores))
    return math.fsum(x * (math.comb(i, k - 1) / ways) for i, x in ascending)


def vote_of_k(votes: Sequence[tuple[str | None, float]], k: int) -> float:
    """Expected score of the commonest answer among k of n samples: maj@k.

    The mean over all draws of k samples without replacement, exact: what is level wins
    alike often, samples without an answer do not vote, and where none votes the score
    is 0. An answer's score is the mean of its samples'.

    That k of n fall on answers in given numbers has the probability of independent
    binomials of rate k/n given that they sum to k. For each number of samples that the
    winner may have, the sum over all others is a product of polynomials.

    Args:
        votes: answer (None: the sample has none) and score of n samples.
        k: inside 1..n.

    Raises:
        ValueError: there are fewer than k samples, or k < 1.

    Example:
        >>> vote_of_k([("5", 1.0), ("5", 1.0), ("6", 0.0)], 3)
        1.0
        >>> vote_of_k([("5", 1.0), ("6", 0.0), (None, 0.0)], 3)
        0.5
    """
    n = len(votes)
    _check_k(k, n)
    scores: dict[str, list[float]] = {}
    for answer, score in votes:
        if answer is not None:
            scores.setdefault(answer, []).append(score)
    silent = n - sum(map(len, scores.values()))
    total = 0.0
    for answer, own in scores.items():
        if any(own):
            others = sorted(len(s) for name, s in scores.items() if name != answer)
            won = _chance_to_win(len(own), tuple(others), silent, k)
            total += won * math.fsum(own) / len(own)
    return total


@functools.lru_cache(4096)
def _chance_to_win(own: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Chance that an answer of ``own`` samples is the commonest of k drawn."""
    n = own + sum(others) + silent
    if k == n:
        most = max(own, *others, 0)
        return 1 / [own, *others].count(most) if own == most else 0.0
    chance = functools.partial(_binomial, rate=k / n)
    won = 0.0
    for drawn in range(1, min(own, k) + 1):
        room = k - drawn + 1
        # [other answers level with ours, samples of other answers]: probability
        ways = np.zeros((k // drawn, room))
        ways[0, 0] = 1.0
        for other in others:
            before, ways = ways, np.zeros_like(ways)
            for i in range(min(other, drawn, room - 1) + 1):
                up = int(i == drawn)
                moved = before[: len(ways) - up, : room - i]
                ways[up:, i:] += chance(i, other) * moved
        rest = [chance(k - drawn - i, silent) for i in range(room)]
        level = ways @ np.array(rest)
        won += chance(drawn, own) * float(np.sum(level / np.arange(1, len(level) + 1)))
    return won / chance(k, n)


@functools.lru_cache(65536)
def _binomial(i: int, n: int, rate: float) -> float:
    """Chance of ``i`` of ``n``, with 0 < ``rate`` < 1."""
    if i > n:
        return 0.0
    ways = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
    return math.exp(ways + i * math.log(rate) + (n - i) * math.log1p(-rate))


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(
            f"`k` must lie in 1 to the number of answers ({n}), got {k}; sample more "
            "answers to each question."
        )

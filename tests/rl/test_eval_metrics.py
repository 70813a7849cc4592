"""Against enumeration of all draws, and numbers worked out by hand."""

import itertools
import math
import statistics
from collections import Counter

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from logra_jax.rl.eval_metrics import (
    Estimate,
    best_of_k,
    clustered_mean,
    macro_mean,
    vote_of_k,
)

SCORES = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=8)
VOTES = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.sampled_from([0.0, 1.0])),
    min_size=1,
    max_size=8,
)


def brute_vote(votes, k: int) -> float:
    means = {
        answer: statistics.fmean(s for a, s in votes if a == answer)
        for answer, _ in votes
    }
    results = []
    for drawn in itertools.combinations(votes, k):
        counts = Counter(answer for answer, _ in drawn if answer is not None)
        most = max(counts.values(), default=0)
        winners = [answer for answer, count in counts.items() if count == most]
        won = [means[answer] for answer in winners]
        results.append(statistics.fmean(won) if won else 0.0)
    return statistics.fmean(results)


@hypothesis.given(SCORES)
def test_best_of_k_is_the_mean_best_of_all_draws(scores):
    for k in range(1, len(scores) + 1):
        bests = [max(drawn) for drawn in itertools.combinations(scores, k)]
        assert best_of_k(scores, k) == pytest.approx(statistics.fmean(bests))


@pytest.mark.parametrize(("n", "c", "k"), [(10, 3, 1), (10, 3, 5), (200, 7, 100)])
def test_of_right_and_wrong_answers_it_is_chen_s_pass_at_k(n: int, c: int, k: int):
    scores = [1.0] * c + [0.0] * (n - c)
    # their own way to write it, which takes no large number
    chen = 1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))
    assert best_of_k(scores, k) == pytest.approx(chen, rel=1e-12)


def test_by_hand():
    # 4 answers, 1 right: pairs with it 3 of 6
    assert best_of_k([0.0, 0.0, 1.0, 0.0], 2) == 0.5
    # a a b: of the 3 pairs one is aa, two are level
    votes = [("a", 1.0), ("a", 1.0), ("b", 0.0)]
    assert vote_of_k(votes, 2) == pytest.approx(1 / 3 + 2 / 3 / 2)
    assert vote_of_k(votes, 1) == pytest.approx(2 / 3)
    # silent samples are drawn, but do not vote: -, a- and a- of 3 pairs
    assert vote_of_k([("a", 1.0), (None, 0.0), (None, 0.0)], 2) == pytest.approx(2 / 3)


@hypothesis.given(VOTES)
def test_vote_of_k_is_the_mean_over_all_draws(votes):
    for k in range(1, len(votes) + 1):
        assert vote_of_k(votes, k) == pytest.approx(brute_vote(votes, k), abs=1e-12)


@hypothesis.given(SCORES)
def test_k_of_one_is_the_mean_and_more_answers_are_never_worse(scores):
    assert best_of_k(scores, 1) == pytest.approx(statistics.fmean(scores))
    bests = [best_of_k(scores, k) for k in range(1, len(scores) + 1)]
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(bests))


def test_thousands_of_samples_neither_overflow_nor_vanish():
    votes = [("a", 1.0)] * 1200 + [("b", 0.0)] * 1100
    random = np.random.default_rng(0)
    wins = random.hypergeometric(1200, 1100, 101, 20000) > 50
    got = vote_of_k(votes, 101)
    assert got == pytest.approx(np.mean(wins), abs=4 * np.std(wins) / 141)
    other = vote_of_k([(a, 1 - s) for a, s in votes], 101)
    assert got + other == pytest.approx(1, abs=1e-9)  # 101 samples are never level
    assert 0 < best_of_k([1.0] + [0.0] * 4999, 1000) < 0.21


@pytest.mark.parametrize("k", [0, 4])
def test_a_k_that_cannot_be_drawn_is_refused(k: int):
    with pytest.raises(ValueError, match=rf"`k` must lie in 1 to .*\(3\), got {k}"):
        best_of_k([1.0, 0.0, 0.0], k)
    with pytest.raises(ValueError, match="`k` must lie"):
        vote_of_k([("a", 1.0)] * 3, k)


def test_errors_are_those_of_question_means():
    scores = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    means = [statistics.fmean(s) for s in scores]
    got = clustered_mean(scores)
    assert got == Estimate(0.5, pytest.approx(statistics.stdev(means) / 2), 8)
    # answering each question twice alike says nothing new
    assert clustered_mean([s + s for s in scores]).se == pytest.approx(got.se)
    assert math.isnan(clustered_mean([[1.0, 0.0]]).se)


def test_the_error_is_what_other_questions_would_change():
    """Of 2,000 repetitions with uneven numbers of answers; a binomial error is 0.6."""
    random = np.random.default_rng(1)
    means, errors = [], []
    for _ in range(2000):
        rates = random.beta(0.5, 0.5, 40)
        counts = [4 + i % 2 for i in range(40)]
        scores = [
            list((random.random(c) < p).astype(float))
            for p, c in zip(rates, counts, strict=True)
        ]
        found = clustered_mean(scores)
        means.append(found.mean)
        errors.append(found.se)
    assert np.mean(np.square(errors)) == pytest.approx(np.var(means), rel=0.1)


def test_every_family_counts_alike():
    large = clustered_mean([[1.0], [1.0], [0.0], [0.0]])
    small = clustered_mean([[1.0], [1.0]])
    macro = macro_mean([large, small])
    assert macro == Estimate(0.75, pytest.approx(large.se / 2), 6)

from collections import Counter

import pytest
from reasoning_gym.factory import create_curriculum

from logra_jax.rl.reasoning_gym_tasks import Family, level_options, mixed_questions
from logra_jax.rl.rewards import ReasoningGymReward

SUMS = {"max_terms": 2, "max_digits": 1}


def mix(*families, size=30, seed=0):
    return mixed_questions(families, size=size, seed=seed)


def test_a_mix_spreads_its_size_by_weight_and_names_each_family():
    families = [Family("chain_sum", SUMS, weight=2.0), Family("gcd"), Family("lcm")]
    counts = Counter(question.family for question in mix(*families, size=40))
    assert counts == {"chain_sum": 20, "gcd": 10, "lcm": 10}


def test_a_family_asks_the_same_alone_as_in_a_mix():
    alone = mix(Family("gcd"), size=10)
    mixed = mix(Family("chain_sum", SUMS), Family("gcd"), size=20)
    assert mixed[10:] == alone
    assert mix(Family("gcd"), size=10) == alone
    assert mix(Family("gcd"), size=10, seed=1) != alone


def test_a_level_is_that_of_the_curriculum_and_options_win_over_it():
    terms = create_curriculum("chain_sum").get_attribute("num_terms").levels
    for level in range(len(terms)):
        assert level_options("chain_sum", level)["max_terms"] == terms[level]
    asked = mix(Family("chain_sum", {"min_terms": 4, "max_terms": 4}, 2), size=20)
    assert {q.entry["metadata"]["num_terms"] for q in asked} == {4}
    digits = [q.entry["metadata"]["num_digits"] for q in asked]
    assert max(digits) > max(
        q.entry["metadata"]["num_digits"] for q in mix(Family("chain_sum", {}, 0))
    )


def test_the_default_is_no_level():
    assert mix(Family("chain_sum")) != mix(Family("chain_sum", {}, 0))


def test_every_gold_answer_scores_1_by_the_scorer_of_its_family():
    for question in mix(Family("gcd"), Family("lcm"), Family("chain_sum", {}, 1)):
        assert ReasoningGymReward("whole_text")(question, question.answer)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (Family("gcdd"), "must be a reasoning-gym data set, got 'gcdd'; did you mean"),
        (Family("gcd", {}, 99), r"`level` must lie in \[0, \d\] for gcd, got 99"),
        (Family("gcd", {}, -1), r"`level` must lie in \[0, \d\] for gcd, got -1"),
        (Family("gsm_symbolic", {}, 0), "must be null for gsm_symbolic, which has no"),
        (Family("gcd", {"max_valu": 3}), "got 'max_valu'; did you mean 'max_value'?"),
        (Family("gcd", weight=1e-9), "gives? every family|gets none"),
        # Its own curriculum sets what the data set then refuses.
        (Family("modulo_grid", {}, 1), "`options` of modulo_grid were refused"),
    ],
)
def test_a_bad_family_is_refused_in_one_sentence(family, message):
    with pytest.raises(ValueError, match=message) as caught:
        mix(Family("lcm"), family)
    assert "\n" not in str(caught.value)

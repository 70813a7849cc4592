"""Classes, splits, duplicates and the stream, over questions made up at random."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.rl.tasks import (
    Question,
    apportion,
    distinct,
    draw,
    put_in_prompt,
    question_class,
    split,
    without,
)

WORDS = st.lists(
    st.sampled_from(["a", "b", "c", "+", "1", "2"]), min_size=1, max_size=4
)
QUESTIONS = st.lists(
    st.builds(
        lambda words, answer, family: ask(" ".join(words), answer, family),
        WORDS,
        st.sampled_from("xy"),
        st.sampled_from(("", "f", "g")),
    ),
    max_size=30,
)


def ask(text, answer="", family=""):
    return Question(text, answer, {"question": text}, family=family)


def classes(questions):
    return {question_class(question) for question in questions}


@given(QUESTIONS, st.sampled_from((0.2, 0.5, 0.8)), st.integers(0, 3))
def test_a_split_keeps_every_question_once_and_no_class_on_both_sides(
    questions, share, seed
):
    questions, _ = distinct(questions, contradictions=True)
    try:
        train, held_out = split(questions, share, seed)
    except ValueError as error:
        assert "leaves no" in str(error)  # noqa: PT017
        return
    assert classes(train).isdisjoint(classes(held_out))
    assert Counter(train + held_out) == Counter(questions)
    order = {question: i for i, question in enumerate(questions)}
    for side in (train, held_out):
        assert [order[q] for q in side] == sorted(order[q] for q in side)


@given(st.lists(st.integers(8, 30), min_size=1, max_size=5), st.integers(0, 5))
def test_each_family_holds_out_its_part_of_the_share(sizes, seed):
    questions = [
        ask(f"f{family} q{i}", family=str(family))
        for family, size in enumerate(sizes)
        for i in range(size)
    ]
    train, held_out = split(questions, 0.25, seed)
    assert len(held_out) == round(0.25 * len(questions))
    for family, size in enumerate(sizes):
        held = sum(q.family == str(family) for q in held_out)
        assert held in (int(0.25 * size), int(0.25 * size) + 1)
        assert 0 < held < size
    assert len(train) + len(held_out) == len(questions)


def test_another_seed_holds_out_other_questions_and_the_same_seed_the_same():
    questions = [ask(str(i)) for i in range(40)]
    assert split(questions, 0.5, 1) == split(questions, 0.5, 1)
    assert split(questions, 0.5, 1) != split(questions, 0.5, 2)


def test_no_share_holds_out_nothing():
    questions = [ask("a"), ask("b")]
    assert split(questions, 0.0, 0) == (tuple(questions), ())


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_outside_of_its_range_is_refused(share):
    with pytest.raises(ValueError, match=r"`held_out` must lie in \[0, 1\), got"):
        split([ask("a"), ask("b")], share, 0)


@given(st.integers(0, 10**6), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_parts_add_up_and_miss_their_ratio_by_less_than_one(total, weights):
    parts = apportion(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1 + 1e-6


@given(QUESTIONS)
def test_distinct_questions_and_those_dropped_make_up_all(questions):
    for contradictions in (True, False):
        kept, dropped = distinct(questions, contradictions=contradictions)
        assert len({q.text for q in kept}) == len(kept)
        assert len(kept) + sum(dropped.values()) == len(questions)
        answers = {
            q.text: {p.answer for p in questions if p.text == q.text} for q in kept
        }
        assert contradictions or all(len(given) == 1 for given in answers.values())
        firsts = [next(p for p in questions if p.text == q.text) for q in kept]
        assert list(kept) == firsts


def test_what_contradicts_itself_is_dropped_whole():
    questions = [ask("a", "1"), ask("b", "2"), ask("a", "3"), ask("b", "2")]
    kept, dropped = distinct(questions, contradictions=False)
    assert kept == (ask("b", "2"),)
    assert dropped == {"duplicate": 1, "contradictory": 2}


@given(QUESTIONS, QUESTIONS)
def test_nothing_left_is_of_a_class_of_the_others(questions, others):
    left = without(questions, others)
    assert classes(left).isdisjoint(classes(others))
    assert classes(left) | classes(others) >= classes(questions)
    assert without(questions, ()) == tuple(questions)


def test_a_prompt_around_a_question_changes_neither_its_class_nor_what_it_equals():
    plain = ask("3 + 5 = {x}?", "8")
    (asked,) = put_in_prompt([plain], r"{question} Use \boxed{}: {0}")
    assert asked.text == r"3 + 5 = {x}? Use \boxed{}: {0}"
    assert (
        question_class(asked)
        == question_class(plain)
        == question_class(ask("5 + 3 = {x}?"))
    )
    assert without([asked], [plain]) == ()
    _, dropped = distinct([plain, asked], contradictions=False)
    assert dropped == {"duplicate": 1}


@given(
    count=st.integers(1, 7),
    seed=st.integers(0, 3),
    group=st.integers(1, 3),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_batches_of_groups_cross_epochs_as_one_stream(count, seed, group, batches):
    """Positions are those of questions: how often each is answered moves none."""
    questions = [ask(str(i)) for i in range(count)]
    start, asked = 0, []
    for batch in batches:
        drawn = draw(questions, batch, seed=seed, start=start)
        asked += [question for question in drawn for _ in range(group)]
        start += batch
    whole = draw(questions, start, seed=seed, start=0)
    assert asked == [question for question in whole for _ in range(group)]
    for epoch in range(start // count):
        one = whole[epoch * count : (epoch + 1) * count]
        assert Counter(one) == Counter(questions)
    # A run that stops at an epoch's end goes on with the next one, whole.
    boundary = -(-start // count) * count
    following = draw(questions, count, seed=seed, start=boundary)
    assert Counter(following) == Counter(questions)

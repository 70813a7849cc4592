import os
import pickle
import re
import subprocess
import sys

import pytest

from logra_jax.rl.reasoning_gym_tasks import reasoning_gym_task
from logra_jax.rl.tasks import Question, draw

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
LETTERS = [Question(letter, letter.upper(), {}) for letter in "abcdefg"]


def sums(options=SUMS, *, size=400, seed=0, held_out=0.3):
    return reasoning_gym_task(
        "chain_sum", options, size=size, seed=seed, held_out=held_out
    )


def numbers(question):
    return tuple(
        sorted(re.findall(r"\d", question.text)) + re.findall("[+]", question.text)
    )


def test_questions_are_distinct_and_splits_disjoint():
    task = sums()
    texts = [q.text for q in task.train + task.held_out]
    assert len(set(texts)) == len(texts) > 100
    assert {q.text for q in task.train}.isdisjoint(q.text for q in task.held_out)


def test_commuted_questions_stay_on_one_side():
    task = sums()
    train = {numbers(q) for q in task.train}
    held_out = {numbers(q) for q in task.held_out}
    assert train.isdisjoint(held_out)
    # The property is empty unless commuted pairs were drawn at all.
    assert len(held_out) < len(task.held_out)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_share_held_out_is_the_share_asked_for(share):
    task = sums(held_out=share)
    total = len(task.train) + len(task.held_out)
    assert len(task.held_out) / total == pytest.approx(share, abs=0.06)


def test_entries_are_whole_and_picklable():
    question = sums(size=20).train[0]
    assert question.entry["question"] == question.text
    assert question.entry["answer"] == question.answer
    assert question.entry["metadata"]["num_terms"] == 2
    assert pickle.loads(pickle.dumps(question)).entry == question.entry


def test_same_arguments_give_the_same_task_in_another_process():
    code = (
        "from logra_jax.rl.reasoning_gym_tasks import reasoning_gym_task as task\n"
        f"print(task('chain_sum', {SUMS}, size=60, seed=3, held_out=0.3))"
    )
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, check=True, capture_output=True, text=True)
    assert other.stdout.strip() == repr(sums(size=60, seed=3))


# The first three ask in an order of Python's hashes, the last counts how often.
@pytest.mark.parametrize(
    "name",
    ["ransom_note", "word_ladder", "polynomial_multiplication", "list_functions"],
)
def test_what_varies_between_processes_in_reasoning_gym_does_not_here(name):
    code = (
        "from logra_jax.rl.reasoning_gym_tasks import reasoning_gym_task as task\n"
        f"print(task({name!r}, {{}}, size=6, seed=3, held_out=0.5))"
    )
    command = [sys.executable, "-c", code]
    hashes = os.environ | {"PYTHONHASHSEED": "7"}
    other = subprocess.run(
        command, check=True, capture_output=True, text=True, env=hashes
    )
    task = reasoning_gym_task(name, {}, size=6, seed=3, held_out=0.5)
    assert other.stdout.strip() == repr(task)


def test_another_seed_gives_another_task():
    assert sums(seed=1) != sums(seed=2)


def test_most_held_out_questions_stay_so_when_the_draw_grows():
    small, large = sums(size=100), sums(size=150)
    moved = set(small.held_out) & set(large.train)
    assert len(moved) < 0.35 * len(small.held_out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "`size` must be at least 1, got 0"),
        ({"seed": -1}, "`seed` must be at least 0, got -1"),
        ({"held_out": 0.0}, r"`held_out` must lie inside \(0, 1\), got 0.0"),
        ({"held_out": 1.0}, r"`held_out` must lie inside \(0, 1\), got 1.0"),
        ({"held_out": float("nan")}, r"`held_out` must lie inside \(0, 1\), got nan"),
        ({"size": 1}, "leaves no held-out question"),
        ({"size": 1, "held_out": 0.9}, "leaves no train question"),
        ({"options": {"max_term": 2}}, "got 'max_term'; did you mean 'max_terms'?"),
        ({"options": {"size": 2}}, "must not set `size`, got 2"),
        ({"options": {"min_terms": 9}}, "max_terms must be >= min_terms"),
        ({"options": {"min_terms": "two"}}, "`options` of chain_sum were refused"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        sums(**change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["chain_sums", "composite", ""])
def test_unknown_data_set_is_refused_with_the_nearest_name(name):
    with pytest.raises(ValueError, match=f"got '{name}'; did you mean '"):
        reasoning_gym_task(name, {}, size=2, seed=0, held_out=0.5)


def test_each_epoch_asks_every_question_once_in_its_own_order():
    stream = draw(LETTERS, 3 * len(LETTERS), seed=0, start=0)
    epochs = [stream[i : i + len(LETTERS)] for i in range(0, len(stream), len(LETTERS))]
    assert all(set(epoch) == set(LETTERS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("batch", [1, 3, 7, 16])
def test_batches_join_into_one_stream(batch):
    whole = draw(LETTERS, 48, seed=5, start=0)
    parts = [
        question
        for start in range(0, 48, batch)
        for question in draw(LETTERS, min(batch, 48 - start), seed=5, start=start)
    ]
    assert parts == whole


def test_position_far_into_the_stream_is_reached_at_once():
    assert draw(LETTERS, 2, seed=0, start=10**12)


def test_another_seed_asks_in_another_order():
    assert draw(LETTERS, 7, seed=0, start=0) != draw(LETTERS, 7, seed=1, start=0)


def test_nothing_is_drawn_when_nothing_is_asked():
    assert draw(LETTERS, 0, seed=0, start=3) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"questions": []}, "`questions` must hold at least one question"),
        ({"count": -1}, "`count` must be at least 0, got -1"),
        ({"start": -1}, "`start` must be at least 0, got -1"),
        ({"seed": -1}, "`seed` must be at least 0, got -1"),
    ],
)
def test_bad_draws_are_refused(change, message):
    arguments = {"questions": LETTERS, "count": 1, "seed": 0, "start": 0} | change
    with pytest.raises(ValueError, match=message):
        draw(**arguments)

"""Questions to learn from, and the order in which they are asked."""

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Question:
    """One question with what its scorer needs.

    Attributes:
        text: the user's message.
        answer: the reference answer; empty where the data set gives none because
            many answers are right.
        entry: the whole reasoning-gym entry (`question`, `answer`, `metadata`),
            picklable. Two questions are equal when text and answer are.
        family: of questions of one kind, over which accuracy is averaged: with
            reasoning-gym the data set's name.
        scorer: which of a run's rewards scores the answers: "" is the task's own,
            another is the name of an evaluation set that brings its own.
    """

    text: str
    answer: str
    entry: dict[str, Any] = field(compare=False, repr=False)
    family: str = field(default="", compare=False)
    scorer: str = field(default="", compare=False)


@dataclass(frozen=True)
class Task:
    """Questions to train on, and questions never trained on."""

    name: str
    train: tuple[Question, ...]
    held_out: tuple[Question, ...]


@dataclass(frozen=True)
class EvalSet:
    """Questions to measure a policy on, under a name of their own."""

    name: str
    questions: tuple[Question, ...]


def reasoning_gym_task(
    name: str,
    options: Mapping[str, Any],
    *,
    size: int,
    seed: int,
    held_out: float,
) -> Task:
    """Draws a reasoning-gym data set and splits it by question.

    A held-out question must not be answerable by having seen its twin, so questions
    made of the same tokens in another order (3 + 5 and 5 + 3) form one class and stay
    on one side. Classes are ranked by a hash of (`seed`, class) and the first
    `held_out` of them are held out. The result depends on the arguments alone.

    Args:
        name: a reasoning-gym data set, such as "chain_sum".
        options: its own options, such as `{"max_terms": 2}`; not `size` or `seed`.
        size: entries drawn, >= 1. Small data sets repeat themselves: only distinct
            questions are kept, in the order in which they first appear.
        seed: of the data set and of the split, >= 0.
        held_out: share of the question classes to hold out, inside (0, 1).

    Returns:
        The task; both of its splits hold at least one question.

    Raises:
        ValueError: an argument is out of range, the data set or an option is unknown
            or refused, or a split would be empty.
    """
    _check_at_least("size", size, 1)
    _check_at_least("seed", seed, 0)
    if not 0 < held_out < 1:
        raise ValueError(
            f"`held_out` must lie inside (0, 1), got {held_out}; 0.3 is a good start"
        )
    questions = _distinct_questions(name, options, size, seed)
    classes = sorted(
        {_question_class(q.text) for q in questions}, key=lambda c: _rank(seed, c)
    )
    kept_back = set(classes[: round(held_out * len(classes))])
    train = tuple(q for q in questions if _question_class(q.text) not in kept_back)
    rest = tuple(q for q in questions if _question_class(q.text) in kept_back)
    if not train or not rest:
        empty = "held-out" if train else "train"
        raise ValueError(
            f"`held_out` = {held_out} of {len(classes)} question classes leaves no "
            f"{empty} question; raise `size` ({size}), widen `options` or move "
            "`held_out` towards 0.5"
        )
    return Task(name, train, rest)


def draw(
    questions: Sequence[Question], count: int, *, seed: int, start: int
) -> list[Question]:
    """Reads positions `start` .. `start + count` of an endless stream.

    The stream goes through all `questions` in a fresh order each epoch, and the order
    of epoch e is a function of (`seed`, e) alone. So the data position of a run is one
    integer: to resume, go on from it.

    Args:
        questions: the questions of a task, at least one.
        count: how many to read, >= 0; the reading may cross epochs.
        seed: of the order, >= 0.
        start: the first position, >= 0.

    Returns:
        `count` questions.

    Raises:
        ValueError: no questions, or a negative number.

    Example:
        >>> letters = [Question(letter, "", {}) for letter in "abc"]
        >>> stream = draw(letters, 6, seed=0, start=0)
        >>> sorted(question.text for question in stream[:3])
        ['a', 'b', 'c']
        >>> stream[2:] == draw(letters, 4, seed=0, start=2)
        True
    """
    if not questions:
        raise ValueError("`questions` must hold at least one question, got none")
    for argument, value in (("count", count), ("seed", seed), ("start", start)):
        _check_at_least(argument, value, 0)
    drawn: list[Question] = []
    while len(drawn) < count:
        epoch, offset = divmod(start + len(drawn), len(questions))
        order = np.random.default_rng((seed, epoch)).permutation(len(questions))
        wanted = order[offset : offset + count - len(drawn)]
        drawn += [questions[index] for index in wanted]
    return drawn


def check_data_set(argument: str, name: str) -> None:
    """Raises a ValueError, with the nearest name, unless reasoning-gym has `name`."""
    from reasoning_gym.factory import DATASETS

    # "composite" mixes the others and has no scorer of its own.
    known = DATASETS.keys() - {"composite"}
    if name not in known:
        raise ValueError(
            f"`{argument}` must be a reasoning-gym data set, got {name!r}"
            f"{_nearest(name, known)}"
        )


def _distinct_questions(
    name: str, options: Mapping[str, Any], size: int, seed: int
) -> list[Question]:
    """The data set's distinct questions in the order in which they first appear."""
    check_data_set("name", name)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    known = {option.name for option in dataclasses.fields(DATASETS[name][1])}
    for option in options:
        if option in ("size", "seed"):
            raise ValueError(
                f"`options` must not set `{option}`, got {options[option]!r}; "
                f"it is an argument of the task itself"
            )
        if option not in known:
            raise ValueError(
                f"`options` of {name} must be options it has, got {option!r}"
                f"{_nearest(option, known - {'size', 'seed'})}"
            )
    try:
        data_set = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
        entries = [data_set[index] for index in range(size)]
    # The data sets check their options with `assert`, or find out while generating.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"`options` of {name} were refused, got {dict(options)}: {reason}"
        ) from error
    distinct: dict[str, Question] = {}
    for entry in entries:
        text, answer = entry["question"], entry["answer"]
        answer = "" if answer is None else str(answer)
        question = Question(text, answer, entry, family=name)
        distinct.setdefault(text, question)
    return list(distinct.values())


def _question_class(text: str) -> str:
    """The tokens of a question (words, numbers, symbols) in sorted order."""
    return " ".join(sorted(re.findall(r"\w+|[^\w\s]", text)))


def _rank(seed: int, question_class: str) -> bytes:
    """A hash by which to order classes: near-stable when `size` grows."""
    return hashlib.blake2b(f"{seed} {question_class}".encode()).digest()


def _nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name that was probably meant."""
    names = sorted(known)
    # A cutoff of 0 always offers one: somebody far off needs the hint most.
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else "; it has none"


def _check_at_least(argument: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"`{argument}` must be at least {least}, got {value}")

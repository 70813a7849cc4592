"""Questions to learn from, and the order in which they are asked.

Where they come from has rooms of its own: :mod:`~logra_jax.rl.reasoning_gym_tasks`,
:mod:`~logra_jax.rl.file_tasks`, :mod:`~logra_jax.rl.hub_tasks` and
:mod:`~logra_jax.rl.aime`.
"""

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

# In a prompt's template, where the question goes.
PLACE = "{question}"


@dataclass(frozen=True)
class Question:
    """One question with what its scorer needs.

    Attributes:
        text: the user's message.
        answer: the reference answer; empty where the data set gives none because
            many answers are right.
        entry: the whole reasoning-gym entry (`question`, `answer`, `metadata`),
            picklable; other sources fill in the same keys. Its `question` is the
            question without a prompt around it. Two questions are equal when text
            and answer are.
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
class EvalSet:
    """Questions to measure a policy on, under a name of their own.

    Attributes:
        name: of the set.
        questions: of the set.
        dropped: questions that the source gave and the set lacks, counted by reason.
    """

    name: str
    questions: tuple[Question, ...]
    dropped: Mapping[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Task:
    """Questions to train on, and questions never trained on.

    Attributes:
        name: of the data set.
        train: trained on.
        held_out: of the same data set, measured on; may be empty beside `eval_sets`.
        eval_sets: other questions to measure on, see `load_eval_sets`.
        dropped: questions that the source gave and neither split has, by reason.
    """

    name: str
    train: tuple[Question, ...]
    held_out: tuple[Question, ...]
    eval_sets: tuple[EvalSet, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict, compare=False)


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
        check_at_least(argument, value, 0)
    drawn: list[Question] = []
    while len(drawn) < count:
        epoch, offset = divmod(start + len(drawn), len(questions))
        order = np.random.default_rng((seed, epoch)).permutation(len(questions))
        wanted = order[offset : offset + count - len(drawn)]
        drawn += [questions[index] for index in wanted]
    return drawn


def split(
    questions: Sequence[Question], share: float, seed: int
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Splits questions into training and held-out ones, by class.

    A held-out question must not be answerable by having seen its twin: a whole
    :func:`question_class` stays on one side. Within each family the classes are ranked
    by a hash of (`seed`, class) and the first are held out, as many as the family's
    part of `share` (largest remainders make up the total).

    Args:
        questions: to split, in the order that both sides keep.
        share: of the question classes to hold out, inside [0, 1); 0 holds out none.
        seed: of the ranking, >= 0.

    Returns:
        Training questions, held-out questions.

    Raises:
        ValueError: an argument is out of range, or a side would be empty.
    """
    check_at_least("seed", seed, 0)
    if not 0 <= share < 1:
        raise ValueError(f"`held_out` must lie in [0, 1), got {share}; 0.3 is usual")
    class_of = {question: question_class(question) for question in questions}
    # A class belongs to the family that it is first seen in.
    family_of: dict[str, str] = {}
    for question in questions:
        family_of.setdefault(class_of[question], question.family)
    families: dict[str, list[str]] = {}
    for name, family in family_of.items():
        families.setdefault(family, []).append(name)
    counts = [len(classes) for classes in families.values()]
    parts = apportion(round(share * sum(counts)), counts)
    kept_back: set[str] = set()
    for classes, part in zip(families.values(), parts, strict=True):
        kept_back.update(sorted(classes, key=lambda c: _rank(seed, c))[:part])
    train = tuple(q for q in questions if class_of[q] not in kept_back)
    rest = tuple(q for q in questions if class_of[q] in kept_back)
    if not train or not (rest or share == 0):
        empty = "held-out" if train else "train"
        raise ValueError(
            f"`held_out` = {share} of {len(family_of)} question classes leaves no "
            f"{empty} question; ask for more questions, or move `held_out` towards 0.5"
        )
    return train, rest


def question_class(question: Question) -> str:
    """The tokens of a question (words, numbers, symbols) in sorted order.

    Questions made of the same tokens in another order (3 + 5 and 5 + 3) are of one
    class. The prompt around a question is no part of it.
    """
    return " ".join(sorted(re.findall(r"\w+|[^\w\s]", plain(question))))


def plain(question: Question) -> str:
    """The question without a prompt around it."""
    return question.entry.get("question", question.text)


def distinct(
    questions: Iterable[Question], *, contradictions: bool
) -> tuple[tuple[Question, ...], dict[str, int]]:
    """Each question once, where it first appears.

    Args:
        questions: may repeat themselves.
        contradictions: keep the first of questions whose answers differ, because many
            answers are right; False drops all of them: which one is right, if any, is
            not known.

    Returns:
        The questions, and how many others were dropped: "duplicate" counts repetitions,
        "contradictory" those whose answers differ.
    """
    copies: dict[str, list[Question]] = {}
    for question in questions:
        copies.setdefault(plain(question), []).append(question)
    kept: list[Question] = []
    dropped = {"duplicate": 0, "contradictory": 0}
    for same in copies.values():
        if contradictions or len({question.answer for question in same}) == 1:
            kept.append(same[0])
            dropped["duplicate"] += len(same) - 1
        else:
            dropped["contradictory"] += len(same)
    return tuple(kept), {reason: n for reason, n in dropped.items() if n}


def without(
    questions: Iterable[Question], others: Iterable[Question]
) -> tuple[Question, ...]:
    """Those questions of whose class none of the `others` is."""
    known = {question_class(question) for question in others}
    if not known:
        return tuple(questions)
    return tuple(q for q in questions if question_class(q) not in known)


def put_in_prompt(questions: Iterable[Question], template: str) -> tuple[Question, ...]:
    r"""The same questions, asked by a text that has :data:`PLACE` where they go.

    Example:
        >>> question = Question("1 + 1?", "2", {"question": "1 + 1?"})
        >>> put_in_prompt([question], r"{question} Answer in \boxed{}.")[0].text
        '1 + 1? Answer in \\boxed{}.'
    """
    # Not str.format: braces are common in LaTeX.
    return tuple(
        dataclasses.replace(q, text=template.replace(PLACE, q.text)) for q in questions
    )


def apportion(total: int, weights: Sequence[float | int]) -> list[int]:
    """Whole numbers in the ratio of `weights` that add up to `total`.

    Largest remainders (Hamilton's method): each gets its part rounded down, and those
    with the largest remainders one more, the earlier first.

    Example:
        >>> apportion(10, [1, 1, 2])
        [3, 2, 5]
    """
    exact = [Fraction(weight) for weight in weights]
    parts = [total * weight / sum(exact) for weight in exact]
    whole = [int(part) for part in parts]
    order = sorted(range(len(parts)), key=lambda i: whole[i] - parts[i])
    for index in order[: total - sum(whole)]:
        whole[index] += 1
    return whole


def check_data_set(argument: str, name: str) -> None:
    """Raises a ValueError, with the nearest name, unless reasoning-gym has `name`."""
    from reasoning_gym.factory import DATASETS

    # "composite" mixes the others and has no scorer of its own.
    known = DATASETS.keys() - {"composite"}
    if name not in known:
        raise ValueError(
            f"`{argument}` must be a reasoning-gym data set, got {name!r}"
            f"{nearest(name, known)}"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name that was probably meant."""
    names = sorted(known)
    # A cutoff of 0 always offers one: somebody far off needs the hint most.
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else "; it has none"


def check_at_least(argument: str, value: int, least: int) -> None:
    """Raises a ValueError unless `value` is `least` or more."""
    if value < least:
        raise ValueError(f"`{argument}` must be at least {least}, got {value}")


def _rank(seed: int, question_class: str) -> bytes:
    """A hash by which to order classes: near-stable when there are more of them."""
    return hashlib.blake2b(f"{seed} {question_class}".encode()).digest()

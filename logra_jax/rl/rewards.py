"""Rewards: callables `(question, text) -> float` that score a response.

`RewardPool` runs them where they can do no harm.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from logra_jax.rl.answers import READINGS, final_answer, last_boxed, read
from logra_jax.rl.math_answers import same_answer
from logra_jax.rl.math_verifier import forget
from logra_jax.rl.reward_worker import Reward
from logra_jax.rl.tasks import Question, check_data_set


def math(answer: str, gold: str) -> float:
    r"""Scores a response to a mathematical question against the reference answer.

    The response's answer is its last box; without one, what `answers.final_answer`
    finds (never the whole text). The two are compared by `math_answers`: a number must
    be written as one (2+3 is not 5, 4/8 is 1/2, 10% is not 10), an expression may be
    any equal one, a tuple keeps its order, units may be missing but not differ.

    It uses no signal, so that it works in any thread, and refuses what could take long
    without computing it. No guard is complete: for answers that nobody wrote, use
    `RewardPool`, which has a hard time limit.

    Args:
        answer: the response, or its answer alone.
        gold: the reference, with or without dollars or a box around it.

    Returns:
        1.0 if the answer is right, otherwise 0.0.

    Example:
        >>> math(r"So it is \boxed{\frac{4}{8}}.", "0.5")
        1.0
        >>> math("The total is $2+3$", "5")
        0.0
        >>> math(r"\boxed{(2, 1)}", "(1, 2)")
        0.0
    """
    given, wanted = final_answer(answer), last_boxed(gold) or gold
    return float(given is not None and same_answer(given, wanted))


@dataclass(frozen=True)
class MathReward:
    """:func:`math` of a response and the question's reference answer.

    What the response repeats of the question is no answer of its own.

    Example:
        >>> question = Question("What is 2 + 3?", "5", {})
        >>> reward = MathReward()
        >>> reward(question, "It is 5."), reward(question, "2 + 3 it is.")
        (1.0, 0.0)
    """

    def prepare(self) -> None:
        """Imports the computer algebra; `RewardPool` calls it in each worker."""
        math(r"\boxed{2\pi}", r"\pi \cdot 2")

    def __call__(self, question: Question, text: str) -> float:
        """1 for a right answer, 0 for any other."""
        score = math(_without(text, question.text), question.answer)
        _forget_now_and_then()
        return score


@dataclass(frozen=True)
class ExactReward:
    """1 where the answer is the reference, word for word, otherwise 0.

    Case, white space, and punctuation at both ends do not count.

    Attributes:
        answer: what of the response is compared, as `answers.read` knows it.

    Raises:
        ValueError: `answer` is unknown.
    """

    answer: str = "final_answer"

    def __post_init__(self) -> None:
        _check_reading(self.answer)

    def __call__(self, question: Question, text: str) -> float:
        """The reward; 0 where the response or the reference is empty."""
        given = _normal(read(_without(text, question.text), self.answer) or "")
        return float(bool(given) and given == _normal(question.answer))


@dataclass(frozen=True)
class PythonReward:
    """A function of the user's own, `score(answer: str, question: Question) -> float`.

    `answer` is what of the response is to be scored, "" where there is none;
    `question.text`, `question.answer` (the reference) and `question.entry` are there to
    score it by. The module is looked for in the working directory, too.

    Attributes:
        function: "module:function".
        answer: what of the response the function is given, as `answers.read`
            knows it; all of it by default.

    Raises:
        ValueError: there is no such function, or `answer` is unknown.
    """

    function: str
    answer: str = "whole_text"

    def __post_init__(self) -> None:
        _check_reading(self.answer)
        _find(self.function)

    def prepare(self) -> None:
        """Imports the module; `RewardPool` calls it in each worker."""
        _find(self.function)

    def __call__(self, question: Question, text: str) -> float:
        """What the function gives."""
        return float(_find(self.function)(read(text, self.answer) or "", question))


@dataclass(frozen=True)
class RewardTable:
    """Lets each question be scored by the reward that it names.

    Attributes:
        rewards: by the name in `question.scorer`; "" is the task's own.

    Raises:
        ValueError: when called, that the question names a reward that is not there.

    Example:
        >>> table = RewardTable({"": MathReward(), "trivia": ExactReward()})
        >>> table(Question("Who?", "Ada", {}, scorer="trivia"), "ada.")
        1.0
    """

    rewards: Mapping[str, Reward]

    def prepare(self) -> None:
        """Prepares each of the rewards."""
        for reward in self.rewards.values():
            prepare = getattr(reward, "prepare", None)
            if prepare is not None:
                prepare()

    def __call__(self, question: Question, text: str) -> float:
        """The reward that the question's own scorer gives."""
        if question.scorer not in self.rewards:
            raise ValueError(
                f"`scorer` must be one of {sorted(self.rewards)}, got "
                f"{question.scorer!r}; give the table a reward of that name"
            )
        return self.rewards[question.scorer](question, text)


@dataclass(frozen=True)
class ReasoningGymReward:
    """Scores a response by the scorer of the data set that its question comes from.

    That is `question.family`: the questions of one task may come from several.

    Attributes:
        answer: what of the response is scored, as `logra_jax.rl.answers.read` knows
            it, such as its "last_number" or the "whole_text".
        partial: False gives 1 to what the scorer finds fully right and 0 to the rest,
            because most scorers give credit to any answer that contains the right one
            ("15" for "5" is worth 0.5). True passes the scorer's number on.

    Raises:
        ValueError: `answer` is unknown; when called, that the family is no data set.
    """

    answer: str = "last_number"
    partial: bool = False

    def __post_init__(self) -> None:
        _check_reading(self.answer)

    def prepare(self) -> None:
        """Imports the scorers; `RewardPool` calls it in each worker."""
        import reasoning_gym  # noqa: F401

    def __call__(self, question: Question, text: str) -> float:
        """The reward, inside [0, 1]; 0 where the response holds no answer."""
        answer = read(text, self.answer)
        if not answer:
            return 0.0
        score = _scorer(question.family)(answer, question.entry)
        return float(score) if self.partial else float(score == 1.0)


@functools.cache
def _scorer(dataset: str) -> Callable[..., float]:
    check_data_set("family", dataset)
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(dataset)


def _check_reading(answer: str) -> None:
    if answer not in READINGS:
        raise ValueError(
            f"`answer` must be one of {', '.join(READINGS)}, got {answer!r}"
        )


def _without(text: str, question: str) -> str:
    """A response without the repeated question, whose boxes are no answers."""
    return text.replace(question, " ") if question.strip() else text


def _normal(text: str) -> str:
    return " ".join(text.split()).strip(" .,;:!?\"'`*_$").casefold()


_FORGET_AFTER = 500
_scored = 0


def _forget_now_and_then() -> None:
    global _scored
    _scored += 1
    if _scored % _FORGET_AFTER == 0:
        forget()


def _where(module: str, error: Exception) -> str:
    """Where a module that is not there should be, or what it should be called."""
    root = module.partition(".")[0]
    if module.endswith(".py") and isinstance(error, ModuleNotFoundError):
        return f"; leave out the .py: {module.removesuffix('.py')}"
    if isinstance(error, ModuleNotFoundError) and error.name == root:
        return f"; the working directory, {os.getcwd()}, has no {root}.py"
    return ""


@functools.cache
def _find(function: str) -> Callable[..., float]:
    """The function that "module:function" names.

    Raises:
        ValueError: in one sentence, what is missing.
    """
    module, _, name = function.partition(":")
    if not module or not name:
        raise ValueError(
            f"`reward.function` must look like 'module:function', got {function!r}"
        )
    # Last, so that a file in the working directory hides no library.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"`reward.function` must name a module that can be imported, got "
            f"{function!r}: {type(error).__name__}: {reason}{_where(module, error)}"
        ) from error
    if not isinstance(found, Callable):
        raise ValueError(
            f"`reward.function` must name a function of its module, got {function!r}; "
            f"{module} has no function {name}"
        )
    return found

"""Rewards: callables `(question, text) -> float` that score a response.

`RewardPool` runs them where they can do no harm.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from logra_jax.rl.answers import READINGS, read
from logra_jax.rl.tasks import Question, check_data_set


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

"""Config section of the rewards."""

from dataclasses import dataclass
from typing import Literal

from logra_jax.training.checks import at_least, positive, require, require_if_set


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How an answer is read and scored, outside the training process."""

    kind: Literal["auto", "reasoning_gym", "math", "exact", "python"] = "auto"
    """`reasoning_gym`: the scorer of the question's data set; `math`: equality of
    mathematical answers, the last box or what the response ends on; `exact`: equality
    of text; `python`: `reward.function`; `auto`: `reasoning_gym` for its own tasks,
    `math` for all others."""
    answer: Literal[
        "auto", "final_answer", "last_boxed", "last_number", "whole_text"
    ] = "auto"
    """Which part of a response is scored; `auto` is the usual one of the kind:
    `last_number` of reasoning_gym, `final_answer` (the last box, or what the response
    ends on) of math and exact, `whole_text` of python."""
    partial: bool = False
    """Keep the partial credit of a reasoning-gym scorer; otherwise only a full score
    counts."""
    function: str | None = None
    """`module:function` of your own, called as `score(answer, question) -> float`; the
    module may lie in the working directory."""
    workers: int = 1
    """Scoring processes."""
    timeout: float = 5.0
    """Seconds after which an answer scores 0 and its process is replaced."""
    memory: float | None = 4.0
    """GiB of data that a scoring process may hold; null sets no limit."""
    max_failed_share: float = 0.5
    """Stop when scoring fails on more than this share of a batch; 1 never stops."""

    def __post_init__(self) -> None:
        """Check values."""
        at_least("reward.workers", self.workers, 1)
        positive("reward.timeout", self.timeout, "5 seconds is usual")
        require_if_set(positive, "reward.memory", self.memory, "null sets no limit")
        require(
            0 <= self.max_failed_share <= 1,
            "reward.max_failed_share",
            self.max_failed_share,
            "lie in [0, 1]",
            "1 never stops",
        )
        require(
            (self.kind == "python") == (self.function is not None),
            "reward.function",
            self.function,
            "be given with reward.kind=python, and only then",
            "it looks like my_rewards:score",
        )
        require(
            self.kind != "math" or self.answer in ("auto", "final_answer"),
            "reward.answer",
            self.answer,
            "be auto when `reward.kind` is math",
            "it finds the answer itself",
        )
        require(
            not self.partial or self.kind in ("auto", "reasoning_gym"),
            "reward.partial",
            self.partial,
            f"be false when `reward.kind` is {self.kind}",
            "only reasoning-gym scorers give partial credit",
        )

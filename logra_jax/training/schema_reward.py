"""Config section of the rewards."""

from dataclasses import dataclass
from typing import Literal

from logra_jax.training.checks import at_least, positive


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How an answer is read and scored, outside the training process."""

    answer: Literal["last_number", "whole_text"] = "last_number"
    """Which part of a response is handed to the scorer."""
    partial: bool = False
    """Keep the scorer's partial credit; otherwise only a full score counts."""
    workers: int = 1
    """Scoring processes."""
    timeout: float = 5.0
    """Seconds after which an answer scores 0 and its process is replaced."""

    def __post_init__(self) -> None:
        """Check values."""
        at_least("reward.workers", self.workers, 1)
        positive("reward.timeout", self.timeout, "5 seconds is usual")

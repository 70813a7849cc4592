"""Config section of the questions."""

from dataclasses import dataclass, field
from typing import Any

from logra_jax.training.checks import at_least, require, seed_in_range


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Questions from reasoning-gym, split into training and held-out ones."""

    name: str = "chain_sum"
    """A reasoning-gym data set."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that data set."""
    size: int = 2000
    """Questions drawn, before duplicates are dropped."""
    held_out: float = 0.3
    """Share of the distinct questions that is never trained on."""
    seed: int = 0
    """Seed of the questions and of the split, apart from the run's own seed."""
    system_prompt: str | None = None
    """System message before each question; null keeps the chat template's default."""

    def __post_init__(self) -> None:
        """Check values."""
        at_least("task.size", self.size, 2, "both splits need a question")
        require(
            0 < self.held_out < 1,
            "task.held_out",
            self.held_out,
            "lie strictly between 0 and 1",
            "0.3 is usual",
        )
        seed_in_range("task.seed", self.seed)

"""Config section of the policy gradient: advantages, loss, correction."""

import math
from dataclasses import dataclass
from typing import Literal

from logra_jax.training.checks import at_least, positive, require


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Advantages, the clipped policy loss, and its correction for the engine."""

    advantage: Literal["running_mean", "grpo"] = "running_mean"
    """`running_mean`: reward minus its running mean over the run;
    `grpo`: reward normalised within the responses to one prompt."""
    responses_per_prompt: int = 1
    """Responses sampled for each prompt."""
    baseline_decay: float = 0.8
    """Decay of the running mean, per update."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    correction: Literal["none", "token", "sequence"] | None = None
    """Weight by the ratio of the trainer's probability to the engine's, of each token
    or of whole responses; the clip has then nothing to do. null is `token` for
    `rollout.engine=sglang`, and `none` for `local`, which samples from the trainer."""
    correction_cap: float = 2.0
    """The weight is cut at this: truncated importance sampling."""
    correction_mask: list[float] | None = None
    """`[low, high]`: tokens, or responses, whose ratio lies outside have no say in the
    loss; null keeps all."""

    def __post_init__(self) -> None:
        """Check values."""
        name, n = "rl.responses_per_prompt", self.responses_per_prompt
        at_least(name, n, 1)
        require(
            self.advantage != "grpo" or n >= 2,
            name,
            n,
            "be at least 2 when `rl.advantage` is grpo",
            "8 is usual, or set rl.advantage=running_mean",
        )
        require(
            0 <= self.baseline_decay < 1,
            "rl.baseline_decay",
            self.baseline_decay,
            "lie in [0, 1)",
        )
        require(0 < self.clip_low < 1, "rl.clip_low", self.clip_low, "lie in (0, 1)")
        positive("rl.clip_high", self.clip_high, "0.2 is usual")
        require(
            1 <= self.correction_cap < math.inf,
            "rl.correction_cap",
            self.correction_cap,
            "be at least 1 and finite",
            "2.0 is usual",
        )
        if self.correction_mask is not None:
            match self.correction_mask:
                case [low, high]:
                    is_interval = 0 <= low <= 1 <= high < math.inf
                case _:
                    is_interval = False
            require(
                is_interval,
                "rl.correction_mask",
                self.correction_mask,
                "be [low, high] with 0 <= low <= 1 <= high",
                "[0.5, 5.0] is usual, null keeps all",
            )

"""Config sections of the policy gradient: rewards, advantages, loss, reference."""

import math
from dataclasses import dataclass
from typing import Literal

from logra_jax.training.checks import at_least, positive, require

OF_GROUPS = ("grpo", "dr_grpo", "rloo")  # advantages within the responses to a prompt


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Advantages, the policy loss, and its correction for the engine."""

    advantage: Literal[
        "running_mean", "batch_mean", "reinforce_pp", "grpo", "dr_grpo", "rloo"
    ] = "running_mean"
    """What a reward is measured against: `running_mean` of the run, `batch_mean`, or
    `reinforce_pp`, which also divides by the batch's deviation; within the responses to
    one prompt `grpo` (mean and deviation), `dr_grpo` (mean) or `rloo` (the others'
    mean)."""
    responses_per_prompt: int = 1
    """Responses sampled for each prompt."""
    baseline_decay: float = 0.8
    """Decay of the running mean, per batch."""
    std_floor: float = 1e-2
    """Least deviation that advantages are divided by."""
    whiten: bool = False
    """Shift and scale advantages to mean 0 and deviation 1 over the batch."""
    loss: Literal["ppo", "reinforce", "cispo", "gspo"] = "ppo"
    """`ppo` clips each token's ratio, `gspo` that of whole responses, `cispo` only the
    weight of a token's gradient; `reinforce` has no ratio."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean of the loss over all tokens, over responses of their tokens' means, or over
    responses of their sums over `rollout.max_new_tokens`."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low; 1, for
    `cispo`, is no bound."""
    clip_high: float = 0.2
    """The probability ratio is clipped above at 1 + clip_high; `gspo` needs bounds of a
    few 1e-4."""
    epochs: int = 1
    """Times that a batch is gone through; each in an order of its own."""
    minibatches: int = 1
    """Updates in each of them: a batch makes epochs times minibatches updates, every
    one with a step size, and a basis, of its own."""
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
            self.advantage not in OF_GROUPS or n >= 2,
            name,
            n,
            f"be at least 2 when `rl.advantage` is {self.advantage}",
            "8 is usual, or set rl.advantage=running_mean",
        )
        positive("rl.std_floor", self.std_floor, "0.01 is usual")
        for name in ("epochs", "minibatches"):
            at_least(f"rl.{name}", getattr(self, name), 1, "1 is usual")
        require(
            0 <= self.baseline_decay < 1,
            "rl.baseline_decay",
            self.baseline_decay,
            "lie in [0, 1)",
        )
        is_open = self.loss == "cispo" and self.clip_low == 1
        require(
            0 < self.clip_low < 1 or is_open,
            "rl.clip_low",
            self.clip_low,
            "lie in (0, 1)",
            "1, which is no bound, goes with rl.loss=cispo",
        )
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

    @property
    def updates_per_batch(self) -> int:
        """Updates that are made of one batch of responses."""
        return self.epochs * self.minibatches


@dataclass(frozen=True, kw_only=True)
class ShapingConfig:
    """What becomes of a score before it is a reward, and which responses count."""

    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """A response cut at the length limit keeps its score, has no say in the loss, or is
    given `truncated_reward`."""
    truncated_reward: float = 0.0
    """Reward of a response that was cut; `penalise` only."""
    overlong_buffer: int | None = None
    """Tokens before the length limit over which a penalty rises from 0 to
    `overlong_penalty`; null is none."""
    overlong_penalty: float = 1.0
    """Taken off the score of a response of the full length."""
    reward_min: float | None = None
    """Smallest reward, after all that; null is no bound."""
    reward_max: float | None = None
    """Largest reward; null is no bound."""
    filter_groups: bool = False
    """Leave out prompts whose responses all score alike, which teach nothing, and
    sample others in their place."""
    filter_rounds: int = 4
    """Batches sampled at most to fill one; what is then missing is filled with such
    prompts."""

    def __post_init__(self) -> None:
        """Check values."""
        buffer = self.overlong_buffer
        if buffer is not None:
            at_least("shaping.overlong_buffer", buffer, 1, "null turns it off")
        name, hint = "shaping.overlong_penalty", "1.0 is usual"
        positive(name, self.overlong_penalty, hint)
        at_least("shaping.filter_rounds", self.filter_rounds, 2, "4 is usual")
        low, high = self.reward_min, self.reward_max
        for name in ("truncated_reward", "reward_min", "reward_max"):
            value = getattr(self, name)
            is_finite = value is None or math.isfinite(value)
            require(is_finite, f"shaping.{name}", value, "be finite")
        require(
            low is None or high is None or low < high,
            "shaping.reward_min",
            low,
            f"be below `shaping.reward_max` ({high})",
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """A policy that the trained one is kept near, by a term of the loss."""

    policy: Literal["none", "base", "sampler"] = "none"
    """`base` is the model as it was before the run, and costs a second copy of the
    trained matrices; `sampler` the policy that sampled the batch, and costs nothing."""
    weight: float = 1e-3
    """Of the KL to it, nats per token, beside the policy loss."""
    estimator: Literal["k3", "k2"] = "k3"
    """How the KL is estimated from a sampled token: e^d - 1 - d, or d^2 / 2, of the
    log-ratio d."""

    def __post_init__(self) -> None:
        """Check values."""
        positive("reference.weight", self.weight, "1e-3 is usual")

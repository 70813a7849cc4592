"""Config sections of an update: sketch, optimizer and KL budget."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from logra_jax.training.checks import (
    at_least,
    positive,
    regular_expression,
    require,
    require_if_set,
)


@dataclass(frozen=True, kw_only=True)
class SketchConfig:
    """Which projections are trained, and through how wide a sketch."""

    rank: Any = 64
    """Columns of each sketch (r): a number, or numbers by regular expression, such as
    `{mlp: 32, attn: 16}`; the first that a projection's name contains is its own."""
    match: str = r"((q|k|v|o|gate|up|down|out)_proj|in_proj_(qkv|z))$"
    """Regular expression that a trained projection's name contains; not the head's."""
    basis: Literal["rademacher", "gaussian"] = "rademacher"
    """Entries of the random basis: signs, or normal ones on an 8-bit grid."""
    refresh: bool = True
    """Draw a new basis at every update; otherwise one basis serves the whole run."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How an update lands on bf16 weights; `nearest` loses most of a small one."""
    bits: int = 16
    """Of the integers that an update is merged and sent as: 16 or 8."""

    def __post_init__(self) -> None:
        """Check values."""
        require(self.bits in (8, 16), "sketch.bits", self.bits, "be 8 or 16")
        regular_expression("sketch.match", self.match)
        if not isinstance(self.rank, dict):
            rule = "be an integer, or integers by regular expression"
            return _rank("sketch.rank", self.rank, rule)
        for pattern, rank in self.rank.items():
            regular_expression("sketch.rank", pattern)
            _rank(f"sketch.rank.{pattern}", rank, "be an integer")
        rule, remedy = "hold a regular expression", "a number serves all projections"
        require(self.rank != {}, "sketch.rank", self.rank, rule, remedy)


class Hyperparameters(NamedTuple):
    """Of an optimizer, with no value left open."""

    learning_rate: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    lora_alpha: float
    projection_gap: int


_USUAL = {
    "logra": Hyperparameters(1e-4, 0.0, 0.95, 1e-12, 0.0, 0.0, 0),
    "adamw": Hyperparameters(1e-6, 0.9, 0.999, 1e-8, 0.01, 0.0, 0),
    "lora": Hyperparameters(1e-4, 0.9, 0.999, 1e-8, 0.0, 32.0, 0),
    "galore": Hyperparameters(1e-5, 0.9, 0.999, 1e-8, 0.0, 0.0, 200),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How the matched projections are trained: the step before the KL budget scales it.

    null is the usual value of the kind:

    | kind | learning_rate | b1 | b2 | eps | weight_decay | |
    |---|---|---|---|---|---|---|
    | logra | 1e-4 | | 0.95 | 1e-12 | | |
    | adamw | 1e-6 | 0.9 | 0.999 | 1e-8 | 0.01 | |
    | lora | 1e-4 | 0.9 | 0.999 | 1e-8 | 0 | lora_alpha 32 |
    | galore | 1e-5 | 0.9 | 0.999 | 1e-8 | 0 | projection_gap 200 |
    """

    kind: Literal["logra", "adamw", "lora", "galore"] = "logra"
    """`logra`: RowAdam on sketches; `adamw`: AdamW on whole kernels; `lora`: AdamW on
    adapters of rank `sketch.rank` beside frozen kernels; `galore`: Adam on whole
    kernels' gradients, projected to `sketch.rank` singular vectors of an earlier one
    (`optax.contrib.galore`)."""
    learning_rate: float | None = None
    """Proposed step size; with a KL budget only the ratio to `kl.alpha_max` matters."""
    b1: float | None = None
    """Decay of the first moment; not of `logra`, which has none."""
    b2: float | None = None
    """Decay of the second moment; of `logra` that is one number per row."""
    eps: float | None = None
    """Added to the root; tiny for `logra`, as squared rows of a sketch are tiny."""
    weight_decay: float | None = None
    """Share of the weights, or adapters, that a step takes off them, times
    `learning_rate`; not of `logra`."""
    lora_alpha: float | None = None
    """The adapters' product is multiplied by this over the rank; of `lora` alone."""
    projection_gap: int | None = None
    """Updates from one SVD of the gradients to the next; of `galore` alone. The first
    update has one; let a short run have several."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradient (or sketches); null leaves it alone."""

    def __post_init__(self) -> None:
        """Check values."""
        kind, usual = self.kind, _USUAL[self.kind]
        for name, kinds in (
            ("b1", ("adamw", "lora", "galore")),
            ("weight_decay", ("adamw", "lora", "galore")),
            ("lora_alpha", ("lora",)),
            ("projection_gap", ("galore",)),
        ):
            require(
                kind in kinds or getattr(self, name) is None,
                f"optimizer.{name}",
                getattr(self, name),
                f"be null when `optimizer.kind` is {kind}",
                f"it is for optimizer.kind={_listed(kinds)}",
            )
        for name in ("learning_rate", "eps", "lora_alpha"):
            value, hint = getattr(self, name), f"{getattr(usual, name):g} is usual"
            require_if_set(positive, f"optimizer.{name}", value, hint)
        for name in ("b1", "b2"):
            require_if_set(_decay, f"optimizer.{name}", getattr(self, name))
        require_if_set(_not_negative, "optimizer.weight_decay", self.weight_decay)
        gap = self.projection_gap
        require_if_set(_positive_count, "optimizer.projection_gap", gap)
        hint = "use null for no clipping"
        require_if_set(positive, "optimizer.clip_norm", self.clip_norm, hint)

    @property
    def settled(self) -> Hyperparameters:
        """The values, the usual one of the kind where one is null."""
        usual = _USUAL[self.kind]._asdict()
        given = {name: getattr(self, name) for name in usual}
        set_ = {name: value for name, value in given.items() if value is not None}
        return Hyperparameters(**(usual | set_))


BUDGETS = ("cosine", "constant", "none")  # `kl.budget` apart from optax schedules


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The predicted KL an update may spend, in nats per token."""

    estimator: Literal["jvp", "difference", "engine"] = "jvp"
    """How the KL is predicted: by forward-mode differentiation, by probes of a finite
    size, or by such probes against the engine's log-probs, less their mismatch. The
    last sees sampled tokens only and scatters more: give it a larger `share`, and no
    `rollout.top_k`, which biases it."""
    share: float = 0.125
    """Share of the batch's responses on which it is predicted; at least one, spread
    evenly over the batch, and so over prompts."""
    budget: str = "cosine"
    """`cosine` falls from `start` to `end` over the run, `constant` stays at `start`,
    `none` takes the optimizer's step as it is; or the name of an optax schedule, such
    as `exponential_decay`, with its arguments in `schedule`."""
    start: float = 1e-2
    """Budget of the first update, nats per token; `cosine` and `constant` only."""
    end: float = 1e-3
    """Budget of the last update, nats per token; `cosine` only."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Arguments of the optax schedule; values in nats per token, steps in updates."""
    alpha_max: float = 100.0
    """Largest factor by which a proposed step may be scaled to fill a budget."""

    def __post_init__(self) -> None:
        """Check values."""
        require(
            0 < self.share <= 1,
            "kl.share",
            self.share,
            "lie in (0, 1]",
            "0.125 is usual",
        )
        positive("kl.start", self.start, "1e-3 to 2e-2 nats per token is usual")
        positive("kl.end", self.end, "1e-3 nats per token is usual")
        positive("kl.alpha_max", self.alpha_max)
        if self.budget not in BUDGETS:
            # Only here: optax brings JAX, and a config should load without it.
            from logra_jax.training.budget import check_schedule

            check_schedule(self)
        else:
            require(
                not self.schedule,
                "kl.schedule",
                self.schedule,
                f"be empty when `kl.budget` is {self.budget}",
                "it is for optax schedules, such as kl.budget=exponential_decay",
            )


def _listed(words: tuple[str, ...]) -> str:
    """Such as: a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _decay(name: str, value: float) -> None:
    require(0 <= value < 1, name, value, "lie in [0, 1)")


def _not_negative(name: str, value: float) -> None:
    require(0 <= value < math.inf, name, value, "be finite and not negative")


def _positive_count(name: str, value: int) -> None:
    at_least(name, value, 1, "200 is usual")


def _rank(name: str, value: Any, rule: str) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    require(is_integer, name, value, rule, "16 to 64 is usual")
    at_least(name, value, 1, "16 to 64 is usual")

"""The fields of a run's configuration: nested frozen dataclasses, one per stage.

Each stage checks its own values, `Config` what concerns more than one; every complaint
is one sentence that names the field, the rule, the value received and what to do.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal


def show(value: object) -> str:
    """A value as the reader wrote it: null, not None."""
    return "null" if value is None else repr(value)


def require(ok: bool, name: str, value: object, rule: str, remedy: str = "") -> None:
    """Raise the one sentence that says which rule `name` broke, and what to do."""
    if not ok:
        hint = f"; {remedy}" if remedy else ""
        raise ValueError(f"`{name}` must {rule}, got {show(value)}{hint}.")


def _at_least(name: str, value: int, low: int, remedy: str = "") -> None:
    require(value >= low, name, value, f"be at least {low}", remedy)


def _positive(name: str, value: float, remedy: str = "") -> None:
    require(0 < value < math.inf, name, value, "be positive and finite", remedy)


def _seed(name: str, value: int) -> None:
    require(0 <= value < 2**32, name, value, "lie in [0, 2**32)")


def _regular_expression(name: str, value: object) -> None:
    try:
        re.compile(str(value))
    except re.error as error:
        require(False, name, value, "be a regular expression", str(error))


def _rank(name: str, value: Any, rule: str) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    require(is_integer, name, value, rule, "16 to 64 is usual")
    _at_least(name, value, 1, "16 to 64 is usual")


def _nearest_divisor(n: int, near: int) -> int:
    """The divisor of `n` closest to `near`."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - near))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained, and how its weights and activations are held."""

    path: str
    """A Hugging Face directory, or the name of a packaged model."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights."""
    activations: Literal["bfloat16", "float32"] | None = None
    """Of the activations; null is the weights' dtype; CPUs like float32."""
    remat: Literal["none", "dots", "layer"] = "none"
    """What a layer keeps for the backward pass: everything, products with weights, or
    only its input (least memory, most time)."""

    def __post_init__(self) -> None:
        """Check values."""
        require(
            self.path != "",
            "model.path",
            self.path,
            "name a model",
            "give a Hugging Face directory or a packaged name",
        )
        require(
            (self.dtype, self.activations) != ("float32", "bfloat16"),
            "model.activations",
            self.activations,
            "be at least as wide as `model.dtype` (float32)",
            "use null",
        )


@dataclass(frozen=True, kw_only=True)
class SketchConfig:
    """Which projections are trained, and through how wide a sketch."""

    rank: Any = 64
    """Columns of each sketch (r): a number, or numbers by regular expression, such as
    `{mlp: 32, attn: 16}`; the first that a projection's name contains is its own."""
    match: str = r"(q|k|v|o|gate|up|down)_proj"
    """Regular expression that a trained projection's name contains."""
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
        _regular_expression("sketch.match", self.match)
        if not isinstance(self.rank, dict):
            rule = "be an integer, or integers by regular expression"
            return _rank("sketch.rank", self.rank, rule)
        for pattern, rank in self.rank.items():
            _regular_expression("sketch.rank", pattern)
            _rank(f"sketch.rank.{pattern}", rank, "be an integer")
        rule, remedy = "hold a regular expression", "a number serves all projections"
        require(self.rank != {}, "sketch.rank", self.rank, rule, remedy)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """RowAdam on the sketches: its step before the KL budget scales it."""

    learning_rate: float = 1e-4
    """Proposed step size; with a KL budget only the ratio to `kl.alpha_max` matters."""
    b2: float = 0.95
    """Decay of the second moment, one number per row."""
    eps: float = 1e-12
    """Added to the root; tiny, because squared rows of a sketch are tiny."""
    clip_norm: float | None = 1.0
    """Largest global norm of the sketches; null leaves them alone."""

    def __post_init__(self) -> None:
        """Check values."""
        _positive("optimizer.learning_rate", self.learning_rate, "1e-4 is usual")
        require(0 <= self.b2 < 1, "optimizer.b2", self.b2, "lie in [0, 1)")
        _positive("optimizer.eps", self.eps, "1e-12 is usual")
        if self.clip_norm is not None:
            _positive("optimizer.clip_norm", self.clip_norm, "use null for no clipping")


BUDGETS = ("cosine", "constant", "none")  # `kl.budget` apart from optax schedules


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The predicted KL an update may spend, in nats per token."""

    estimator: Literal["jvp", "difference", "engine"] = "jvp"
    """How the KL is predicted: by forward-mode differentiation, by probes of a finite
    size, or by such probes against the engine's log-probs, less their mismatch. The
    last sees sampled tokens only and scatters more: give it a larger `share`."""
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
    """Largest factor by which a proposed step may be scaled."""

    def __post_init__(self) -> None:
        """Check values."""
        require(
            0 < self.share <= 1,
            "kl.share",
            self.share,
            "lie in (0, 1]",
            "0.125 is usual",
        )
        _positive("kl.start", self.start, "1e-3 to 2e-2 nats per token is usual")
        _positive("kl.end", self.end, "1e-3 nats per token is usual")
        _positive("kl.alpha_max", self.alpha_max)
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
        _at_least("task.size", self.size, 2, "both splits need a question")
        require(
            0 < self.held_out < 1,
            "task.held_out",
            self.held_out,
            "lie strictly between 0 and 1",
            "0.3 is usual",
        )
        _seed("task.seed", self.seed)


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
        _at_least("reward.workers", self.workers, 1)
        _positive("reward.timeout", self.timeout, "5 seconds is usual")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    engine: Literal["local"] = "local"
    """`local` samples in this process, from the trainer's own weights."""
    temperature: float = 1.0
    """Sampling temperature, also of the log-probs that training uses."""
    top_p: float = 1.0
    """Smallest nucleus that holds this probability; 1 is off."""
    top_k: int = 0
    """Most likely tokens kept; 0 is off."""
    max_new_tokens: int = 24
    """Response length at which a response is cut, tokens."""
    prompt_bucket: int = 8
    """Prompt lengths are rounded up to a multiple of this, tokens."""

    def __post_init__(self) -> None:
        """Check values."""
        _positive("rollout.temperature", self.temperature, "1.0 is usual")
        require(
            0 < self.top_p <= 1,
            "rollout.top_p",
            self.top_p,
            "lie in (0, 1]",
            "1.0 turns it off",
        )
        _at_least("rollout.top_k", self.top_k, 0, "0 turns it off")
        _at_least("rollout.max_new_tokens", self.max_new_tokens, 1)
        _at_least("rollout.prompt_bucket", self.prompt_bucket, 1, "1 pads nothing")


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Advantages and the clipped policy loss."""

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

    def __post_init__(self) -> None:
        """Check values."""
        name, n = "rl.responses_per_prompt", self.responses_per_prompt
        _at_least(name, n, 1)
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
        _positive("rl.clip_high", self.clip_high, "0.2 is usual")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and size of an update."""

    steps: int
    """Updates."""
    batch: int = 64
    """Responses per update."""
    microbatch: int = 16
    """Responses whose activations are held at once."""
    eval_every: int = 10
    """Updates between evaluations; there is always one before and one after."""
    checkpoint_every: int = 10
    """Updates between checkpoints; there is always one at the end."""
    target_accuracy: float | None = None
    """Stop when held-out accuracy at T=1 reaches this; null runs all steps."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    save_updates: bool = False
    """Keep every update in `updates/`, in the bytes that a rollout server receives."""

    def __post_init__(self) -> None:
        """Check values."""
        for name in ("steps", "batch", "microbatch", "eval_every"):
            _at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("checkpoint_every", "keep_checkpoints"):
            _at_least(f"train.{name}", getattr(self, name), 1)
        require(
            self.batch % self.microbatch == 0,
            "train.microbatch",
            self.microbatch,
            f"divide `train.batch` ({self.batch})",
            f"{_nearest_divisor(self.batch, self.microbatch)} does",
        )
        if self.target_accuracy is not None:
            require(
                0 < self.target_accuracy <= 1,
                "train.target_accuracy",
                self.target_accuracy,
                "lie in (0, 1]",
                "use null to run all steps",
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation: every question greedily, and samples at T=1."""

    samples: int = 256
    """Responses at T=1, spread over the held-out questions."""
    batch: int = 64
    """Responses sampled at once."""

    def __post_init__(self) -> None:
        """Check values."""
        _at_least("eval.samples", self.samples, 1)
        _at_least("eval.batch", self.batch, 1)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """A look at real gradients now and then, and when a metric raises an alarm."""

    every: int = 0
    """Updates between measurements of how well the sketches keep gradients; 0 is never;
    each costs about one dense gradient of `responses`."""
    responses: int = 8
    """Responses of the batch whose gradient is measured, spread evenly over it."""
    min_cos_c: float = 0.25
    """Alarm below this gain of a layer kind's step at equal KL, of the dense step's."""
    min_snr: float = 0.5
    """Alarm below this signal-to-noise ratio in any layer."""
    kl_ratio_low: float = 0.3
    """Alarm below this ratio of the realised KL to the predicted one."""
    kl_ratio_high: float = 3.0
    """Alarm above this ratio of the realised KL to the predicted one."""
    landed_low: float = 0.5
    """Alarm below this part of an update landing on the weights, in its direction."""
    landed_high: float = 1.5
    """Alarm above this part."""
    max_truncated: float = 0.95
    """Alarm above this share of responses cut at the length limit."""
    max_failed: float = 0.1
    """Alarm above this share of responses whose scoring raised, or timed out."""

    def __post_init__(self) -> None:
        """Check values."""
        _at_least("monitor.every", self.every, 0, "0 turns it off")
        _at_least("monitor.responses", self.responses, 1, "8 is usual")
        for name in ("min_cos_c", "min_snr", "max_truncated", "max_failed"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"monitor.{name}", value, "lie in [0, 1]")
        for name in ("kl_ratio", "landed"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            require(
                0 <= low < high,
                f"monitor.{name}_low",
                low,
                f"be at least 0 and below `monitor.{name}_high` ({high})",
                "0 never raises an alarm",
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. `load_config` builds it from a file and overrides."""

    name: str = "run"
    """Names the default run directory; `load_config` puts the file's stem here."""
    seed: int = 0
    """Seed of sampling, bases, rounding and data order."""
    run_dir: str | None = None
    """Where results go; null makes `runs/<name>-<time>`."""
    resume: str | None = None
    """A run directory to continue."""
    cache_dir: str | None = None
    """Converted models and compiled programs; null is the user's cache directory."""
    model: ModelConfig
    sketch: SketchConfig = field(default_factory=SketchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    train: TrainConfig
    eval: EvalConfig = field(default_factory=EvalConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        """Check what concerns more than one stage."""
        _seed("seed", self.seed)
        batch, n = self.train.batch, self.rl.responses_per_prompt
        require(
            batch % n == 0,
            "rl.responses_per_prompt",
            n,
            f"divide `train.batch` ({batch})",
            f"{_nearest_divisor(batch, n)} does",
        )
        require(
            self.monitor.every == 0 or self.monitor.responses <= batch,
            "monitor.responses",
            self.monitor.responses,
            f"be at most `train.batch` ({batch})",
        )

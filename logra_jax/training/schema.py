"""The fields of a run's configuration: nested frozen dataclasses, one per stage.

Each stage checks its own values, `Config` what concerns more than one. The stages that
make an update are in `schema_update`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from logra_jax.training.checks import at_least, positive, require, seed_in_range
from logra_jax.training.schema_distributed import DistributedConfig
from logra_jax.training.schema_mesh import MeshConfig
from logra_jax.training.schema_serve import ServeConfig
from logra_jax.training.schema_update import (
    KLConfig,
    MonitorConfig,
    OptimizerConfig,
    RLConfig,
    SketchConfig,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained, and how its weights and activations are held."""

    path: str | None = None
    """A Hugging Face directory; a GGUF file (Llama, Qwen2, Qwen3); `owner/name` or
    `owner/name@revision` on the Hugging Face Hub; or the name of a packaged model."""
    preset: str | None = None
    """In place of `path`, a name that stands for shapes alone, such as `qwen2.5-7b`:
    for `logra plan` and `logra bench step`, which need no weights. Given as an override
    it wins over the file's `path`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights."""
    activations: Literal["bfloat16", "float32"] | None = None
    """Of the activations; null is the weights' dtype; CPUs like float32."""
    attention: Literal["auto", "full", "chunked"] = "auto"
    """How attention scores are held: of all queries at once, of a few queries at a
    time, or (auto) the first up to 1,024 keys and the second beyond."""
    remat: Literal["none", "dots", "layer", "offload"] = "none"
    """What a layer keeps for the backward pass: everything, products with weights, only
    its input (most time), or that in the host's memory (least memory)."""

    def __post_init__(self) -> None:
        """Check values."""
        require(
            self.path != "" and (self.path is not None or self.preset is not None),
            "model.path",
            self.path,
            "name a model",
            "give a Hugging Face directory, `owner/name` or a packaged name",
        )
        if self.preset is not None:
            require(
                self.path is None,
                "model.preset",
                self.preset,
                f"be null beside `model.path` ({self.path!r})",
                "a preset has shapes only",
            )
            # Only here: shapes bring JAX, and a config should load without it.
            from logra_jax.models.presets import preset

            preset(self.preset)
        require(
            (self.dtype, self.activations) != ("float32", "bfloat16"),
            "model.activations",
            self.activations,
            "be at least as wide as `model.dtype` (float32)",
            "use null",
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
        at_least("task.size", self.size, 2, "both splits need a question")
        require(
            0 < self.held_out < 1,
            "task.held_out",
            self.held_out,
            "lie strictly between 0 and 1",
            "0.3 is usual",
        )
        seed_in_range("task.seed", self.seed)


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


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    engine: Literal["local", "sglang"] = "local"
    """`local` samples in this process, from the trainer's own weights; `sglang` on the
    servers at `urls`, which receive every update."""
    temperature: float = 1.0
    """Sampling temperature, also of the log-probs that training uses."""
    top_p: float = 1.0
    """Smallest nucleus that holds this probability; 1 is off."""
    top_k: int = 0
    """Most likely tokens kept; 0 is off."""
    max_new_tokens: int = 24
    """Response length at which a response is cut, tokens."""
    prompt_bucket: int = 8
    """All prompts are padded to the longest one's length, rounded up to a multiple of
    this, tokens."""
    urls: list[str] = field(default_factory=list)
    """Base URLs of the SGLang servers, such as `[http://127.0.0.1:30000]`."""
    router: str | None = None
    """URL of an SGLang router in front of them, that requests go through; updates go to
    `urls` all the same."""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable that holds the servers' API key; unset is no key."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """What an update does to requests that are running: start them again from their
    prompts, go on with them under the new weights, or end them."""
    staleness: int = 0
    """Updates that a batch's weights may be behind; 0 samples after each update, 1 and
    more sample the next batches while this one is trained on."""
    request_deadline: float = 600.0
    """Seconds after which a request is asked of another server."""
    batch_deadline: float = 3600.0
    """Seconds after which a batch of requests is given up."""
    concurrency: int = 256
    """Requests under way at once."""
    push_deadline: float = 600.0
    """Seconds for one update, or all weights, to reach one server."""
    patience: float = 600.0
    """Seconds to wait for a server to come back when none is left."""
    keep_updates: int = 64
    """Newest updates kept for servers that missed some; one that missed more is sent
    all weights."""
    load_weights: bool = False
    """At the start, load the trainer's weights into servers that hold others; otherwise
    such a server is an error, but for a run that is resumed."""
    share_dir: str | None = None
    """Directory that trainer and servers share, for sending all weights; null is the
    run directory."""

    def __post_init__(self) -> None:
        """Check values."""
        positive("rollout.temperature", self.temperature, "1.0 is usual")
        require(
            0 < self.top_p <= 1,
            "rollout.top_p",
            self.top_p,
            "lie in (0, 1]",
            "1.0 turns it off",
        )
        at_least("rollout.top_k", self.top_k, 0, "0 turns it off")
        at_least("rollout.max_new_tokens", self.max_new_tokens, 1)
        at_least("rollout.prompt_bucket", self.prompt_bucket, 1, "1 pads nothing")
        self._check_servers()

    def _check_servers(self) -> None:
        if self.engine == "local":
            rule, remedy = "when `rollout.engine` is local", "set rollout.engine=sglang"
            require(not self.urls, "rollout.urls", self.urls, f"be [] {rule}", remedy)
            name = "rollout.router"
            require(self.router is None, name, self.router, f"be null {rule}", remedy)
            name = "rollout.staleness"
            require(self.staleness == 0, name, self.staleness, f"be 0 {rule}", remedy)
        else:
            require(
                self.urls != [],
                "rollout.urls",
                self.urls,
                "name a server when `rollout.engine` is sglang",
                "`logra serve` starts one and prints its URL",
            )
            # Only here: most configs load without it.
            from logra_jax.rollout.servers import base_url

            bases = {base_url("rollout.urls", url) for url in self.urls}
            if self.router is not None:
                base_url("rollout.router", self.router)
            require(
                len(bases) == len(self.urls),
                "rollout.urls",
                self.urls,
                "name each server once",
            )
        require(
            self.api_key_env != "",
            "rollout.api_key_env",
            self.api_key_env,
            "name an environment variable",
            "SGLANG_API_KEY is usual, set or not",
        )
        at_least("rollout.staleness", self.staleness, 0, "0 waits for each update")
        positive("rollout.request_deadline", self.request_deadline, "600 s is usual")
        positive("rollout.batch_deadline", self.batch_deadline, "3600 s is usual")
        positive("rollout.push_deadline", self.push_deadline, "600 s is usual")
        positive("rollout.patience", self.patience, "600 s is usual")
        require(
            self.batch_deadline >= self.request_deadline,
            "rollout.batch_deadline",
            self.batch_deadline,
            f"be at least `rollout.request_deadline` ({self.request_deadline})",
        )
        at_least("rollout.concurrency", self.concurrency, 1, "256 is usual")
        at_least("rollout.keep_updates", self.keep_updates, 1, "64 is usual")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and size of an update."""

    steps: int
    """Updates."""
    batch: int = 64
    """Responses per update."""
    microbatch: int = 16
    """Responses whose activations are held at once, on each device of the mesh."""
    microbatch_tokens: int | None = None
    """Tokens whose activations are held at once, in place of `microbatch`: responses of
    any length are packed into rows of so many tokens. Null pads them."""
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
            at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("checkpoint_every", "keep_checkpoints"):
            at_least(f"train.{name}", getattr(self, name), 1)
        if self.microbatch_tokens is not None:
            name = "train.microbatch_tokens"
            at_least(name, self.microbatch_tokens, 1, "null packs nothing")
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
        at_least("eval.samples", self.samples, 1)
        at_least("eval.batch", self.batch, 1)


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
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sketch: SketchConfig = field(default_factory=SketchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    train: TrainConfig
    eval: EvalConfig = field(default_factory=EvalConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        """Check what concerns more than one stage."""
        seed_in_range("seed", self.seed)
        batch, n = self.train.batch, self.rl.responses_per_prompt
        require(
            batch % n == 0,
            "rl.responses_per_prompt",
            n,
            f"divide `train.batch` ({batch})",
            f"{_nearest_divisor(batch, n)} does",
        )
        self._check_batch_on_mesh()
        require(
            not self.distributed.enabled or self.rollout.engine == "local",
            "rollout.engine",
            self.rollout.engine,
            "be local when `distributed.enabled` is true",
            "a run on SGLang servers is of one process",
        )
        require(
            self.monitor.every == 0 or self.monitor.responses <= batch,
            "monitor.responses",
            self.monitor.responses,
            f"be at most `train.batch` ({batch})",
        )
        require(
            self.rl.correction_mask is None or self.correction != "none",
            "rl.correction_mask",
            self.rl.correction_mask,
            "be null without a correction",
            "set rl.correction=token",
        )

        self._check_kind()

    def _check_kind(self) -> None:
        """Refuse what is made of sketches, or of their factors, without such."""
        kind = self.optimizer.kind
        for name, value, off in (
            ("rollout.engine", self.rollout.engine, "local"),
            ("train.save_updates", self.train.save_updates, False),
            ("monitor.every", self.monitor.every, 0),
        ):
            require(
                kind == "logra" or value == off,
                name,
                value,
                f"be {str(off).lower()} when `optimizer.kind` is {kind}",
                "it is made of the sketches of optimizer.kind=logra",
            )

    def _check_batch_on_mesh(self) -> None:
        batch, parts = self.train.batch, self.mesh.row_parts
        require(
            batch % parts == 0,
            "train.batch",
            batch,
            f"be a multiple of `mesh.data` times `mesh.fsdp` ({parts})",
            f"{-(-batch // parts) * parts} is",
        )
        held = min(self.train.microbatch, batch // parts)
        require(
            (batch // parts) % held == 0,
            "train.microbatch",
            self.train.microbatch,
            f"divide the {batch // parts} responses of a device",
            f"{_nearest_divisor(batch // parts, held)} does",
        )

    @property
    def correction(self) -> Literal["none", "token", "sequence"]:
        """`rl.correction`, or the engine's default where that is null."""
        default = "token" if self.rollout.engine == "sglang" else "none"
        return self.rl.correction or default


def _nearest_divisor(n: int, near: int) -> int:
    """The divisor of `n` closest to `near`."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - near))

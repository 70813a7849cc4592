"""The fields of a run's configuration: nested frozen dataclasses, one per stage.

Each stage checks its own values, `Config` what concerns more than one.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from logra_jax.training.checks import at_least, require, seed_in_range
from logra_jax.training.schema_distributed import DistributedConfig
from logra_jax.training.schema_mesh import MeshConfig
from logra_jax.training.schema_reward import RewardConfig
from logra_jax.training.schema_rl import ReferenceConfig, RLConfig, ShapingConfig
from logra_jax.training.schema_rollout import RolloutConfig
from logra_jax.training.schema_serve import ServeConfig
from logra_jax.training.schema_task import HELD_OUT, TaskConfig
from logra_jax.training.schema_update import KLConfig, OptimizerConfig, SketchConfig
from logra_jax.training.schema_watch import EvalConfig, MonitorConfig


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
    attention: Literal["auto", "full", "chunked", "flash"] = "auto"
    """How attention scores are held: of all queries at once, of a few queries at a
    time, or (auto) the first up to 1,024 keys and the second beyond; or not at all, by
    cuDNN's kernel (flash), on NVIDIA GPUs and for activations in bfloat16. The KL of an
    update is measured in float32 and so by auto; `logra plan` counts chunks."""
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
        require(
            self.attention != "flash" or (self.activations or self.dtype) == "bfloat16",
            "model.attention",
            self.attention,
            "be auto, full or chunked for activations in float32",
            "use auto, or `model.activations=bfloat16`",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and size of an update."""

    steps: int
    """Updates."""
    batch: int = 64
    """Responses per update."""
    microbatch: int = 16
    """Responses whose activations are held at once, on each device of the mesh; all of
    a batch that is smaller."""
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
            self.batch % min(self.microbatch, self.batch) == 0,
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
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
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
        self._check_shaping()
        update, whole = batch // self.rl.minibatches, "`train.batch`"
        if self.rl.minibatches > 1:
            whole += " over `rl.minibatches`"
        require(
            not self.distributed.enabled or self.rollout.engine == "local",
            "rollout.engine",
            self.rollout.engine,
            "be local when `distributed.enabled` is true",
            "a run on SGLang servers is of one process",
        )
        require(
            self.monitor.every == 0 or self.monitor.responses <= update,
            "monitor.responses",
            self.monitor.responses,
            f"be at most {whole} ({update})",
        )
        require(
            self.rl.correction_mask is None or self.correction != "none",
            "rl.correction_mask",
            self.rl.correction_mask,
            "be null without a correction",
            "set rl.correction=token",
        )

        self._check_eval_sets()
        self._check_references()
        self._check_kind()

    def _check_eval_sets(self) -> None:
        for name, questions in self.eval.sets.items():
            require(
                re.fullmatch(r"[\w-]+", name) is not None and name != HELD_OUT,
                f"eval.sets.{name}",
                name,
                f"be called by letters, digits, - and _, and not {HELD_OUT}",
                "metrics go by that name",
            )
            questions.check(f"eval.sets.{name}")
        require(
            self.task.held_out > 0 or bool(self.eval.sets),
            "task.held_out",
            self.task.held_out,
            "be above 0 without `eval.sets`",
            "there would be nothing to measure on",
        )

    def _check_references(self) -> None:
        """Refuse questions without answers where the reward compares with them."""
        own = self.reward.kind
        kinds = [("task", self.task.columns, own)]
        for name, one in self.eval.sets.items():
            kinds.append((f"eval.sets.{name}", one.columns, one.reward or own))
        for section, columns, kind in kinds:
            require(
                columns.answer is not None or kind == "python",
                f"{section}.columns.answer",
                None,
                f"name a column when the reward is {kind}",
                "reward.kind=python can do without",
            )

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

    def _check_shaping(self) -> None:
        """Refuse filters and penalties that do not go with the sampling."""
        buffer, new = self.shaping.overlong_buffer, self.rollout.max_new_tokens
        require(
            buffer is None or buffer <= new,
            "shaping.overlong_buffer",
            buffer,
            f"be at most `rollout.max_new_tokens` ({new})",
        )
        if self.shaping.filter_groups:
            name = "shaping.filter_groups"
            n = self.rl.responses_per_prompt
            rule = f"be false when `rl.responses_per_prompt` is {n}"
            require(n >= 2, name, True, rule, "a single response is always constant")
            staleness = self.rollout.staleness
            rule = f"be false when `rollout.staleness` is {staleness}"
            remedy = "which prompts come next is known only after scoring"
            require(staleness == 0, name, True, rule, remedy)

    def _check_updates(self) -> None:
        """Every batch is used up before a run looks, saves or ends."""
        batch, parts = self.train.batch, self.rl.minibatches
        require(
            batch % parts == 0,
            "rl.minibatches",
            parts,
            f"divide `train.batch` ({batch})",
            f"{_nearest_divisor(batch, parts)} does",
        )
        count = self.rl.updates_per_batch
        for name in ("steps", "eval_every", "checkpoint_every"):
            value = getattr(self.train, name)
            require(
                value % count == 0,
                f"train.{name}",
                value,
                f"be a multiple of `rl.epochs` times `rl.minibatches` ({count})",
                f"{-(-value // count) * count} is",
            )

    def _check_batch_on_mesh(self) -> None:
        self._check_updates()
        batch, parts = self.train.batch // self.rl.minibatches, self.mesh.row_parts
        require(
            batch % parts == 0,
            "train.batch",
            self.train.batch,
            "be a multiple of `mesh.data` times `mesh.fsdp` times `rl.minibatches` "
            f"({parts * self.rl.minibatches})",
            f"{-(-batch // parts) * parts * self.rl.minibatches} is",
        )
        held = min(self.train.microbatch, batch // parts)
        require(
            (batch // parts) % held == 0,
            "train.microbatch",
            self.train.microbatch,
            f"divide the {batch // parts} responses of a device's minibatch",
            f"{_nearest_divisor(batch // parts, held)} does",
        )

    @property
    def best_metric(self) -> str:
        """`eval.best`, or the first set's sampled accuracy where that is null."""
        has_held_out = self.task.held_out > 0 or not self.eval.sets
        first = HELD_OUT if has_held_out else next(iter(self.eval.sets))
        return self.eval.best or f"{first}/sampled"

    @property
    def correction(self) -> Literal["none", "token", "sequence"]:
        """`rl.correction`, or the engine's default where that is null."""
        default = "token" if self.rollout.engine == "sglang" else "none"
        return self.rl.correction or default


def _nearest_divisor(n: int, near: int) -> int:
    """The divisor of `n` closest to `near`."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - near))

"""From a config to the parts of a run: model, engine, task, rewards, step."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Key

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.predicted_kl import scale_by_predicted_kl
from logra_jax.algorithm.row_adam import scale_by_row_adam
from logra_jax.algorithm.sketch import Probe, perturbed, sketch
from logra_jax.models.hf import load_decoder
from logra_jax.models.packaged import is_packaged, packaged_model
from logra_jax.models.tokenizer import ChatTokenizer
from logra_jax.rl.rewards import ReasoningGymReward, RewardPool, Rewards
from logra_jax.rl.tasks import Question, Task, draw, reasoning_gym_task
from logra_jax.rollout.local import LocalEngine
from logra_jax.rollout.sglang import SGLangEngine, room_for
from logra_jax.rollout.types import Completions, Sampling, common_prefix
from logra_jax.training.budget import build_budget
from logra_jax.training.monitor import Monitor, build_monitor
from logra_jax.training.objective import LossOptions
from logra_jax.training.paths import default_cache_dir
from logra_jax.training.schema import Config
from logra_jax.training.state import Batch
from logra_jax.training.step import Step, StepOptions, build_step

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The model's static parts, and what turns questions into responses with it.

    Attributes:
        graph: of the sketched model.
        plain_graph: of its perturbed twin.
        probes: zeros.
        tokenizer: with the chat template.
        engine: samples token ids, in this process or on servers.
        system_prompt: before each question, or None.
    """

    graph: nnx.GraphDef
    plain_graph: nnx.GraphDef
    probes: nnx.State
    tokenizer: ChatTokenizer
    engine: LocalEngine | SGLangEngine
    system_prompt: str | None

    def respond(
        self,
        weights: nnx.State,
        questions: Sequence[Question],
        sampling: Sampling,
        key: Key[Array, ""],
    ) -> tuple[Completions, list[str]]:
        """One completion for each question, as token ids and as text."""
        full = nnx.merge_state(self.probes, weights)
        prompts = self.encode(questions)
        completions = self.engine.generate(full, prompts, sampling, key)
        return completions, self.decode(completions)

    def encode(self, questions: Sequence[Question]) -> list[list[int]]:
        """The prompts' token ids."""
        return [
            encode_question(self.tokenizer, q, self.system_prompt) for q in questions
        ]

    def decode(self, completions: Completions) -> list[str]:
        """The completions as text."""
        ended = zip(completions.tokens, completions.lengths, strict=True)
        return [self.tokenizer.decode(row[:n]) for row, n in ended]


def encode_question(
    tokenizer: ChatTokenizer, question: Question, system_prompt: str | None
) -> list[int]:
    """The prompt's token ids: chat template, with a system message where one is set."""
    messages = [{"role": "user", "content": question.text}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return tokenizer.encode_chat(messages)


def enable_compile_cache(config: Config) -> None:
    """Keep compiled programs between runs, in the cache directory."""
    cache = default_cache_dir(config) / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    # The default keeps what took a second; a run has dozens of programs that take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def model_directory(config: Config) -> Path:
    """The Hugging Face directory of ``model.path``, a packaged model converted first.

    Raises:
        ValueError: neither a directory nor a packaged model.
    """
    if is_packaged(config.model.path):
        return packaged_model(config.model.path, default_cache_dir(config))
    path = Path(config.model.path).expanduser()
    if not path.is_dir():
        raise ValueError(
            "`model.path` must be a Hugging Face directory or the name of a packaged "
            f"model, got {config.model.path!r}, which is neither."
        )
    return path


def load_task(config: Config) -> Task:
    """The questions of a run, split."""
    task = config.task
    return reasoning_gym_task(
        task.name,
        task.options,
        size=task.size,
        seed=task.seed,
        held_out=task.held_out,
    )


def load_policy(
    config: Config, task: Task, directory: Path
) -> tuple[Policy, nnx.State]:
    """Load and sketch the model; the static parts, and the weights.

    Raises:
        ValueError: the directory cannot be loaded, a bad rank or match, a prompt that
            does not fit the context.
    """
    tokenizer = ChatTokenizer.load(directory)
    model = load_decoder(
        directory,
        dtype=config.model.dtype,
        activations=config.model.activations,
        remat=config.model.remat,
    )
    shapes = model.config
    if tokenizer.vocab_size > shapes.vocab_size:
        raise ValueError(
            f"The tokenizer of {str(directory)!r} must fit the model's `vocab_size` "
            f"({shapes.vocab_size}), got ids up to {tokenizer.vocab_size - 1}."
        )
    model = sketch(model, config.sketch.rank, config.sketch.match, basis_of(config))
    graph, probes, weights = nnx.split(model, Probe, ...)
    plain_graph, _, _ = nnx.split(perturbed(model), Probe, ...)
    prompts = [
        encode_question(tokenizer, q, config.task.system_prompt)
        for q in (*task.train, *task.held_out)
    ]
    longest, new = max(map(len, prompts)), config.rollout.max_new_tokens
    unused = room_for(new) - new if config.rollout.engine == "sglang" else 0
    if longest + new + unused > shapes.max_positions:
        less = f", less {unused} that SGLang leaves unused" if unused else ""
        raise ValueError(
            "`rollout.max_new_tokens` and the longest prompt must fit the model's "
            f"context of {shapes.max_positions} tokens{less}, got {new} + {longest}."
        )
    engine = LocalEngine(
        graph,
        max_positions=shapes.max_positions,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        prefix=common_prefix(prompts),
        bucket=config.rollout.prompt_bucket,
    )
    policy = Policy(
        graph, plain_graph, probes, tokenizer, engine, config.task.system_prompt
    )
    return policy, weights


def basis_of(config: Config) -> Basis:
    """The run's basis rule."""
    sketch = config.sketch
    return Basis(seed=config.seed, refresh=sketch.refresh, kind=sketch.basis)


def build_rewards(config: Config) -> RewardPool:
    """The pool of scoring processes."""
    reward = config.reward
    return RewardPool(
        ReasoningGymReward(config.task.name, reward.answer, reward.partial),
        workers=reward.workers,
        timeout=reward.timeout,
    )


def build_optimizer(config: Config) -> optax.GradientTransformation:
    """Sketches -> proposal: clip, RowAdam, learning rate."""
    options = config.optimizer
    clip = (
        optax.identity()
        if options.clip_norm is None
        else optax.clip_by_global_norm(options.clip_norm)
    )
    return optax.chain(
        clip,
        scale_by_row_adam(options.b2, options.eps),
        optax.scale_by_learning_rate(options.learning_rate),
    )


def build_controller(config: Config) -> optax.GradientTransformationExtraArgs:
    """Proposal -> update within the KL budget.

    Raises:
        ValueError: the budget's schedule does not run, or not to budgets.
    """
    budget = build_budget(config.kl, config.train.steps)
    return scale_by_predicted_kl(budget, config.kl.alpha_max)


def build_training_step(
    config: Config,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    controller: optax.GradientTransformationExtraArgs,
) -> Step:
    """The jitted update of this config."""
    options = StepOptions(
        basis=basis_of(config),
        rounding=config.sketch.rounding,
        bits=config.sketch.bits,
        microbatch=config.train.microbatch,
        kl_estimator=config.kl.estimator,
        kl_share=config.kl.share,
        **loss_options_of(config)._asdict(),
    )
    return build_step(
        policy.graph, policy.plain_graph, policy.probes, optimizer, controller, options
    )


def loss_options_of(config: Config) -> LossOptions:
    """The policy loss, of the training step and of measurements beside it."""
    rl, keep = config.rl, config.rl.correction_mask
    return LossOptions(
        temperature=config.rollout.temperature,
        advantage=rl.advantage,
        group=rl.responses_per_prompt,
        baseline_decay=rl.baseline_decay,
        clip_low=rl.clip_low,
        clip_high=rl.clip_high,
        correction=config.correction,
        correction_cap=rl.correction_cap,
        correction_mask=None if keep is None else (keep[0], keep[1]),
    )


def build_training_monitor(config: Config, policy: Policy) -> Monitor:
    """The jitted measurement of how well the sketches keep real gradients."""
    return build_monitor(
        policy.graph,
        policy.probes,
        loss_options_of(config),
        responses=config.monitor.responses,
        kind=config.sketch.basis,
    )


def sampling_of(config: Config) -> Sampling:
    """How training responses are sampled."""
    rollout = config.rollout
    return Sampling(
        rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens
    )


def training_questions(config: Config, task: Task, step: int) -> list[Question]:
    """The questions of one update's batch, each as often as it is answered."""
    group = config.rl.responses_per_prompt
    count = config.train.batch // group
    drawn = draw(task.train, count, seed=config.seed, start=step * count)
    return [question for question in drawn for _ in range(group)]


def to_batch(completions: Completions, rewards: Rewards) -> Batch:
    """Responses and their scores as the training step takes them."""
    prompts = completions.prompts
    return Batch(
        prefix=jnp.asarray(prompts.prefix),
        prompts=jnp.asarray(prompts.tokens),
        prompt_lengths=jnp.asarray(prompts.lengths),
        completions=jnp.asarray(completions.tokens),
        mask=jnp.asarray(completions.mask),
        logprobs=jnp.asarray(completions.logprobs),
        rewards=jnp.asarray(rewards.values),
    )


def repeat_to(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` items, going round ``items`` as often as it takes."""
    return [items[i % len(items)] for i in range(count)]


def stream_key(seed: int, stream: str, step: int) -> Key[Array, ""]:
    """The PRNG key of one step of a stream, "rollout" or "eval"."""
    key = jax.random.fold_in(jax.random.key(seed), {"rollout": 1, "eval": 2}[stream])
    return jax.random.fold_in(key, np.uint32(step))

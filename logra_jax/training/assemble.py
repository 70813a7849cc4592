"""From a config to the parts of a run: task, rewards, optimizer, step, batches."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Key

from logra_jax.algorithm.galore import stacked_galore
from logra_jax.algorithm.predicted_kl import scale_by_predicted_kl
from logra_jax.algorithm.row_adam import scale_by_row_adam
from logra_jax.rl.tasks import EvalSet, Question, Task, draw
from logra_jax.rollout.types import Completions, Sampling
from logra_jax.training.budget import build_budget
from logra_jax.training.layout import Layout
from logra_jax.training.monitor import Monitor, build_monitor
from logra_jax.training.objective import LossOptions
from logra_jax.training.packing import Fields, pack
from logra_jax.training.parts import StepOptions
from logra_jax.training.paths import default_cache_dir
from logra_jax.training.policy import Policy, model_directory
from logra_jax.training.prepare import Prepare, build_prepare
from logra_jax.training.prompts import drop_too_long
from logra_jax.training.questions import load_questions
from logra_jax.training.schema import Config
from logra_jax.training.schema_task import HELD_OUT
from logra_jax.training.state import Batch
from logra_jax.training.step import Step, build_step

Item = TypeVar("Item")


def enable_compile_cache(config: Config) -> None:
    """Keep compiled programs between runs, in the cache directory."""
    cache = default_cache_dir(config) / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    # The default keeps what took a second; a run has dozens of programs that take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def load_task(config: Config) -> Task:
    """The questions of a run: to train on, held out, and of its evaluation sets.

    With `task.too_long=drop`, those whose prompts do not fit the model are left out;
    the model is fetched to see which.

    Raises:
        ValueError: the questions, or the model, cannot be had.
    """
    task = load_questions(config)
    if config.task.too_long == "drop":
        task = drop_too_long(config, task, model_directory(config))
    return task


def load_eval_sets(config: Config, task: Task) -> list[EvalSet]:
    """What a run is measured on: its held-out questions first, then `eval.sets`.

    Held-out questions are called "heldout", and left out where there are none. The
    questions of a set that brings a reward of its own name the set as their scorer.
    """
    held_out = [EvalSet(HELD_OUT, task.held_out)] if task.held_out else []
    return held_out + [
        EvalSet(
            one.name,
            tuple(
                replace(question, scorer=one.name)
                if config.eval.sets[one.name].reward is not None
                else question
                for question in one.questions
            ),
            one.dropped,
        )
        for one in task.eval_sets
    ]


def build_optimizer(
    config: Config, *, first_count: int = 0
) -> optax.GradientTransformation:
    """Gradients or sketches -> proposal: clip, the kind's own rule, learning rate.

    Args:
        config: a run's.
        first_count: updates that GaLore takes for done already; 0 has it begin with
            SVDs, as it must to train.
    """
    clip_norm = config.optimizer.clip_norm
    clip = (
        optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    )
    options, kind = config.optimizer.settled, config.optimizer.kind
    if kind == "logra":
        return optax.chain(
            clip,
            scale_by_row_adam(options.b2, options.eps),
            optax.scale_by_learning_rate(options.learning_rate),
        )
    if kind == "galore":
        rule = stacked_galore(
            options.learning_rate,
            config.sketch.rank,
            gap=options.projection_gap,
            b1=options.b1,
            b2=options.b2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            first_count=first_count,
        )
    else:
        rule = optax.adamw(
            options.learning_rate,
            options.b1,
            options.b2,
            options.eps,
            weight_decay=options.weight_decay,
        )
    return optax.chain(clip, rule)


def build_controller(config: Config) -> optax.GradientTransformationExtraArgs:
    """Proposal -> update within the KL budget; without one, as it is.

    Raises:
        ValueError: the budget's schedule does not run, or not to budgets.
    """
    budget = build_budget(config.kl, config.train.steps)
    alpha_max = 1.0 if budget is None else config.kl.alpha_max
    return scale_by_predicted_kl(budget, alpha_max)


def build_training_step(
    config: Config,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    controller: optax.GradientTransformationExtraArgs,
) -> Step:
    """The jitted update of this config."""
    options = step_options_of(config)
    return build_step(policy.method, optimizer, controller, options, policy.layout)


def build_training_prepare(config: Config, policy: Policy) -> Prepare | None:
    """What comes before the updates of a batch; None where nothing has to."""
    makes_several = config.rl.updates_per_batch > 1
    if not makes_several and config.reference.policy != "base":
        return None
    return build_prepare(
        policy.method,
        step_options_of(config),
        policy.layout,
        needs_old=makes_several and config.correction != "none",
        rows=config.train.microbatch,
        row_tokens=config.train.microbatch_tokens,
    )


def step_options_of(config: Config) -> StepOptions:
    """The static choices of an update."""
    return StepOptions(
        loss=loss_options_of(config),
        microbatch=config.train.microbatch,
        kl_estimator=config.kl.estimator,
        kl_share=config.kl.share,
    )


def loss_options_of(config: Config) -> LossOptions:
    """The policy loss, of the training step and of measurements beside it."""
    rl, keep, reference = config.rl, config.rl.correction_mask, config.reference
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
        std_floor=rl.std_floor,
        whiten=rl.whiten,
        loss=rl.loss,
        aggregation=rl.aggregation,
        length=config.rollout.max_new_tokens,
        reference_weight=0.0 if reference.policy == "none" else reference.weight,
        reference_estimator=reference.estimator,
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
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        rollout.max_new_tokens,
        rollout.min_new_tokens,
    )


def training_questions(config: Config, task: Task, position: int) -> list[Question]:
    """The questions of one batch, each as often as it is answered.

    ``position`` is that of its first in the run's stream of questions.
    """
    group = config.rl.responses_per_prompt
    count = config.train.batch // group
    drawn = draw(task.train, count, seed=config.seed, start=position)
    return [question for question in drawn for _ in range(group)]


def to_batch(
    completions: Completions,
    rewards: Float[np.ndarray, " batch"],
    microbatch_tokens: int | None = None,
    layout: Layout | None = None,
    counts: Bool[np.ndarray, " batch"] | None = None,
) -> Batch:
    """Responses and their scores as the training step takes them.

    Args:
        completions: the responses.
        rewards: of them.
        microbatch_tokens: tokens of the rows that they are packed into; None packs
            nothing.
        layout: puts the rows on its mesh; None for one device.
        counts: which of them have a say in the loss; None is all.

    Raises:
        ValueError: a response is longer than ``microbatch_tokens``.
    """
    prompts = completions.prompts
    packed = None
    if microbatch_tokens is not None:
        fields = Fields(
            prompts.tokens,
            prompts.lengths,
            completions.tokens,
            completions.mask,
            completions.logprobs,
        )
        packed = pack(fields, microbatch_tokens, layout.row_parts if layout else 1)
    on_host: dict[str, Any] = {
        "packed": packed,
        "prefix": prompts.prefix,
        "prompts": prompts.tokens,
        "prompt_lengths": prompts.lengths,
        "completions": completions.tokens,
        "mask": completions.mask,
        "logprobs": completions.logprobs,
        "rewards": rewards.astype(np.float32),
        "counts": counts,
    }
    batch = Batch(**on_host)
    return layout.put_batch(batch) if layout else jax.device_put(batch)


def repeat_to(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` items, going round ``items`` as often as it takes."""
    return [items[i % len(items)] for i in range(count)]


def stream_key(seed: int, stream: str, step: int, attempt: int = 0) -> Key[Array, ""]:
    """The PRNG key of one step of a stream, "rollout" or "eval".

    Those of the attempts at one step are keys of their own.
    """
    counts = jax.device_put((np.uint32(step), np.uint32(attempt)))
    return _stream_key(*counts, seed=seed, stream=stream)


@functools.partial(jax.jit, static_argnames=("seed", "stream"))
def _stream_key(
    step: Array, attempt: Array, *, seed: int, stream: str
) -> Key[Array, ""]:
    key = jax.random.fold_in(jax.random.key(seed), {"rollout": 1, "eval": 2}[stream])
    key = jax.random.fold_in(key, step)
    again = jax.random.fold_in(key, attempt)
    return jax.random.wrap_key_data(
        jnp.where(attempt > 0, jax.random.key_data(again), jax.random.key_data(key))
    )

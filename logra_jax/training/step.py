"""One update, pure and jitted: sketch, RowAdam, predicted KL, merge."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.low_rank import merge
from logra_jax.algorithm.predicted_kl import (
    PredictedKLState,
    predict_kl,
    realised_kl,
)
from logra_jax.models.decoder import Decoder
from logra_jax.models.logprobs import token_logprobs
from logra_jax.rl.advantages import grpo, running_mean
from logra_jax.rl.losses import ppo_clip
from logra_jax.rollout.local import prefill
from logra_jax.training.state import Batch, TrainState, rows

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]


class StepOptions(NamedTuple):
    """Static choices of the step, from the config."""

    basis: Basis
    rounding: str
    temperature: float
    microbatch: int  # responses per microbatch; divides the batch
    kl_responses: int  # responses that the KL is measured on
    advantage: str
    group: int  # responses per prompt
    baseline_decay: float
    clip_low: float
    clip_high: float


def build_step(
    graph: nnx.GraphDef,
    plain_graph: nnx.GraphDef,
    probes: nnx.State,
    optimizer: optax.GradientTransformation,
    controller: optax.GradientTransformationExtraArgs,
    options: StepOptions,
) -> Step:
    """The jitted update ``(state, batch) -> (state, metrics)``; ``state`` is donated.

    Args:
        graph: of the sketched model.
        plain_graph: of its perturbed twin, for the predicted KL.
        probes: zeros, the point that everything is differentiated at.
        optimizer: sketches -> proposal, such as clip, RowAdam and the learning rate.
        controller: scales the proposal by its predicted KL.
        options: static choices.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        advantages, baseline = _advantages(state, batch, options)
        sketches, metrics = _accumulate(
            graph, probes, state.weights, batch, advantages, options
        )
        proposal, optimizer_state = optimizer.update(sketches, state.optimizer)

        few = rows(batch, lambda a: a[:: max(1, len(a) // options.kl_responses)])
        few = rows(few, lambda a: a[: options.kl_responses])
        mask = few.mask.reshape(-1)
        head = nnx.merge(plain_graph, probes, state.weights).logits
        q, hidden_before = predict_kl(
            lambda p: _response_hidden(plain_graph, p, state.weights, few, jnp.float32),
            head,
            probes,
            proposal,
            mask,
            temperature=options.temperature,
        )
        updates, controller_state = controller.update(
            proposal, state.controller, predicted_kl=q
        )
        updates = cast(nnx.State, updates)
        controller_state = cast(PredictedKLState, controller_state)
        weights = merge(
            state.weights, updates, options.basis, rounding=options.rounding
        )
        hidden_after = _response_hidden(graph, probes, weights, few, jnp.float32)
        head = nnx.merge(plain_graph, probes, weights).logits
        realised = realised_kl(
            hidden_before, hidden_after, head, mask, temperature=options.temperature
        )
        metrics |= {
            "kl/q": q,
            "kl/budget": controller_state.budget,
            "kl/predicted": jnp.square(controller_state.alpha) * q,
            "kl/realised": realised,
            "alpha": controller_state.alpha,
            "update/sketch_norm": optax.tree.norm(sketches),
        }
        after = TrainState(
            state.step + 1, weights, optimizer_state, controller_state, baseline
        )
        return after, metrics

    return jax.jit(step, donate_argnums=0)


def _advantages(state: TrainState, batch: Batch, options: StepOptions):
    if options.advantage == "grpo":
        return grpo(batch.rewards, options.group), state.baseline
    return running_mean(batch.rewards, state.baseline, options.baseline_decay)


def _accumulate(
    graph: nnx.GraphDef,
    probes: nnx.State,
    weights: nnx.State,
    batch: Batch,
    advantages: Float[Array, " batch"],
    options: StepOptions,
) -> tuple[nnx.State, dict[str, Array]]:
    """Sketches of the whole batch, summed in float32 over microbatches."""
    tokens = jnp.maximum(jnp.sum(batch.mask), 1)

    def loss(probes: nnx.State, part: Batch, advantages: Array):
        model = nnx.merge(graph, probes, weights)
        hidden = _response_hidden(graph, probes, weights, part)
        logprobs = token_logprobs(
            hidden,
            part.completions.reshape(-1),
            model.logits,
            temperature=options.temperature,
        ).reshape(part.completions.shape)
        per_token, is_clipped = ppo_clip(
            logprobs,
            part.logprobs,
            advantages,
            part.mask,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
        )
        mismatch = jnp.where(part.mask, jnp.abs(logprobs - part.logprobs), 0.0)
        value = jnp.sum(per_token) / tokens
        return value, {
            "loss": value,
            "clip/share": jnp.sum(is_clipped) / tokens,
            "mismatch/mean": jnp.sum(mismatch) / tokens,
        }

    def split(a: Array) -> Array:
        return a.reshape(-1, options.microbatch, *a.shape[1:])

    zeros = {name: jnp.float32(0) for name in ("loss", "clip/share", "mismatch/mean")}
    parts = rows(batch, split)._replace(prefix=None)

    def microbatch(total, inputs):
        part, advantages = inputs
        part = part._replace(prefix=batch.prefix)
        one = jax.grad(loss, has_aux=True)(probes, part, advantages)
        return jax.tree.map(jnp.add, total, one), None

    (sketches, metrics), _ = jax.lax.scan(
        microbatch,
        (jax.tree.map(jnp.zeros_like, probes), zeros),
        (parts, split(advantages)),
    )
    return sketches, metrics


def _response_hidden(
    graph: nnx.GraphDef,
    probes: nnx.State,
    weights: nnx.State,
    batch: Batch,
    dtype=None,
) -> Float[Array, "tokens features"]:
    """Hidden states that predict each completion token, (batch * new, features)."""
    model: Decoder = nnx.merge(graph, probes, weights)
    width, new = batch.prompts.shape[1], batch.completions.shape[1]
    tokens = jnp.concatenate([batch.prompts, batch.completions[:, :-1]], axis=1)
    hidden, _, _ = prefill(
        model,
        batch.prefix,
        tokens,
        batch.prompt_lengths,
        prompt_width=width,
        dtype=dtype,
    )
    return hidden[:, width - 1 : width - 1 + new].reshape(-1, hidden.shape[-1])

"""What a run carries from step to step: all of it is in every checkpoint."""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32

from logra_jax.algorithm.predicted_kl import PredictedKLState
from logra_jax.rl.advantages import RunningMean
from logra_jax.training.packing import Packed


class TrainState(NamedTuple):
    """State of a run. Its PRNG is a function of (seed, step), so ``step`` holds it."""

    step: Int32[Array, ""]  # updates done
    weights: nnx.State  # kernels, embeddings, norms and basis addresses, no probes
    optimizer: optax.OptState  # sketch-shaped or smaller
    controller: PredictedKLState
    baseline: RunningMean
    position: Int32[Array, ""]  # prompts drawn from the stream of questions


class Credit(NamedTuple):
    """How the responses of a batch are judged, before its first update."""

    advantages: Float32[Array, " batch"]
    # Log-probs of the sampled tokens, at the sampling temperature, where needed:
    old: Float32[Array, "batch new"] | None = None  # of the policy before the batch
    reference: Float32[Array, "batch new"] | None = None  # of the reference


class Batch(NamedTuple):
    """One update's responses, split as the engine packed them."""

    prefix: Int32[Array, " prefix"]  # common to all rows
    prompts: Int32[Array, "batch suffix"]  # padded on the left
    prompt_lengths: Int32[Array, " batch"]
    completions: Int32[Array, "batch new"]
    mask: Bool[Array, "batch new"]  # sampled tokens
    logprobs: Float32[Array, "batch new"]  # the engine's, at the sampling temperature
    rewards: Float32[Array, " batch"]
    counts: Bool[Array, " batch"] | None = None  # has a say in the loss; None is all
    packed: Packed | None = None  # the same in rows of tokens, for the gradients
    credit: Credit | None = None  # None: the update judges by the rewards alone


def initial_state(
    weights: nnx.State,
    probes: nnx.State,
    optimizer: optax.GradientTransformation,
    controller: optax.GradientTransformation,
) -> TrainState:
    """The state before the first update."""
    return TrainState(
        jnp.zeros((), jnp.int32),
        weights,
        optimizer.init(probes),
        cast(PredictedKLState, controller.init(probes)),
        RunningMean.zero(),
        jnp.zeros((), jnp.int32),
    )


def evenly(count: int, size: int) -> list[int]:
    """``count`` of ``size`` rows, spread evenly over them.

    Rows are prompts in drawing order, the responses to one prompt side by side: an even
    spread covers as many prompts as it can. It is the same rows at every update.
    """
    return [i * size // count for i in range(count)]


def rows(batch: Batch, select) -> Batch:
    """``batch`` with ``select`` applied to every per-row array; nothing is packed."""
    apart = {"prefix": batch.prefix, "packed": None}
    selected = jax.tree.map(select, batch._replace(prefix=None, packed=None))
    return selected._replace(**apart)

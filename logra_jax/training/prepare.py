"""Before the updates of a batch: advantages, and log-probs of policies that stay put.

Not needed where one update is made of a batch and no reference is kept: then the update
has all that it judges by.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from logra_jax.rl.advantages import RunningMean
from logra_jax.training.layout import Layout
from logra_jax.training.methods import Method
from logra_jax.training.objective import advantages_of
from logra_jax.training.parts import Parts, StepOptions
from logra_jax.training.state import Batch, Credit

# (weights, baseline, batch, reference) -> how it is judged, and the baseline after it
Prepare = Callable[
    [nnx.State, RunningMean, Batch, nnx.State | None], tuple[Credit, RunningMean]
]


def build_prepare(
    method: Method,
    options: StepOptions,
    layout: Layout | None,
    *,
    needs_old: bool,
    rows: int,
    row_tokens: int | None = None,
) -> Prepare:
    """The jitted judgement of a batch, from the weights before its first update.

    Args:
        method: of the run.
        options: of its updates.
        layout: on the mesh; None for one device.
        needs_old: the log-probs of those weights are needed.
        rows: responses whose activations are held at once, on each device.
        row_tokens: tokens, in place of that; None where responses are not packed.

    Returns:
        A function that takes the reference's :func:`trained_weights`, or None, too.
    """
    parts = Parts(method, options, layout)

    def prepare(
        weights: nnx.State,
        baseline: RunningMean,
        batch: Batch,
        reference: nnx.State | None,
    ) -> tuple[Credit, RunningMean]:
        advantages, baseline = advantages_of(batch.rewards, baseline, options.loss)
        most = rows
        if row_tokens is not None:
            longest = batch.prompts.shape[1] + batch.completions.shape[1] - 1
            most = max(1, row_tokens // longest)
        old = parts.logprobs(weights, batch, most) if needs_old else None
        other = None
        if reference is not None:
            weights = nnx.merge_state(weights, reference)
            other = parts.logprobs(weights, batch, most)
        return Credit(advantages, old, other), baseline

    return jax.jit(prepare)


def trained_weights(method: Method, weights: nnx.State) -> nnx.State:
    """The weights that updates change: all that tells two policies apart.

    Those of a LoRA run are its adapters, of others the matched kernels.
    """
    flat = dict(nnx.to_flat_state(weights))
    changed: dict[Any, Any] = {}
    for path, _ in nnx.to_flat_state(method.trained):
        place = path if path in flat else (*path[:-1], "kernel")
        changed[place] = flat[place]
    return nnx.from_flat_state(changed)


def minibatch_rows(
    seed: int, index: int, batch: int, *, epochs: int, minibatches: int
) -> list[np.ndarray]:
    """The rows of each update that is made of one batch.

    In each epoch every row is in one minibatch. The order is a function of (seed,
    index, epoch) alone; a minibatch that is the whole batch keeps its order.

    Args:
        seed: of the run.
        index: updates done before the batch.
        batch: rows.
        epochs: times that all rows are gone through.
        minibatches: of an epoch; divides ``batch``.
    """
    if minibatches == 1:
        return [np.arange(batch)] * epochs
    size = batch // minibatches
    found: list[np.ndarray] = []
    for epoch in range(epochs):
        order = np.random.default_rng((seed, index, epoch)).permutation(batch)
        # In order within: the responses to one prompt lie side by side where they can.
        found += [np.sort(part) for part in order.reshape(minibatches, size)]
    return found


@jax.jit
def select(credit: Credit, rows: jax.Array) -> Credit:
    """The judgement of some rows."""
    return jax.tree.map(lambda a: a[rows], credit)

"""One update, pure and jitted: sketch, RowAdam, predicted KL, merge."""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from logra_jax.algorithm.low_rank import check_moments
from logra_jax.algorithm.merge import Landing, combine
from logra_jax.algorithm.predicted_kl import PredictedKLState
from logra_jax.training.layout import REPLICATED, Layout
from logra_jax.training.methods import Method
from logra_jax.training.objective import advantages_of
from logra_jax.training.parts import Parts, StepOptions
from logra_jax.training.state import Batch, Credit, TrainState, evenly, rows

# The next state, metrics, and the factors that were merged (what a server needs), if
# the method has such.
Stepped = tuple[TrainState, dict[str, Array], nnx.State | None]
Step = Callable[[TrainState, Batch], Stepped]


def build_step(
    method: Method,
    optimizer: optax.GradientTransformation,
    controller: optax.GradientTransformationExtraArgs,
    options: StepOptions,
    layout: Layout | None = None,
) -> Step:
    """The jitted update ``(state, batch) -> Stepped``; ``state`` is donated.

    On a mesh, gradients, predicted KL and merge run on each device's parts: layers
    gather their kernels, and devices exchange nothing else but sums of gradients (of
    sketches: O(d r)), updates of that size, and scalars. What the optimizer does in
    between is partitioned by XLA.

    Args:
        method: what is trained, and how it lands.
        optimizer: gradients -> proposal, such as clip, RowAdam and the learning rate.
        controller: scales the proposal by its predicted KL.
        options: static choices.
        layout: on the mesh; None for one device.

    Raises:
        ValueError: the optimizer keeps moments that a refreshed basis would void.
    """
    if method.basis is not None:
        kept = jax.eval_shape(optimizer.init, method.trained)
        check_moments(kept, method.trained, method.basis)
    parts = Parts(method, options, layout)

    def step(state: TrainState, batch: Batch) -> Stepped:
        credit, baseline = batch.credit, state.baseline
        if credit is None:
            advantages, baseline = advantages_of(batch.rewards, baseline, options.loss)
            credit = Credit(advantages)
        trained, _ = method.split(state.weights)
        gradients, metrics = parts.accumulate(state.weights, trained, batch, credit)
        proposal, optimizer_state = optimizer.update(
            gradients, state.optimizer, trained
        )
        updates, controller_state = cast(nnx.State, proposal), state.controller
        few, measured = None, None
        most = rows_at_once(batch, options.microbatch)
        if options.kl_share:
            few = _share(batch, options.kl_share, parts.rows)
            measured = parts.predict(state, trained, few, updates, most)
            scaled, controlled = controller.update(
                proposal, state.controller, predicted_kl=measured[0]
            )
            updates = cast(nnx.State, scaled)
            controller_state = cast(PredictedKLState, controlled)
        weights, landings, factors = parts.land(state.weights, updates)
        metrics |= {
            "update/sketch_norm": optax.tree.norm(gradients),
            "update/rows_dropped": _rows_not_finite(updates),
        } | _landed(landings)
        if few is not None and measured is not None:
            q, before = measured
            alpha = controller_state.alpha
            realised, entropy = parts.realised(weights, few, before, most)
            metrics |= {
                "kl/q": q,
                "kl/budget": controller_state.budget,
                # a dropped update spends nothing, whatever q is
                "kl/predicted": jnp.where(alpha > 0, jnp.square(alpha) * q, 0.0),
                "kl/realised": realised,
                "entropy": entropy,
                "alpha": alpha,
            }
        after = TrainState(
            state.step + 1,
            weights,
            optimizer_state,
            controller_state,
            baseline,
            state.position,
        )
        return after, metrics, factors

    if layout is None:
        return jax.jit(step, donate_argnums=0)
    # The next state lies as this one does, so that the step is compiled once.
    state = layout.state_shardings(optimizer, controller, method.trained)
    everywhere = layout.shardings(REPLICATED)
    where = (state, everywhere, everywhere)
    return jax.jit(step, donate_argnums=0, out_shardings=where)


def accumulate(
    method: Method,
    weights: nnx.State,
    batch: Batch,
    advantages: Float[Array, " batch"],
    options: StepOptions,
    layout: Layout | None = None,
) -> tuple[nnx.State, dict[str, Array]]:
    """The gradients, summed over the batch in float32, and the loss's metrics."""
    trained, _ = method.split(weights)
    parts = Parts(method, options, layout)
    credit = (batch.credit or Credit(advantages))._replace(advantages=advantages)
    return parts.accumulate(weights, trained, batch, credit)


def _rows_not_finite(updates: nnx.State) -> Array:
    """Rows that do not land, because they hold what is not finite."""
    return sum(
        (jnp.sum(~jnp.all(jnp.isfinite(u), -1)) for u in jax.tree.leaves(updates)),
        jnp.int32(0),
    )


def _landed(landings: dict[str, Landing]) -> dict[str, Array]:
    """How much of the update landed, for each kind of layer (the end of its name)."""
    kinds: dict[str, list[Landing]] = {}
    for path, landing in landings.items():
        kinds.setdefault(path.rpartition(".")[2], []).append(landing)
    return {
        f"landed/{kind}/{name}": value
        for kind, parts in kinds.items()
        for name, value in combine(parts).items()
    }


def _share(batch: Batch, share: float, multiple: int) -> Batch:
    """At least one response, spread evenly over the batch's rows.

    As many as ``multiple`` devices divide among them: rows that fill up count nothing.
    """
    size = len(batch.mask)
    chosen = evenly(max(1, round(share * size)), size)
    padding = -len(chosen) % multiple
    indices = jnp.array(chosen + chosen[-1:] * padding)
    few = rows(batch, lambda a: a[indices])
    is_chosen = jnp.arange(len(indices)) < len(chosen)
    return few._replace(mask=few.mask & is_chosen[:, None])


def rows_at_once(batch: Batch, microbatch: int) -> int:
    """Whole responses, on each device, that have no more tokens than a microbatch."""
    if batch.packed is None:
        return microbatch
    longest = batch.prompts.shape[1] + batch.completions.shape[1] - 1
    return max(1, batch.packed.rows.tokens.shape[-1] // longest)

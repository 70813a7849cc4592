"""One update, pure and jitted: sketch, RowAdam, predicted KL, merge."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from logra_jax.algorithm.divergence import exp_excess, realised_kl
from logra_jax.algorithm.low_rank import check_moments
from logra_jax.algorithm.merge import Landing, combine
from logra_jax.algorithm.parallel import AXES, ROWS, total
from logra_jax.algorithm.predicted_kl import (
    PredictedKLState,
    predict_kl,
    predict_kl_by_difference,
)
from logra_jax.models.decoder import Decoder
from logra_jax.training.layout import (
    BY_ROWS,
    REPLICATED,
    Layout,
    batch_specs,
    on_parts,
)
from logra_jax.training.methods import Method
from logra_jax.training.objective import (
    LossOptions,
    PolicyTerms,
    advantages_of,
    hidden_in_parts,
    packed_terms,
    policy_terms,
)
from logra_jax.training.packing import Packed, PackedRows
from logra_jax.training.state import Batch, TrainState, evenly, rows

_PROBE_KL = 1e-4  # nats per token: the KL that a finite-difference probe makes

# The next state, metrics, and the factors that were merged (what a server needs), if
# the method has such.
Stepped = tuple[TrainState, dict[str, Array], nnx.State | None]
Step = Callable[[TrainState, Batch], Stepped]


class StepOptions(NamedTuple):
    """Static choices of the step, from the config."""

    loss: LossOptions
    microbatch: int  # responses held at once, on each device; divides what it has
    kl_estimator: str  # jvp, difference or engine
    kl_share: float  # of the responses, that the KL is measured on; at 0 it is not,
    # and the optimizer's step is taken as it is


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
    parts = _Parts(method, options, layout)

    def step(state: TrainState, batch: Batch) -> Stepped:
        advantages, baseline = advantages_of(
            batch.rewards, state.baseline, options.loss
        )
        trained, _ = method.split(state.weights)
        gradients, metrics = parts.accumulate(state.weights, trained, batch, advantages)
        proposal, optimizer_state = optimizer.update(
            gradients, state.optimizer, trained
        )
        updates, controller_state = cast(nnx.State, proposal), state.controller
        few, measured = None, None
        most = _rows_at_once(batch, options.microbatch)
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
            metrics |= {
                "kl/q": q,
                "kl/budget": controller_state.budget,
                # a dropped update spends nothing, whatever q is
                "kl/predicted": jnp.where(alpha > 0, jnp.square(alpha) * q, 0.0),
                "kl/realised": parts.realised(weights, few, before, most),
                "alpha": alpha,
            }
        after = TrainState(
            state.step + 1, weights, optimizer_state, controller_state, baseline
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
    parts = _Parts(method, options, layout)
    return parts.accumulate(weights, trained, batch, advantages)


class _Parts:
    """The pieces of the step that run on each device's parts of batch and weights."""

    def __init__(self, method: Method, options: StepOptions, layout: Layout | None):
        self.method, self.options, self.layout = method, options, layout
        self.rows = layout.row_parts if layout else 1
        self.axes = AXES if layout else None  # means are over all devices
        self.weights = self.used = self.kept = None
        if layout:
            self.weights, self.used, self.kept = (
                layout.weights,
                layout.used,
                layout.kept,
            )

    def model(self, weights: nnx.State, trained: nnx.State, *, plain: bool) -> Decoder:
        """The model of this device, ``trained`` in place of what the weights hold."""
        _, rest = self.method.split(weights)
        graph = self.method.plain_graph if plain else self.method.graph
        return nnx.merge(graph, trained, rest)

    def accumulate(
        self,
        weights: nnx.State,
        trained: nnx.State,
        batch: Batch,
        advantages: Float[Array, " batch"],
    ) -> tuple[nnx.State, dict[str, Array]]:
        """Gradients of the whole batch, summed in float32 over microbatches."""
        tokens = jnp.maximum(jnp.sum(batch.mask), 1)

        def accumulate(weights, trained, batch, advantages, tokens):
            def loss(trained: nnx.State, part: Batch | PackedRows, advantages: Array):
                model = self.model(weights, trained, plain=False)
                terms = _terms_of(model, batch, part, advantages, self.options.loss)
                value = jnp.sum(terms.loss) / tokens
                return value, {"loss": value} | _token_metrics(terms, tokens)

            grad = jax.grad(loss, has_aux=True)
            if batch.packed is None:
                size = min(self.options.microbatch, len(batch.rewards))
                gradients, each = _sum_over_microbatches(
                    grad, trained, batch, advantages, size
                )
            else:
                gradients, each = _sum_over_packed(
                    grad, trained, batch.packed, advantages
                )
            metrics = {
                name: self._over_devices(name, values) for name, values in each.items()
            }
            if self.layout:
                gradients = self.layout.reduce(gradients)
            return gradients, metrics

        run = on_parts(
            self.layout,
            accumulate,
            (
                self.weights,
                self.used,
                batch_specs(batch),
                # packed rows come from anywhere in the batch
                BY_ROWS if batch.packed is None else REPLICATED,
                REPLICATED,
            ),
            (self.kept, REPLICATED),
        )
        return run(weights, trained, batch, advantages, tokens)

    def _over_devices(self, name: str, values: Float[Array, "*microbatches"]) -> Array:
        if name == "mismatch/max":
            value = jnp.max(values)
            return lax.pmax(value, ROWS) if self.layout else value
        return total(jnp.sum(values), ROWS if self.layout else None)

    def predict(
        self,
        state: TrainState,
        trained: nnx.State,
        batch: Batch,
        proposal: nnx.State,
        most: int,
    ) -> tuple[Float32[Array, ""], Float[Array, "tokens features"]]:
        """``q`` of the proposal by the configured estimator, and the hidden states.

        ``most`` rows go through the layers at once, on each device.
        """

        def predict(weights, trained, batch, proposal, last):
            def hidden(trained: nnx.State) -> Array:
                model = self.model(weights, trained, plain=True)
                return hidden_in_parts(model, batch, most, jnp.float32)

            model = self.model(weights, trained, plain=True)
            head, proposal = model.head_after(proposal)
            mask = batch.mask.reshape(-1)
            policy = (hidden, head, trained, proposal, mask)
            temperature = self.options.loss.temperature
            if self.options.kl_estimator == "jvp":
                return predict_kl(*policy, temperature=temperature, axis_name=self.axes)
            engine = None
            if self.options.kl_estimator == "engine":
                engine = batch.completions.reshape(-1), batch.logprobs.reshape(-1)
            # The last update's q starts the search for the probe's size.
            is_known = jnp.isfinite(last) & (last > 0)
            return predict_kl_by_difference(
                *policy,
                temperature=temperature,
                step=jnp.where(is_known, jnp.sqrt(_PROBE_KL / last), 1.0),
                target=_PROBE_KL,
                engine=engine,
                axis_name=self.axes,
            )

        run = on_parts(
            self.layout,
            predict,
            (self.weights, self.used, batch_specs(batch), self.used, REPLICATED),
            (REPLICATED, BY_ROWS),
        )
        return run(state.weights, trained, batch, proposal, state.controller.q)

    def land(
        self, weights: nnx.State, updates: nnx.State
    ) -> tuple[nnx.State, dict[str, Landing], nnx.State | None]:
        """The update on the weights."""
        splits = self.layout.splits if self.layout else {}
        run = on_parts(
            self.layout,
            lambda weights, updates: self.method.land(weights, updates, splits),
            (self.weights, self.layout and self.layout.landing),
            (self.weights, REPLICATED, REPLICATED),
        )
        return run(weights, updates)

    def realised(
        self, weights: nnx.State, batch: Batch, before: Array, most: int
    ) -> Float32[Array, ""]:
        """KL of the policy before and after, nats per token; see :meth:`predict`."""

        def realised(weights, trained, batch, before):
            model = self.model(weights, trained, plain=False)
            after = hidden_in_parts(model, batch, most, jnp.float32)
            head, after = model.head_after(after)
            return realised_kl(
                before,
                after,
                head,
                batch.mask.reshape(-1),
                temperature=self.options.loss.temperature,
                axis_name=self.axes,
            )

        run = on_parts(
            self.layout,
            realised,
            (self.weights, self.used, batch_specs(batch), BY_ROWS),
            REPLICATED,
        )
        trained, _ = self.method.split(weights)
        return run(weights, trained, batch, before)


def _sum_over_microbatches(
    grad: Callable, trained: nnx.State, batch: Batch, advantages: Array, size: int
) -> tuple[nnx.State, dict[str, Array]]:
    """Sums of ``grad(trained, part, advantages)``'s gradients; metrics of each part."""

    def split(a: Array) -> Array:
        return a.reshape(-1, size, *a.shape[1:])

    def microbatch(total, inputs):
        part, advantages = inputs
        part = part._replace(prefix=batch.prefix)
        one, metrics = grad(trained, part, advantages)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, one), metrics

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    parts = rows(batch, split)._replace(prefix=None)
    return jax.lax.scan(microbatch, zeros, (parts, split(advantages)))


def _sum_over_packed(
    grad: Callable, trained: nnx.State, packed: Packed, advantages: Array
) -> tuple[nnx.State, dict[str, Array]]:
    """The same over the rows that hold tokens, however many; metrics of all of them."""

    def add(index: Array, sums: tuple) -> tuple:
        one, new = grad(trained, packed.microbatch(index), advantages)
        gradients = jax.tree.map(lambda t, g: t + g.astype(t.dtype), sums[0], one)
        return gradients, {
            name: jnp.maximum(sums[1][name], value)
            if name == "mismatch/max"
            else sums[1][name] + value
            for name, value in new.items()
        }

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    _, metrics = jax.eval_shape(grad, trained, packed.microbatch(0), advantages)
    nothing = {name: jnp.zeros(v.shape, v.dtype) for name, v in metrics.items()}
    return lax.fori_loop(0, packed.count, add, (zeros, nothing))


def _terms_of(
    model: Decoder,
    batch: Batch,
    part: Batch | PackedRows,
    advantages: Float[Array, " batch"],
    options: LossOptions,
) -> PolicyTerms:
    """The loss of one part of ``batch``, a microbatch or a packed row."""
    if isinstance(part, Batch):
        return policy_terms(model, part, advantages, options)
    longest = batch.prompts.shape[1] + batch.completions.shape[1] - 1
    return packed_terms(model, batch.prefix, part, advantages, options, longest=longest)


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


def _rows_at_once(batch: Batch, microbatch: int) -> int:
    """Whole responses, on each device, that have no more tokens than a microbatch."""
    if batch.packed is None:
        return microbatch
    longest = batch.prompts.shape[1] + batch.completions.shape[1] - 1
    return max(1, batch.packed.rows.tokens.shape[-1] // longest)


def _token_metrics(terms: PolicyTerms, tokens: Array) -> dict[str, Array]:
    """Means over the batch's ``tokens``, of which ``terms`` are a part, and a maximum.

    Where nothing is corrected there is no ``correction/``. Its shares are of tokens at
    the level of sequences too.
    """
    size = jnp.abs(terms.log_ratio)
    metrics = {
        "clip/share": jnp.sum(terms.is_clipped) / tokens,
        "mismatch/mean": jnp.sum(size) / tokens,
        "mismatch/max": jnp.max(size),
        # as logra.sampled_kl, summed over microbatches
        "mismatch/kl": jnp.sum(exp_excess(terms.log_ratio)) / tokens,
    }
    if terms.correction is not None:
        weights, is_capped, is_masked = terms.correction
        metrics |= {
            "correction/mean_weight": jnp.sum(weights) / tokens,
            "correction/capped": jnp.sum(is_capped) / tokens,
            "correction/masked": jnp.sum(is_masked) / tokens,
        }
    return metrics

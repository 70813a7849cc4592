"""The pieces of an update that run on each device's parts of batch and weights."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from logra_jax.algorithm.divergence import LateHead, change_of_policy, exp_excess
from logra_jax.algorithm.kl_prediction import predict_kl, predict_kl_by_difference
from logra_jax.algorithm.merge import Landing
from logra_jax.algorithm.parallel import AXES, ROWS, Tree, not_before, total
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
    Judged,
    LossOptions,
    PolicyTerms,
    hidden_in_parts,
    judge,
    logprobs_in_parts,
    packed_terms,
    policy_terms,
)
from logra_jax.training.packing import Packed, PackedRows
from logra_jax.training.state import Batch, Credit, TrainState, rows

_PROBE_KL = 1e-4  # nats per token: the KL that a finite-difference probe makes


class StepOptions(NamedTuple):
    """Static choices of the step, from the config."""

    loss: LossOptions
    microbatch: int  # responses held at once, on each device; divides what it has
    kl_estimator: str  # jvp, difference or engine
    kl_share: float  # of the responses, that the KL is measured on; at 0 it is not,
    # and the optimizer's step is taken as it is


class Parts:
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
        credit: Credit,
    ) -> tuple[nnx.State, dict[str, Array]]:
        """Gradients of the whole batch, summed in float32 over microbatches."""
        tokens = jnp.maximum(jnp.sum(batch.mask), 1)
        judged = judge(batch, credit, self.options.loss)
        batch = batch._replace(credit=None)

        def accumulate(weights, trained, batch, judged, tokens):
            def loss(trained: nnx.State, part: Batch | PackedRows, judged: Judged):
                model = self.model(weights, trained, plain=False)
                terms = _terms_of(model, batch, part, judged, self.options.loss)
                value = jnp.sum(terms.loss)
                return value, {"loss": value} | _token_metrics(terms, tokens)

            grad = jax.grad(loss, has_aux=True)
            if batch.packed is None:
                size = min(self.options.microbatch, len(batch.rewards))
                gradients, each = _sum_over_microbatches(
                    grad, trained, batch, judged, size
                )
            else:
                gradients, each = _sum_over_packed(grad, trained, batch.packed, judged)
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
        return run(weights, trained, batch, judged, tokens)

    def _over_devices(self, name: str, values: Float[Array, "*microbatches"]) -> Array:
        if name == "mismatch/max":
            value = jnp.max(values)
            return lax.pmax(value, ROWS) if self.layout else value
        return total(jnp.sum(values), ROWS if self.layout else None)

    def _not_before(self, batch: Batch, arrays: Tree) -> tuple[Batch, Tree]:
        """``batch``, of which the model sees nothing before there are ``arrays``."""
        if self.layout is None:
            return batch, arrays
        tokens, arrays = not_before((batch.prefix, batch.prompts), arrays)
        return batch._replace(prefix=tokens[0], prompts=tokens[1]), arrays

    def logprobs(
        self, weights: nnx.State, batch: Batch, most: int
    ) -> Float32[Array, "batch new"]:
        """Of the completion tokens, ``most`` rows at a time on each device."""
        batch = batch._replace(credit=None, packed=None, counts=None)

        def logprobs(weights, trained, batch):
            model = self.model(weights, trained, plain=False)
            temperature = self.options.loss.temperature
            return logprobs_in_parts(model, batch, most, temperature)

        specs = (self.weights, self.used, batch_specs(batch))
        run = on_parts(self.layout, logprobs, specs, BY_ROWS)
        trained, _ = self.method.split(weights)
        return run(weights, trained, batch)

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
            batch, proposal = self._not_before(batch, proposal)

            def hidden(trained: nnx.State) -> Array:
                model = self.model(weights, trained, plain=True)
                return hidden_in_parts(model, batch, most, jnp.float32)

            model = self.model(weights, trained, plain=True)
            head = LateHead(model.head_after)
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
    ) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
        """KL of the policy before and after, and the entropy before, nats per token.

        See :meth:`predict`.
        """

        def realised(weights, trained, batch, before):
            batch, weights = self._not_before(batch, weights)
            model = self.model(weights, trained, plain=False)
            after = hidden_in_parts(model, batch, most, jnp.float32)
            return change_of_policy(
                before,
                after,
                LateHead(model.head_after),
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
    grad: Callable, trained: nnx.State, batch: Batch, judged: Judged, size: int
) -> tuple[nnx.State, dict[str, Array]]:
    """Sums of ``grad(trained, part, judged)``'s gradients; metrics of each part."""

    def split(a: Array) -> Array:
        return a.reshape(-1, size, *a.shape[1:])

    def microbatch(total, inputs):
        part, judged = inputs
        part = part._replace(prefix=batch.prefix)
        one, metrics = grad(trained, part, judged)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, one), metrics

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    parts = rows(batch, split)._replace(prefix=None)
    return jax.lax.scan(microbatch, zeros, (parts, jax.tree.map(split, judged)))


def _sum_over_packed(
    grad: Callable, trained: nnx.State, packed: Packed, judged: Judged
) -> tuple[nnx.State, dict[str, Array]]:
    """The same over the rows that hold tokens, however many; metrics of all of them."""

    def add(index: Array, sums: tuple) -> tuple:
        one, new = grad(trained, packed.microbatch(index), judged)
        gradients = jax.tree.map(lambda t, g: t + g.astype(t.dtype), sums[0], one)
        return gradients, {
            name: jnp.maximum(sums[1][name], value)
            if name == "mismatch/max"
            else sums[1][name] + value
            for name, value in new.items()
        }

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    _, metrics = jax.eval_shape(grad, trained, packed.microbatch(0), judged)
    nothing = {name: jnp.zeros(v.shape, v.dtype) for name, v in metrics.items()}
    return lax.fori_loop(0, packed.count, add, (zeros, nothing))


def _terms_of(
    model: Decoder,
    batch: Batch,
    part: Batch | PackedRows,
    judged: Judged,
    options: LossOptions,
) -> PolicyTerms:
    """The loss of one part of ``batch``, a microbatch or a packed row."""
    if isinstance(part, Batch):
        return policy_terms(model, part, judged, options)
    longest = batch.prompts.shape[1] + batch.completions.shape[1] - 1
    return packed_terms(model, batch.prefix, part, judged, options, longest=longest)


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
    if terms.reference_kl is not None:
        metrics["reference/kl"] = jnp.sum(terms.reference_kl) / tokens
    if terms.correction is not None:
        weights, is_capped, is_masked = terms.correction
        metrics |= {
            "correction/mean_weight": jnp.sum(weights) / tokens,
            "correction/capped": jnp.sum(is_capped) / tokens,
            "correction/masked": jnp.sum(is_masked) / tokens,
        }
    return metrics

"""One update, pure and jitted: sketch, RowAdam, predicted KL, merge."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Float32

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.divergence import exp_excess, realised_kl
from logra_jax.algorithm.factor import quantise
from logra_jax.algorithm.low_rank import check_moments
from logra_jax.algorithm.merge import Landing, combine, merge_measured
from logra_jax.algorithm.predicted_kl import (
    PredictedKLState,
    predict_kl,
    predict_kl_by_difference,
)
from logra_jax.training.objective import (
    LossOptions,
    PolicyTerms,
    advantages_of,
    policy_terms,
    response_hidden,
)
from logra_jax.training.state import Batch, TrainState, evenly, rows

_PROBE_KL = 1e-4  # nats per token: the KL that a finite-difference probe makes

# The next state, metrics, and the factors that were merged (what a server needs).
Stepped = tuple[TrainState, dict[str, Array], nnx.State]
Step = Callable[[TrainState, Batch], Stepped]


class StepOptions(NamedTuple):
    """Static choices of the step, from the config."""

    basis: Basis
    rounding: str
    bits: int  # of the factor
    temperature: float
    microbatch: int  # responses per microbatch; divides the batch
    kl_estimator: str  # jvp, difference or engine
    kl_share: float  # of the responses, that the KL is measured on
    advantage: str
    group: int  # responses per prompt
    baseline_decay: float
    clip_low: float
    clip_high: float
    correction: str = "none"  # for the engine's mismatch: none, token or sequence
    correction_cap: float = 2.0
    correction_mask: tuple[float, float] | None = None  # ratios that count

    @property
    def loss(self) -> LossOptions:
        """Those of the loss."""
        return LossOptions(*(getattr(self, name) for name in LossOptions._fields))


def build_step(
    graph: nnx.GraphDef,
    plain_graph: nnx.GraphDef,
    probes: nnx.State,
    optimizer: optax.GradientTransformation,
    controller: optax.GradientTransformationExtraArgs,
    options: StepOptions,
) -> Step:
    """The jitted update ``(state, batch) -> Stepped``; ``state`` is donated.

    Args:
        graph: of the sketched model.
        plain_graph: of its perturbed twin, for the predicted KL.
        probes: zeros, the point that everything is differentiated at.
        optimizer: sketches -> proposal, such as clip, RowAdam and the learning rate.
        controller: scales the proposal by its predicted KL.
        options: static choices.

    Raises:
        ValueError: the optimizer keeps moments that a refreshed basis would void.
    """

    check_moments(jax.eval_shape(optimizer.init, probes), probes, options.basis)

    def step(state: TrainState, batch: Batch) -> Stepped:
        advantages, baseline = advantages_of(
            batch.rewards, state.baseline, options.loss
        )
        sketches, metrics = _accumulate(
            graph, probes, state.weights, batch, advantages, options
        )
        proposal, optimizer_state = optimizer.update(sketches, state.optimizer)

        few = _share(batch, options.kl_share)
        mask = few.mask.reshape(-1)
        q, hidden_before = _predict(
            plain_graph, probes, state, few, cast(nnx.State, proposal), options
        )
        updates, controller_state = controller.update(
            proposal, state.controller, predicted_kl=q
        )
        updates = cast(nnx.State, updates)
        controller_state = cast(PredictedKLState, controller_state)
        factors = quantise(updates, options.basis, options.bits)
        weights, landings = merge_measured(
            state.weights, factors, options.basis, rounding=options.rounding
        )
        hidden_after = _response_hidden(graph, probes, weights, few, jnp.float32)
        head = nnx.merge(plain_graph, probes, weights).logits
        realised = realised_kl(
            hidden_before, hidden_after, head, mask, temperature=options.temperature
        )
        alpha = controller_state.alpha
        metrics |= {
            "kl/q": q,
            "kl/budget": controller_state.budget,
            # a dropped update spends nothing, whatever q is
            "kl/predicted": jnp.where(alpha > 0, jnp.square(alpha) * q, 0.0),
            "kl/realised": realised,
            "alpha": alpha,
            "update/sketch_norm": optax.tree.norm(sketches),
            "update/rows_dropped": _rows_not_finite(updates),
        } | _landed(landings)
        after = TrainState(
            state.step + 1, weights, optimizer_state, controller_state, baseline
        )
        return after, metrics, factors

    return jax.jit(step, donate_argnums=0)


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


def _share(batch: Batch, share: float) -> Batch:
    """At least one response, spread evenly over the batch's rows."""
    size = len(batch.mask)
    chosen = jnp.array(evenly(max(1, round(share * size)), size))
    return rows(batch, lambda a: a[chosen])


def _predict(
    plain_graph: nnx.GraphDef,
    probes: nnx.State,
    state: TrainState,
    batch: Batch,
    proposal: nnx.State,
    options: StepOptions,
) -> tuple[Float32[Array, ""], Float[Array, "tokens features"]]:
    """``q`` of the proposal by the configured estimator, and the hidden states now."""

    def hidden(p: nnx.State) -> Array:
        return _response_hidden(plain_graph, p, state.weights, batch, jnp.float32)

    head = nnx.merge(plain_graph, probes, state.weights).logits
    policy = (hidden, head, probes, proposal, batch.mask.reshape(-1))
    if options.kl_estimator == "jvp":
        return predict_kl(*policy, temperature=options.temperature)
    engine = None
    if options.kl_estimator == "engine":
        engine = batch.completions.reshape(-1), batch.logprobs.reshape(-1)
    # The last update's q starts the search for the probe's size; 1 before there is one.
    last = state.controller.q
    is_known = jnp.isfinite(last) & (last > 0)
    return predict_kl_by_difference(
        *policy,
        temperature=options.temperature,
        step=jnp.where(is_known, jnp.sqrt(_PROBE_KL / last), 1.0),
        target=_PROBE_KL,
        engine=engine,
    )


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
        terms = policy_terms(model, part, advantages, options.loss)
        value = jnp.sum(terms.loss) / tokens
        return value, {"loss": value} | _token_metrics(terms, tokens)

    def split(a: Array) -> Array:
        return a.reshape(-1, options.microbatch, *a.shape[1:])

    parts = rows(batch, split)._replace(prefix=None)

    def microbatch(total, inputs):
        part, advantages = inputs
        part = part._replace(prefix=batch.prefix)
        one, metrics = jax.grad(loss, has_aux=True)(probes, part, advantages)
        return jax.tree.map(jnp.add, total, one), metrics

    sketches, each = jax.lax.scan(
        microbatch, jax.tree.map(jnp.zeros_like, probes), (parts, split(advantages))
    )
    metrics = {
        name: jnp.max(values) if name == "mismatch/max" else jnp.sum(values)
        for name, values in each.items()
    }
    return sketches, metrics


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


def _response_hidden(
    graph: nnx.GraphDef,
    probes: nnx.State,
    weights: nnx.State,
    batch: Batch,
    dtype=None,
) -> Float[Array, "tokens features"]:
    """Hidden states that predict each completion token, (batch * new, features)."""
    return response_hidden(nnx.merge(graph, probes, weights), batch, dtype)

"""Real gradients of a few responses, looked at layer by layer while a run goes on.

The training step never forms a gradient; here one is formed on purpose, of one layer at
a time, to see how much of it the sketch keeps (:mod:`logra_jax.algorithm.alignment`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from logra_jax.algorithm import alignment
from logra_jax.algorithm.capture import Measure, Tap, measurements, tapped
from logra_jax.models.sharding import on_host
from logra_jax.rl.advantages import RunningMean
from logra_jax.training.objective import (
    LossOptions,
    advantages_of,
    judge,
    policy_terms,
)
from logra_jax.training.state import Batch, Credit, TrainState, evenly

Monitor = Callable[[TrainState, Batch], dict[str, float]]
# (weights, advantages' baseline, batch) -> by layer path and name of measurement
Measuring = Callable[[nnx.State, RunningMean, Batch], dict[str, dict[str, np.ndarray]]]


def build_monitor(
    graph: nnx.GraphDef,
    probes: nnx.State,
    options: LossOptions,
    *,
    responses: int,
    kind: str,
) -> Monitor:
    """The monitor ``(state, batch) -> metrics``, jitted; ``state`` is only read.

    The gradient is the update's own, policy loss and advantages included, but of a few
    responses, spread evenly over the batch. For each kind of layer (the last part of
    its path), the mean over its layers is recorded under ``monitor/<kind>/``:

    - ``snr``, ``norm_ratio``: of the reconstruction ``S A`` to the gradient;
    - ``d_eff``, ``cos_c``: how many directions the inputs spread over, and the gain of
      a step through the sketch at equal KL, of the dense step's;
    - ``cos_c_sketch``: the same without the gradient;

    and ``monitor/snr_min``, the smallest ``snr`` of all layers. A gradient of zero (all
    advantages equal) has none of them: NaN.

    Peak memory beyond the weights is that of a backward pass of these responses that
    keeps one layer's activations (``remat="layer"``), and one layer's gradient.

    Args:
        graph: of the sketched model.
        probes: zeros.
        options: of the loss.
        responses: rows of the batch that are used.
        kind: of the basis.
    """
    measure = build_measuring(
        graph, probes, options, alignment.measure_moments, responses=responses
    )
    ranks = ranks_of(probes)

    def monitor(state: TrainState, batch: Batch) -> dict[str, float]:
        found = measure(state.weights, state.baseline, batch)
        with jax.transfer_guard("allow"):  # a few numbers of each layer
            return summarise(found, ranks, kind)

    return monitor


def build_measuring(
    graph: nnx.GraphDef,
    probes: nnx.State,
    options: LossOptions,
    measure: Measure,
    *,
    responses: int,
) -> Measuring:
    """``(weights, baseline, batch) -> measurements`` of the policy gradient, by layer.

    See :func:`build_monitor` for the gradient, :mod:`logra_jax.algorithm.capture` for
    ``measure`` and what comes back.
    """
    cotangents = build_cotangents(graph, probes, options, measure, responses=responses)
    return lambda weights, baseline, batch: measurements(
        jax.tree.map(on_host, cotangents(weights, baseline, batch))
    )


def build_cotangents(
    graph: nnx.GraphDef,
    probes: nnx.State,
    options: LossOptions,
    measure: Measure,
    *,
    responses: int,
) -> Callable[[nnx.State, RunningMean, Batch], nnx.State]:
    """The jitted part of :func:`build_measuring`: the taps' cotangents."""

    @jax.jit
    def cotangents(
        weights: nnx.State, baseline: RunningMean, batch: Batch
    ) -> nnx.State:
        credit = batch.credit
        if credit is None:
            credit = Credit(advantages_of(batch.rewards, baseline, options)[0])
        size = len(batch.rewards)
        count = min(responses, size)
        chosen = jnp.array(evenly(count, size))
        few, credit = (
            jax.tree.map(lambda a: a[chosen], part)
            for part in (batch._replace(prefix=None, packed=None, credit=None), credit)
        )
        few = unshare_prefix(few._replace(prefix=batch.prefix))
        new = few.completions.shape[1]
        tokens = count * (few.prompts.shape[1] + new - 1)
        model = nnx.merge(graph, probes, weights)
        model.remat = "layer"
        # Not a sketched head, which runs on a chunk of tokens at a time.
        model = tapped(model, measure, tokens, match=r"^layers\.")
        tapped_graph, taps, rest = nnx.split(model, Tap, ...)

        def loss(taps: nnx.State) -> Array:
            model = nnx.merge(tapped_graph, taps, rest)
            terms = policy_terms(model, few, judge(few, credit, options), options)
            return jnp.sum(terms.loss)

        return jax.grad(loss)(taps)

    return cotangents


def summarise(
    found: dict[str, dict[str, np.ndarray]], ranks: dict[str, int], kind: str
) -> dict[str, float]:
    """The metrics of :func:`build_monitor` from the :class:`Moments` of each layer.

    Args:
        found: fields of Moments (*layers) by path.
        ranks: of each path's sketch.
        kind: of the basis.
    """
    by_kind: dict[str, dict[str, list[np.ndarray]]] = {}
    for path, values in found.items():
        moments = alignment.Moments.of(values)
        rank = ranks[path]
        numbers = {
            "snr": alignment.snr(moments),
            "norm_ratio": alignment.norm_ratio(moments),
            "d_eff": alignment.effective_dimension(moments),
            "cos_c": alignment.cos_c(moments, rank, kind),
            "cos_c_sketch": alignment.sketched_cos_c(moments, rank, kind),
        }
        layers = by_kind.setdefault(path.rpartition(".")[2], {})
        for name, value in numbers.items():
            layers.setdefault(name, []).append(np.ravel(value))
    metrics = {
        f"monitor/{layer_kind}/{name}": _finite(np.mean, values)
        for layer_kind, layers in by_kind.items()
        for name, values in layers.items()
    }
    every_snr = [v for layers in by_kind.values() for v in layers["snr"]]
    return metrics | {"monitor/snr_min": _finite(np.min, every_snr)}


def ranks_of(probes: nnx.State) -> dict[str, int]:
    """The rank of each sketched layer, by dotted path."""
    return {
        ".".join(map(str, path[:-1])): probe.shape[-1]
        for path, probe in nnx.to_flat_state(probes)
    }


def unshare_prefix(batch: Batch) -> Batch:
    """The same batch with the common prefix put back into every prompt.

    A layer that a prefix runs through apart is called twice, and cannot be tapped.
    """
    shared, width = batch.prefix.shape[0], batch.prompts.shape[1]
    if not shared:
        return batch
    first = width - batch.prompt_lengths[:, None]  # the first real column
    column = jnp.arange(shared + width)[None] - first
    from_prefix = jnp.take(batch.prefix, jnp.clip(column, 0, shared - 1))
    prompts = jnp.pad(batch.prompts, ((0, 0), (shared, 0)))
    return batch._replace(
        prefix=batch.prefix[:0],
        prompts=jnp.where((column >= 0) & (column < shared), from_prefix, prompts),
        prompt_lengths=batch.prompt_lengths + shared,
    )


def _finite(reduce: Callable, values: list[np.ndarray]) -> float:
    """``reduce`` of the finite values; NaN where there is none."""
    flat = np.concatenate(values)
    flat = flat[np.isfinite(flat)]
    return float(reduce(flat)) if flat.size else float("nan")

"""What an update trains and how it lands: one step serves every kind of training."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.dense import WideKernel, land_dense, stand_in, widen
from logra_jax.algorithm.factor import quantise
from logra_jax.algorithm.lora import LoRAFactor
from logra_jax.algorithm.merge import Landing, merge_measured
from logra_jax.algorithm.parallel import Split
from logra_jax.algorithm.sketch import Probe, perturbed

Splits = Mapping[str, Split]  # by dotted path of a layer
# (weights, updates, splits) -> the weights after, landings by dotted path of the layer,
# and the factors that were merged, where there are such.
Land = Callable[
    [nnx.State, nnx.State, Splits],
    tuple[nnx.State, dict[str, Landing], nnx.State | None],
]


def weights_of(model: nnx.Module) -> nnx.State:
    """What a model of any kind of training keeps from step to step."""
    _, _, weights = nnx.split(model, (Probe, WideKernel), ...)
    return weights


class Method(NamedTuple):
    """What is trained of a model, and how an update of it lands on the weights.

    Attributes:
        graph: for reverse mode; merges with the two states of ``split``.
        plain_graph: its twin for forward mode and finite changes.
        trained: shapes and dtypes of what is trained; gradients and updates are alike.
        split: weights -> what is trained, and the rest.
        land: inside the step, updates -> weights; ``splits`` is empty on one device.
        whole: weights -> every variable of ``graph``, to run the model forward; no
            weight is copied.
        basis: that sketches are formed in, or None.
    """

    graph: nnx.GraphDef
    plain_graph: nnx.GraphDef
    trained: nnx.State
    split: Callable[[nnx.State], tuple[nnx.State, nnx.State]]
    land: Land
    whole: Callable[[nnx.State], nnx.State]
    basis: Basis | None = None


def logra_method(
    graph: nnx.GraphDef,
    plain_graph: nnx.GraphDef,
    probes: nnx.State,
    basis: Basis,
    *,
    rounding: str,
    bits: int,
) -> Method:
    """Sketches of the gradient, merged as quantised factors.

    Args:
        graph: of the sketched model.
        plain_graph: of its perturbed twin.
        probes: zeros, or their shapes: the point that everything is differentiated at.
        basis: of the sketches.
        rounding: of the merge.
        bits: of the factor's integers.
    """

    @jax.jit  # called outside the step too, where each zero would be sent to the device
    def zeros() -> nnx.State:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), probes)

    def split(weights: nnx.State) -> tuple[nnx.State, nnx.State]:
        return zeros(), weights

    def land(weights: nnx.State, updates: nnx.State, splits: Splits):
        factors = quantise(updates, basis, bits)
        weights, landings = merge_measured(
            weights, factors, basis, rounding=rounding, splits=splits
        )
        return weights, landings, factors

    def whole(weights: nnx.State) -> nnx.State:
        return nnx.merge_state(*split(weights))

    shapes = jax.eval_shape(lambda: split(nnx.State({}))[0])
    return Method(graph, plain_graph, shapes, split, land, whole, basis)


def adamw_method(model: nnx.Module, *, rounding: str) -> Method:
    """Gradients of whole kernels, and updates that are rounded as merges are.

    Args:
        model: from :func:`logra_jax.algorithm.dense.dense`, or its shapes.
        rounding: of the updates.
    """
    graph, _, weights = nnx.split(model, WideKernel, ...)
    plain_graph, _, _ = nnx.split(perturbed(model), WideKernel, ...)

    def split(weights: nnx.State) -> tuple[nnx.State, nnx.State]:
        return widen(weights), weights

    def land(weights: nnx.State, updates: nnx.State, splits: Splits):
        return *land_dense(weights, updates, rounding=rounding, splits=splits), None

    def whole(weights: nnx.State) -> nnx.State:
        return nnx.merge_state(stand_in(weights), weights)

    shapes = jax.eval_shape(widen, weights)
    return Method(graph, plain_graph, shapes, split, land, whole)


def lora_method(model: nnx.Module) -> Method:
    """The factors beside frozen kernels; in float32, they take updates as they are.

    Args:
        model: from :func:`logra_jax.algorithm.lora.lora`, or its shapes.
    """
    graph, factors, _ = nnx.split(model, LoRAFactor, ...)
    plain_graph, _, _ = nnx.split(perturbed(model), LoRAFactor, ...)

    def split(weights: nnx.State) -> tuple[nnx.State, nnx.State]:
        trained, rest = nnx.split_state(weights, LoRAFactor, ...)
        return trained, rest

    def land(weights: nnx.State, updates: nnx.State, splits: Splits):
        del splits  # factors and updates lie alike
        trained, rest = split(weights)
        trained = jax.tree.map(jnp.add, trained, updates)
        return nnx.merge_state(trained, rest), {}, None

    shapes = jax.eval_shape(lambda: factors)
    return Method(graph, plain_graph, shapes, split, land, lambda weights: weights)

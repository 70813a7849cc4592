"""Running stacked layers one after the other, each from its own slice of the stack."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from logra_jax.algorithm.slicing import BFLOAT16_SLICES_ARE_CONVERTED, take_layer

# What each layer keeps for the backward pass: everything, the products of its matmuls
# with weights, only its input, or that in the host's memory.
REMAT = ("none", "dots", "layer", "offload")

_LAYER_INPUT = "layer_input"
_HOST_MEMORY = "pinned_host"

# take_layer as a rematerialisation policy sees it; other functions with a JVP of their
# own come apart before, because they are differentiated.
_SLICING = "custom_jvp_call"


class Run(NamedTuple):
    """Layers of one kind, which follow one another in each block of layers.

    Attributes:
        layer: ``(carry, (weights, inputs)) -> (carry, output)`` of one of them.
        weights: tree of arrays stacked along axis 0.
        inputs: tree of other arrays stacked along axis 0.
    """

    layer: Callable[[Any, tuple[Any, Any]], tuple[Any, Any]]
    weights: Any
    inputs: Any

    @property
    def layers(self) -> int:
        """Of its layers, in all blocks."""
        return len(jax.tree.leaves(self.weights)[0])


def scan_layers(runs: Sequence[Run], carry: Any, *, remat: str) -> tuple[Any, list]:
    """All layers one after the other, rematerialised by ``remat``.

    Each block of layers has the same number of each run's, and runs them in order. A
    single run is ``lax.scan(layer, carry, (weights, inputs))``. Neither forward nor
    backward ever holds a copy of the stacked weights, in any dtype.

    Args:
        runs: of which one, at least, has a single layer in each block.
        carry: what goes from layer to layer.
        remat: one of ``REMAT``.

    Returns:
        The carry, and for each run its outputs, stacked along axis 0.

    Raises:
        ValueError: the inputs are to go to the host, and the device cannot do that.
    """
    policy = _policy(remat)
    blocks = math.gcd(*(run.layers for run in runs))
    made = [_step(run, blocks, remat, policy) for run in runs]
    steps, inputs = zip(*made, strict=True)

    def block(carry: Any, parts: tuple) -> tuple[Any, list]:
        outputs = []
        for step, part in zip(steps, parts, strict=True):
            carry, output = step(carry, part)
            outputs.append(output)
        return carry, outputs

    carry, outputs = lax.scan(block, carry, inputs)
    return carry, [
        output if run.layers == blocks else jax.tree.map(_unfold, output)
        for run, output in zip(runs, outputs, strict=True)
    ]


def _step(
    run: Run, blocks: int, remat: str, policy: Callable
) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any]:
    """A run's layers in one block, and what a scan over blocks gives them."""
    layer = _name_input(run.layer) if remat == "offload" else run.layer
    each = run.layers // blocks
    if each == 1 and not BFLOAT16_SLICES_ARE_CONVERTED:
        if remat != "none":
            layer = jax.checkpoint(layer, policy=policy)
        return layer, (run.weights, run.inputs)
    leaves, treedef = jax.tree.flatten(run.weights)
    held = {i: a for i, a in enumerate(leaves) if a.dtype == jnp.bfloat16}
    scanned = {i: a for i, a in enumerate(leaves) if i not in held}

    def body(carry: Any, bits: Any, part: tuple):
        index, sliced, inputs = part
        carry = jax.tree.map(_from_kept, carry, bits)
        # Sliced inside the checkpoint: a slice that was kept for the backward pass of
        # each layer would add up to a copy of the stack.
        sliced |= {i: take_layer(a, index) for i, a in held.items()}
        weights = treedef.unflatten([sliced[i] for i in range(len(leaves))])
        return layer(carry, (weights, inputs))

    body = jax.checkpoint(body, policy=policy)

    def one(carry: Any, part: tuple) -> tuple[Any, Any]:
        return body(carry, jax.tree.map(_to_keep, carry), part)

    parts = (jnp.arange(run.layers), scanned, run.inputs)
    if each == 1:
        return one, parts
    fold = lambda a: a.reshape(blocks, each, *a.shape[1:])  # noqa: E731
    return lambda carry, part: lax.scan(one, carry, part), jax.tree.map(fold, parts)


def _unfold(array: jax.Array) -> jax.Array:
    return array.reshape(-1, *array.shape[2:])


def _to_keep(carry: jax.Array) -> jax.Array:
    """What a checkpoint keeps of its input: of bfloat16 the bits.

    All layers' inputs are a stack too, which the backward pass would convert.
    """
    if carry.dtype != jnp.bfloat16:
        return carry
    return lax.bitcast_convert_type(carry, jnp.uint16)


@jax.custom_jvp
def _from_kept(carry: jax.Array, kept: jax.Array) -> jax.Array:
    """``carry``, computed from what was kept of it."""
    if carry.dtype != jnp.bfloat16:
        return kept
    return lax.bitcast_convert_type(kept, carry.dtype)


@_from_kept.defjvp
def _from_kept_jvp(primals, tangents):
    return _from_kept(*primals), tangents[0]


def _policy(remat: str) -> Callable:
    """What may be kept of a layer."""
    policies = jax.checkpoint_policies
    if remat == "offload":
        _check_host_memory()
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_LAYER_INPUT],
            offload_src="device",
            offload_dst=_HOST_MEMORY,
        )
    return {
        "none": lambda primitive, *_, **__: primitive.name != _SLICING,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "layer": policies.nothing_saveable,
    }[remat]


def _name_input(layer: Callable) -> Callable:
    """The same layer, its carry under the name that the policy looks for."""

    def named(carry: Any, inputs: Any):
        return layer(
            jax.tree.map(lambda a: checkpoint_name(a, _LAYER_INPUT), carry), inputs
        )

    return named


def _check_host_memory() -> None:
    device = jax.devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if _HOST_MEMORY not in kinds:
        raise ValueError(
            f"`remat` may be 'offload' only where the device has {_HOST_MEMORY} "
            f"memory, got {device.device_kind} with {', '.join(kinds)}; use 'layer'."
        )

"""Running stacked layers one after the other, each from its own slice of the stack."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from logra_jax.algorithm.slicing import BFLOAT16_SLICES_ARE_CONVERTED, take_layer

# What each layer keeps for the backward pass: everything, the products of its matmuls
# with weights, or only its input.
REMAT = ("none", "dots", "layer")

# take_layer as a rematerialisation policy sees it; other functions with a JVP of their
# own come apart before, because they are differentiated.
_SLICING = "custom_jvp_call"


def scan_layers(
    layer: Callable[[Any, tuple[Any, Any]], tuple[Any, Any]],
    carry: Any,
    weights: Any,
    inputs: Any,
    *,
    remat: str,
) -> tuple[Any, Any]:
    """``lax.scan(layer, carry, (weights, inputs))``, rematerialised by ``remat``.

    Neither forward nor backward ever holds a copy of the stacked weights, in any dtype.

    Args:
        layer: ``(carry, (weights, inputs)) -> (carry, output)`` of one layer.
        carry: what goes from layer to layer.
        weights: tree of arrays stacked along axis 0.
        inputs: tree of other arrays stacked along axis 0.
        remat: one of ``REMAT``.
    """
    policies = jax.checkpoint_policies
    policy = {
        "none": lambda primitive, *_, **__: primitive.name != _SLICING,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "layer": policies.nothing_saveable,
    }[remat]
    if not BFLOAT16_SLICES_ARE_CONVERTED:
        if remat != "none":
            layer = jax.checkpoint(layer, policy=policy)
        return lax.scan(layer, carry, (weights, inputs))
    leaves, treedef = jax.tree.flatten(weights)
    held = {i: a for i, a in enumerate(leaves) if a.dtype == jnp.bfloat16}
    scanned = {i: a for i, a in enumerate(leaves) if i not in held}

    def body(carry: Any, part: tuple):
        index, sliced, inputs = part
        # Sliced inside the checkpoint: a slice that was kept for the backward pass of
        # each layer would add up to a copy of the stack.
        sliced |= {i: take_layer(a, index) for i, a in held.items()}
        weights = treedef.unflatten([sliced[i] for i in range(len(leaves))])
        return layer(carry, (weights, inputs))

    body = jax.checkpoint(body, policy=policy)
    indices = jnp.arange(len(leaves[0]))
    return lax.scan(body, carry, (indices, scanned, inputs))

"""Nested dicts of arrays, in which linen and plain JAX hold weights, as states."""

from collections.abc import Mapping
from typing import Any

from flax import nnx, traverse_util

from logra_jax.algorithm.sketch import Probe


def is_plain(tree: Any) -> bool:
    """Whether a tree of weights is a dict of arrays and no state of an NNX model."""
    return isinstance(tree, Mapping) and not isinstance(tree, nnx.State)


def as_state(tree: Mapping[str, Any]) -> nnx.State:
    """A nested dict of arrays as a state; a leaf called ``probe`` is a Probe."""
    flat = traverse_util.flatten_dict(dict(tree))
    return nnx.from_flat_state(
        {
            path: (Probe if path[-1] == "probe" else nnx.Variable)(leaf)
            for path, leaf in flat.items()
        }
    )


def as_dict(state: nnx.State) -> dict[str, Any]:
    """:func:`as_state`'s inverse."""
    flat = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
    return traverse_util.unflatten_dict(flat)

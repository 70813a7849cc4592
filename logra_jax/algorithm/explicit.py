"""Meshes of explicit axes, where types carry shardings that JAX will not guess.

What is computed here has one sensible sharding each, that of an argument; between the
two the compiler chooses, as on a mesh of automatic axes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shardings:
    """Of some arrays, as static data."""

    each: tuple[NamedSharding, ...]


def shardings_of(*arrays: Array) -> Shardings | None:
    """How arrays lie on a mesh of explicit axes; None where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return None
    return Shardings(tuple(jax.typeof(array).sharding for array in arrays))


def with_outputs(
    function: Callable[..., Any], outputs: Shardings | None
) -> Callable[..., Any]:
    """``function`` without types of shardings inside; its results lie as given.

    Args:
        function: of arrays, returns as many as ``outputs`` has.
        outputs: from :func:`shardings_of`; None leaves the function as it is.
    """
    if outputs is None:
        return function
    return jax.sharding.auto_axes(function, out_sharding=outputs.each)

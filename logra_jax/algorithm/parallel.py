"""Weights cut over a device mesh, and how layers compute with their part of them.

Everything here runs inside ``jax.shard_map`` (with ``check_vma=False``), where arrays
are a device's own part. A mesh has three axes:

- ``data``: more of the batch; weights are repeated,
- ``fsdp``: the batch and the weights; a layer gathers its kernel when it runs, and
  again in its backward pass,
- ``tensor``: kernels stay cut, heads and features are divided; activations are summed
  after the kernels that are cut along their inputs (Megatron-LM, arXiv:1909.08053).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call
from jax.typing import DTypeLike
from jaxtyping import Array

from logra_jax.algorithm.slicing import BARRIERS_ARE_FORGOTTEN, take_rows

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # axes that the batch is cut over
_TENSOR = "tensor"

Tree = TypeVar("Tree")
Other = TypeVar("Other")
AxisNames = str | Sequence[str] | None


class Split(NamedTuple):
    """How a kernel (k, d) lies on the mesh; static, of a layer.

    Attributes:
        inputs: mesh axes that cut k.
        outputs: mesh axes that cut d.
        parallel: ``"inputs"`` or ``"outputs"``, which of the two stays cut over
            ``tensor`` when the layer runs; None gathers all of the kernel.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    parallel: str | None = None

    def gather(self, kernel: Array) -> Array:
        """All of the kernel that this device computes with."""
        for axis, name in enumerate(("inputs", "outputs")):
            kernel = gather(kernel, self._gathered(name), axis)
        return kernel

    def _gathered(self, name: str) -> tuple[str, ...]:
        """Mesh axes that cut ``inputs`` or ``outputs``, but not when the layer runs."""
        names = getattr(self, name)
        if self.parallel == name:
            names = tuple(n for n in names if n != _TENSOR)
        return names

    def gather_rows(self, probe: Array, outputs: int) -> Array:
        """The rows (d, r) of a probe that go with what this device computes.

        Their transpose sums the sketch over ``fsdp``, each device its part of it.

        Args:
            probe: perhaps cut over ``fsdp`` too.
            outputs: of the kernel, this device's part.
        """
        if probe.shape[-2] == outputs * parts(self._gathered("outputs")):
            return probe
        return gather(probe, ("fsdp",), probe.ndim - 2)

    def scatter(self, gradient: Array) -> Array:
        """:meth:`gather`'s transpose: gradients summed, each device its part.

        Devices along ``tensor`` that compute the same have the same gradient.
        """
        for axis, name in enumerate(("inputs", "outputs")):
            for mesh_axis in getattr(self, name):
                if mesh_axis != _TENSOR:
                    gradient = lax.psum_scatter(
                        gradient, mesh_axis, scatter_dimension=axis, tiled=True
                    )
                elif self.parallel != name:
                    gradient = own_part(gradient, (mesh_axis,), axis)
        return gradient


def gather(array: Array, names: tuple[str, ...], axis: int) -> Array:
    """The whole of an array that is cut along ``axis`` over mesh axes ``names``.

    bfloat16 travels as its bits: a CPU would send float32. Parts arrive one after the
    other, and only then are put side by side: a GPU gathers along an array's outermost
    axis alone, and would for another one hold a transposed copy of the layers' stack.
    """
    if parts(names) == 1:
        return array
    gathered = lax.all_gather(_bits(array), names)
    shape = (*array.shape[:axis], -1, *array.shape[axis + 1 :])
    return from_bits(jnp.moveaxis(gathered, 0, axis).reshape(shape), array.dtype)


def gather_bits(
    array: Array, names: tuple[str, ...], after: Any, *, tiled: bool
) -> Array:
    """The whole of an array that is cut over mesh axes ``names``, not before ``after``.

    Left alone, XLA gathers once for all that use the array, at the beginning, and holds
    the whole until the last one has. bfloat16 stays bits (uint16), for
    :func:`from_bits`: of all of it that is a copy.

    Args:
        array: this device's part.
        names: more than one part.
        after: a tree of what the gather waits for; to be used from then on behind a
            barrier with ``array``.
        tiled: parts follow each other along axis 0, in place of a new axis.
    """
    bits = _bits(array)
    if BARRIERS_ARE_FORGOTTEN and bits.dtype == jnp.uint16:
        bits ^= _no_bits(after)
    return lax.all_gather(bits, names, axis=0, tiled=tiled)


def gather_rows(table: Array, names: tuple[str, ...], rows: Array) -> Array:
    """``table[rows]`` of a table whose rows are cut over mesh axes ``names``.

    The whole table exists only for as long as that takes.
    """
    if parts(names) == 1:
        return take_rows(table, rows)
    table, rows = lax.optimization_barrier((table, rows))
    return from_bits(gather_bits(table, names, rows, tiled=True)[rows], table.dtype)


def not_before(tokens: Tree, arrays: Other) -> tuple[Tree, Other]:
    """Token ids that are not there before ``arrays`` are; and the arrays.

    What needs tokens and weights alone XLA may begin at once, and hold the whole
    embedding that it gathered until something that comes much later has used it.

    Args:
        tokens: a tree of integer arrays.
        arrays: a tree, to be used from then on as it is returned.
    """
    tokens, arrays = lax.optimization_barrier((tokens, arrays))
    if BARRIERS_ARE_FORGOTTEN:
        none = _no_bits(arrays)
        tokens = jax.tree.map(lambda x: x + none.astype(x.dtype), tokens)
    return tokens, arrays


def _no_bits(tree: Any) -> Array:
    """Zero, uint16, that comes from all arrays of a tree without XLA knowing."""
    return sum(map(_no_bits_of, jax.tree.leaves(tree)), jnp.uint16(0))


def _no_bits_of(array: Array) -> Array:
    some = _bits(lax.stop_gradient(array)).reshape(-1)[0]
    if jnp.issubdtype(some.dtype, jnp.floating):
        some = lax.bitcast_convert_type(some.astype(jnp.float32), jnp.uint32)
    return (lax.population_count(some) >> 8).astype(jnp.uint16)


def _bits(array: Array) -> Array:
    is_sent_as_bits = array.dtype == jnp.bfloat16
    return lax.bitcast_convert_type(array, jnp.uint16) if is_sent_as_bits else array


def from_bits(array: Array, dtype: DTypeLike) -> Array:
    """The numbers again, where an array is the bits of such."""
    is_bits = array.dtype == jnp.uint16
    return lax.bitcast_convert_type(array, dtype) if is_bits else array


def whole(kernel: Array, split: Split | None) -> Array:
    """All of a kernel that this device computes with; without a split, the kernel."""
    return split.gather(kernel) if split else kernel


def matmul(
    x: Array,
    kernel: Array,
    split: Split | None = None,
    precision: Any = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """``x @ kernel`` in ``x``'s dtype, the kernel gathered first where it is cut.

    Args:
        x: input.
        kernel: (k, d), this device's part.
        split: how the kernel lies on the mesh.
        precision: of the product, see ``jax.lax.Precision``.
        dtype: of the result, where it is not ``x``'s.
    """
    kernel = whole(kernel, split).astype(x.dtype)
    return jnp.matmul(x, kernel, precision=precision, preferred_element_type=dtype)


def offset(names: tuple[str, ...], size: int) -> Array | int:
    """Index of the first of ``size`` entries that this device holds of an axis."""
    return lax.axis_index(names) * size if names else 0


def parts(names: tuple[str, ...]) -> int:
    """Number of parts that an axis cut over mesh axes ``names`` has."""
    return lax.axis_size(names) if names else 1


def own_part(array: Array, names: tuple[str, ...], axis: int) -> Array:
    """This device's part of an array that all hold in full."""
    if parts(names) == 1:
        return array
    size = array.shape[axis] // parts(names)
    return lax.dynamic_slice_in_dim(array, offset(names, size), size, axis)


def enter(x: Array, split: Split | None) -> Array:
    """``x`` on its way into kernels cut along their outputs: gradients are summed."""
    if split is None or split.parallel != "outputs" or parts((_TENSOR,)) == 1:
        return x
    return linear_call(lambda _, x: x, lambda _, g: lax.psum(g, _TENSOR), (), x)


def leave(y: Array, split: Split | None) -> Array:
    """The sum of what kernels cut along their inputs give; gradients pass through."""
    if split is None or split.parallel != "inputs" or parts((_TENSOR,)) == 1:
        return y
    return linear_call(lambda _, y: lax.psum(y, _TENSOR), lambda _, g: g, (), y)


def split_of(layer: object) -> Split | None:
    """How a layer's kernel lies on the mesh, if it knows of one."""
    return getattr(layer, "split", None)


def total(tree: Tree, axis_name: AxisNames) -> Tree:
    """Sums over mesh axes; the tree as it is where ``axis_name`` is None."""
    if axis_name is None:
        return tree
    return jax.tree.map(lambda x: lax.psum(x, axis_name), tree)

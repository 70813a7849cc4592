"""Slices of bfloat16 stacks that never convert, or copy, the stack."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

# On CPUs, XLA before jax 0.12 reads or writes a slice of a bfloat16 array by converting
# all of the array to float32 (and back): in a loop over layers, 9 times a merge's own
# time, and a float32 copy of the weights for as long as the loop runs.
BFLOAT16_SLICES_ARE_CONVERTED = jax.__version_info__ < (0, 12)
# The same XLA drops optimization barriers before it orders the program.
BARRIERS_ARE_FORGOTTEN = jax.__version_info__ < (0, 12)


@jax.custom_jvp
def take_layer(stack: jax.Array, index: jax.Array) -> jax.Array:
    """``stack[index]``; of a bfloat16 stack by way of its bits, where that is needed.

    The barrier keeps XLA from reinterpreting (and so copying) the whole stack ahead of
    a loop.
    """
    if stack.dtype != jnp.bfloat16 or not BFLOAT16_SLICES_ARE_CONVERTED:
        return lax.dynamic_index_in_dim(stack, index, keepdims=False)
    shape = stack.shape[1:]
    starts = (index, *(0 for _ in shape))
    return _take_by_bits(stack, starts, (1, *shape)).reshape(shape)


@take_layer.defjvp
def _take_layer_jvp(primals, tangents):
    stack, index = primals
    tangent = lax.dynamic_index_in_dim(tangents[0], index, keepdims=False)
    return take_layer(stack, index), tangent


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def take_block(
    array: jax.Array, starts: tuple[jax.Array | int, ...], shape: tuple[int, ...]
) -> jax.Array:
    """``lax.dynamic_slice(array, starts, shape)``, in the same way."""
    if array.dtype != jnp.bfloat16 or not BFLOAT16_SLICES_ARE_CONVERTED:
        return lax.dynamic_slice(array, starts, shape)
    return _take_by_bits(array, starts, shape)


@take_block.defjvp
def _take_block_jvp(shape, primals, tangents):
    array, starts = primals
    tangent = lax.dynamic_slice(tangents[0], starts, shape)
    return take_block(array, starts, shape), tangent


def _take_by_bits(
    array: jax.Array, starts: tuple[jax.Array | int, ...], shape: tuple[int, ...]
) -> jax.Array:
    array, starts = lax.optimization_barrier((array, starts))
    bits = lax.bitcast_convert_type(array, jnp.uint16)
    return lax.bitcast_convert_type(lax.dynamic_slice(bits, starts, shape), array.dtype)


@jax.custom_jvp
def take_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """``table[indices]`` of an embedding, in the same way."""
    if table.dtype != jnp.bfloat16 or not BFLOAT16_SLICES_ARE_CONVERTED:
        return table[indices]
    table, indices = lax.optimization_barrier((table, indices))
    bits = lax.bitcast_convert_type(table, jnp.uint16)
    return lax.bitcast_convert_type(bits[indices], jnp.bfloat16)


@take_rows.defjvp
def _take_rows_jvp(primals, tangents):
    return take_rows(*primals), tangents[0][primals[1]]


def rows_within(shape: tuple[int, int], limit: int) -> int:
    """The most rows of a matrix that divide it evenly into ``limit`` entries or fewer.

    One row at least, however long.
    """
    rows, columns = shape
    most = max(1, min(rows, limit // columns))
    return next(n for n in range(most, 0, -1) if rows % n == 0)

"""A digest of weights: equal on two machines exactly if (all but surely) they are.

Of one matrix: the sum over its weights, modulo 2**32, of

    mix(mix(row * width + column) ^ bits)

with ``bits`` the weight's bits (16 or 32 of them) and ``mix`` of :mod:`random_bits`. A
sum does not depend on its order, so shards are digested where they lie and added. At
each place the hash is a bijection of the bits: a single changed weight changes the sum
with certainty; anything else (swapped rows, say) but for one chance in 2**32.

Of a model: the first 16 hex digits of the sha256 of its lines ``name dtype shape
digest``, sorted by name.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from logra_jax.algorithm.arrays import Library, jax_library, library_of
from logra_jax.algorithm.random_bits import mix
from logra_jax.algorithm.replay import rows_at_once

if TYPE_CHECKING:
    from jax import Array

# Entries that JAX digests at once on a CPU, where it does not sum hashes as it goes.
_BLOCK = 2**18


class TensorDigest(NamedTuple):
    """Digest of one tensor, and what it is of."""

    dtype: str  # "bfloat16" or "float32"
    shape: tuple[int, ...]  # in Hugging Face order
    word: int  # in [0, 2**32)


def digest_words(
    library: Library, weight: Any, row: Any, column: Any, width: int
) -> Any:
    """The hashes that a digest sums, int32, of weights at some rows and columns.

    Args:
        library: of the arrays.
        weight: bfloat16, uint16 (the bits of bfloat16) or float32.
        row: index of each weight's row in the whole matrix, int32, broadcasting.
        column: index of its column.
        width: columns of the whole matrix.
    """
    if weight.dtype.itemsize == 2:
        bits = library.int32(library.bits(weight, "int16")) & 0xFFFF
    else:
        bits = library.bits(weight, "int32")
    return mix(mix(row * width + column) ^ bits)


def digest_array(
    weight: Any, *, rows: int = 0, columns: int = 0, width: int | None = None
) -> int:
    """The digest's word for a numpy array or torch tensor, or the summand of a shard.

    Args:
        weight: (out, in); a vector counts as one row, other arrays as rows of their
            last axis.
        rows: index of ``weight``'s first row in the whole matrix.
        columns: index of its first column.
        width: columns of the whole matrix; those of ``weight`` by default.

    Returns:
        A word in ``[0, 2**32)``; words of shards are added modulo ``2**32``.
    """
    library = library_of(weight)
    weight = weight.reshape(-1, weight.shape[-1])
    out, held = weight.shape
    full = held if width is None else width
    block = rows_at_once(weight)
    column = library.arange(columns, columns + held)[None, :]
    total = 0
    for start in range(0, out, block):
        stop = min(start + block, out)
        row = library.arange(rows + start, rows + stop)[:, None]
        words = digest_words(library, weight[start:stop], row, column, full)
        total += int(words.sum())  # of int32, in 64 bits
    return total % 2**32


def digest_stack(weights: "Array", stack: int, *, transposed: bool) -> "Array":
    """The digests' words of a stacked JAX array, (*stack,) uint32, in one pass.

    Args:
        weights: (*stack, out, in), or other arrays, as in :func:`digest_array`.
        stack: number of leading axes that count matrices.
        transposed: the last two axes are (in, out), JAX's order of a kernel.
    """
    import jax.numpy as jnp
    from jax import lax

    from logra_jax.algorithm.slicing import rows_within, take_layer

    library = jax_library()
    shape = weights.shape[stack:]
    rows, columns = math.prod(shape[:-1]), shape[-1]
    width = rows if transposed else columns

    def digest(part: "Array", first: Any) -> "Array":
        """Sums over the last two axes, whose rows count from ``first``."""
        row = library.arange(0, part.shape[-2])[:, None] + first
        column = library.arange(0, columns)[None, :]
        if transposed:
            row, column = column, row
        axes = tuple(range(part.ndim - 2))
        row, column = jnp.expand_dims(row, axes), jnp.expand_dims(column, axes)
        words = digest_words(library, part, row, column, width)
        return jnp.sum(words, axis=(-2, -1), dtype=jnp.int32)

    def at_once(flat: "Array") -> "Array":
        return digest(flat, 0)

    def in_blocks(flat: "Array") -> "Array":
        some = rows_within((rows, columns), _BLOCK)
        number = rows // some
        blocks = flat.reshape(-1, some, columns)

        def digest_block(i: "Array") -> "Array":
            return digest(take_layer(blocks, i), (i % number) * some)

        sums = lax.map(digest_block, jnp.arange(blocks.shape[0]))
        return jnp.sum(sums.reshape(-1, number), axis=1, dtype=jnp.int32)

    flat = weights.reshape(-1, rows, columns)
    sums = lax.platform_dependent(flat, cpu=in_blocks, default=at_once)
    return library.bits(sums, "uint32").reshape(weights.shape[:stack])


def model_digest(tensors: Mapping[str, TensorDigest]) -> str:
    """The digest of a model from those of its tensors, by Hugging Face name."""
    lines = [
        f"{name} {t.dtype} {'x'.join(map(str, t.shape))} {t.word:08x}\n"
        for name, t in sorted(tensors.items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

"""Landing a change on a weight, the same bits in numpy, JAX and torch.

Over int32 and float32 operators alone (:mod:`arrays`). XLA flushes subnormal float32
numbers to zero on CPUs, numpy and torch do not: so here they are zero by rule.
"""

from typing import Any

from logra_jax.algorithm.arrays import Library
from logra_jax.algorithm.random_bits import hashed_words, shift_right

ROUNDINGS = ("stochastic", "nearest")

_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_QUIET_NAN = 0x00400000
_UPPER_HALF = -0x10000


def land(library: Library, weight: Any, change: Any, noise: Any) -> Any:
    """``weight + change``, rounded to bfloat16 where there is ``noise``.

    One float32 addition, then :func:`round_to_bfloat16`. Subnormal weights and sums
    count as zero; a weight whose change is zero keeps its bits, whatever they are.

    Args:
        library: of the arrays.
        weight: bits of float32 weights, int32.
        change: float32, zero or normal.
        noise: see :func:`round_to_bfloat16`, or a function from the bits of the sum to
            it, such as :func:`nearest_noise`; None keeps float32.

    Returns:
        Bits of the new weights as float32, int32.
    """
    base = library.bits(_flush(weight), "float32")
    moved = _flush(library.bits(base + change, "int32"))
    if noise is not None:
        noise = noise(moved) if callable(noise) else noise
        moved = round_to_bfloat16(moved, noise)
    # All ones where there is a change, no ones where it is zero of either sign.
    moves = -(library.bits(change, "int32") & _MAGNITUDE) >> 31
    return (moved & moves) | (weight & ~moves)


def round_to_bfloat16(bits: Any, noise: Any) -> Any:
    """Add ``noise`` below the bfloat16 mantissa and truncate.

    Args:
        bits: of float32 values, int32.
        noise: int32 in ``[0, 2**16)``: uniform for stochastic rounding, whose
            expectation is the value itself; :func:`nearest_noise` for the nearest.

    Returns:
        The bits with the lower half zero. What bfloat16 holds exactly stays under
        uniform noise, infinities and NaN under any.
    """
    excess = (bits & _MAGNITUDE) - _EXPONENT  # negative: finite, positive: NaN
    quiet = (-excess >> 31) & _QUIET_NAN
    return ((bits + (noise & (excess >> 31))) & _UPPER_HALF) | quiet


def nearest_noise(bits: Any) -> Any:
    """The noise that rounds to the nearest bfloat16, ties to even."""
    return ((bits >> 16) & 1) + 0x7FFF


def stochastic_noise(
    address: tuple[Any, Any, Any], row: Any, column: Any, width: int
) -> Any:
    """16 random bits for the weights of some rows and columns of a matrix.

    The upper half of hashed word ``row * width + column`` at the matrix's address, so
    a shard draws the bits of its own weights.

    Args:
        address: seed, step, matrix.
        row: index of the output features, int32, shaped to broadcast with ``column``.
        column: index of the input features, int32.
        width: input features of the whole matrix.
    """
    return shift_right(hashed_words(address, row * width + column), 16)


def _flush(bits: Any) -> Any:
    """Subnormal numbers and negative zero become zero."""
    return bits & (-(bits & _EXPONENT) >> 31)

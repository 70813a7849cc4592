"""Random words from counters, over int32 operators alone (:mod:`arrays`).

Two generators that share nothing: threefry2x32, which is `jax.random`'s and draws the
basis, and a cheap hash, which draws the bits of stochastic rounding. int32 arithmetic
wraps in numpy, JAX and torch alike; a word is the two's complement of its uint32.

Key words may be Python integers or arrays, counters must be arrays (not scalars: those
do not wrap in numpy).
"""

from collections.abc import Callable
from typing import Any

Threefry = Callable[[tuple[Any, Any], Any, Any], tuple[Any, Any]]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def signed(word: int) -> int:
    """The int32 with the bits of a uint32."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def shift_right(x: Any, count: int) -> Any:
    """``x >> count`` of the uint32 behind an int32 (no copies of the sign)."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def threefry2x32(key: tuple[Any, Any], high: Any, low: Any) -> tuple[Any, Any]:
    """The 20 rounds of threefry2x32 on the counter ``(high, low)``: two words.

    Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = high + keys[0], low + keys[1]
    for block in range(5):
        for turn in _ROTATIONS[block % 2]:
            x = x + y
            y = ((y << turn) | shift_right(y, 32 - turn)) ^ x
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + (block + 1)
    return x, y


def random_words(
    key: tuple[Any, Any], index: Any, threefry: Threefry = threefry2x32
) -> Any:
    """Words number ``index`` of a key: those of ``jax.random.bits``, in C order.

    Args:
        key: two words.
        index: int32 array, taken as counters in ``[0, 2**32)``; so a part of an array
            of random words is drawn without the rest.
        threefry: the generator, or another way to its words.
    """
    x, y = threefry(key, index & 0, index)
    return x ^ y


def fold_in(
    key: tuple[Any, Any], word: Any, threefry: Threefry = threefry2x32
) -> tuple[Any, Any]:
    """``jax.random.fold_in``: the key for ``word`` (an array), two words."""
    return threefry(key, word & 0, word)


def mix(x: Any) -> Any:
    """An invertible 32-bit hash: every output bit depends on every input bit.

    Reference: Wellons, "Prospecting for hash functions" (the ``lowbias32`` family).
    """
    x = (x ^ shift_right(x, 16)) * 0x7FEB352D
    x = (x ^ shift_right(x, 15)) * signed(0x846CA68B)
    return x ^ shift_right(x, 16)


def hashed_words(address: tuple[Any, Any, Any], index: Any) -> Any:
    """Words number ``index`` of the hash stream at an address.

    ``mix(mix(index) ^ mix(mix(mix(seed) + step) + matrix))``: a tenth of threefry's
    cost, and unrelated to its bits.

    Args:
        address: seed, step, matrix; arrays of one entry or int32 scalars of JAX.
        index: int32 array, taken as uint32.
    """
    seed, step, matrix = address
    return mix(mix(index) ^ mix(mix(mix(seed) + step) + matrix))

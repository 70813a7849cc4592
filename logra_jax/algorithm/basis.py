"""The random basis ``A`` of a sketch: never stored, drawn again from its address.

A matrix of the model is addressed by three words, ``(seed, step, matrix)``, where
``matrix`` is the crc32 of its Hugging Face name. The address is all that forward,
merge and (later) a rollout server need to draw the same ``A``.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt32

SIGNS_PER_WORD = 32


@dataclasses.dataclass(frozen=True)
class Basis:
    """How addresses become matrices: static, hashable, the same on every machine.

    Attributes:
        seed: first word of every address, in ``[0, 2**32)``.
        refresh: draw a new ``A`` after each merge (``True``), or keep the ``A`` of
            step 0 for the whole run (``False``), which first moments need.
    """

    seed: int = 0
    refresh: bool = True

    def __post_init__(self):
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` must be in [0, 2**32), got {self.seed}.")

    def address(self, name: str, step: int = 0) -> tuple[int, int, int]:
        """The ``(seed, step, matrix)`` of the matrix called ``name``."""
        return self.seed, step, zlib.crc32(name.encode())

    def key(self, address: UInt32[Array, "3"]) -> Key[Array, ""]:
        """The threefry key of the matrix at ``address``.

        ``seed -> fold_in(step, or 0 for a fixed basis) -> fold_in(matrix)``. Always
        threefry2x32, never ``rbg``, whose bits depend on how an array is sharded.
        """
        seed, step, matrix = address[0], address[1], address[2]
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(key, step if self.refresh else jnp.uint32(0))
        return jax.random.fold_in(key, matrix)


def random_signs(
    key: Key[Array, ""], rank: int, width: int, dtype: DTypeLike = jnp.float32
) -> Float[Array, "rank width"]:
    """Rademacher signs, 32 of them from each random word (bit set: +1).

    Sign ``(i, j)`` is bit ``j % 32`` of word ``(i, j // 32)``, least significant first.
    """
    words = jax.random.bits(key, (rank, -(-width // SIGNS_PER_WORD)), jnp.uint32)
    shifts = jnp.arange(SIGNS_PER_WORD, dtype=jnp.uint32)
    bits = (words[:, :, None] >> shifts[None, None, :]) & 1
    signs = 2 * bits.reshape(rank, -1)[:, :width].astype(jnp.int8) - 1
    return signs.astype(dtype)


def basis_matrix(
    key: Key[Array, ""], rank: int, width: int
) -> Float[Array, "rank width"]:
    """The basis ``A``: random signs scaled by ``1/sqrt(rank)``, float32.

    ``E[Aᵀ A] = I``, so ``S A`` is an unbiased estimate of the gradient ``G`` that was
    sketched as ``S = G Aᵀ``, and ``E ||S||² = ||G||²``.

    Args:
        key: a threefry key, from :meth:`Basis.key` or ``jax.random.key``.
        rank: number of rows ``r``.
        width: number of columns ``k``, the input features of the projection.

    Example:
        >>> import jax, logra_jax as logra
        >>> logra.basis_matrix(jax.random.key(0), rank=4, width=6).shape
        (4, 6)
    """
    return random_signs(key, rank, width) / jnp.sqrt(jnp.float32(rank))

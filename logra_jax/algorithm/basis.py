"""The random basis ``A`` of a sketch: never stored, drawn again from its address.

A matrix of the model is addressed by three words, ``(seed, step, matrix)``, where
``matrix`` is the crc32 of its Hugging Face name. From the address alone forward, merge
and a rollout server draw the same ``A = entries * scale`` (r, k), or any columns of it:

- key: threefry2x32, ``seed -> fold_in(step, or 0 if fixed) -> fold_in(matrix)``;
- ``"rademacher"``: entry ``(i, j)`` is +1 if bit ``j % 32`` (least significant first)
  of random word ``i * ceil(k / 32) + j // 32`` is set, else -1;
- ``"gaussian"``: entry ``(i, j)`` is ``GAUSSIAN[b]`` of byte ``b``, number ``j % 4``
  (least significant first) of random word ``i * ceil(k / 4) + j // 4``;
- ``scale = 1 / sqrt(r * m)``, ``m`` the mean square of an entry, so that
  ``E[Aᵀ A] = I`` exactly.

Written over :mod:`arrays`; JAX is imported only where a JAX key or array is made.
"""

import dataclasses
import math
import zlib
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from logra_jax.algorithm.arrays import Library, jax_library
from logra_jax.algorithm.random_bits import fold_in, random_words

if TYPE_CHECKING:
    from jax import Array

KINDS = ("rademacher", "gaussian")

# The standard normal's 256 quantile midpoints on a grid of 1/44: small integers, so
# that products with them stay exact. Their distribution function is off by at most
# .0065, their kurtosis is 2.92, the largest is 2.9 standard deviations; mean and
# variance are exact.
GAUSSIAN = tuple(round(44 * NormalDist().inv_cdf((b + 0.5) / 256)) for b in range(256))
_MEAN_SQUARE = {
    "rademacher": 1.0,
    "gaussian": sum(n * n for n in GAUSSIAN) / len(GAUSSIAN),
}
_ENTRIES_PER_WORD = {"rademacher": 32, "gaussian": 4}


@dataclasses.dataclass(frozen=True)
class Basis:
    """How addresses become matrices: static, hashable, the same on every machine.

    Attributes:
        seed: first word of every address, in ``[0, 2**32)``.
        refresh: draw a new ``A`` after each merge (``True``), or keep the ``A`` of
            step 0 for the whole run (``False``), which first moments need.
        kind: ``"rademacher"`` (random signs) or ``"gaussian"``.

    Example:
        >>> import jax.numpy as jnp, logra_jax as logra
        >>> basis = logra.Basis(seed=7)
        >>> address = basis.address("up", step=3)  # of the matrix that is called so
        >>> address[:2]
        (7, 3)
        >>> A = basis.matrix(jnp.array(address, jnp.uint32), rank=4, width=6)
        >>> A.shape, set(abs(A).ravel().tolist())  # signs, over the root of the rank
        ((4, 6), {0.5})
    """

    seed: int = 0
    refresh: bool = True
    kind: str = "rademacher"

    def __post_init__(self):
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` must be in [0, 2**32), got {self.seed}.")
        if self.kind not in KINDS:
            raise ValueError(f"`kind` must be one of {KINDS}, got {self.kind!r}.")

    def address(self, name: str, step: int = 0) -> tuple[int, int, int]:
        """The ``(seed, step, matrix)`` of the matrix called ``name``."""
        return self.seed, step, matrix_word(name)

    def key(self, address: "Array") -> "Array":
        """The JAX key of the matrix at ``address`` (3,), uint32.

        Always threefry2x32, never ``rbg``, whose bits depend on how an array is
        sharded.
        """
        import jax
        import jax.numpy as jnp

        library = jax_library()
        words = library.bits(jnp.asarray(address, jnp.uint32), "int32")
        words = self.key_words(library, (words[0], words[1], words[2]))
        data = jnp.stack([library.bits(word, "uint32") for word in words])
        return jax.random.wrap_key_data(data, impl="threefry2x32")

    def key_words(
        self, library: Library, address: tuple[Any, Any, Any]
    ) -> tuple[Any, Any]:
        """The two int32 words of that key, from int32 arrays of ``library``."""
        seed, step, matrix = address
        step = step if self.refresh else step & 0
        key = fold_in((0, seed), step, library.threefry)
        return fold_in(key, matrix, library.threefry)

    def matrix(self, address: "Array", rank: int, width: int) -> "Array":
        """The basis ``A`` (rank, width) at ``address``, float32, see basis_matrix."""
        return basis_matrix(self.key(address), rank, width, self.kind)


def matrix_word(name: str) -> int:
    """The third word of a matrix's address: the crc32 of its name."""
    return zlib.crc32(name.encode())


def entry_scale(kind: str, rank: int) -> float:
    """What the integer entries are multiplied by to give ``A``."""
    return 1.0 / math.sqrt(rank * _MEAN_SQUARE[kind])


def basis_entries(
    library: Library,
    key: tuple[Any, Any],
    rows: tuple[int, int],
    columns: tuple[int, int],
    width: int,
    kind: str = "rademacher",
) -> Any:
    """The integer entries of ``A``'s ``rows`` and ``columns``, int32.

    Args:
        library: of the key's words and of the result.
        key: two int32 words, see :meth:`Basis.key_words`.
        rows: half-open range in ``[0, rank)``.
        columns: half-open range in ``[0, width)``; nothing outside it is drawn, but
            for what shares a word with its ends.
        width: columns ``k`` of the whole ``A``.
        kind: of the basis.
    """
    per_word = _ENTRIES_PER_WORD[kind]
    bits = 32 // per_word
    words_a_row = -(-width // per_word)
    first, last = columns[0] // per_word, -(-columns[1] // per_word)
    row = library.arange(*rows)[:, None]
    index = row * words_a_row + library.arange(first, last)[None, :]
    words = random_words(key, index, library.threefry)
    shifts = library.arange(0, per_word) * bits
    parts = (words[:, :, None] >> shifts[None, None, :]) & ((1 << bits) - 1)
    parts = parts.reshape(rows[1] - rows[0], -1)
    skipped = first * per_word
    parts = parts[:, columns[0] - skipped : columns[1] - skipped]
    if kind == "rademacher":
        return 2 * parts - 1
    return library.constant(GAUSSIAN)[parts]


def basis_matrix(
    key: "Array", rank: int, width: int, kind: str = "rademacher"
) -> "Array":
    """The basis ``A`` (rank, width), float32: integer entries times their scale.

    ``E[Aᵀ A] = I``, so ``S A`` is an unbiased estimate of the gradient ``G`` that was
    sketched as ``S = G Aᵀ``, and ``E ||S||² = ||G||²``.

    Args:
        key: a threefry key, from :meth:`Basis.key` or ``jax.random.key``.
        rank: number of rows ``r``.
        width: number of columns ``k``, the input features of the projection.
        kind: ``"rademacher"`` or ``"gaussian"``.

    Example:
        >>> import jax, logra_jax as logra
        >>> logra.basis_matrix(jax.random.key(0), rank=4, width=6).shape
        (4, 6)
    """
    import jax.numpy as jnp

    return jax_entries(key, rank, width, kind, jnp.float32) * entry_scale(kind, rank)


def jax_entries(key: "Array", rank: int, width: int, kind: str, dtype: Any) -> "Array":
    """The integer entries of ``A`` (rank, width) from a JAX key or its two words."""
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    library = jax_library()
    words = library.bits(key, "int32")
    pair = (words[0], words[1])
    entries = basis_entries(library, pair, (0, rank), (0, width), width, kind)
    return entries.astype(dtype)

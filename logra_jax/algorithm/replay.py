"""The merge of one matrix, or of a shard of it, repeated outside JAX: numpy or torch.

Same factor, same address, same weights: the same bits as :func:`logra_jax.merge`.
Imports neither JAX nor torch by itself.
"""

from typing import Any

import numpy as np

from logra_jax.algorithm.arrays import Library, library_of, numpy_library
from logra_jax.algorithm.basis import Basis, basis_entries
from logra_jax.algorithm.factor import lift
from logra_jax.algorithm.random_bits import signed
from logra_jax.algorithm.rounding import (
    ROUNDINGS,
    land,
    nearest_noise,
    stochastic_noise,
)

# Weights taken at once: what a pass over them needs stays in a CPU's cache.
CPU_BLOCK = 2**17
BLOCK = 2**26


def replay(
    weight: Any,
    integers: Any,
    exponents: Any,
    address: tuple[int, int, int],
    basis: Basis,
    *,
    rounding: str = "stochastic",
    rows: int = 0,
    columns: int = 0,
    width: int | None = None,
) -> None:
    """``weight += F B`` in place, a block of rows at a time.

    Args:
        weight: numpy array or torch tensor (out, in) in Hugging Face order, or the
            part of the matrix that a tensor-parallel rank holds; bfloat16 or float32.
            A numpy array of uint16 is taken as the bits of bfloat16.
        integers: of the factor (out, r), int16 or int8: the rows of ``weight``.
        exponents: of the factor (out,), int8.
        address: seed, step and matrix word, each in ``[0, 2**32)``.
        basis: refreshed or fixed, and of which kind; its seed is in the address.
        rounding: ``"stochastic"`` or ``"nearest"``.
        rows: index of ``weight``'s first row in the whole matrix.
        columns: index of its first column.
        width: columns of the whole matrix; those of ``weight`` by default.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"`rounding` must be one of {ROUNDINGS}, got {rounding!r}.")
    library = library_of(weight)
    out, held = weight.shape
    full = held if width is None else width
    # Arrays of one entry: numpy's scalars do not wrap. They broadcast everywhere.
    seed, step, matrix = (np.array([signed(word)], np.int32) for word in address)
    key = basis.key_words(numpy_library(), (seed, step, matrix))
    words = tuple(library.constant([signed(word)]) for word in address)
    entries = basis_entries(
        library,
        (int(key[0][0]), int(key[1][0])),
        (0, integers.shape[1]),
        (columns, columns + held),
        full,
        basis.kind,
    )
    column = library.arange(columns, columns + held)[None, :]
    block = rows_at_once(weight)
    # Infinities in the weights are answers here, not faults.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, out, block):
            part = slice(start, min(start + block, out))
            change = lift(library, integers[part], exponents[part], entries)
            noise = nearest_noise
            if rounding == "stochastic":
                row = library.arange(rows + part.start, rows + part.stop)[:, None]
                noise = stochastic_noise(words, row, column, full)
            _land_in_place(library, weight, part, change, noise)


def rows_at_once(weight: Any) -> int:
    """Rows of a numpy array or torch tensor that one pass should take."""
    is_on_cpu = getattr(getattr(weight, "device", None), "type", "cpu") == "cpu"
    return max(1, (CPU_BLOCK if is_on_cpu else BLOCK) // weight.shape[1])


def _land_in_place(
    library: Library, weight: Any, part: slice, change: Any, noise: Any
) -> None:
    if weight.dtype.itemsize == 4:
        bits = library.bits(weight, "int32")
        bits[part] = land(library, bits[part], change, None)
        return
    bits = library.bits(weight, "int16")
    before = library.int32(bits[part]) << 16
    bits[part] = library.int16(land(library, before, change, noise) >> 16)

"""The factor of an update: what is merged, sent and written down, in small integers.

``W += F B``, with ``B`` (r, k) the integer entries of the basis and the factor
``F[i, j] = integers[i, j] * 2**exponents[i]`` (d, r). Split into two int8 halves, every
partial sum of ``integers @ B`` stays below 2**24 (to rank 1,024; signs far beyond), and
every entry fits bfloat16 and TF32: so the products are exact in *any* order of
summation, on any device. What may round at all, the sum of the halves and the addition
to the weight, is one float32 operation each; powers of two never round.
"""

from typing import TYPE_CHECKING, Any

from logra_jax.algorithm.arrays import Library
from logra_jax.algorithm.basis import Basis, entry_scale

if TYPE_CHECKING:
    from flax import nnx
    from jax import Array

MAX_RANK = 1024
BITS = (16, 8)
# Of 2**e: it, its inverse, and one 16-bit integer times it are normal float32 numbers.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -111, 113


def lift(
    library: Library,
    integers: Any,
    exponents: Any,
    entries: Any,
    *,
    transposed: bool = False,
) -> Any:
    """``F B``, float32, the same bits in every library and on every device.

    Args:
        library: of the arrays.
        integers: (d, r), int16 or int8.
        exponents: (d,), int8.
        entries: of the basis, int32 (r, k), or any columns of it.
        transposed: give (k, d), JAX's order of a kernel, in place of (d, k).
    """
    integers = library.int32(integers)
    low = ((integers + 128) & 255) - 128
    high = (integers - low) >> 8

    def product(half: Any) -> Any:
        if transposed:
            return library.product(entries.T, half.T)
        return library.product(half, entries)

    scale = library.bits((library.int32(exponents) + 127) << 23, "float32")
    total = product(high) * 256.0 + product(low)
    return total * (scale[None, :] if transposed else scale[:, None])


def quantise(updates: "nnx.State", basis: Basis, bits: int = 16) -> "nnx.State":
    """Updates ``U`` as factors: ``U / sqrt(r m)`` on a grid of its own for each row.

    The step of a row's grid is the power of two that makes the row's largest entry fit
    ``bits``, so an entry moves by at most ``2**(1 - bits)`` of the largest (16: 3.1e-5,
    8: .8 %). The trainer merges the factor, not the update, so both sides agree.

    Args:
        updates: state of ``probe``-shaped updates (..., d, r), float32.
        basis: that the sketches were formed in; its scale goes into the factor.
        bits: 16, or 8 for half the bytes.

    Returns:
        State with ``integers`` (..., d, r), int16 or int8, and ``exponents`` (..., d),
        int8, in the place of each probe. A row that is not finite becomes zero: a
        weight must not be lost to it.

    Raises:
        ValueError: ``bits``, or a rank above 1,024, where sums would no longer be
            exact.

    Example:
        >>> import jax.numpy as jnp, logra_jax as logra
        >>> from flax import nnx
        >>> updates = nnx.State({"probe": logra.Probe(jnp.ones((3, 2)))})
        >>> factors = logra.quantise(updates, logra.Basis())
        >>> factors["integers"].shape, factors["exponents"].shape
        ((3, 2), (3,))
    """
    from flax import nnx

    if bits not in BITS:
        raise ValueError(f"`bits` must be 16 or 8, got {bits!r}.")
    flat = {}
    for path, update in nnx.to_flat_state(updates):
        rank = update.shape[-1]
        if rank > MAX_RANK:
            raise ValueError(
                f"The rank of an update must be at most {MAX_RANK}, got {rank} for "
                f"{'.'.join(map(str, path))!r}: beyond it sums are no longer exact."
            )
        scaled = update[...] * entry_scale(basis.kind, rank)
        integers, exponents = _quantise_rows(scaled, bits)
        flat[(*path[:-1], "integers")] = nnx.Variable(integers)
        flat[(*path[:-1], "exponents")] = nnx.Variable(exponents)
    return nnx.from_flat_state(flat)


def _quantise_rows(factor: "Array", bits: int) -> tuple["Array", "Array"]:
    import jax.numpy as jnp

    finite = jnp.all(jnp.isfinite(factor), -1, keepdims=True)
    factor = jnp.where(finite, factor, 0.0)
    largest = jnp.max(jnp.abs(factor), -1)
    _, exponent = jnp.frexp(largest)  # largest < 2**exponent
    exponents = jnp.where(largest > 0, exponent - (bits - 1), LOWEST_EXPONENT)
    exponents = jnp.clip(exponents, LOWEST_EXPONENT, HIGHEST_EXPONENT)
    limit = 2 ** (bits - 1) - 1
    integers = jnp.round(jnp.ldexp(factor, -exponents[..., None]))
    integers = jnp.clip(integers, -limit, limit).astype(f"int{bits}")
    return integers, exponents.astype(jnp.int8)

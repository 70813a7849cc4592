"""Low-rank updates of full weights: lift ``U A``, round, merge in place."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt32

from logra_jax.algorithm.basis import Basis, random_signs
from logra_jax.algorithm.sketch import Probe

ROUNDINGS = ("stochastic", "nearest")

# On CPUs, XLA before jax 0.12 writes a slice into a bfloat16 array by converting all of
# the array to float32 and back: for a stack of 30 layers, 9 times the merge's own time.
# Through the array's uint16 bits it writes the slice alone, at the cost of one copy.
BFLOAT16_SLICES_ARE_CONVERTED = jax.__version_info__ < (0, 12)


def merge(
    weights: nnx.State,
    updates: nnx.State,
    basis: Basis,
    *,
    rounding: str = "stochastic",
) -> nnx.State:
    """``W <- W + (U A)ᵀ`` for every sketched layer; the step in each address moves on.

    ``A`` is the basis that the sketches were formed in (its address lies beside the
    kernel), and the weights come back addressed for the next step, so what is sketched
    and what is merged cannot come from different bases.

    One layer of one stacked kernel is updated at a time, in place when ``weights`` is
    donated to the enclosing ``jax.jit``. bfloat16 kernels are rounded stochastically:
    to nearest, an update below half a unit in the last place would be lost.

    Args:
        weights: state with ``kernel`` (..., k, d) and ``address`` (..., 3) variables
            of the sketched layers, and anything else, which is passed through.
        updates: state with the ``probe``-shaped updates ``U`` (..., d, r) of the same
            layers, sign and step size included: they are added.
        basis: the rule given to :func:`logra_jax.sketch`.
        rounding: ``"stochastic"`` or ``"nearest"``; float32 kernels need neither.

    Returns:
        ``weights`` with kernels and addresses replaced, dtypes kept.

    Raises:
        ValueError: an update for a layer that ``weights`` does not hold, or of another
            shape than the layer's probe.

    Example:
        >>> import jax, logra_jax as logra
        >>> from flax import nnx
        >>> model = logra.sketch(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), rank=2)
        >>> _, probes, weights = nnx.split(model, logra.Probe, ...)
        >>> updates = jax.tree.map(lambda p: p + 0.1, probes)
        >>> logra.merge(weights, updates, logra.Basis())["kernel"].shape
        (8, 4)
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"`rounding` must be one of {ROUNDINGS}, got {rounding!r}.")
    flat = dict(nnx.to_flat_state(weights))
    for path, update in nnx.to_flat_state(updates):
        layer = path[:-1]
        kernel, address = (*layer, "kernel"), (*layer, "address")
        if not isinstance(update, Probe) or kernel not in flat or address not in flat:
            raise ValueError(
                f"`updates` must hold one Probe per sketched layer of `weights`, got "
                f"{'.'.join(map(str, path))!r}, which has no kernel and address there."
            )
        w, words = flat[kernel], flat[address]
        *stack, _, d = w.shape
        if update.shape[:-1] != (*stack, d):
            raise ValueError(
                f"`updates` must have the shapes of the probes, got {update.shape} for "
                f"{'.'.join(map(str, path))!r}, whose kernel {w.shape} needs "
                f"{(*stack, d, 'rank')}."
            )
        flat[kernel] = w.replace(
            _merge_stack(w[...], update[...], words[...], basis, rounding)
        )
        flat[address] = words.replace(words[...].at[..., 1].add(1))
    return nnx.from_flat_state(flat)


def _merge_stack(
    kernel: Float[Array, "*stack k d"],
    update: Float[Array, "*stack d r"],
    addresses: UInt32[Array, "*stack 3"],
    basis: Basis,
    rounding: str,
) -> Float[Array, "*stack k d"]:
    k, d = kernel.shape[-2:]
    update = update.reshape(-1, d, update.shape[-1])
    addresses = addresses.reshape(-1, 3)

    def merge_layers(stacked: Array, stored: DTypeLike = kernel.dtype) -> Array:
        def merge_layer(i: Array, stacked: Array) -> Array:
            w = lax.dynamic_index_in_dim(stacked, i, keepdims=False)
            w = lax.bitcast_convert_type(w, kernel.dtype)
            w = _merge_matrix(w, update[i], addresses[i], basis, rounding)
            w = lax.bitcast_convert_type(w, stored)
            return lax.dynamic_update_index_in_dim(stacked, w, i, 0)

        # A loop over donated buffers, not scan or vmap: those hold the weights twice.
        return lax.fori_loop(0, stacked.shape[0], merge_layer, stacked)

    def merge_bits(stacked: Array) -> Array:
        bits = lax.bitcast_convert_type(stacked, jnp.uint16)
        return lax.bitcast_convert_type(merge_layers(bits, jnp.uint16), kernel.dtype)

    stacked = kernel.reshape(-1, k, d)
    if kernel.dtype == jnp.bfloat16 and BFLOAT16_SLICES_ARE_CONVERTED:
        merged = lax.platform_dependent(stacked, cpu=merge_bits, default=merge_layers)
    else:
        merged = merge_layers(stacked)
    return merged.reshape(kernel.shape)


def _merge_matrix(
    w: Float[Array, "k d"],
    update: Float[Array, "d r"],
    address: UInt32[Array, "3"],
    basis: Basis,
    rounding: str,
) -> Float[Array, "k d"]:
    rank = update.shape[-1]
    signs = random_signs(basis.key(address), rank, w.shape[0])
    factor = update.astype(jnp.float32) / jnp.sqrt(jnp.float32(rank))
    change = jnp.einsum("rk,dr->kd", signs, factor, precision=lax.Precision.HIGHEST)
    moved = w.astype(jnp.float32) + change
    if w.dtype == jnp.bfloat16 and rounding == "stochastic":
        return round_stochastically(
            moved, rounding_bits(address, (w.shape[0], w.shape[1]))
        )
    return moved.astype(w.dtype)


def round_stochastically(
    x: Float32[Array, "k d"], bits: UInt32[Array, "k d"]
) -> Float[Array, "k d"]:
    """float32 -> bfloat16, up or down with probability by distance: ``E[out] = x``.

    Adds 16 random bits below the bfloat16 mantissa and truncates; what bfloat16 holds
    exactly stays as it is, and so do infinities and NaN.

    Args:
        x: values.
        bits: uniform words; the upper 16 bits of each are used.
    """
    raised = lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    rounded = lax.bitcast_convert_type(raised & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def rounding_bits(
    address: UInt32[Array, "3"], shape: tuple[int, int]
) -> UInt32[Array, "k d"]:
    """A word per weight: a counter-based hash of (seed, step, matrix, index).

    A tenth of threefry's cost, and unrelated to the bits of ``A``. The index counts in
    Hugging Face order, ``out * k + in``, for a kernel of shape (k, d) = (in, out).
    """
    k, d = shape
    stream = _mix(_mix(_mix(address[0]) + address[1]) + address[2])
    rows = jnp.arange(k, dtype=jnp.uint32)[:, None]
    columns = jnp.arange(d, dtype=jnp.uint32)[None, :]
    return _mix(_mix(columns * jnp.uint32(k) + rows) ^ stream)


def _mix(x: Array) -> Array:
    """An invertible 32-bit mixer: every output bit depends on every input bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)

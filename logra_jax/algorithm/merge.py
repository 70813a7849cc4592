"""Updates land on full weights: lift the factor, add, round, in place."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Shaped, UInt32

from logra_jax.algorithm.arrays import jax_library
from logra_jax.algorithm.basis import Basis, basis_entries
from logra_jax.algorithm.factor import lift, quantise
from logra_jax.algorithm.rounding import (
    ROUNDINGS,
    land,
    nearest_noise,
    stochastic_noise,
)
from logra_jax.algorithm.sketch import Probe
from logra_jax.algorithm.slicing import BFLOAT16_SLICES_ARE_CONVERTED


class Landing(NamedTuple):
    """How much of an update arrived on the weights; sums over each matrix of a stack.

    All float32, one entry for each matrix: (...,).
    """

    intended: Array  # sum of squares of the update
    landed: Array  # sum of squares of what the weights moved by
    inner: Array  # inner product of the two
    changed: Array  # number of weights whose value changed
    size: Array  # number of weights


def combine(landings: Sequence[Landing]) -> dict[str, Array]:
    """Of all these matrices: norm ratio landed / intended, cosine, share changed."""
    intended, landed, inner = (
        sum((jnp.sum(v) for v in part), jnp.float32(0))
        for part in zip(*(x[:3] for x in landings), strict=True)
    )
    changed = jnp.concatenate([x.changed.reshape(-1) for x in landings])
    sizes = jnp.concatenate([x.size.reshape(-1) for x in landings])
    return {
        "norm_ratio": jnp.sqrt(landed / intended),
        "cosine": inner / jnp.sqrt(landed * intended),
        "changed": jnp.sum(changed) / jnp.sum(sizes),
    }


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
    to nearest, an update below half a unit in the last place would be lost. The bits of
    the result depend on the factor (:func:`logra_jax.quantise`), the basis and the
    address alone: whoever holds the same weights and these gets the same ones.

    Args:
        weights: state with ``kernel`` (..., k, d) and ``address`` (..., 3) variables
            of the sketched layers, and anything else, which is passed through.
        updates: state with the ``probe``-shaped updates ``U`` (..., d, r) of the same
            layers, sign and step size included: they are added. They are quantised to
            16 bits first; or the factors that :func:`logra_jax.quantise` makes of them.
        basis: the rule given to :func:`logra_jax.sketch`.
        rounding: ``"stochastic"`` or ``"nearest"``; float32 kernels need neither.

    Returns:
        ``weights`` with kernels and addresses replaced, dtypes kept.

    Raises:
        ValueError: an update for a layer that ``weights`` does not hold, or of another
            shape than the layer's probe; kernels of another dtype.

    Example:
        >>> import jax, logra_jax as logra
        >>> from flax import nnx
        >>> model = logra.sketch(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), rank=2)
        >>> _, probes, weights = nnx.split(model, logra.Probe, ...)
        >>> updates = jax.tree.map(lambda p: p + 0.1, probes)
        >>> logra.merge(weights, updates, logra.Basis())["kernel"].shape
        (8, 4)
    """
    return _merge(weights, updates, basis, rounding, measure=False)[0]


def merge_measured(
    weights: nnx.State,
    updates: nnx.State,
    basis: Basis,
    *,
    rounding: str = "stochastic",
) -> tuple[nnx.State, dict[str, Landing]]:
    """:func:`merge`, and how much of the update landed, by dotted path of the layer."""
    return _merge(weights, updates, basis, rounding, measure=True)


def _merge(
    weights: nnx.State, updates: nnx.State, basis: Basis, rounding: str, measure: bool
) -> tuple[nnx.State, dict[str, Landing]]:
    if rounding not in ROUNDINGS:
        raise ValueError(f"`rounding` must be one of {ROUNDINGS}, got {rounding!r}.")
    flat = dict(nnx.to_flat_state(weights))
    factors = _factors(updates, basis)
    landings = {}
    for layer in sorted({path[:-1] for path in factors}):
        integers, exponents = (factors[*layer, n] for n in ("integers", "exponents"))
        _check_layer(flat, layer, integers.shape)
        w, words = flat[*layer, "kernel"], flat[*layer, "address"]
        kernel, landing = _merge_stack(
            w[...],
            integers[...],
            exponents[...],
            words[...],
            basis,
            rounding,
            measure,
        )
        flat[*layer, "kernel"] = w.replace(kernel)
        flat[*layer, "address"] = words.replace(words[...].at[..., 1].add(1))
        if landing is not None:
            landings[".".join(map(str, layer))] = landing
    return nnx.from_flat_state(flat), landings


def _factors(updates: nnx.State, basis: Basis) -> dict[tuple, nnx.Variable]:
    flat = dict(nnx.to_flat_state(updates))
    if all(path[-1:] in (("integers",), ("exponents",)) for path in flat):
        return flat
    for path, update in flat.items():
        if not isinstance(update, Probe):
            raise ValueError(
                "`updates` must hold one Probe, or one factor, per sketched layer, got "
                f"{'.'.join(map(str, path))!r}, which is neither."
            )
    return dict(nnx.to_flat_state(quantise(updates, basis)))


def _check_layer(flat: dict, layer: tuple, shape: tuple[int, ...]) -> None:
    name = ".".join(map(str, (*layer, "probe")))
    if (*layer, "kernel") not in flat or (*layer, "address") not in flat:
        raise ValueError(
            f"`updates` must hold one Probe per sketched layer of `weights`, got "
            f"{name!r}, which has no kernel and address there."
        )
    w = flat[*layer, "kernel"]
    *stack, _, d = w.shape
    if shape[:-1] != (*stack, d):
        raise ValueError(
            f"`updates` must have the shapes of the probes, got {shape} for {name!r}, "
            f"whose kernel {w.shape} needs {(*stack, d, 'rank')}."
        )
    if w.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"`weights` must hold bfloat16 or float32 kernels, got {w.dtype} for "
            f"{name!r}; cast it before sketching."
        )


def _merge_stack(
    kernel: Float[Array, "*stack k d"],
    integers: Shaped[Array, "*stack d r"],
    exponents: Int8[Array, "*stack d"],
    addresses: UInt32[Array, "*stack 3"],
    basis: Basis,
    rounding: str,
    measure: bool,
) -> tuple[Float[Array, "*stack k d"], Landing | None]:
    *stack, k, d = kernel.shape
    integers = integers.reshape(-1, d, integers.shape[-1])
    exponents = exponents.reshape(-1, d)
    addresses = addresses.reshape(-1, 3)
    layers = addresses.shape[0]

    def merge_layers(stacked: Array, stored: DTypeLike = kernel.dtype):
        def merge_layer(i: Array, carry: tuple[Array, Array]):
            stacked, sums = carry
            w = lax.dynamic_index_in_dim(stacked, i, keepdims=False)
            w = lax.bitcast_convert_type(w, kernel.dtype)
            moved, change = _merge_matrix(
                w, integers[i], exponents[i], addresses[i], basis, rounding
            )
            if measure:
                sums = sums.at[i].set(_measure(w, moved, change))
            moved = lax.bitcast_convert_type(moved, stored)
            return lax.dynamic_update_index_in_dim(stacked, moved, i, 0), sums

        # A loop over donated buffers, not scan or vmap: those hold the weights twice.
        sums = jnp.zeros((layers, len(Landing._fields)), jnp.float32)
        return lax.fori_loop(0, layers, merge_layer, (stacked, sums))

    def merge_bits(stacked: Array):  # in place but for one copy of the stack's bits
        bits = lax.bitcast_convert_type(stacked, jnp.uint16)
        bits, sums = merge_layers(bits, jnp.uint16)
        return lax.bitcast_convert_type(bits, kernel.dtype), sums

    stacked = kernel.reshape(-1, k, d)
    if kernel.dtype == jnp.bfloat16 and BFLOAT16_SLICES_ARE_CONVERTED:
        stacked, sums = lax.platform_dependent(
            stacked, cpu=merge_bits, default=merge_layers
        )
    else:
        stacked, sums = merge_layers(stacked)
    landing = Landing(*(sums[:, i].reshape(stack) for i in range(sums.shape[1])))
    return stacked.reshape(kernel.shape), landing if measure else None


def _merge_matrix(
    w: Float[Array, "k d"],
    integers: Shaped[Array, "d r"],
    exponents: Int8[Array, " d"],
    address: UInt32[Array, "3"],
    basis: Basis,
    rounding: str,
) -> tuple[Float[Array, "k d"], Float32[Array, "k d"]]:
    """The matrix after the update, and the update."""
    library = jax_library()
    k, d = w.shape
    words = library.bits(address, "int32")
    address_words = (words[0], words[1], words[2])
    entries = basis_entries(
        library,
        basis.key_words(address_words),
        (0, integers.shape[-1]),
        (0, k),
        k,
        basis.kind,
    )
    change = lift(library, integers, exponents, entries, transposed=True)
    if w.dtype == jnp.float32:
        moved = land(library, library.bits(w, "int32"), change, None)
        return library.bits(moved, "float32"), change
    bits = library.int32(library.bits(w, "uint16")) << 16
    if rounding == "stochastic":
        row, column = library.arange(0, d)[None, :], library.arange(0, k)[:, None]
        moved = land(
            library, bits, change, stochastic_noise(address_words, row, column, k)
        )
    else:
        moved = land(library, bits, change, nearest_noise)
    return library.bits(library.int16(moved >> 16), "bfloat16"), change


def _measure(before: Array, after: Array, intended: Array) -> Array:
    moved = after.astype(jnp.float32) - before.astype(jnp.float32)
    return jnp.stack(
        [
            jnp.sum(jnp.square(intended)),
            jnp.sum(jnp.square(moved)),
            jnp.sum(moved * intended),
            jnp.sum((after != before).astype(jnp.float32)),
            jnp.float32(intended.size),
        ]
    )

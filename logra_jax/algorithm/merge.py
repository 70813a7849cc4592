"""Updates land on full weights: lift the factor, add, round, in place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Int32, Shaped, UInt32

from logra_jax.algorithm.arrays import jax_library
from logra_jax.algorithm.basis import Basis, basis_entries
from logra_jax.algorithm.contraction import PLAIN, Matrix
from logra_jax.algorithm.factor import lift, quantise
from logra_jax.algorithm.parallel import Split, offset, own_part, parts, total
from logra_jax.algorithm.plain import as_dict, as_state, is_plain
from logra_jax.algorithm.rounding import (
    ROUNDINGS,
    land,
    nearest_noise,
    stochastic_noise,
)
from logra_jax.algorithm.sketch import MATRIX, Probe
from logra_jax.algorithm.slicing import BFLOAT16_SLICES_ARE_CONVERTED

Weights = TypeVar("Weights", bound=Mapping[Any, Any])  # nnx.State, or nested dicts

# Parts, at most, that a stack's bits are copied in where bfloat16 slices are converted:
# each costs a pass over the stack, and holds so much less of it.
_GROUPS = 4


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
    weights: Weights,
    updates: Weights,
    basis: Basis,
    *,
    rounding: str = "stochastic",
    splits: Mapping[str, Split] | None = None,
) -> Weights:
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
            of the sketched layers, and anything else, which is passed through. A kernel
            of other axes is read as the address says (its metadata ``matrix``). Or a
            nested dict of such arrays, as linen and plain JAX have it.
        updates: state or dict with the ``probe``-shaped updates ``U`` (..., d, r) of
            the same layers, sign and step size included: they are added. They are
            quantised to 16 bits first; or a state of the factors that
            :func:`logra_jax.quantise` makes of them.
        basis: the rule given to :func:`logra_jax.sketch`.
        rounding: ``"stochastic"`` or ``"nearest"``; float32 kernels need neither.
        splits: inside ``jax.shard_map``, how each kernel lies on the mesh, by dotted
            path of its layer; updates are whole. A device changes its own part, to the
            bits that it has in the whole.

    Returns:
        ``weights`` with kernels and addresses replaced, dtypes kept.

    Raises:
        ValueError: an update for a layer that ``weights`` does not hold, or of another
            shape than the layer's probe; kernels of another dtype.

    Example:
        >>> import jax, jax.numpy as jnp, logra_jax as logra
        >>> from flax import nnx
        >>> model = logra.sketch(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), rank=2)
        >>> _, probes, weights = nnx.split(model, logra.Probe, ...)
        >>> updates = jax.tree.map(lambda p: p + 0.1, probes)
        >>> logra.merge(weights, updates, logra.Basis())["kernel"].shape
        (8, 4)
        >>> address = jnp.array(logra.Basis().address("up"), jnp.uint32)
        >>> weights = {"up": {"kernel": jnp.ones((8, 4)), "address": address}}
        >>> updates = {"up": {"probe": jnp.ones((4, 2))}}
        >>> logra.merge(weights, updates, logra.Basis())["up"]["kernel"].shape
        (8, 4)
    """
    if is_plain(weights):
        state, changes = as_state(weights), as_state(updates)
        merged = merge(state, changes, basis, rounding=rounding, splits=splits)
        return cast(Weights, as_dict(merged))
    state, changes = cast(nnx.State, weights), cast(nnx.State, updates)
    rule = (basis, rounding, splits or {})
    return cast(Weights, _merge(state, changes, *rule, measure=False)[0])


def merge_measured(
    weights: nnx.State,
    updates: nnx.State,
    basis: Basis,
    *,
    rounding: str = "stochastic",
    splits: Mapping[str, Split] | None = None,
) -> tuple[nnx.State, dict[str, Landing]]:
    """:func:`merge`, and how much of the update landed, by dotted path of the layer.

    Example:
        >>> import jax, logra_jax as logra
        >>> from flax import nnx
        >>> model = logra.sketch(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), rank=2)
        >>> _, probes, weights = nnx.split(model, logra.Probe, ...)
        >>> updates = jax.tree.map(lambda p: p + 0.1, probes)
        >>> weights, landings = logra.merge_measured(weights, updates, logra.Basis())
        >>> landing = landings[""]  # of a model that is a layer itself
        >>> round(float(landing.landed / landing.intended), 2)
        1.0
    """
    return _merge(weights, updates, basis, rounding, splits or {}, measure=True)


def _merge(
    weights: nnx.State,
    updates: nnx.State,
    basis: Basis,
    rounding: str,
    splits: Mapping[str, Split],
    *,
    measure: bool,
) -> tuple[nnx.State, dict[str, Landing]]:
    if rounding not in ROUNDINGS:
        raise ValueError(f"`rounding` must be one of {ROUNDINGS}, got {rounding!r}.")
    flat = dict(nnx.to_flat_state(weights))
    factors = _factors(updates, basis)
    landings, landed = {}, [f[...] for f in factors.values()]
    for layer in sorted({path[:-1] for path in factors}):
        integers, exponents = (factors[*layer, n] for n in ("integers", "exponents"))
        split = splits.get(".".join(map(str, layer)), Split())
        matrix = _check_layer(flat, layer, integers.shape, parts(split.outputs))
        w, words = flat[*layer, "kernel"], flat[*layer, "address"]
        # One stack after the other, and none before there are factors: left alone, XLA
        # prepares the landing of all of them first, and holds it through the step.
        stack, landed = lax.optimization_barrier((w[...], landed))
        kernel, landing = _merge_stack(
            stack,
            integers[...],
            exponents[...],
            words[...],
            _Rule(basis, rounding, split, matrix),
            measure,
        )
        landed = kernel
        flat[*layer, "kernel"] = w.replace(kernel)
        flat[*layer, "address"] = words.replace(words[...].at[..., 1].add(1))
        if landing is not None:
            whole = total(landing, (*split.inputs, *split.outputs) or None)
            landings[".".join(map(str, layer))] = whole
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


def _check_layer(
    flat: dict, layer: tuple, shape: tuple[int, ...], d_parts: int
) -> Matrix:
    """How the layer's kernel is a matrix, if an update of that shape fits it."""
    name = ".".join(map(str, (*layer, "probe")))
    if (*layer, "kernel") not in flat or (*layer, "address") not in flat:
        raise ValueError(
            f"`updates` must hold one Probe per sketched layer of `weights`, got "
            f"{name!r}, which has no kernel and address there."
        )
    w = flat[*layer, "kernel"]
    matrix = flat[*layer, "address"].get_metadata(MATRIX, PLAIN)
    *stack, _, d = matrix.shape(w.shape)
    d *= d_parts
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
    return matrix


class _Rule(NamedTuple):
    """How every matrix of a stack is merged."""

    basis: Basis
    rounding: str
    split: Split
    matrix: Matrix


def _merge_stack(
    kernel: Float[Array, "..."],
    integers: Shaped[Array, "*stack whole r"],
    exponents: Int8[Array, "*stack whole"],
    addresses: UInt32[Array, "*stack 3"],
    rule: _Rule,
    measure: bool,
) -> tuple[Float[Array, "..."], Landing | None]:
    *_, k, d = rule.matrix.shape(kernel.shape)
    outputs = rule.split.outputs
    integers = integers.reshape(-1, d * parts(outputs), integers.shape[-1])
    integers = own_part(integers, outputs, 1)
    exponents = own_part(exponents.reshape(len(integers), -1), outputs, 1)
    words = addresses.reshape(-1, 3)

    def change(i: Array) -> Float32[Array, "k d"]:
        return _lift(integers[i], exponents[i], words[i], rule, k)

    return land_stack(
        kernel,
        addresses,
        change,
        rule.rounding,
        rule.split,
        rule.matrix,
        measure=measure,
    )


def land_stack(
    kernel: Float[Array, "..."],
    addresses: UInt32[Array, "*stack 3"],
    change: Callable[[Array], Array],
    rounding: str,
    split: Split,
    matrix: Matrix = PLAIN,
    *,
    measure: bool,
) -> tuple[Float[Array, "..."], Landing | None]:
    """Add a change to every matrix of a stack, in place, one matrix at a time.

    Args:
        kernel: (*stack, k, d), or as ``matrix`` says; bfloat16 or float32; inside
            ``jax.shard_map`` this device's part.
        addresses: of the whole matrices, for the bits of stochastic rounding.
        change: index of a matrix in the flattened stack -> its change (k, d), float32.
        rounding: one of ``ROUNDINGS``, of bfloat16.
        split: how the kernel lies on the mesh.
        matrix: how the kernel's axes make up k and d.
        measure: also return how much landed, of this device's part.
    """
    *stack, _, d = matrix.shape(kernel.shape)
    own = kernel.shape[kernel.ndim - matrix.axes :]
    addresses = addresses.reshape(-1, 3)
    layers = addresses.shape[0]

    def merge_layers(
        stacked: Array, first: Array | int = 0, stored: DTypeLike = kernel.dtype
    ) -> tuple[Array, Array]:
        count = stacked.shape[0]

        def take(stacked: Array, i: Array) -> Array:
            return lax.dynamic_index_in_dim(stacked, i, keepdims=False)

        def merge_layer(i: Array, carry: tuple[Array, Array, Array]):
            stacked, held, sums = carry
            w = matrix.flatten(lax.bitcast_convert_type(held, kernel.dtype))
            intended = change(first + i)
            address = addresses[first + i]
            before, after = _land_matrix(w, intended, address, rounding, split)
            if measure:
                sums = sums.at[i].set(_measure(before, after, intended))
            w = matrix.restore(_narrow(after, kernel.dtype), own)
            w = lax.bitcast_convert_type(w, stored)
            stacked = lax.dynamic_update_index_in_dim(stacked, w, i, 0)
            return stacked, take(stacked, jnp.minimum(i + 1, count - 1)), sums

        # A loop over donated buffers, not scan or vmap: those hold the weights twice.
        # The layer is read an iteration ahead: if it were read beside the write, XLA
        # would copy the stack first, once for every layer.
        sums = jnp.zeros((count, len(Landing._fields), d), jnp.float32)
        held = take(stacked, jnp.int32(0))
        stacked, _, sums = lax.fori_loop(0, count, merge_layer, (stacked, held, sums))
        return stacked, sums

    def merge_bits(stacked: Array) -> tuple[Array, Array]:
        # In place but for the bits of a group of layers. A group is written by a pass
        # over the stack that converts it within a fusion.
        groups = max(n for n in range(1, _GROUPS + 1) if layers % n == 0)
        size = layers // groups

        def merge_group(i: Array, carry: tuple[Array, Array]):
            stacked, sums = carry
            group = lax.dynamic_slice_in_dim(stacked, i * size, size)
            bits = lax.bitcast_convert_type(group, jnp.uint16)
            bits, new = merge_layers(bits, i * size, jnp.uint16)
            group = lax.bitcast_convert_type(bits, kernel.dtype)
            return (
                lax.dynamic_update_slice_in_dim(stacked, group, i * size, 0),
                lax.dynamic_update_slice_in_dim(sums, new, i * size, 0),
            )

        sums = jnp.zeros((layers, len(Landing._fields), d), jnp.float32)
        return lax.fori_loop(0, groups, merge_group, (stacked, sums))

    stacked = kernel.reshape(-1, *own)
    if kernel.dtype == jnp.bfloat16 and BFLOAT16_SLICES_ARE_CONVERTED:
        stacked, sums = lax.platform_dependent(
            stacked, cpu=merge_bits, default=merge_layers
        )
    else:
        stacked, sums = merge_layers(stacked)
    sums = jnp.moveaxis(jnp.sum(sums, -1), 1, 0)
    landing = Landing(*(part.reshape(stack) for part in sums))
    return stacked.reshape(kernel.shape), landing if measure else None


def _lift(
    integers: Shaped[Array, "d r"],
    exponents: Int8[Array, " d"],
    address: UInt32[Array, "3"],
    rule: _Rule,
    k: int,
) -> Float32[Array, "k d"]:
    """The change of a matrix, of the ``k`` inputs that this device holds."""
    library = jax_library()
    basis, split = rule.basis, rule.split
    width = k * parts(split.inputs)
    entries = basis_entries(
        library,
        basis.key_words(library, _words(address)),
        (0, integers.shape[-1]),
        (0, width),
        width,
        basis.kind,
    )
    entries = own_part(entries, split.inputs, 1)
    return lift(library, integers, exponents, entries, transposed=True)


def _land_matrix(
    w: Float[Array, "k d"],
    change: Float32[Array, "k d"],
    address: UInt32[Array, "3"],
    rounding: str,
    split: Split,
) -> tuple[Int32[Array, "k d"], Int32[Array, "k d"]]:
    """Bits (as float32) of the matrix before and after the change."""
    library = jax_library()
    k, d = w.shape
    if w.dtype == jnp.float32:
        before, noise = library.bits(w, "int32"), None
    else:
        before, noise = library.int32(library.bits(w, "uint16")) << 16, nearest_noise
        if rounding == "stochastic":
            row = library.arange(0, d)[None, :] + offset(split.outputs, d)
            column = library.arange(0, k)[:, None] + offset(split.inputs, k)
            width = k * parts(split.inputs)
            # The barrier keeps XLA from hashing the indices ahead of the loop over
            # layers, and so from holding four bytes for each weight of a matrix.
            address, row, column = lax.optimization_barrier((address, row, column))
            noise = stochastic_noise(_words(address), row, column, width)
    return before, land(library, before, change, noise)


def _words(address: UInt32[Array, "3"]) -> tuple[Array, Array, Array]:
    words = jax_library().bits(address, "int32")
    return words[0], words[1], words[2]


def _narrow(bits: Int32[Array, "k d"], dtype: DTypeLike) -> Float[Array, "k d"]:
    library = jax_library()
    if dtype == jnp.float32:
        return library.bits(bits, "float32")
    return library.bits(library.int16(bits >> 16), "bfloat16")


def _measure(
    before: Int32[Array, "k d"], after: Int32[Array, "k d"], intended: Array
) -> Float32[Array, "5 d"]:
    """The sums of a :class:`Landing`, for each output feature."""
    bits = jax_library().bits
    moved = bits(after, "float32") - bits(before, "float32")
    values = (
        jnp.square(intended),
        jnp.square(moved),
        moved * intended,
        (moved != 0).astype(jnp.float32),
        jnp.ones_like(moved),
    )
    return jnp.stack([jnp.sum(v, axis=0) for v in values])

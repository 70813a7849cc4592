"""Dense training of the same layers: full gradients, and updates that are rounded.

The baseline. A kernel is differentiated through a *wide* twin: the kernel in float32,
whose value the layer ignores and whose cotangent is the gradient ``G`` (k, d) in
float32, whatever dtype the kernel has. What is never read is never made, so beside
``G`` nothing of a kernel's size exists. Its parts:

    model = dense(model, match)
    graph, _, weights = nnx.split(model, WideKernel, ...)
    wide = widen(weights)  # inside jit
    gradients = jax.grad(lambda wide: loss(nnx.merge(graph, wide, weights)))(wide)
    weights, landings = land_dense(weights, updates)
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.layers import (
    Match,
    Model,
    TrainedLinear,
    addresses_of,
    replace_linears,
)
from logra_jax.algorithm.merge import Landing, land_stack
from logra_jax.algorithm.parallel import Split, matmul, total, whole
from logra_jax.algorithm.rounding import ROUNDINGS
from logra_jax.algorithm.sketch import BasisAddress


class WideKernel(nnx.Variable):
    """A kernel (..., k, d) in float32; its cotangent is the kernel's gradient."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense(x: Array, w: Array, wide: Array, split: Split | None) -> Array:
    return matmul(x, w, split)


def _dense_fwd(x, w, wide, split):
    if w.perturbed:
        raise ValueError(
            "`w` of a dense projection must not be differentiated, got a request for "
            "its gradient; differentiate with respect to the `WideKernel` variables "
            "instead."
        )
    return matmul(x.value, w.value, split), (x.value, w.value)


def _dense_bwd(split, residuals, g):
    x, w = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        g = jnp.zeros(g.shape, x.dtype)
    # Gathered once more: kept, the kernels of all layers would add up to the model.
    w = whole(w, split).astype(g.dtype)
    dx = jnp.einsum("...d,kd->...k", g, w)
    gradient = jnp.einsum(
        "nk,nd->kd",
        x.reshape(-1, x.shape[-1]),
        g.reshape(-1, g.shape[-1]),
        preferred_element_type=jnp.float32,
    )
    return dx, None, split.scatter(gradient) if split else gradient


_dense.defvjp(_dense_fwd, _dense_bwd, symbolic_zeros=True)


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _moved(x: Array, w: Array, wide: Array, split: Split | None) -> Array:
    return matmul(x, wide, split)


@_moved.defjvp
def _moved_jvp(split, primals, tangents):
    x, w, _ = primals
    x_rate, _, wide_rate = tangents
    y_rate = matmul(x_rate, w, split) + matmul(x, wide_rate, split)
    return matmul(x, w, split), y_rate


class DenseLinear(TrainedLinear):
    """A linear layer whose kernel is trained by its gradient.

    The kernel is moved by :func:`land_dense`.

    Attributes:
        wide: (..., k, d) float32, see :class:`WideKernel`; () until it is merged.
        address: (..., 3) uint32, where the bits of stochastic rounding are drawn from.
    """

    takes_pieces = False  # a gradient like the kernel's would be held for the sum too

    def __init__(self, linear: nnx.Linear, addresses: Array):
        super().__init__(linear)
        # The place of what `widen` makes: here it would be a copy of the kernel.
        self.wide = WideKernel(jnp.zeros(()))
        self.address = BasisAddress(addresses)

    def multiply(self, x: Array, kernel: Array) -> Array:
        """``x @ kernel``, whose backward forms the gradient.

        The plain form, in forward mode, is at the kernel itself, and otherwise at
        ``wide``: there it may be another one.
        """
        multiply = _moved if self.plain else _dense
        return multiply(x, kernel, self.wide[...], self.split)


def dense(model: Model, match: Match = ".*", seed: int = 0) -> Model:
    """A copy of ``model``, the same buffers, whose matched layers are trained densely.

    Args:
        model: any NNX model; its ``nnx.Linear`` modules are candidates.
        match: as in :func:`logra_jax.sketch`.
        seed: of stochastic rounding, in ``[0, 2**32)``.

    Raises:
        ValueError: nothing matched.
    """
    basis = Basis(seed=seed)

    def make(path: str, linear: nnx.Linear, names: Sequence[str]) -> DenseLinear:
        del path
        return DenseLinear(linear, addresses_of(basis, names, linear.kernel.shape[:-2]))

    return replace_linears(model, match, make)


def widen(weights: nnx.State) -> nnx.State:
    """The wide twin of every trained kernel; free inside ``jax.jit``.

    Outside of it this is a float32 copy of the kernels.
    """
    return _with_kernels(weights, lambda kernel: kernel.astype(jnp.float32))


def stand_in(weights: nnx.State) -> nnx.State:
    """The kernels themselves in place of their wide twins, to run the model forward."""
    return _with_kernels(weights, lambda kernel: kernel)


def _with_kernels(weights: nnx.State, change) -> nnx.State:
    flat = dict(nnx.to_flat_state(weights))
    layers = [path[:-1] for path, v in flat.items() if isinstance(v, BasisAddress)]
    return nnx.from_flat_state(
        {
            (*layer, "wide"): WideKernel(change(flat[*layer, "kernel"][...]))
            for layer in layers
        }
    )


def land_dense(
    weights: nnx.State,
    updates: nnx.State,
    *,
    rounding: str = "stochastic",
    splits: Mapping[str, Split] | None = None,
) -> tuple[nnx.State, dict[str, Landing]]:
    """Add dense updates to the kernels; as :func:`logra_jax.merge_measured` does.

    One layer of one stack at a time, in place where ``weights`` is donated. bfloat16
    kernels are rounded; the step in each address moves on.

    Args:
        weights: state with ``kernel`` (..., k, d) and ``address`` (..., 3) variables of
            the dense layers, and anything else, which is passed through.
        updates: state of the :class:`WideKernel` updates, float32: they are added.
        rounding: ``"stochastic"`` or ``"nearest"``; float32 kernels need neither.
        splits: inside ``jax.shard_map``, how each kernel lies on the mesh, by dotted
            path of its layer; updates are cut like kernels.

    Returns:
        ``weights`` with kernels and addresses replaced, and how much of the update
        landed, by dotted path of the layer.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"`rounding` must be one of {ROUNDINGS}, got {rounding!r}.")
    flat = dict(nnx.to_flat_state(weights))
    landings = {}
    for (*layer, _), update in sorted(nnx.to_flat_state(updates), key=lambda p: p[0]):
        w, words = flat[*layer, "kernel"], flat[*layer, "address"]
        name = ".".join(map(str, layer))
        split = (splits or {}).get(name, Split())
        changes = update[...].reshape(-1, *update.shape[-2:])
        kernel, landing = land_stack(
            w[...],
            words[...],
            lambda i, changes=changes: changes[i],
            rounding,
            split,
            measure=True,
        )
        flat[*layer, "kernel"] = w.replace(kernel)
        flat[*layer, "address"] = words.replace(words[...].at[..., 1].add(1))
        assert landing is not None
        landings[name] = total(landing, (*split.inputs, *split.outputs) or None)
    return nnx.from_flat_state(flat), landings

"""Sketched projections: the backward pass forms ``S = G Aᵀ`` and never ``G``.

One idea, the *probe*: add a zero ``p`` (d, r) behind a fixed basis ``A`` (r, k),

    y(p) = x w + (x Aᵀ) pᵀ        at p = 0, so the forward never changes.

Reverse mode at ``p = 0`` gives the sketch ``dL/dp = G Aᵀ`` (:func:`sketched_matmul`);
forward mode gives the model's rate of change along an update ``w + (p A)ᵀ``
(:func:`perturbed_matmul`, the plain twin, because ``jax.jvp`` refuses custom_vjp).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, Shaped

from logra_jax.algorithm.basis import Basis, entry_scale, jax_entries
from logra_jax.algorithm.contraction import PLAIN, Linear, Matrix, contraction_of
from logra_jax.algorithm.explicit import shardings_of, with_outputs
from logra_jax.algorithm.layers import (
    Match,
    Model,
    TrainedLinear,
    addresses_of,
    dotted_name,
    matrix_stack,
    rank_of,
    replace_layers,
    replace_linears,
)
from logra_jax.algorithm.parallel import (
    Split,
    matmul,
    own_part,
    parts,
    whole,
)

__all__ = [
    "BasisAddress",
    "Model",
    "Probe",
    "SketchedLinear",
    "TrainedLinear",
    "addresses_of",
    "dotted_name",
    "perturbed",
    "perturbed_matmul",
    "rank_of",
    "replace_layers",
    "replace_linears",
    "sketch",
    "sketched_matmul",
]

# `merge` reads from an address's metadata how the kernel beside it is a matrix, where
# its axes are not simply (..., k, d).
MATRIX = "matrix"


class Probe(nnx.Variable):
    """The zero perturbation ``p`` (..., d, r), float32; its cotangent is the sketch.

    Example:
        >>> import jax, jax.numpy as jnp, logra_jax as logra
        >>> from flax import nnx
        >>> model = logra.sketch(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), rank=2)
        >>> graph, probes, weights = nnx.split(model, logra.Probe, ...)
        >>> x = jnp.ones((1, 8))
        >>> loss = lambda probes: nnx.merge(graph, probes, weights)(x).sum()
        >>> jax.grad(loss)(probes)["probe"].shape
        (4, 2)
    """


class BasisAddress(nnx.Variable):
    """The ``(seed, step, matrix)`` words (..., 3), uint32, that ``A`` is drawn from."""


def _project(
    x: Array, key: Array, rank: int, kind: str, split: Split | None = None
) -> Array:
    """``x Aᵀ`` (..., r) in ``x``'s dtype: exact integer entries first, then scaled.

    Of a kernel cut along its inputs, the summand of this device's inputs.
    """
    cut = split.inputs if split and split.parallel == "inputs" else ()
    entries = jax_entries(key, rank, x.shape[-1] * parts(cut), kind, x.dtype)
    product = jnp.einsum(
        "...k,rk->...r",
        x,
        own_part(entries, cut, 1),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (product * entry_scale(kind, rank)).astype(x.dtype)


class _Rule(NamedTuple):
    """How a layer multiplies; static."""

    kind: str  # of the basis
    split: Split | None = None
    matrix: Matrix = PLAIN
    precision: Any = None  # of the products with the kernel, forward and backward
    dtype: DTypeLike | None = None  # of the product, by default the input's

    def product(self, x: Array, w: Array) -> Array:
        """``x`` times the kernel, which has its own axes."""
        w = self.matrix.flatten(w)
        return matmul(x, w, self.split, self.precision, self.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sketched(x: Array, w: Array, probe: Array, key: Array, rule: _Rule) -> Array:
    return rule.product(x, w)


def _sketched_fwd(x, w, probe, key, rule):
    if w.perturbed:
        raise ValueError(
            "`w` of a sketched projection must not be differentiated, got a request "
            "for its gradient: a sketched kernel has none (only its sketch S = G A^T); "
            "differentiate with respect to the `logra.Probe` variables instead."
        )
    rank = probe.value.shape[-1]
    y = rule.product(x.value, w.value)
    # The kernel as the model holds it: one with its axes moved would be a copy to keep.
    projected = _project(x.value, key.value, rank, rule.kind, rule.split)
    return y, (projected, w.value, shardings_of(x.value, probe.value))


def _sketched_bwd(rule, residuals, g):
    x_projected, w, shardings = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        g = jnp.zeros(g.shape, x_projected.dtype)
    pull = with_outputs(partial(_pull, rule), shardings)
    dx, sketch = pull(x_projected, w, g)
    return dx, None, sketch, None


def _pull(rule, x_projected, w, g):
    """Cotangents of input and probe."""
    # Gathered once more: kept, the kernels of all layers would add up to the model.
    w = whole(rule.matrix.flatten(w), rule.split).astype(g.dtype)
    dx = jnp.einsum("...d,kd->...k", g, w, precision=rule.precision)
    sketch = jnp.einsum(
        "nd,nr->dr",
        g.reshape(-1, g.shape[-1]),
        x_projected.reshape(-1, x_projected.shape[-1]),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return dx.astype(x_projected.dtype), sketch


_sketched.defvjp(_sketched_fwd, _sketched_bwd, symbolic_zeros=True)


def sketched_matmul(
    x: Float[Array, "... k"],
    w: Float[Array, "k d"],
    probe: Float[Array, "d r"],
    key: Key[Array, ""] | Shaped[Array, "2"],
    kind: str = "rademacher",
) -> Float[Array, "... d"]:
    """``x @ w`` whose gradient with respect to ``probe`` is the sketch ``S = G Aᵀ``.

    ``G = gᵀ x`` (d, k) is the gradient of ``wᵀ``; neither it nor ``x`` is kept: the
    residuals are ``x Aᵀ`` (..., r) and ``w`` itself. The sketch is accumulated in
    float32. ``w`` gets no cotangent, and asking for one raises.

    Args:
        x: input, the compute dtype.
        w: kernel in JAX's (in, out) order, cast to ``x``'s dtype.
        probe: zeros, float32; its values are ignored, its cotangent is the sketch.
        key: threefry key that ``A`` (r, k) is drawn from, see ``basis_matrix``.
        kind: of the basis, ``"rademacher"`` or ``"gaussian"``.

    Returns:
        ``x @ w`` in ``x``'s dtype.

    Raises:
        ValueError: when ``w`` is differentiated.

    Example:
        >>> import jax, jax.numpy as jnp, logra_jax as logra
        >>> key, x, w = jax.random.key(0), jnp.ones((5, 4)), jnp.ones((4, 3))
        >>> loss = lambda p: logra.sketched_matmul(x, w, p, key).sum()
        >>> jax.grad(loss)(jnp.zeros((3, 2))).shape
        (3, 2)

    Reference: LoGRA, arXiv:2610.06647.
    """
    return _sketched(x, w, probe, key, _Rule(kind))


def perturbed_matmul(
    x: Float[Array, "... k"],
    w: Float[Array, "k d"],
    probe: Float[Array, "d r"],
    key: Key[Array, ""] | Shaped[Array, "2"],
    kind: str = "rademacher",
) -> Float[Array, "... d"]:
    """``x @ (w + (probe A)ᵀ)``, differentiable in every mode: sketched_matmul's twin.

    ``jax.jvp`` along ``probe`` gives the rate of change under an update; a finite
    ``probe`` gives the updated projection without touching ``w``.

    Example:
        >>> import jax, jax.numpy as jnp, logra_jax as logra
        >>> key, x, w = jax.random.key(0), jnp.ones((5, 4)), jnp.ones((4, 3))
        >>> probe, A = jnp.full((3, 2), 0.1), logra.basis_matrix(key, 2, 4)
        >>> y = logra.perturbed_matmul(x, w, probe, key)
        >>> bool(jnp.allclose(y, x @ (w + (probe @ A).T)))
        True
    """
    return _perturbed(x, w, probe, key, _Rule(kind))


def _perturbed(x: Array, w: Array, probe: Array, key: Array, rule: _Rule) -> Array:
    projected = _project(x, key, probe.shape[-1], rule.kind, rule.split)
    change = projected @ probe.T.astype(x.dtype)
    y = rule.product(x, w)
    return y + change.astype(y.dtype)


class SketchedLinear(TrainedLinear):
    """A linear layer whose kernel is trained through its sketch.

    The kernel is moved by :func:`logra_jax.merge`.

    Attributes:
        probe: (..., d, r) float32 zeros.
        address: (..., 3) uint32, where ``A`` is drawn from.
        basis: static rule that turns the address into a key.

    Example:
        >>> import jax, logra_jax as logra
        >>> from flax import nnx
        >>> up, down = (nnx.Linear(*n, rngs=nnx.Rngs(0)) for n in ((8, 4), (4, 2)))
        >>> model = nnx.Sequential(up, jax.nn.relu, down)
        >>> model = logra.sketch(model, rank=2, match="layers.0")
        >>> [isinstance(layer, logra.SketchedLinear) for layer in model.layers]
        [True, False, False]
        >>> model.layers[0].kernel.shape, model.layers[0].probe.shape
        ((8, 4), (4, 2))
    """

    def __init__(
        self,
        linear: Linear,
        rank: int,
        basis: Basis,
        addresses: Array,
    ):
        super().__init__(linear)
        matrix = self.contraction.matrix()
        *stack, _, d = matrix.shape(linear.kernel.shape)
        self.probe = Probe(jnp.zeros((*stack, d, rank), jnp.float32))
        _share_sharding(self.kernel, self.probe, matrix)
        self.address = BasisAddress(addresses)
        if matrix != PLAIN:
            self.address.set_metadata(MATRIX, matrix)
        self.basis = basis

    def multiply(self, x: Array, kernel: Array) -> Array:
        """``x`` times the kernel, whose backward forms the sketch."""
        matrix = self.contraction.matrix()
        probe, address = self.probe[...], self.address[...]
        self._check_slices(matrix, kernel, probe)
        if self.split:
            probe = self.split.gather_rows(probe, matrix.shape(kernel.shape)[-1])
        rule = _Rule(
            self.basis.kind,
            self.split,
            matrix,
            self.precision,
            self.preferred_element_type,
        )
        product = _perturbed if self.plain else _sketched

        def multiply(x: Array, w: Array, probe: Array, address: Array) -> Array:
            return product(x, w, probe, self.basis.key(address), rule)

        for _ in range(matrix.batch):
            multiply = jax.vmap(multiply)
        return multiply(x, kernel, probe, address)

    def _check_slices(self, matrix: Matrix, kernel: Array, probe: Array) -> None:
        """Refuse a stack's probe beside the kernel of one layer, or the reverse."""
        if kernel.ndim != matrix.batch + matrix.axes or probe.ndim != matrix.batch + 2:
            raise ValueError(
                "`model` must slice the probe and address of stacked layers as their "
                f"kernels, got a kernel {kernel.shape} beside a probe {probe.shape}; "
                "name logra.Probe and every other type in the state axes of its scan "
                "or vmap."
            )


def _share_sharding(kernel: nnx.Variable, probe: nnx.Variable, matrix: Matrix) -> None:
    """Give a probe the axis names of its kernel: those of the stack, and of d's first.

    As metadata alone, whatever mesh there is: the probe is small.
    """
    names = kernel.get_metadata("out_sharding", None)
    names = names.spec if isinstance(names, NamedSharding) else names
    if not isinstance(names, tuple | PartitionSpec) or not names:
        return
    names = (*names, *(None,) * (kernel.ndim - len(names)))
    stack = names[: kernel.ndim - matrix.axes]
    output = names[len(stack) + matrix.outputs[0]]
    probe.set_metadata(out_sharding=(*stack, output, None))
    for name in ("mesh", "sharding_rules"):
        if kernel.has_metadata(name):
            probe.set_metadata(name, kernel.get_metadata(name))


def sketch(
    model: Model,
    rank: int | Mapping[str, int],
    match: Match = ".*",
    basis: Basis | None = None,
) -> Model:
    """A copy of ``model`` whose matched linear layers are sketched.

    The copy shares the kernels' buffers. Layers stacked along leading axes (made by
    ``nnx.vmap``, run by a scan) get one probe and one basis per layer; a layer shared
    by several parents stays shared. Differentiate with respect to the probes only::

        graph, probes, weights = nnx.split(model, logra.Probe, ...)
        loss = lambda probes: f(nnx.merge(graph, probes, weights, copy=True))

    (``copy`` for models that run an ``nnx.scan`` or the like: Flax refuses to hand it
    variables from outside of ``jax.grad``.)

    A kernel of more than two axes is sketched as the matrix (k, d) of what it sums and
    what it adds, and keeps its own shape; axes that an einsum's input, kernel and
    output share count matrices as a stack does. :func:`logra_jax.sketch_table` lists
    what was chosen.

    Args:
        model: any NNX model; candidates are its ``nnx.Linear``, ``nnx.LinearGeneral``
            (so the projections of ``nnx.MultiHeadAttention``) and ``nnx.Einsum``
            modules. Convolutions and embeddings are none.
        rank: ``r``, or a mapping from regular expressions to ranks (first hit wins;
            a matched layer that no expression hits is an error).
        match: regular expression searched for in each layer's dotted path, such as
            ``"layers.self_attn.q_proj"``, or a predicate ``(path, layer) -> bool``.
        basis: seed and rule of the random bases; ``Basis()`` by default.

    Matrices are named by ``model.tensor_name(path, layer)`` where the model has such a
    method (Hugging Face names), else by their dotted path and layer index.

    Raises:
        ValueError: nothing matched, a rank outside ``[1, min(k, d)]``, or a matched
            layer that would then compute something else: a subclass with a ``__call__``
            of its own, a ``dot_general`` or ``promote_dtype`` of the user's, an einsum
            that is no matrix product.

    Example:
        >>> import logra_jax as logra
        >>> from flax import nnx
        >>> model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        >>> graph, probes, weights = nnx.split(
        ...     logra.sketch(model, rank=2), logra.Probe, ...
        ... )
        >>> probes["probe"].shape
        (4, 2)
    """
    basis = basis or Basis()

    def make(path: str, linear: Linear, names: Sequence[str]) -> SketchedLinear:
        *_, k, d = contraction_of(linear).matrix().shape(linear.kernel.shape)
        layer_rank = rank_of(path, rank, min(k, d), "narrow `match`")
        addresses = addresses_of(basis, names, matrix_stack(linear))
        return SketchedLinear(linear, layer_rank, basis, addresses)

    return replace_linears(model, match, make, general=True)


def perturbed(model: Model) -> Model:
    """The same model and buffers with every trained layer in its plain form.

    For ``jax.jvp`` along the probes and for finite probes, see
    :func:`perturbed_matmul`. The split of the result has the same states.

    Example:
        >>> import jax, jax.numpy as jnp, logra_jax as logra
        >>> from flax import nnx
        >>> model = logra.sketch(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), rank=2)
        >>> graph, probes, weights = nnx.split(logra.perturbed(model), logra.Probe, ...)
        >>> f = lambda probes: nnx.merge(graph, probes, weights)(jnp.ones((1, 8)))
        >>> y, rate = jax.jvp(f, (probes,), (jax.tree.map(jnp.ones_like, probes),))
        >>> rate.shape
        (1, 4)
    """
    model = nnx.clone(model)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, TrainedLinear):
            module.plain = True
    return model

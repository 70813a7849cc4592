"""Sketched projections: the backward pass forms ``S = G Aᵀ`` and never ``G``.

One idea, the *probe*: add a zero ``p`` (d, r) behind a fixed basis ``A`` (r, k),

    y(p) = x w + (x Aᵀ) pᵀ        at p = 0, so the forward never changes.

Reverse mode at ``p = 0`` gives the sketch ``dL/dp = G Aᵀ`` (:func:`sketched_matmul`);
forward mode gives the model's rate of change along an update ``w + (p A)ᵀ``
(:func:`perturbed_matmul`, the plain twin, because ``jax.jvp`` refuses custom_vjp).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Key, Shaped, UInt32

from logra_jax.algorithm.basis import Basis, entry_scale, jax_entries
from logra_jax.algorithm.parallel import (
    Split,
    leave,
    matmul,
    own_part,
    parts,
    whole,
)

Model = TypeVar("Model", bound=nnx.Module)


class Probe(nnx.Variable):
    """The zero perturbation ``p`` (..., d, r), float32; its cotangent is the sketch."""


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


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sketched(
    x: Array, w: Array, probe: Array, key: Array, kind: str, split: Split | None
) -> Array:
    return matmul(x, w, split)


def _sketched_fwd(x, w, probe, key, kind, split):
    if w.perturbed:
        raise ValueError(
            "`w` of a sketched projection must not be differentiated, got a request "
            "for its gradient: a sketched kernel has none (only its sketch S = G A^T); "
            "differentiate with respect to the `logra.Probe` variables instead."
        )
    rank = probe.value.shape[-1]
    y = matmul(x.value, w.value, split)
    return y, (_project(x.value, key.value, rank, kind, split), w.value)


def _sketched_bwd(kind, split, residuals, g):
    del kind
    x_projected, w = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        g = jnp.zeros(g.shape, x_projected.dtype)
    # Gathered once more: kept, the kernels of all layers would add up to the model.
    w = whole(w, split).astype(g.dtype)
    dx = jnp.einsum("...d,kd->...k", g, w)
    sketch = jnp.einsum(
        "nd,nr->dr",
        g.reshape(-1, g.shape[-1]),
        x_projected.reshape(-1, x_projected.shape[-1]),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return dx, None, sketch, None


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
    return _sketched(x, w, probe, key, kind, None)


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
    """
    return _perturbed(x, w, probe, key, kind, None)


def _perturbed(
    x: Array, w: Array, probe: Array, key: Array, kind: str, split: Split | None
) -> Array:
    change = _project(x, key, probe.shape[-1], kind, split) @ probe.T.astype(x.dtype)
    return matmul(x, w, split) + change


class TrainedLinear(nnx.Module):
    """What stands where an ``nnx.Linear`` was, with a backward pass of its own.

    Attributes:
        kernel: (..., k, d), frozen for autodiff.
        bias: (..., d) or None, frozen.
        plain: use the plain twin (forward mode, finite changes) instead.
        split: inside ``jax.shard_map``, how the kernel lies on the mesh.
        takes_pieces: of the tokens, whose gradients then add up.
    """

    takes_pieces = True

    def __init__(self, linear: nnx.Linear):
        self.kernel = linear.kernel
        self.bias = linear.bias
        self.dtype = linear.dtype
        self.plain = False
        self.split: Split | None = None

    def multiply(self, x: Array, kernel: Array) -> Array:
        """``x @ kernel``, and what training adds; this device's summand of it."""
        raise NotImplementedError

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... d"]:
        """``x @ kernel + bias``."""
        kernel = self.kernel[...]
        x = x.astype(self.dtype or jnp.promote_types(x.dtype, kernel.dtype))
        y = leave(self.multiply(x, kernel), self.split)
        if self.bias is not None:
            bias = self.bias[...].astype(y.dtype)
            y = y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
        return y


class SketchedLinear(TrainedLinear):
    """A linear layer whose kernel is trained through its sketch.

    The kernel is moved by :func:`logra_jax.merge`.

    Attributes:
        probe: (..., d, r) float32 zeros.
        address: (..., 3) uint32, where ``A`` is drawn from.
        basis: static rule that turns the address into a key.
    """

    def __init__(
        self,
        linear: nnx.Linear,
        rank: int,
        basis: Basis,
        addresses: Array,
    ):
        super().__init__(linear)
        *stack, _, d = linear.kernel.shape
        self.probe = Probe(jnp.zeros((*stack, d, rank), jnp.float32))
        self.address = BasisAddress(addresses)
        self.basis = basis

    def multiply(self, x: Array, kernel: Array) -> Array:
        """``x @ kernel``, whose backward forms the sketch."""
        key = self.basis.key(self.address[...])
        multiply = _perturbed if self.plain else _sketched
        return multiply(x, kernel, self.probe[...], key, self.basis.kind, self.split)


def sketch(
    model: Model,
    rank: int | Mapping[str, int],
    match: str = ".*",
    basis: Basis | None = None,
) -> Model:
    """A copy of ``model`` whose matched linear layers are sketched.

    The copy shares the kernels' buffers. Layers stacked along leading axes (made by
    ``nnx.vmap``, run by a scan) get one probe and one basis per layer; a layer shared
    by several parents stays shared. Differentiate with respect to the probes only::

        graph, probes, weights = nnx.split(model, logra.Probe, ...)

    Args:
        model: any NNX model; its ``nnx.Linear`` modules are candidates.
        rank: ``r``, or a mapping from regular expressions to ranks (first hit wins;
            a matched layer that no expression hits is an error).
        match: regular expression searched for in each layer's dotted path, such as
            ``"layers.self_attn.q_proj"``.
        basis: seed and rule of the random bases; ``Basis()`` by default.

    Matrices are named by ``model.tensor_name(path, layer)`` where the model has such a
    method (Hugging Face names), else by their dotted path and layer index.

    Raises:
        ValueError: nothing matched, or a rank outside ``[1, min(k, d)]``.

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

    def make(path: str, linear: nnx.Linear, names: Sequence[str]) -> SketchedLinear:
        *stack, k, d = linear.kernel.shape
        layer_rank = rank_of(path, rank, min(k, d), "narrow `match`")
        addresses = addresses_of(basis, names, tuple(stack))
        return SketchedLinear(linear, layer_rank, basis, addresses)

    return replace_linears(model, match, make)


def addresses_of(
    basis: Basis, names: Sequence[str], stack: tuple[int, ...]
) -> UInt32[Array, "*stack 3"]:
    """The addresses at step 0 of a stack of matrices, from their names."""
    words = np.array([basis.address(name) for name in names], np.uint32)
    return jnp.asarray(words.reshape(*stack, 3))


def perturbed(model: Model) -> Model:
    """The same model and buffers with every trained layer in its plain form.

    For ``jax.jvp`` along the probes and for finite probes, see
    :func:`perturbed_matmul`. The split of the result has the same states.
    """
    model = nnx.clone(model)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, TrainedLinear):
            module.plain = True
    return model


def replace_linears(
    model: Model,
    match: str,
    make: Callable[[str, nnx.Linear, Sequence[str]], TrainedLinear],
) -> Model:
    """A copy of ``model``, the same buffers, with other layers in place of some.

    Args:
        model: any NNX model.
        match: regular expression searched for in each linear layer's dotted path.
        make: ``(path, layer, names of its matrices) -> replacement``.

    Raises:
        ValueError: nothing matched.
    """
    model = nnx.clone(model)
    name_of = getattr(model, "tensor_name", dotted_name)
    linears = dict(_linear_modules(model))
    matched = {path: m for path, m in linears.items() if re.search(match, path)}
    if not matched:
        raise ValueError(
            f"`match` must hit at least one linear layer, got {match!r}, which hits "
            f"none of: {', '.join(sorted(linears)) or '(the model has none)'}."
        )
    replacements: dict[int, nnx.Module] = {}
    for path, linear in matched.items():
        stack = linear.kernel.shape[:-2]
        names = [name_of(path, index) for index in np.ndindex(*stack)]
        made = make(path, linear, names)
        if not path:
            return cast(Model, made)  # the model itself was the linear layer
        replacements[id(linear)] = made
    replace_layers(model, replacements)
    return model


def _linear_modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Linear]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear):
            yield ".".join(map(str, path)), module


def dotted_name(path: str, layer: tuple[int, ...]) -> str:
    """The name of a matrix of a model that gives none: its path, and layer if stacked.

    It is part of the basis's address.
    """
    return ".".join((path, *map(str, layer)))


def rank_of(path: str, rank: int | Mapping[str, int], limit: int, way_out: str) -> int:
    """The rank of the layer at ``path``; the first expression that hits decides.

    Args:
        path: dotted.
        rank: of all layers, or by regular expression.
        limit: largest rank that the layer has room for.
        way_out: how the caller leaves the layer alone, for the message.

    Raises:
        ValueError: no expression hits, or a rank outside ``[1, limit]``.
    """
    if isinstance(rank, Mapping):
        hits = [r for pattern, r in rank.items() if re.search(pattern, path)]
        if not hits:
            raise ValueError(
                f"`rank` must cover every layer, got {dict(rank)}, which says nothing "
                f"of {path!r}; add an expression for it or {way_out}."
            )
        rank = hits[0]
    if not 1 <= rank <= limit:
        raise ValueError(
            f"`rank` must be in [1, min(k, d)] = [1, {limit}] for layer {path!r}, "
            f"got {rank}; give it a rank of its own or {way_out}."
        )
    return rank


def replace_layers(model: nnx.Module, replacements: Mapping[int, nnx.Module]) -> None:
    """Put the replacement of each layer (by ``id``) wherever the layer is referred to.

    A layer may be shared: left in one place, its gradient there would be lost silently.
    """
    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if id(value) in replacements:
                    setattr(node, name, replacements[id(value)])
    for path, linear in _linear_modules(model):
        if id(linear) in replacements:
            raise ValueError(
                "`model` must hold its layers in modules, `nnx.List` or `nnx.Dict`, "
                f"got {path!r} in another container, where it cannot be replaced."
            )

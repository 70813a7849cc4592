"""Layers of a model replaced by such as are trained otherwise: which, where, by what.

Any NNX model: ``nnx.Linear``, ``nnx.LinearGeneral`` and ``nnx.Einsum`` (and so the
attention of Flax) are candidates, wherever the model holds them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax
from jaxtyping import Array, Shaped, UInt32

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.contraction import (
    KINDS,
    Equation,
    Linear,
    contraction_of,
    declared_shape,
)
from logra_jax.algorithm.parallel import Split, leave

Model = TypeVar("Model", bound=nnx.Module)

# A regular expression searched for in a layer's dotted path, or (path, layer) -> bool.
Match = str | Callable[[str, nnx.Module], Any]


class TrainedLinear(nnx.Module):
    """What stands where a linear layer was, with a backward pass of its own.

    Attributes:
        kernel: (..., k, d), or with the axes of the layer that it was; frozen for
            autodiff.
        bias: of the output's axes that the kernel has too, or None; frozen.
        contraction: what the layer sums over.
        plain: use the plain twin (forward mode, finite changes) instead.
        split: inside ``jax.shard_map``, how the kernel lies on the mesh.
        takes_pieces: of the tokens, whose gradients then add up.
    """

    takes_pieces = True

    def __init__(self, linear: Linear):
        self.kernel = linear.kernel
        self.bias = linear.bias
        self.dtype = linear.dtype
        self.precision = linear.precision
        self.preferred_element_type = linear.preferred_element_type
        self.contraction = contraction_of(linear)
        self.plain = False
        self.split: Split | None = None

    def multiply(self, x: Array, kernel: Array) -> Array:
        """``x`` (*batch, ..., k) times the kernel, and what training adds.

        This device's summand of it.
        """
        raise NotImplementedError

    def __call__(
        self, x: Shaped[Array, "..."], out_sharding: Any = None
    ) -> Shaped[Array, "..."]:
        """What the layer computed that stood here."""
        if out_sharding is not None:
            raise ValueError(
                "`out_sharding` must be None for a layer that was replaced, got "
                f"{out_sharding}; reshard its output instead."
            )
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        held = (kernel,) if bias is None else (kernel, bias)
        x = x.astype(self.dtype or jnp.result_type(x, *held))
        at = self.contraction.subscripts(x.ndim)
        if self.split is None:
            at.check(x.shape, kernel.shape)
        y = leave(self.multiply(at.flatten(x), kernel), self.split)
        y = at.restore(y, kernel.shape)
        if bias is not None:
            own = (n if c in at.w else 1 for c, n in zip(at.y, y.shape, strict=True))
            y = y + bias.astype(x.dtype).reshape(*own)
        return y


def addresses_of(
    basis: Basis, names: Sequence[str], stack: tuple[int, ...]
) -> UInt32[Array, "*stack 3"]:
    """The addresses at step 0 of a stack of matrices, from their names."""
    words = np.array([basis.address(name) for name in names], np.uint32)
    return jnp.asarray(words.reshape(*stack, 3))


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


def matrix_stack(layer: Linear) -> tuple[int, ...]:
    """How many matrices a layer's kernel holds, as the shape of their stack."""
    return contraction_of(layer).matrix().shape(layer.kernel.shape)[:-2]


def replace_linears(
    model: Model,
    match: Match,
    make: Callable[[str, Any, Sequence[str]], TrainedLinear],
    *,
    general: bool = False,
) -> Model:
    """A copy of ``model``, the same buffers, with other layers in place of some.

    Args:
        model: any NNX model.
        match: regular expression searched for in each linear layer's dotted path, or a
            predicate ``(path, layer) -> bool``.
        make: ``(path, layer, names of its matrices) -> replacement``.
        general: candidates are all of :data:`KINDS`, not ``nnx.Linear`` alone, and the
            replacement computes with a layer's ``precision``.

    Raises:
        ValueError: nothing matched, or a layer that would compute something else.
    """
    model = nnx.clone(model)
    name_of = getattr(model, "tensor_name", dotted_name)
    linears = dict(_linear_modules(model, KINDS if general else (nnx.Linear,)))
    matched = {path: m for path, m in linears.items() if _hits(match, path, m)}
    if not matched:
        got = repr(match) if isinstance(match, str) else "a predicate"
        raise ValueError(
            f"`match` must hit at least one linear layer, got {got}, which hits "
            f"none of: {', '.join(sorted(linears)) or '(the model has none)'}."
        )
    replacements: dict[int, nnx.Module] = {}
    for path, linear in matched.items():
        if fault := _fault(linear, general):
            raise ValueError(
                f"`match` must hit plain linear layers, got {path!r}, a "
                f"{type(linear).__name__} {fault}; narrow `match`."
            )
        names = [name_of(path, index) for index in np.ndindex(*matrix_stack(linear))]
        made = make(path, linear, names)
        if not path:
            return cast(Model, made)  # the model itself was the linear layer
        replacements[id(linear)] = made
    replace_layers(model, replacements)
    return model


def _linear_modules(
    model: nnx.Module, kinds: tuple[type, ...]
) -> Iterator[tuple[str, Linear]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, kinds):
            yield ".".join(map(str, path)), cast(Linear, module)


def _hits(match: Match, path: str, layer: nnx.Module) -> bool:
    if isinstance(match, str):
        return re.search(match, path) is not None
    return bool(match(path, layer))


# Attributes of Flax's layers that a replacement does not repeat, and what they are
# where nobody has set them.
_USUAL = {
    "dot_general": (None, lax.dot_general),
    "dot_general_cls": (None,),
    "einsum_op": (None, jnp.einsum),
    "promote_dtype": (None, promote_dtype),
}
_NUMERICS = {"precision": (None,), "preferred_element_type": (None,)}


def _fault(layer: Linear, general: bool) -> str | None:
    """Why a replacement would compute something else than the layer, or None."""
    kind = next(kind for kind in KINDS if isinstance(layer, kind))
    if type(layer).__call__ is not kind.__call__:
        return "that computes in a __call__ of its own"
    for name, usual in (_USUAL if general else _USUAL | _NUMERICS).items():
        value = getattr(layer, name, None)
        if not any(value is u for u in usual):
            return f"whose `{name}` is {value}, which its replacement would not respect"
    contraction = contraction_of(layer)
    if isinstance(contraction, Equation) and (why := contraction.fault()):
        return f"of {cast(nnx.Einsum, layer).einsum_str!r}, where {why}"
    declared, shape = declared_shape(layer), layer.kernel.shape
    if shape[max(len(shape) - len(declared), 0) :] != declared:
        return (
            f"whose kernel {shape} does not end in its own shape {declared}, as it "
            "does where layers are stacked along leading axes"
        )
    return None


def replace_layers(model: nnx.Module, replacements: Mapping[int, nnx.Module]) -> None:
    """Put the replacement of each layer (by ``id``) wherever the layer is referred to.

    A layer may be shared: left in one place, its gradient there would be lost silently.
    """

    def is_replaced(value: Any) -> bool:
        return id(value) in replacements

    def replaced(value: Any) -> Any:
        return replacements.get(id(value), value)

    for _, node in list(nnx.iter_graph(model)):
        if not isinstance(node, nnx.Pytree):
            continue
        for name, value in list(vars(node).items()):
            if is_replaced(value):
                setattr(node, name, replaced(value))
            elif isinstance(value, list | tuple | dict) and any(
                map(is_replaced, jax.tree.leaves(value, is_leaf=is_replaced))
            ):
                value = jax.tree.map(replaced, value, is_leaf=is_replaced)
                setattr(node, name, nnx.data(value))
    for path, layer in nnx.iter_modules(model):
        if id(layer) in replacements:
            raise ValueError(
                "`model` must hold its layers in modules, lists, tuples or dicts, got "
                f"{'.'.join(map(str, path))!r} in another container, where it cannot "
                "be replaced."
            )

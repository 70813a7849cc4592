"""Taps: look at a layer's gradient in the backward pass, one layer at a time.

The gradient of a projection's weight is ``G = gᵀ x`` (d, k), of the layer's input ``x``
(tokens, k) and the cotangent ``g`` (tokens, d) of its output. The two meet in one place
alone: that layer's step of the backward pass. A *tap* is a tree of zeros that goes into
the layer, does nothing there, and whose cotangent is ``measure(x, g, A)``: whatever is
to be known about the layer's gradient.

    model = tapped(sketched_model, raw, tokens=512)
    graph, taps, rest = nnx.split(model, Tap, ...)
    found = jax.grad(lambda taps: loss(nnx.merge(graph, taps, rest)))(taps)
    measurements(found)  # {"layers.self_attn.q_proj": {"x": ..., "g": ...}, ...}

The backward pass visits layer after layer, so what ``measure`` forms on its way (``G``
itself, if need be) is held for one layer at a time; only its results are held for all.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from logra_jax.algorithm.basis import basis_matrix
from logra_jax.algorithm.contraction import Matrix
from logra_jax.algorithm.layers import replace_layers
from logra_jax.algorithm.parallel import matmul
from logra_jax.algorithm.sketch import SketchedLinear

Model = TypeVar("Model", bound=nnx.Module)

# x (tokens, k), g (tokens, d), A (r, k), all float32 -> arrays by name. Hashable, and
# one object for all calls: it is part of the compiled program's identity.
Measure = Callable[[Array, Array, Array], Mapping[str, Array]]

# Every tap counts the calls of its layer: cotangents of a layer called twice add up,
# and a sum of measurements is none.
_CALLS = "calls"


class Tap(nnx.Variable):
    """Zeros (*layers, *shape of a measurement), whose cotangent is the measurement."""


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What a tapped layer does, statically."""

    measure: Measure
    rank: int
    kind: str  # of the basis
    matrix: Matrix
    precision: Any  # of the product, see jax.lax.Precision
    dtype: DTypeLike | None  # of the product, by default the input's

    def product(self, x: Array, w: Array) -> Array:
        """``x`` times the kernel, which has its own axes."""
        w = self.matrix.flatten(w)
        return matmul(x, w, None, self.precision, self.dtype)

    def __call__(self, x: Array, g: Array, key: Array) -> dict[str, Array]:
        """The cotangents of the taps."""
        A = basis_matrix(key, self.rank, x.shape[-1], self.kind)
        found = dict(self.measure(_tokens(x), _tokens(g), A))
        found[_CALLS] = jnp.ones(())
        return {name: value.astype(jnp.float32) for name, value in found.items()}


def raw(
    x: Float[Array, "tokens k"], g: Float[Array, "tokens d"], A: Float[Array, "r k"]
) -> dict[str, Array]:
    """The measurement that keeps ``x`` and ``g`` as they are.

    For a look at a few tokens: all layers' are held together, ``4 * layers * tokens *
    (k + d)`` bytes for each kind of projection.
    """
    del A
    return {"x": x, "g": g}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(
    recipe: _Recipe, x: Array, w: Array, taps: dict[str, Array], key: Array
) -> Array:
    return recipe.product(x, w)


def _tapped_fwd(recipe, x, w, taps, key):
    if w.perturbed:
        raise ValueError(
            "`w` of a tapped projection must not be differentiated, got a request for "
            "its gradient; differentiate with respect to the `Tap` variables instead."
        )
    x, w = x.value, w.value
    return recipe.product(x, w), (x, w, key.value)


def _tapped_bwd(recipe, residuals, g):
    x, w, key = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        g = jnp.zeros(g.shape, x.dtype)
    w = recipe.matrix.flatten(w).astype(g.dtype)
    dx = jnp.einsum("...d,kd->...k", g, w, precision=recipe.precision)
    return dx.astype(x.dtype), None, recipe(x, g, key), None


_tapped.defvjp(_tapped_fwd, _tapped_bwd, symbolic_zeros=True)


class TappedLinear(SketchedLinear):
    """A sketched layer's twin: the same output, taps in place of the probe's sketch.

    Attributes:
        taps: zeros by name of measurement.
        recipe: measure, rank and kind of the basis.
        tokens: that every call must have, batch dimensions multiplied.
    """

    takes_pieces = False  # a measurement is of all tokens

    def __init__(self, linear: SketchedLinear, measure: Measure, tokens: int):
        for name, value in vars(linear).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        matrix = linear.contraction.matrix()
        self.recipe = _Recipe(
            measure,
            linear.probe.shape[-1],
            linear.basis.kind,
            matrix,
            linear.precision,
            linear.preferred_element_type,
        )
        self.tokens = tokens
        *stack, k, d = matrix.shape(linear.kernel.shape)
        x, g = (jax.ShapeDtypeStruct((tokens, n), jnp.float32) for n in (k, d))
        found = jax.eval_shape(self.recipe, x, g, jax.random.key(0))
        self.taps = nnx.Dict(
            {name: Tap(jnp.zeros((*stack, *s.shape))) for name, s in found.items()}
        )

    def multiply(self, x: Array, kernel: Array) -> Array:
        """``x`` times the kernel, whose backward measures."""

        def multiply(x: Array, w: Array, taps: dict[str, Array], address: Array):
            if (called := x.size // x.shape[-1]) != self.tokens:
                raise ValueError(
                    "`tokens` must be those of every call of a tapped layer, got "
                    f"{self.tokens}, but the layer runs on {called}; run the model "
                    "once, on whole sequences."
                )
            key = self.basis.key(address)
            return cast(Array, _tapped(self.recipe, x, w, taps, key))

        for _ in range(self.recipe.matrix.batch):
            multiply = jax.vmap(multiply)
        taps = {name: tap[...] for name, tap in self.taps.items()}
        return multiply(x, kernel, taps, self.address[...])


def tapped(model: Model, measure: Measure, tokens: int, match: str = ".*") -> Model:
    """A copy of a sketched ``model`` whose sketched layers are tapped.

    The copy shares the weights' buffers. Each layer must run exactly once per forward
    pass: no prefix computed apart, no layer shared by two parents
    (:func:`measurements` refuses what came of it).

    Args:
        model: from :func:`logra_jax.sketch`.
        measure: of one layer, from ``x`` (tokens, k), ``g`` (tokens, d) and ``A``
            (r, k), float32; arrays by name. See :func:`raw`.
        tokens: in each call of a layer, batch dimensions multiplied.
        match: regular expression searched for in each sketched layer's dotted path.

    Raises:
        ValueError: no sketched layer matches.
    """
    model = nnx.clone(model)
    layers = {
        ".".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, SketchedLinear)
    }
    replacements = {
        id(module): TappedLinear(module, measure, tokens)
        for path, module in layers.items()
        if re.search(match, path)
    }
    if not replacements:
        raise ValueError(
            f"`match` must hit at least one sketched layer, got {match!r}, which hits "
            f"none of: {', '.join(sorted(layers)) or '(the model has none)'}."
        )
    if isinstance(model, SketchedLinear):
        return cast(Model, replacements[id(model)])
    replace_layers(model, replacements)
    return model


def measurements(cotangents: nnx.State) -> dict[str, dict[str, np.ndarray]]:
    """The measurements in the taps' cotangents, by dotted path of the layer and name.

    Args:
        cotangents: gradient of a scalar with respect to the taps, on the host's side
            of ``jax.jit``.

    Returns:
        float32 arrays (*layers, *shape of the measurement).

    Raises:
        ValueError: a layer that ran twice, or that the scalar does not depend on.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for path, value in nnx.to_flat_state(cotangents):
        *layer, _, name = map(str, path)
        found.setdefault(".".join(layer), {})[name] = np.asarray(value[...])
    for path, values in found.items():
        calls = values.pop(_CALLS)
        if not np.all(calls == 1):
            raise ValueError(
                f"`model` must run each tapped layer once, got {path!r} run "
                f"{calls.max():.0f} times; measurements of several calls cannot be "
                "told apart."
            )
    return found


def _tokens(x: Array) -> Array:
    """(..., features) -> float32 (tokens, features)."""
    return x.reshape(-1, x.shape[-1]).astype(jnp.float32)

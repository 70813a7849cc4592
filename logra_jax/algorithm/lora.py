"""LoRA: a frozen kernel, and two small matrices beside it that are trained.

    y = x w + (alpha / r) (x Aᵀ) Bᵀ

A probe that persists, with a trained basis: where ``A`` is a sketch's basis, the
gradient of ``B`` is ``alpha / r`` times the sketch. The other baseline. Its parts:

    model = lora(model, rank, match, alpha)
    graph, factors, rest = nnx.split(model, LoRAFactor, ...)
    gradients = jax.grad(lambda f: loss(nnx.merge(graph, f, rest)))(factors)
    merge_lora(model)  # ordinary linear layers

Reference: LoRA, arXiv:2106.09685.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from logra_jax.algorithm.basis import matrix_word
from logra_jax.algorithm.layers import (
    Match,
    Model,
    TrainedLinear,
    rank_of,
    replace_layers,
    replace_linears,
)
from logra_jax.algorithm.parallel import Split, matmul, whole

ALPHA = 32.0  # usual with any rank, as the step then need not follow the rank


class LoRAFactor(nnx.Variable):
    """``A`` (..., r, k) or ``B`` (..., d, r), float32."""


def _multiply(
    x: Array, w: Array, a: Array, b: Array, scale: float, split: Split | None
) -> Array:
    low = _project(x, a) @ b.T.astype(x.dtype)
    return matmul(x, w, split) + (scale * low).astype(x.dtype)


def _project(x: Array, a: Array) -> Array:
    return x @ a.T.astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _adapted(
    x: Array, w: Array, a: Array, b: Array, scale: float, split: Split | None
) -> Array:
    return _multiply(x, w, a, b, scale, split)


def _adapted_fwd(x, w, a, b, scale, split):
    if w.perturbed:
        raise ValueError(
            "`w` of a LoRA projection must not be differentiated, got a request for "
            "its gradient: the kernel is frozen; differentiate with respect to the "
            "`LoRAFactor` variables instead."
        )
    x, w, a, b = x.value, w.value, a.value, b.value
    return _multiply(x, w, a, b, scale, split), (x, _project(x, a), w, a, b)


def _adapted_bwd(scale, split, residuals, g):
    x, x_projected, w, a, b = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        g = jnp.zeros(g.shape, x.dtype)
    # Gathered once more: kept, the kernels of all layers would add up to the model.
    w = whole(w, split)
    g_projected = scale * (g @ b.astype(g.dtype))
    dx = jnp.einsum("...d,kd->...k", g, w.astype(g.dtype))
    dx = dx + g_projected @ a.astype(g.dtype)
    da = _sum_of_products(g_projected, x)
    db = scale * _sum_of_products(g, x_projected)
    return dx.astype(x.dtype), None, da, db


def _sum_of_products(left: Array, right: Array) -> Array:
    """``leftᵀ right`` over all tokens, float32."""
    return jnp.einsum(
        "nd,nr->dr",
        left.reshape(-1, left.shape[-1]),
        right.reshape(-1, right.shape[-1]),
        preferred_element_type=jnp.float32,
    )


_adapted.defvjp(_adapted_fwd, _adapted_bwd, symbolic_zeros=True)


class LoRALinear(TrainedLinear):
    """A linear layer with a trained product of low rank beside its frozen kernel.

    Attributes:
        lora_a: (..., r, k) float32, random at first.
        lora_b: (..., d, r) float32, zeros at first, so that the layer begins as it was.
        scale: ``alpha / r``, static.
    """

    def __init__(
        self, linear: nnx.Linear, rank: int, alpha: float, words: UInt32[Array, "..."]
    ):
        super().__init__(linear)
        *stack, k, d = linear.kernel.shape
        self.lora_a = LoRAFactor(_normal(words, rank, k))
        self.lora_b = LoRAFactor(jnp.zeros((*stack, d, rank), jnp.float32))
        self.scale = alpha / rank

    def multiply(self, x: Array, kernel: Array) -> Array:
        """``x @ kernel + scale (x Aᵀ) Bᵀ``."""
        multiply = _multiply if self.plain else _adapted
        a, b = self.lora_a[...], self.lora_b[...]
        return multiply(x, kernel, a, b, self.scale, self.split)

    def merged_kernel(self) -> Float[Array, "*stack k d"]:
        """``w + scale (B A)ᵀ``, rounded to nearest; one matrix at a time."""
        w, a, b = self.kernel[...], self.lora_a[...], self.lora_b[...]
        *_, k, d = w.shape
        return _merge(
            w.reshape(-1, k, d),
            a.reshape(-1, *a.shape[-2:]),
            b.reshape(-1, *b.shape[-2:]),
            self.scale,
        ).reshape(w.shape)


@partial(jax.jit, static_argnames="scale")
def _merge(
    w: Float[Array, "n k d"],
    a: Float32[Array, "n r k"],
    b: Float32[Array, "n d r"],
    scale: float,
) -> Float[Array, "n k d"]:
    def one(matrix: tuple[Array, Array, Array]) -> Array:
        w, a, b = matrix
        change = jnp.einsum("rk,dr->kd", a, b, precision=lax.Precision.HIGHEST)
        return (w.astype(jnp.float32) + scale * change).astype(w.dtype)

    return lax.map(one, (w, a, b))


def _normal(words: UInt32[Array, "*stack 2"], rank: int, k: int) -> Array:
    """``A`` (*stack, r, k) of variance 1/k, each matrix from its (seed, name) words."""

    def one(pair: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(pair[0], impl="threefry2x32"), pair[1])
        return jax.random.normal(key, (rank, k), jnp.float32) / np.float32(np.sqrt(k))

    drawn = jax.vmap(one)(words.reshape(-1, 2))
    return drawn.reshape(*words.shape[:-1], rank, k)


def lora(
    model: Model,
    rank: int | Mapping[str, int],
    match: Match = ".*",
    alpha: float = ALPHA,
    seed: int = 0,
) -> Model:
    """A copy of ``model``, the same buffers, with LoRA beside the matched layers.

    Args:
        model: any NNX model; its ``nnx.Linear`` modules are candidates.
        rank: as in :func:`logra_jax.sketch`.
        match: as in :func:`logra_jax.sketch`.
        alpha: the product is multiplied by ``alpha / rank``.
        seed: of the first ``A``, in ``[0, 2**32)``; each matrix draws its own, by name.

    Raises:
        ValueError: nothing matched, a rank outside ``[1, min(k, d)]``, an ``alpha``
            that is not positive.
    """
    if not 0 < alpha < float("inf"):
        raise ValueError(
            f"`alpha` must be positive and finite, got {alpha}; {ALPHA:.0f} is usual."
        )

    def make(path: str, linear: nnx.Linear, names: Sequence[str]) -> LoRALinear:
        *stack, k, d = linear.kernel.shape
        layer_rank = rank_of(path, rank, min(k, d), "narrow `match`")
        words = np.array([(seed, matrix_word(name)) for name in names], np.uint32)
        words = jnp.asarray(words.reshape(*stack, 2))
        return LoRALinear(linear, layer_rank, alpha, words)

    return replace_linears(model, match, make)


def merge_lora(model: Model) -> Model:
    """A copy of ``model`` with an ordinary linear layer for each LoRA layer.

    Kernels keep their dtype: in bfloat16, what is less than half a unit in the last
    place of a weight is lost.
    """
    model = nnx.clone(model)
    layers = [m for _, m in nnx.iter_modules(model) if isinstance(m, LoRALinear)]
    replacements: dict[int, nnx.Module] = {id(m): _ordinary(m) for m in layers}
    if id(model) in replacements:
        return cast(Model, replacements[id(model)])
    replace_layers(model, replacements)
    return model


def _ordinary(layer: LoRALinear) -> nnx.Linear:
    kernel = layer.merged_kernel()
    *_, k, d = kernel.shape
    linear = nnx.eval_shape(
        lambda: nnx.Linear(
            k, d, use_bias=layer.bias is not None, dtype=layer.dtype, rngs=nnx.Rngs(0)
        )
    )
    linear.kernel = cast(nnx.Param, layer.kernel.replace(kernel))
    linear.bias = layer.bias
    return linear

r"""How much of a gradient its sketch keeps: as a matrix, and in gain at equal KL.

One layer: ``G = gᵀ x`` (d, k) is its gradient, ``S = G Aᵀ`` (d, r) its sketch, and
``Ĝ = S A`` what an update sees of ``G``. The entries of ``A`` are independent, of mean
0, variance ``1/r`` and kurtosis ``κ`` (1 for signs, 3 for normals), so ``E Ĝ = G``, and
for any symmetric ``C`` (k, k)

.. math::
    E \operatorname{tr}(\hat G C \hat G^T) = \operatorname{tr}(G C G^T)
        + \tfrac1r \big( \operatorname{tr}(G C G^T) + \|G\|^2 \operatorname{tr} C
        + (\kappa - 3) \operatorname{tr}(G \operatorname{diag}(C)\, G^T) \big)

because a row ``a`` of ``√r A`` has ``E[aaᵀ C aaᵀ] = 2C + tr(C) I + (κ-3) diag(C)``, and
two rows are independent. All below follows from this one identity.

- With ``C = I``, ``E||Ĝ||² = ||G||² (1 + (k - 2 + κ)/r)``: the cosine of ``G`` and
  ``Ĝ`` as matrices is about ``(1 + (k-1)/r)^-½`` for signs. It, the ratio of the norms
  and the signal-to-noise ratio ``||Ĝ||/||G-Ĝ||`` are functions of the *shape*, which
  the gradient moves little: they find a broken basis, not a rank that is too small.
- With ``C = mean xxᵀ``, ``tr(D C Dᵀ)`` is the mean square by which an update ``D``
  changes the layer's output, which stands for the KL that it costs. At equal cost
  ``Ĝ`` gains ``cos_C`` of what ``G`` gains:

.. math::
    \cos_C = \frac{E\langle G, \hat G\rangle}{\|G\|^2}
        \sqrt{\frac{\operatorname{tr}(G C G^T)}{E \operatorname{tr}(\hat G C\hat G^T)}}
        = \Big(1 + \frac{1 + d_{eff} + (\kappa-3)\,\delta}{r}\Big)^{-1/2}

  with ``d_eff = ||G||² tr C / tr(G C Gᵀ)``, over how many directions the inputs spread
  for each one that the gradient uses, and ``δ = tr(G diag(C) Gᵀ) / tr(G C Gᵀ)``
  (``C = I`` has ``d_eff = k``, ``δ = 1``).

As a ratio of means it lies a little below the mean for single draws (whose gain and
cost rise together): .66 against .73 at r = 4, .85 against .89 at r = 16, .951 against
.956 at r = 64, on 35 matrices of SmolLM2-135M (layers 0, 2, 14, 27, 29; gradient of 8
responses to sums, float32, signs). And it takes every change of the output to cost
alike, which makes it a floor: measured by the second order of the KL (``jax.jvp``),
steps of 16 of those matrices, one at a time, gained .71 to 1.13 (mean .97) of the dense
step at r = 4, where ``cos_C`` is .34 to .89, and .81 to 1.14 (mean 1.00) at r = 16,
where it is .58 to .97.

The *sketch-only* estimate of ``cos_C`` needs no ``G``: ``||S||²`` is unbiased for
``||G||²``, and the identity, read backwards, gives the other terms of ``G`` from those
of ``Ĝ`` (:func:`sketched_cos_c`). On the same 35 matrices its error for one of them is
(bias / root mean square) -.14 / .28 at r = 4, where it is of no use, -.02 / .055 at
r = 16 and -.002 / .011 at r = 64; without the terms of ``κ`` and ``1 + 1/r`` it would
be -.19 / .32, -.03 / .065 and -.008 / .014.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from logra_jax.algorithm.basis import GAUSSIAN

# Of the bases' entries; a normal distribution's is 3, its grid's a little less.
KURTOSIS = {
    "rademacher": 1.0,
    "gaussian": len(GAUSSIAN)
    * sum(n**4 for n in GAUSSIAN)
    / sum(n * n for n in GAUSSIAN) ** 2,
}


class Moments(NamedTuple):
    """The numbers of one layer, or of stacked layers, that the measures are ratios of.

    float32. The first three need ``G``; the others only ``S``, ``A``, and sums over the
    tokens of ``A x (A x)ᵀ`` and of ``x²``.
    """

    gradient: Array  # ||G||²
    gradient_cost: Array  # tr(G C Gᵀ)
    gradient_diagonal: Array  # tr(G diag(C) Gᵀ)
    inputs: Array  # tr C
    sketch: Array  # ||S||²
    lifted: Array  # ||Ĝ||², Ĝ = S A
    lifted_cost: Array  # tr(Ĝ C Ĝᵀ)
    lifted_diagonal: Array  # tr(Ĝ diag(C) Ĝᵀ)

    @classmethod
    def of(cls, found: Mapping[str, ArrayLike]) -> "Moments":
        """From measurements by name, which may hold others."""
        return cls(*(jnp.asarray(found[name]) for name in cls._fields))


def measure_moments(
    x: Float[Array, "tokens k"], g: Float[Array, "tokens d"], A: Float[Array, "r k"]
) -> dict[str, Array]:
    """The :class:`Moments` of one layer, by field; a ``Measure`` of :mod:`capture`.

    ``C`` is the mean of ``xxᵀ`` over the tokens whose output the loss depends on
    (``g != 0``), so padding does not count. Holds ``G`` (d, k), but no ``C`` (k, k) and
    no ``Ĝ``: about ``4 (d k + tokens (k + d))`` bytes.
    """
    counted = jnp.any(g != 0, -1, keepdims=True).astype(jnp.float32)
    x = x * counted
    tokens = jnp.maximum(jnp.sum(counted), 1.0)
    G = _dot(g.T, x)
    projected = _dot(x, A.T)  # (tokens, r)
    S = _dot(g.T, projected)
    squared = _dot(S.T, S)  # (r, r): ||S v||² = vᵀ squared v
    columns = jnp.sum(A * _dot(squared, A), 0)  # (k,): squared norms of Ĝ's columns
    diagonal = jnp.sum(x * x, 0) / tokens  # (k,): of C
    return Moments(
        gradient=jnp.sum(G * G),
        gradient_cost=jnp.sum(jnp.square(_dot(x, G.T))) / tokens,
        gradient_diagonal=jnp.sum(jnp.sum(G * G, 0) * diagonal),
        inputs=jnp.sum(diagonal),
        sketch=jnp.trace(squared),
        lifted=jnp.sum(columns),
        lifted_cost=jnp.sum(_dot(projected, squared) * projected) / tokens,
        lifted_diagonal=jnp.sum(columns * diagonal),
    )._asdict()


def cosine(m: Moments) -> Array:
    """Cosine of ``G`` and ``Ĝ`` as matrices: ``||S||² / (||G|| ||Ĝ||)``."""
    return m.sketch / jnp.sqrt(m.gradient * m.lifted)


def snr(m: Moments) -> Array:
    """Signal-to-noise ratio ``||Ĝ|| / ||G - Ĝ||``; above 1 for any sound basis."""
    noise = m.gradient - 2 * m.sketch + m.lifted  # <G, Ĝ> = ||S||²
    return jnp.sqrt(m.lifted / jnp.maximum(noise, 0.0))


def norm_ratio(m: Moments) -> Array:
    """``||Ĝ|| / ||G||``, about ``sqrt(1 + (k-1)/r)`` for signs."""
    return jnp.sqrt(m.lifted / m.gradient)


def effective_dimension(m: Moments) -> Array:
    """``d_eff = ||G||² tr C / tr(G C Gᵀ)``, at least 1."""
    return m.gradient * m.inputs / m.gradient_cost


def cos_c(m: Moments, rank: int, kind: str = "rademacher") -> Array:
    """``cos_C`` of this gradient, as expected over the draw of ``A``."""
    delta = m.gradient_diagonal / m.gradient_cost
    return expected_cos_c(effective_dimension(m), rank, kind, delta)


def realised_cos_c(m: Moments) -> Array:
    """``cos_C`` for this one ``A``; its mean over draws is a little above the law."""
    return m.sketch / m.gradient * jnp.sqrt(m.gradient_cost / m.lifted_cost)


def sketched_cos_c(m: Moments, rank: int, kind: str = "rademacher") -> Array:
    r"""``cos_C`` from the sketch alone; fit for use from about rank 16.

    With ``n = ||S||² tr C``, unbiased estimates of ``e = tr(G diag(C) Gᵀ)`` and
    ``c = tr(G C Gᵀ)`` are

    .. math::
        \hat e = \frac{\operatorname{tr}(\hat G \operatorname{diag}(C) \hat G^T)
            - n/r}{1 + (\kappa - 2)/r}, \qquad
        \hat c = \frac{\operatorname{tr}(\hat G C \hat G^T)
            - n/r - (\kappa - 3)\,\hat e/r}{1 + 1/r}

    and put into the formula they give ``cos_C² = ĉ / tr(Ĝ C Ĝᵀ)``. At small ranks
    noise can push ``ĉ`` below 0: then the result is 0.
    """
    spread = m.sketch * m.inputs / rank
    kurtosis = KURTOSIS[kind]
    # A single row of signs says nothing of the diagonal.
    factor = 1 + (kurtosis - 2) / rank
    diagonal = (m.lifted_diagonal - spread) / factor if factor > 0 else 0.0
    cost = m.lifted_cost - spread - (kurtosis - 3) / rank * diagonal
    return jnp.sqrt(jnp.clip(cost / (1 + 1 / rank) / m.lifted_cost, 0.0, 1.0))


def expected_cosine(width: int, rank: int, kind: str = "rademacher") -> float:
    """The law of :func:`cosine`: ``(1 + (width - 2 + κ)/rank)^-½``, any gradient.

    Example:
        >>> from logra_jax.algorithm.alignment import expected_cosine
        >>> round(expected_cosine(1536, 256), 3)
        0.378
    """
    return (1 + (width - 2 + KURTOSIS[kind]) / rank) ** -0.5


def expected_cos_c(
    d_eff: ArrayLike, rank: int, kind: str = "rademacher", delta: ArrayLike = 0.0
) -> Array:
    """The law of :func:`realised_cos_c`: ``(1 + (1 + d_eff + (κ-3) delta)/rank)^-½``.

    With ``delta = 0`` it is a lower bound that holds for every kind of basis.
    """
    spread = 1 + jnp.asarray(d_eff) + (KURTOSIS[kind] - 3) * jnp.asarray(delta)
    return (1 + spread / rank) ** -0.5


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

"""Merges and their inverses in bfloat16: how far rounding carries the weights away."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.factor import quantise
from logra_jax.algorithm.merge import merge
from logra_jax.algorithm.sketch import Probe, sketch

SHAPE = (256, 256)
RANK = 16
WEIGHT_RMS = 0.02
UPDATE_RMS = 1e-5  # of the weights' change in one merge, as in the quickstart


class Drift(NamedTuple):
    """Distance from the first weights after some cycles, rms over the weights."""

    cycles: tuple[int, ...]
    drift: tuple[float, ...]  # measured
    bound: tuple[float, ...]  # of stochastic rounding, see merge_drift
    landed: float  # projection of the first merge on its update: 1 is all of it


def merge_drift(
    cycles: tuple[int, ...] = (1, 10, 100, 1000),
    rounding: str = "stochastic",
    *,
    update_rms: float = UPDATE_RMS,
    seed: int = 0,
) -> Drift:
    r"""Merge an update and then its inverse, again and again, a new update each time.

    Exact arithmetic would return to the first weights. A weight ``w`` on its bfloat16
    grid of step :math:`u` that is moved by :math:`\Delta` and rounded stochastically
    gains an error of mean zero and variance :math:`f (1 - f) u^2`, with :math:`f` the
    fractional part of :math:`|\Delta| / u`. Errors of different merges are
    uncorrelated, so after ``n`` cycles, ``2 n`` merges, the drift is

    .. math::
        \operatorname{rms} = \sqrt{2 n \operatorname{mean}[f (1 - f) u^2]}
        \le u \sqrt{n / 2}

    Rounding to nearest has no such law: below half a step nothing lands, so nothing has
    to come back; above it, what is lost is lost for good.

    Args:
        cycles: numbers of cycles to report, increasing.
        rounding: ``"stochastic"`` or ``"nearest"``.
        update_rms: of the change of a weight in one merge.
        seed: of the weights, the updates and the rounding.
    """
    basis = Basis(seed=seed, refresh=False)
    linear = nnx.Linear(
        *SHAPE, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    _, probes, weights = nnx.split(sketch(linear, RANK, basis=basis), Probe, ...)
    keys = jax.random.split(jax.random.key(seed))
    kernel = WEIGHT_RMS * jax.random.normal(keys[0], SHAPE)
    weights["kernel"] = weights["kernel"].replace(kernel.astype(jnp.bfloat16))
    first = weights["kernel"][...].astype(jnp.float32)

    def update(cycle: Array) -> nnx.State:
        key = jax.random.fold_in(keys[1], cycle)
        return jax.tree.map(
            lambda p: update_rms * jax.random.normal(key, p.shape), probes
        )

    def cycle(i: Array, weights: nnx.State) -> nnx.State:
        there = quantise(update(i), basis)
        back = jax.tree.map(lambda x: x, there)
        back["integers"] = there["integers"].replace(-there["integers"][...])
        weights = merge(weights, there, basis, rounding=rounding)
        return merge(weights, back, basis, rounding=rounding)

    @jax.jit
    def run(weights: nnx.State, start: Array, stop: Array) -> nnx.State:
        return jax.lax.fori_loop(start, stop, cycle, weights)

    once = merge(weights, update(jnp.int32(0)), basis, rounding=rounding)
    moved = once["kernel"][...].astype(jnp.float32) - first
    intended = (
        update(jnp.int32(0))["probe"][...]
        @ basis.matrix(weights["address"][...], RANK, SHAPE[0])
    ).T
    noise = _rounding_variance(np.asarray(first), np.asarray(intended))
    drifts, done = [], 0
    for count in cycles:
        weights = run(weights, jnp.int32(done), jnp.int32(count))
        done = count
        gone = weights["kernel"][...].astype(jnp.float32) - first
        drifts.append(float(jnp.sqrt(jnp.mean(jnp.square(gone)))))
    return Drift(
        tuple(cycles),
        tuple(drifts),
        tuple(float(np.sqrt(2 * n * noise)) for n in cycles),
        float(jnp.sum(moved * intended) / jnp.sum(jnp.square(intended))),
    )


def _rounding_variance(weights: np.ndarray, changes: np.ndarray) -> float:
    """Mean of ``f (1 - f) u²`` over the weights."""
    step = np.spacing(np.abs(weights)).astype(np.float64) * 2.0**16
    fraction = np.abs(changes) / step % 1
    return float(np.mean(fraction * (1 - fraction) * step**2))

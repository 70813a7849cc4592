"""Merges and their inverses in bfloat16: how far rounding carries the weights away."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.factor import quantise
from logra_jax.algorithm.merge import merge
from logra_jax.algorithm.rounding import ROUNDINGS
from logra_jax.algorithm.sketch import Probe, sketch
from logra_jax.study.tables import make_table

if TYPE_CHECKING:
    from rich.console import Console

CYCLES = (1, 10, 100, 1000)
UPDATES = (1e-6, 1e-5, 1e-4)  # rms of a weight's change in one merge; 1e-5: quickstart
SHAPE = (256, 256)
RANK = 16
WEIGHT_RMS = 0.02


class Drift(NamedTuple):
    """Distance from the first weights after some cycles, rms over the weights."""

    cycles: tuple[int, ...]
    drift: tuple[float, ...]  # measured
    bound: tuple[float, ...]  # of stochastic rounding, see merge_drift
    landed: float  # projection of the first merge on its update: 1 is all of it


def merge_drift(
    cycles: tuple[int, ...] = CYCLES,
    rounding: str = "stochastic",
    *,
    update_rms: float = 1e-5,
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
    states: Any = nnx.split(sketch(linear, RANK, basis=basis), Probe, ...)
    _, probes, weights = states
    keys = jax.random.split(jax.random.key(seed))
    kernel = WEIGHT_RMS * jax.random.normal(keys[0], SHAPE)
    weights["kernel"] = weights["kernel"].replace(kernel.astype(jnp.bfloat16))
    first = weights["kernel"][...].astype(jnp.float32)

    def update(cycle: Array) -> Any:
        key = jax.random.fold_in(keys[1], cycle)
        return jax.tree.map(
            lambda p: update_rms * jax.random.normal(key, p.shape), probes
        )

    def cycle(i: Array, weights: nnx.State) -> nnx.State:
        there: Any = quantise(update(i), basis)
        back = jax.tree.map(lambda x: x, there)  # a copy to write in
        back["integers"] = there["integers"].replace(-there["integers"][...])
        weights = merge(weights, there, basis, rounding=rounding)
        return merge(weights, back, basis, rounding=rounding)

    @jax.jit
    def run(weights: nnx.State, start: Array, stop: Array) -> nnx.State:
        return jax.lax.fori_loop(start, stop, cycle, weights)

    once: Any = merge(weights, update(jnp.int32(0)), basis, rounding=rounding)
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


def measure_drifts(tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Both roundings at every size of ``UPDATES``; ``tick`` after each."""
    found = []
    for update_rms in UPDATES:
        for rounding in ROUNDINGS:
            drift = merge_drift(rounding=rounding, update_rms=update_rms)
            found.append(
                {"update_rms": update_rms, "rounding": rounding} | drift._asdict()
            )
            tick()
    return found


def show_drifts(found: list[dict[str, Any]], console: "Console") -> None:
    """A table of :func:`measure_drifts`."""
    title = "Drift / weights, rms, after n merges and their inverses"
    columns = "update", "rounding", "landed", *map(str, CYCLES), "of law"
    rows = []
    for row in found:
        last = row["drift"][-1] / row["bound"][-1]
        rows.append(
            [
                f"{row['update_rms'] / WEIGHT_RMS:.0e}".replace("e-0", "e-"),
                row["rounding"],
                f"{row['landed']:.2f}",
                *(
                    f"{drift / WEIGHT_RMS:.1e}".replace("e-0", "e-")
                    for drift in row["drift"]
                ),
                f"{last:.2f}" if row["rounding"] == "stochastic" else "",
            ]
        )
    console.print(make_table(columns, rows, title=title))
    console.print(
        "bfloat16 weights; updates in shares of them, rms. Landed: projection of one "
        "merge\non its update. Law: the noise of 2 n roundings. Rounding to nearest "
        "comes back\nthe better, the less of an update it lets land.\n"
    )


def plot_drifts(axes: Any, found: list[dict[str, Any]]) -> None:
    """Drift against cycles for the quickstart's size of update, on matplotlib axes."""
    rows = [row for row in found if row["update_rms"] == UPDATES[1]]
    styles = {"stochastic": ("o", "#0072B2"), "nearest": ("x", "#D55E00")}
    for row in rows:
        marker, color = styles[row["rounding"]]
        label = f"{row['rounding']} ({row['landed']:.2f} of an update lands)"
        axes.plot(
            row["cycles"],
            np.divide(row["drift"], WEIGHT_RMS),
            marker,
            color=color,
            label=label,
        )
    bound = np.divide(rows[0]["bound"], WEIGHT_RMS)
    axes.plot(rows[0]["cycles"], bound, color="#777777", label="law of stochastic")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("merges and their inverses")
    axes.set_ylabel("rms drift / rms weight")
    axes.set_title(
        f"bfloat16 weights, updates of rms {UPDATES[1] / WEIGHT_RMS:.0e} of theirs",
        loc="left",
    )
    axes.legend(frameon=False)

"""The paper's table: cosine of a dense gradient and what its sketch reconstructs."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from logra_jax.algorithm.alignment import expected_cosine
from logra_jax.algorithm.basis import KINDS, Basis, matrix_word
from logra_jax.study.tables import make_table

if TYPE_CHECKING:
    from rich.console import Console

# Qwen2.5-1.5B: output and input features of each projection of a layer.
PROJECTIONS = {
    "self_attn.q_proj": (1536, 1536),
    "self_attn.k_proj": (256, 1536),
    "self_attn.v_proj": (256, 1536),
    "self_attn.o_proj": (1536, 1536),
    "mlp.gate_proj": (8960, 1536),
    "mlp.up_proj": (8960, 1536),
    "mlp.down_proj": (1536, 8960),
}
PAPER = {4: 0.047, 256: 0.348}  # mean cosine
PAPER_DIFFERENCES = {"basis": 0.0014, "kind": 0.0008}  # largest
NAMES = {"rademacher": "signs", "gaussian": "normal"}


def measure_reconstruction(
    ranks: Sequence[int],
    *,
    seeds: int,
    rows: int,
    updates: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Mean cosine by rank, for fixed and refreshed bases of both kinds.

    Args:
        ranks: of the sketches.
        seeds: independent repetitions.
        rows: of each random gradient at most; the law knows nothing of their number.
        updates: gradients that a fixed basis serves, and a refreshed one changes with.
        tick: called after each gradient.

    Returns:
        ``rows``: one for each rank, with ``theory``, ``theory_gaussian``, and for each
        of ``fixed`` and ``refreshed`` times ``rademacher`` and ``gaussian`` the mean
        and its standard error over repetitions, updates and projections (which are no
        sample: their differences in width are taken out first).
    """
    cases = [(refresh, kind) for refresh in (False, True) for kind in KINDS]
    found: dict[tuple, list[float]] = {}
    for seed in range(seeds):
        for update in range(updates):
            for name, (d, k) in PROJECTIONS.items():
                key = jax.random.fold_in(jax.random.key(seed), update)
                key = jax.random.fold_in(key, np.uint32(matrix_word(name)))
                G = jax.random.normal(key, (min(d, rows), k))
                for refresh, kind in cases:
                    basis = Basis(seed, refresh, kind)
                    address = jnp.array(basis.address(name, update), jnp.uint32)
                    for rank in ranks:
                        A = basis.matrix(address, rank, k)
                        ratio = reconstruction_cosine(G, A)
                        excess = float(ratio) - expected_cosine(k, rank, kind)
                        found.setdefault((rank, refresh, kind), []).append(excess)
                tick()
    table = []
    for rank in ranks:
        law = {kind: _mean_law(rank, kind) for kind in KINDS}
        row: dict[str, Any] = {"rank": rank, "theory": law["rademacher"]}
        row["theory_gaussian"] = law["gaussian"]
        for refresh, kind in cases:
            excess = np.array(found[rank, refresh, kind])
            row[f"{'refreshed' if refresh else 'fixed'}_{kind}"] = {
                "mean": float(law[kind] + excess.mean()),
                "standard_error": float(excess.std() / math.sqrt(excess.size)),
            }
        table.append(row)
    return {"rows": table}


def _mean_law(rank: int, kind: str) -> float:
    laws = [expected_cosine(k, rank, kind) for _, k in PROJECTIONS.values()]
    return math.fsum(laws) / len(laws)


@jax.jit
def reconstruction_cosine(
    G: Float[Array, "d k"], A: Float[Array, "r k"]
) -> Float[Array, ""]:
    """Cosine of ``G`` and ``G Aᵀ A`` as vectors, by the definition."""
    lifted = _dot(_dot(G, A.T), A)
    return jnp.sum(G * lifted) / jnp.sqrt(jnp.sum(G * G) * jnp.sum(lifted * lifted))


def show_reconstruction(result: dict[str, Any], console: "Console") -> None:
    """A table of :func:`measure_reconstruction`."""
    columns = [f"{basis}_{kind}" for basis in ("fixed", "refreshed") for kind in KINDS]
    title = (
        "Cosine of a gradient and its reconstruction, mean over the projections "
        "of Qwen2.5-1.5B"
    )
    paper = {rank: f"{cosine:.3f}" for rank, cosine in PAPER.items()}
    rows = [
        (
            str(row["rank"]),
            f"{row['theory']:.4f}",
            *(f"{row[c]['mean']:.4f}" for c in columns),
            paper.get(row["rank"], ""),
        )
        for row in result["rows"]
    ]
    heads = "rank", "theory", *map(_head, columns), "paper"
    console.print(make_table(heads, rows, title=title))
    basis, kind = differences(result)
    errors = [row[c]["standard_error"] for row in result["rows"] for c in columns]
    console.print(
        f"Largest difference between fixed and refreshed bases {basis:.4f} (paper: "
        f"{PAPER_DIFFERENCES['basis']}), between signs and normal entries {kind:.4f} "
        f"(paper: {PAPER_DIFFERENCES['kind']}); standard errors up to "
        f"{max(errors):.4f}.\n"
    )


def _head(column: str) -> str:
    basis, kind = column.split("_")
    return f"{basis} {NAMES[kind]}"


def differences(result: dict[str, Any]) -> tuple[float, float]:
    """The largest over ranks, fixed against refreshed, and signs against normal."""

    def mean(row: dict[str, Any], basis: str, kind: str) -> float:
        return row[f"{basis}_{kind}"]["mean"]

    basis = max(
        abs(mean(row, "fixed", kind) - mean(row, "refreshed", kind))
        for row in result["rows"]
        for kind in KINDS
    )
    kind = max(
        abs(mean(row, basis, "rademacher") - mean(row, basis, "gaussian"))
        for row in result["rows"]
        for basis in ("fixed", "refreshed")
    )
    return basis, kind


def plot_reconstruction(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Cosine against rank, on matplotlib axes: measured, the law, and the paper's."""
    ranks = [row["rank"] for row in rows]
    finer = np.unique(np.geomspace(ranks[0], ranks[-1], 50).round().astype(int))
    law = [_mean_law(int(rank), "rademacher") for rank in finer]
    axes.plot(finer, law, color="#777777", label="theory")
    for basis, marker in (("fixed", "o"), ("refreshed", "x")):
        means = [row[f"{basis}_rademacher"]["mean"] for row in rows]
        axes.plot(ranks, means, marker, color="#0072B2", label=f"{basis} signs")
    axes.plot(*zip(*PAPER.items(), strict=True), "+", color="#D55E00", label="paper")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlabel("rank")
    axes.set_ylabel("cosine of gradient and reconstruction")
    axes.set_title("Mean over the projections of Qwen2.5-1.5B", loc="left")
    axes.legend(frameon=False)


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

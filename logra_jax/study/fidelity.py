"""`logra fidelity`: does the method do, in numbers, what its theory says?

Each section is a claim, measured on random data that runs in seconds on a CPU:

1. reconstruction: the mean cosine of a dense gradient ``G`` and ``Ĝ = G Aᵀ A`` over the
   seven projections of Qwen2.5-1.5B, the paper's table;
2. norms: ``E||S||² = ||G||²`` for every row of a gradient;
3. quadratic: the KL of a step of size alpha is ``alpha² q``;
4. drift: merges and their inverses move bfloat16 weights by rounding noise alone.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array

from logra_jax.algorithm.basis import KINDS, Basis
from logra_jax.algorithm.divergence import realised_kl
from logra_jax.algorithm.kl_prediction import predict_kl
from logra_jax.algorithm.rounding import ROUNDINGS
from logra_jax.algorithm.sketch import Probe, perturbed, sketch
from logra_jax.models.attention import Span
from logra_jax.models.decoder import Decoder
from logra_jax.models.layers import DecoderConfig
from logra_jax.study.drift import UPDATES, measure_drifts, plot_drifts, show_drifts
from logra_jax.study.reconstruction import (
    NAMES,
    PROJECTIONS,
    measure_reconstruction,
    plot_reconstruction,
    show_reconstruction,
)
from logra_jax.study.tables import make_table

if TYPE_CHECKING:
    from rich.console import Console

RANKS = (4, 16, 64, 256)
BUDGETS = (1e-4, 1e-3, 1e-2, 1e-1)  # predicted KL of a step, nats per token

Tick = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
        ranks: sketch widths.
        seeds: independent repetitions.
        rows: of each gradient at most; the law knows nothing of their number, and 256
            leave a standard error of 3e-4 or less.
        updates: gradients that a fixed basis serves, and a refreshed one changes with.
        draws: bases per repetition, for the norms.
    """

    ranks: tuple[int, ...] = RANKS
    seeds: int = 3
    rows: int = 256
    updates: int = 4
    draws: int = 100

    def __post_init__(self):
        if self.seeds < 1:
            raise ValueError(f"`--seeds` must be at least 1, got {self.seeds}.")
        widest = min(min(shape) for shape in PROJECTIONS.values())
        for rank in self.ranks:
            if not 1 <= rank <= widest:
                raise ValueError(
                    f"`--rank` must lie in [1, {widest}], the smallest side of a "
                    f"projection, got {rank}."
                )


class Section(NamedTuple):
    """One claim: how it is measured, and how shown."""

    name: str
    rounds: Callable[[Options], int]  # how often ``measure`` calls its tick
    measure: Callable[[Options, Tick], dict[str, Any]]  # what goes into the JSON
    show: Callable[[dict[str, Any], "Console"], None]


def fidelity(
    ranks: Sequence[int] = RANKS,
    seeds: int = 3,
    as_json: bool = False,
    plot: str | None = None,
) -> int:
    """Measure every section, print, and return the exit code 0.

    Args:
        ranks: of the sketches.
        seeds: repetitions.
        as_json: print one JSON object in place of tables.
        plot: PNG file for cosine against rank.

    Raises:
        ValueError: a rank that no projection has room for, no repetition, or a plot
            that cannot be written.
    """
    from rich.console import Console
    from rich.progress import Progress

    options = Options(ranks=tuple(sorted(set(ranks))), seeds=seeds)
    if plot is not None:
        _check_plot(Path(plot))
    results = {}
    # On standard error, which is not what --json is read from; nothing off a terminal.
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        for section in SECTIONS:
            bar = bars.add_task(section.name, total=section.rounds(options))
            results[section.name] = section.measure(
                options, lambda bar=bar: bars.advance(bar)
            )
    if as_json:
        print(json.dumps({"options": dataclasses.asdict(options)} | results))
    else:
        for section in SECTIONS:
            section.show(results[section.name], Console(highlight=False))
    if plot is not None:
        _plot(results, Path(plot))
    return 0


# --- the sketch keeps norms


def measure_norms(options: Options, tick: Tick) -> dict[str, Any]:
    """``||S_i||² / ||G_i||²`` and its root over the rows of a gradient, many bases.

    Returns:
        ``rows``: for each rank and kind ``mean_square`` (1 in theory), its
        ``standard_error``, ``mean_norm``, and in ``theory_norm`` what that is for rows
        spread over many columns, ``sqrt(2/r) Γ((r+1)/2) / Γ(r/2)``.
    """
    _, width = PROJECTIONS["self_attn.q_proj"]
    G = jax.random.normal(jax.random.key(0), (64, width))
    length = jnp.sum(G * G, -1)
    rows = []
    for rank in options.ranks:
        for kind in KINDS:

            def squares(key: Array, rank: int = rank, kind: str = kind) -> Array:
                S = _dot(G, Basis(kind=kind).matrix(key, rank, width).T)
                return jnp.sum(S * S, -1) / length

            addresses = [
                Basis().address("rows", step)
                for step in range(options.seeds * options.draws)
            ]
            found = lax.map(jax.jit(squares), jnp.array(addresses, jnp.uint32))
            found = np.asarray(found, np.float64)
            by_draw = found.mean(1)  # rows share a draw
            rows.append(
                {
                    "rank": rank,
                    "kind": kind,
                    "mean_square": float(by_draw.mean()),
                    "standard_error": float(by_draw.std() / math.sqrt(by_draw.size)),
                    "mean_norm": float(np.sqrt(found).mean()),
                    "theory_norm": math.sqrt(2 / rank)
                    * math.exp(math.lgamma((rank + 1) / 2) - math.lgamma(rank / 2)),
                }
            )
            tick()
    return {"rows": rows}


def _show_norms(result: dict[str, Any], console: "Console") -> None:
    title = "Rows of a sketch against the gradient's"
    columns = "rank", "basis", "mean ||S||²/||G||²", "mean ||S||/||G||", "theory"
    rows = [
        (
            str(row["rank"]),
            NAMES[row["kind"]],
            f"{row['mean_square']:.4f} ± {row['standard_error']:.4f}",
            f"{row['mean_norm']:.4f}",
            f"{row['theory_norm']:.4f}",
        )
        for row in result["rows"]
    ]
    console.print(make_table(columns, rows, title=title, left=["basis"]))
    console.print("In theory the mean of the squares is 1.\n")


# --- the KL is quadratic in the step


def measure_quadratic(options: Options, tick: Tick) -> dict[str, Any]:
    """Realised KL of random steps over the predicted ``alpha² q``, by predicted KL.

    On a random decoder in float32. The ratio goes to 1 as the step goes to 0.

    Returns:
        ``rows``: ``predicted`` (nats per token), mean ``ratio`` over repetitions, and
        the ``lowest`` and ``highest``.
    """
    ratios = np.array([_ratios(seed, BUDGETS, tick) for seed in range(options.seeds)])
    return {
        "rows": [
            {
                "predicted": budget,
                "ratio": float(ratio.mean()),
                "lowest": float(ratio.min()),
                "highest": float(ratio.max()),
            }
            for budget, ratio in zip(BUDGETS, ratios.T, strict=True)
        ]
    }


def _ratios(seed: int, budgets: Sequence[float], tick: Tick) -> list[float]:
    config = DecoderConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=32,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
    )
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    model = perturbed(sketch(model, 8, "_proj$", Basis(seed)))
    graph, probes, weights = nnx.split(model, Probe, ...)
    key = jax.random.key(seed)
    tokens = jax.random.randint(key, (4, 16), 0, config.vocab_size)
    mask = jnp.ones(tokens.size, bool)
    leaves, treedef = jax.tree.flatten(probes)
    keys = jax.random.split(key, len(leaves))
    step = treedef.unflatten(
        [jax.random.normal(k, p.shape) for k, p in zip(keys, leaves, strict=True)]
    )

    @jax.jit
    def hidden(probes: nnx.State) -> Array:
        time = jnp.arange(tokens.shape[1])[None]
        span = Span.causal(tokens.shape[1])
        out, _ = nnx.merge(graph, probes, weights)(tokens, time, span)
        return out.reshape(-1, out.shape[-1])

    q, before = predict_kl(hidden, model.logits, probes, step, mask)
    ratios = []
    for budget in budgets:
        alpha = jnp.sqrt(budget / q)
        after = hidden(jax.tree.map(lambda u, a=alpha: a * u, step))
        ratios.append(float(realised_kl(before, after, model.logits, mask)) / budget)
        tick()
    return ratios


def _show_quadratic(result: dict[str, Any], console: "Console") -> None:
    title = "KL of a step of a random decoder"
    columns = "alpha² q (nats per token)", "realised / predicted", "range"
    rows = [
        (
            f"{row['predicted']:.0e}",
            f"{row['ratio']:.3f}",
            f"{row['lowest']:.3f} to {row['highest']:.3f}",
        )
        for row in result["rows"]
    ]
    console.print(make_table(columns, rows, title=title))


# In the order they are printed.
SECTIONS = [
    Section(
        "reconstruction",
        lambda o: o.seeds * o.updates * len(PROJECTIONS),
        lambda o, tick: measure_reconstruction(
            o.ranks, seeds=o.seeds, rows=o.rows, updates=o.updates, tick=tick
        ),
        show_reconstruction,
    ),
    Section("norms", lambda o: len(o.ranks) * 2, measure_norms, _show_norms),
    Section(
        "quadratic",
        lambda o: o.seeds * len(BUDGETS),
        measure_quadratic,
        _show_quadratic,
    ),
    Section(
        "drift",
        lambda _: len(UPDATES) * len(ROUNDINGS),
        lambda _, tick: {"rows": measure_drifts(tick)},
        lambda result, console: show_drifts(result["rows"], console),
    ),
]


def _check_plot(path: Path) -> None:
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise ValueError(
            f"`--plot` must name a .png file in a directory that exists, got "
            f"{str(path)!r}."
        )


def _plot(results: dict[str, Any], path: Path) -> None:
    """Cosine against rank, and drift against merges: what was measured, and the law."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_reconstruction(left, results["reconstruction"]["rows"])
    plot_drifts(right, results["drift"]["rows"])
    figure.savefig(path, dpi=150)


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

"""How well sketches of real gradients reconstruct them: cosine by layer and rank.

The policy gradient of one batch is sketched with the first ``r`` rows of one basis, for
every rank and both kinds of entries. Whether a run draws its basis anew changes which
draw it is, and nothing else that one gradient could show.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from logra_jax.algorithm import alignment
from logra_jax.algorithm.basis import KINDS
from logra_jax.study.spectrum import measure_gradients
from logra_jax.study.trial import shapes_of
from logra_jax.training.assemble import enable_compile_cache
from logra_jax.training.checks import at_least, require
from logra_jax.training.schema import Config
from logra_jax.training.scoring import build_rewards

RANKS = (4, 16, 64, 256)
RESPONSES = 16


def measure_heat_map(
    config: Config,
    *,
    ranks: Sequence[int] = RANKS,
    responses: int = RESPONSES,
    on_phase: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Cosines of real gradients and what their sketches reconstruct.

    Args:
        config: its model, task, sampling and ``train.batch`` are used.
        ranks: of the sketches, rising; a layer's is at most its number of rows.
        responses: of the batch whose gradient is measured.
        on_phase: told what is being done.

    Returns:
        ``ranks``, ``responses``; ``cosines``: by kind of basis and path of the layers,
        a list by layer of lists by rank; ``means``: a row for each kind and rank.

    Raises:
        ValueError: see :func:`logra_jax.study.spectrum.measure_gradients`.
    """
    ranks = list(ranks)
    is_rising = ranks == sorted(set(ranks)) and bool(ranks)
    require(is_rising, "reconstruction.ranks", ranks, "be a rising list of integers")
    at_least("reconstruction.ranks", ranks[0], 1)
    at_least("reconstruction.responses", responses, 1)
    responses = min(responses, config.train.batch)
    enable_compile_cache(config)

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        on_phase(name)
        yield

    def measure(
        x: Float[Array, "tokens k"], g: Float[Array, "tokens d"], A: Float[Array, "r k"]
    ) -> dict[str, Array]:
        found = [alignment.measure_moments(x, g, A[:rank]) for rank in ranks]
        cosines = {
            f"cosine_{rank}": alignment.cosine(alignment.Moments.of(moments))
            for rank, moments in zip(ranks, found, strict=True)
        }
        return {"gradient": found[0]["gradient"], **cosines}

    cosines: dict[str, dict[str, list]] = {}
    means = []
    with build_rewards(config) as rewards:
        for kind in KINDS:
            rank = _ranks(config, ranks[-1])
            sketch = dataclasses.replace(config.sketch, rank=rank, basis=kind)
            found = measure_gradients(
                dataclasses.replace(config, sketch=sketch),
                rewards,
                measure,
                responses,
                phase,
            )
            by_path = {
                path: np.stack([values[f"cosine_{rank}"] for rank in ranks], -1)
                for path, values in found.layers.items()
            }
            cosines[kind] = {
                path: np.round(values.reshape(-1, len(ranks)), 5).tolist()
                for path, values in by_path.items()
            }
            for i, rank in enumerate(ranks):
                laws = {
                    path: alignment.expected_cosine(
                        found.shapes[path][1], min(rank, found.ranks[path]), kind
                    )
                    for path in by_path
                }
                means.append(_mean_row(kind, rank, i, by_path, laws))
    return {
        "ranks": ranks,
        "responses": responses,
        "cosines": cosines,
        "means": means,
    }


def _ranks(config: Config, rank: int) -> dict[str, int]:
    """The rank of each layer: keys and values have fewer rows than others."""
    shapes = shapes_of(config)
    rows = shapes.num_kv_heads * shapes.head_dim
    return {r"\b[kv]_proj$": min(rank, rows), ".*": rank}


def _mean_row(
    kind: str,
    rank: int,
    column: int,
    by_path: dict[str, np.ndarray],
    laws: dict[str, float],
) -> dict[str, Any]:
    """Over all layers of a rank; a layer whose gradient is zero is left out."""
    values, theory = [], []
    for path, cosines in by_path.items():
        found = cosines.reshape(-1, cosines.shape[-1])[:, column]
        found = found[np.isfinite(found)]
        values.append(found)
        theory.append(np.full(found.shape, laws[path]))
    flat = np.concatenate(values)
    return {
        "rank": rank,
        "basis": kind,
        "mean": float(flat.mean()),
        "low": float(flat.min()),
        "high": float(flat.max()),
        "theory": float(np.concatenate(theory).mean()),
    }

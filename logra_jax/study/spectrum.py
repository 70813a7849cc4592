"""`logra spectrum`: how wide must a sketch be for this model and task?

One batch is sampled and scored as a run would, and the policy gradient of some of its
responses is looked at, matrix by matrix: its singular values, and how much of it the
configured sketch keeps. Nothing is trained.

A gradient of ``n`` tokens has at most rank ``n``, and the spectrum of a larger batch is
wider: the ranks are those of the responses looked at.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from logra_jax.algorithm import alignment
from logra_jax.algorithm.capture import Measure
from logra_jax.rl.advantages import RunningMean
from logra_jax.rl.reward_pool import RewardPool
from logra_jax.training.assemble import (
    enable_compile_cache,
    load_task,
    loss_options_of,
    sampling_of,
    stream_key,
    to_batch,
    training_questions,
)
from logra_jax.training.display import Display
from logra_jax.training.monitor import build_measuring, ranks_of
from logra_jax.training.policy import load_policy, model_directory
from logra_jax.training.schema import Config
from logra_jax.training.scoring import build_rewards

ENERGIES = (0.5, 0.9, 0.95, 0.99)
RESPONSES = 32


def spectrum(
    config: Config,
    energies: Sequence[float] = ENERGIES,
    responses: int = RESPONSES,
    as_json: bool = False,
) -> int:
    """Measure, print, and return the exit code 0.

    Args:
        config: its model, sketch, task, sampling and ``train.batch`` are used.
        energies: shares of a gradient's squared norm, each in (0, 1).
        responses: of the batch whose gradient is measured, spread evenly over it.
        as_json: print one JSON object in place of a table.

    Raises:
        ValueError: a share outside (0, 1), a bad model or task, or a batch whose
            rewards are all alike, which has no gradient.
    """
    from rich.console import Console

    for share in energies:
        if not 0 < share < 1:
            raise ValueError(f"`--energy` must lie in (0, 1), got {share}.")
    if responses < 1:
        raise ValueError(f"`--responses` must be at least 1, got {responses}.")
    enable_compile_cache(config)
    # Standard error: standard output is for the result.
    with (
        Display(total_steps=0, console=Console(stderr=True)) as display,
        build_rewards(config) as rewards,
    ):
        result = measure_spectrum(
            config, rewards, energies, min(responses, config.train.batch), display.phase
        )
    if as_json:
        print(json.dumps(result))
    else:
        _print_table(result)
    return 0


def measure_spectrum(
    config: Config,
    rewards: RewardPool,
    energies: Sequence[float],
    responses: int,
    phase: Callable[[str], AbstractContextManager],
) -> dict[str, Any]:
    """What is printed: ``setup``, and an entry of ``kinds`` for each kind of layer.

    Args:
        config: of the run.
        rewards: scores the batch.
        energies: shares of a gradient's squared norm.
        responses: whose gradient is measured.
        phase: context that shows what is being done.

    Raises:
        ValueError: see :func:`spectrum`.
    """
    measured = measure_gradients(config, rewards, measure_layer, responses, phase)
    kind = config.sketch.basis
    return {
        "setup": {
            "model": config.model.path,
            "task": config.task.name,
            "batch": measured.batch,
            "reward": measured.reward,
            "responses": responses,
            "basis": kind,
        },
        "kinds": [
            summarise_layers(
                path,
                values,
                measured.shapes[path],
                measured.ranks[path],
                kind,
                energies,
            )
            for path, values in measured.layers.items()
        ],
    }


class Measured(NamedTuple):
    """What :func:`measure_gradients` finds; mappings are by dotted path of a layer."""

    layers: dict[str, dict[str, np.ndarray]]  # the measurements, (*layers, ...)
    shapes: dict[str, tuple[int, int]]  # (d, k) of each weight
    ranks: dict[str, int]  # of the sketches
    batch: int  # responses sampled
    reward: float  # their mean


def measure_gradients(
    config: Config,
    rewards: RewardPool,
    measure: Measure,
    responses: int,
    phase: Callable[[str], AbstractContextManager],
) -> Measured:
    """Sample and score one batch as a run would, and look at its policy gradient.

    Args:
        config: of the run.
        rewards: scores the batch.
        measure: what is measured of each layer; see :mod:`logra_jax.algorithm.capture`.
            Its ``gradient`` is the squared norm.
        responses: whose gradient is measured.
        phase: context that shows what is being done.

    Raises:
        ValueError: a bad model or task, or a batch without a gradient.
    """
    task = load_task(config)
    with phase("loading the model"):
        policy, weights = load_policy(config, task, model_directory(config))
    questions = training_questions(config, task, 0)
    with phase("rollout"):
        completions, texts = policy.respond(
            weights,
            questions,
            sampling_of(config),
            stream_key(config.seed, "rollout", 0),
        )
    with phase("reward"):
        scores = rewards.score(questions, texts)
    batch = to_batch(completions, scores.values)
    measuring = build_measuring(
        policy.graph,
        policy.probes,
        loss_options_of(config),
        measure,
        responses=responses,
    )
    with phase("measuring gradients"):
        found = measuring(weights, RunningMean.zero(), batch)
    reward = float(np.mean(scores.values))
    if not all(values["gradient"].any() for values in found.values()):
        raise ValueError(
            "`train.batch` must hold responses of unlike rewards, got "
            f"{len(questions)} of mean reward {reward:.3g}, which have no gradient; "
            "raise it, or choose a task that the model solves now and then."
        )
    shapes = {
        ".".join(map(str, path[:-1])): value.shape[:-3:-1]
        for path, value in nnx.to_flat_state(weights)
        if path[-1] == "kernel"
    }
    return Measured(found, shapes, ranks_of(policy.probes), len(questions), reward)


def measure_layer(
    x: Float[Array, "tokens k"], g: Float[Array, "tokens d"], A: Float[Array, "r k"]
) -> dict[str, Array]:
    """Moments and spectrum of one layer; a ``Measure`` of ``algorithm.capture``."""
    return {
        **alignment.measure_moments(x, g, A),
        "energies": gradient_energies(x, g),
    }


def gradient_energies(
    x: Float[Array, "tokens k"], g: Float[Array, "tokens d"]
) -> Float[Array, " n"]:
    """Squared singular values of ``gᵀ x``, falling; ``n = min(tokens, k, d)``.

    Eigenvalues of the smallest Gram matrix there is: exact to float32's precision of
    the largest one, which is what shares of energy need.
    """
    tokens, k = x.shape
    d = g.shape[1]
    if tokens < min(k, d):
        # gᵀ x = Q_g (R_g R_xᵀ) Q_xᵀ
        core = _dot(jnp.linalg.qr(g.T, "r"), jnp.linalg.qr(x.T, "r").T)
    else:
        core = _dot(g.T, x) if d <= k else _dot(x.T, g)
    return jnp.maximum(jnp.linalg.eigvalsh(_dot(core, core.T))[::-1], 0.0)


def smallest_rank(
    energies: Float[np.ndarray, "layers n"], share: float
) -> Int[np.ndarray, " layers"]:
    """How many directions hold a share of each gradient's energy; 0 for a zero one."""
    kept = np.cumsum(energies.astype(np.float64), -1)
    enough = kept >= share * kept[:, -1:]
    return np.where(kept[:, -1] > 0, enough.argmax(-1) + 1, 0)


def summarise_layers(
    path: str,
    values: dict[str, np.ndarray],
    shape: tuple[int, int],
    rank: int,
    kind: str,
    energies: Sequence[float],
) -> dict[str, Any]:
    """One row of the result, from the measurements of the layers at one path.

    Layers whose gradient is zero are left out; there must be others.

    Args:
        path: of the layers.
        values: Moments and ``energies``, (*layers, ...).
        shape: of each weight, (d, k).
        rank: of the configured sketch.
        kind: of its basis.
        energies: shares of energy.
    """
    spectra = values["energies"].reshape(-1, values["energies"].shape[-1])
    is_real = spectra[:, 0] > 0
    spectra = spectra[is_real]
    m = alignment.Moments.of(
        {name: values[name].reshape(-1)[is_real] for name in alignment.Moments._fields}
    )
    needed = {str(share): smallest_rank(spectra, share) for share in energies}
    cos_c = np.asarray(alignment.cos_c(m, rank, kind))
    return {
        "path": path,
        "layers": int(is_real.sum()),
        "shape": list(shape),
        "rank_for": {
            share: {"mean": float(r.mean()), "max": int(r.max())}
            for share, r in needed.items()
        },
        "stable_rank": float((spectra.sum(-1) / spectra[:, 0]).mean()),
        "d_eff": float(np.mean(alignment.effective_dimension(m))),
        "rank": rank,
        "cos_c": {"mean": float(cos_c.mean()), "min": float(cos_c.min())},
    }


def _print_table(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    setup, kinds = result["setup"], result["kinds"]
    console = Console(highlight=False)
    console.print(
        f"{setup['model']} on {setup['task']}: policy gradient of {setup['responses']} "
        f"responses of a batch of {setup['batch']}, mean reward {setup['reward']:.3f}"
    )
    shares = list(kinds[0]["rank_for"])
    heads = [f"{100 * float(share):g} %" for share in shares]
    needed = Table(
        box=box.SIMPLE_HEAD,
        title="Smallest rank that holds a share of the gradient's energy: mean over "
        "layers (maximum)",
        title_justify="left",
    )
    kept = Table(
        box=box.SIMPLE_HEAD,
        title=f"What the configured sketch keeps ({setup['basis']})",
        title_justify="left",
    )
    for table, columns in (
        (needed, heads),
        (kept, ("d×k", "stable rank", "d_eff", "rank", "cos_C")),
    ):
        table.add_column("projection", no_wrap=True)
        for head in columns:
            table.add_column(head, justify="right", no_wrap=True)
    for row in kinds:
        name = row["path"].rpartition(".")[2]
        ranks = (row["rank_for"][share] for share in shares)
        needed.add_row(
            name,
            *(f"{r['mean']:.1f} ({r['max']})" for r in ranks),
        )
        cos_c = row["cos_c"]
        kept.add_row(
            name,
            "{}×{}".format(*row["shape"]),
            f"{row['stable_rank']:.1f}",
            f"{row['d_eff']:.1f}",
            str(row["rank"]),
            f"{cos_c['mean']:.2f} ({cos_c['min']:.2f})",
        )
    console.print(needed)
    console.print(kept)
    console.print(
        "stable rank: ||G||² over its largest squared singular value. cos_C: a floor "
        "of what a step through the sketch gains, at equal KL, of what the dense step "
        "gains; mean over layers (minimum)."
    )


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

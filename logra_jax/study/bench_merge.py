"""`logra bench merge`: what landing an update costs, next to the step it ends.

The training step and the merge alone, in turns, on the same weights; the share is of
their medians. The step contains a merge too, measured as training measures it.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from logra_jax.algorithm.merge import merge, merge_measured
from logra_jax.algorithm.rounding import ROUNDINGS
from logra_jax.rollout.types import pack_prompts
from logra_jax.study.tables import make_table
from logra_jax.training.assemble import (
    build_controller,
    build_optimizer,
    build_training_step,
    load_task,
    repeat_to,
)
from logra_jax.training.display import Display
from logra_jax.training.policy import (
    Policy,
    basis_of,
    encode_question,
    load_policy,
    model_directory,
)
from logra_jax.training.schema import Config
from logra_jax.training.state import Batch, TrainState, initial_state

REPETITIONS = 5
_MIB = 2**20


def bench_merge(
    config: Config, tokens: int, as_json: bool, *, repetitions: int = REPETITIONS
) -> int:
    """Measure, print, and return the exit code 0.

    Args:
        config: its model, sketch, task and microbatch are used.
        tokens: at least so many positions go through the backward pass of a step.
        as_json: print one JSON object instead of a table.
        repetitions: timed calls of each, interleaved, after one that compiles.

    Raises:
        ValueError: ``tokens`` below 1, a bad model or task.
    """
    from rich.console import Console

    if tokens < 1:
        raise ValueError(f"`--tokens` must be at least 1, got {tokens}.")
    # Standard error: standard output is for the result.
    with Display(total_steps=0, console=Console(stderr=True)) as display:
        with display.phase("loading the model"):
            task, directory = load_task(config), model_directory(config)
            policy, weights = load_policy(config, task, directory)
            optimizer, controller = build_optimizer(config), build_controller(config)
            step = build_training_step(config, policy, optimizer, controller)
            state = initial_state(weights, policy.probes, optimizer, controller)
            del weights
        ids = [
            encode_question(policy.tokenizer, q, config.task.system_prompt)
            for q in task.train
        ]
        batch = _batch(config, policy, ids, tokens)
        with display.phase("timing steps and merges in turns"):
            updates = _random_updates(policy.probes)
            merges = _merges(config)
            memory = {
                name: run.lower(state.weights, updates).compile().memory_analysis()
                for name, run in merges.items()
            }
            merged = _weights_merged(state)
            seconds = _time_in_turns(step, merges, state, batch, updates, repetitions)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    result = {
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "cores": os.cpu_count(),
        "versions": {n: metadata.version(n) for n in ("logra-jax", "jax")},
        "model": directory.name,
        "weights": config.model.dtype,
        "rank": config.sketch.rank,
        "basis": config.sketch.basis,
        "tokens": int(batch.prompts.size + batch.completions.size),
        "weights_merged": merged,
        "seconds": seconds,
        "median_seconds": medians,
        "share_of_step": {n: m / medians["step"] for n, m in medians.items()},
        "temporaries_mib": {
            name: m.temp_size_in_bytes / _MIB for name, m in memory.items() if m
        },
        "repetitions": repetitions,
    }
    print(json.dumps(result)) if as_json else _print_table(result)
    return 0


def _batch(
    config: Config, policy: Policy, prompts: list[list[int]], tokens: int
) -> Batch:
    """Real prompts with random completions of full length, at least ``tokens`` long."""
    new, microbatch = config.rollout.max_new_tokens, config.train.microbatch
    engine = policy.engine

    def pack(count: int):
        return pack_prompts(
            repeat_to(prompts, count),
            prefix=engine.prefix,
            bucket=engine.bucket,
            pad_id=engine.pad_id,
        )

    width = pack(len(prompts)).tokens.shape[1] + new
    rows = -(-tokens // (width * microbatch)) * microbatch
    packed = pack(rows)
    rng = np.random.default_rng(0)
    completions = rng.integers(0, policy.tokenizer.vocab_size, (rows, new), np.int32)
    return Batch(
        prefix=jnp.asarray(packed.prefix),
        prompts=jnp.asarray(packed.tokens),
        prompt_lengths=jnp.asarray(packed.lengths),
        completions=jnp.asarray(completions),
        mask=jnp.ones((rows, new), bool),
        logprobs=jnp.full((rows, new), -10.0, jnp.float32),
        rewards=jnp.asarray(rng.integers(0, 2, rows), jnp.float32),
    )


def _random_updates(probes: nnx.State) -> nnx.State:
    """As large as those of the quickstart: rows of rms 1e-5."""
    leaves, treedef = jax.tree.flatten(probes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noise = [
        1e-5 * jax.random.normal(k, p.shape) for k, p in zip(keys, leaves, strict=True)
    ]
    return treedef.unflatten(noise)


def _weights_merged(state: TrainState) -> int:
    flat = dict(nnx.to_flat_state(state.weights))
    sketched = [path[:-1] for path in flat if path[-1] == "address"]
    return sum(flat[*layer, "kernel"].size for layer in sketched)


def _merges(config: Config) -> dict[str, Any]:
    """The merge with each rounding, and as the step runs it: measured."""
    basis = basis_of(config)

    def jit(run: Callable) -> Any:
        return jax.jit(run, donate_argnums=0)

    runs = {
        f"merge, {r}": jit(lambda w, u, r=r: merge(w, u, basis, rounding=r))
        for r in ROUNDINGS
    }
    runs["merge, stochastic, measured"] = jit(lambda w, u: merge_measured(w, u, basis))
    return runs


def _time_in_turns(
    step: Callable,
    merges: dict[str, Any],
    state: TrainState,
    batch: Batch,
    updates: nnx.State,
    repetitions: int,
) -> dict[str, list[float]]:
    """Seconds of each; the first call of each compiles and is not counted."""
    seconds: dict[str, list[float]] = {"step": [], **{name: [] for name in merges}}
    for _ in range(1 + repetitions):
        began = time.perf_counter()
        state, _, _ = jax.block_until_ready(step(state, batch))
        seconds["step"].append(time.perf_counter() - began)
        for name, run in merges.items():
            began = time.perf_counter()
            out = jax.block_until_ready(run(state.weights, updates))
            seconds[name].append(time.perf_counter() - began)
            weights = out[0] if isinstance(out, tuple) else out
            state = state._replace(weights=weights)
    return {name: values[1:] for name, values in seconds.items()}


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    console.print(
        f"{result['model']}, {result['weights']} weights, {result['tokens']} tokens a "
        f"step; {result['weights_merged'] / 1e6:.0f}M weights merged at rank "
        f"{result['rank']} ({result['basis']})\n"
        f"{result['device']}, {result['cores']} cores; {versions}"
    )
    columns = "", "median (s)", "share of the step", "temporaries (MiB)"
    memory = {name: f"{mib:.0f}" for name, mib in result["temporaries_mib"].items()}
    rows = [
        (
            name,
            f"{median:.3f}",
            f"{100 * result['share_of_step'][name]:.1f} %",
            memory.get(name, ""),
        )
        for name, median in result["median_seconds"].items()
    ]
    console.print(make_table(columns, rows))
    console.print(
        f"Medians of {result['repetitions']} interleaved repetitions; the step holds a "
        "measured merge of its own."
    )

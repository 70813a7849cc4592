"""`logra plan`: will it fit? The real training step, compiled for shapes alone.

No weights are loaded and no arrays made: the step of each kind of training is compiled,
and the compiler says what it holds; for as many virtual CPU devices as asked for, or,
with JAX's CUDA plugin, for GPUs that need not be there. A CPU widens bfloat16 products
to float32 and a GPU's compiler orders the program otherwise: their temporaries differ.
"""

import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from logra_jax.algorithm.target import tracing_for
from logra_jax.study.gpu_target import (
    COMPILER_OPTIONS,
    GPUS,
    check_flash,
    compile_only_devices,
)
from logra_jax.study.trial import (
    KINDS,
    Kind,
    Trial,
    Workload,
    build_trial,
    model_name,
    on_devices,
    shapes_of,
    virtual_devices,
    workload_of,
)
from logra_jax.training.display import Display
from logra_jax.training.memory import GIB, device_bytes
from logra_jax.training.schema import Config

# Memory of a device as its driver reports it, GiB.
CARDS = {
    "T4-16GB": 15.0,
    "TPU-v5e-16GB": 15.75,
    "RTX4080-16GB": 15.99,
    "L4-24GB": 22.5,
    "RTX4090-24GB": 23.99,
    "RTX3090-24GB": 24.0,
    "TPU-v6e-32GB": 31.25,
    "RTX5090-32GB": 31.84,
    "A100-40GB": 39.59,
    "L40S-48GB": 44.99,
    "H100-80GB": 79.65,
    "A100-80GB": 80.0,
    "TPU-v5p-95GB": 95.74,
    "H200-141GB": 140.4,
    "B200-180GB": 178.4,
}
# Of a card, for programs; the rest is the driver's, the allocator's and the kernels'.
USABLE = 0.92


class Memory(NamedTuple):
    """Of one device during one update, GiB; the parts add up to ``peak``.

    ``kv_cache`` is not among them: the local engine samples between updates, when
    activations and sketches are gone.
    """

    weights: float
    sketches: float  # gradient accumulators: of sketches, kernels or adapters
    optimizer: float
    reference: float  # weights that the policy is kept near
    activations: float  # and all other temporaries
    other: float  # batch, factors and metrics
    peak: float
    kv_cache: float
    rollout: float  # weights, optimizer state, reference and KV cache

    @property
    def needed(self) -> float:
        """By a run that trains and samples in turns."""
        return max(self.peak, self.rollout)


class Planned(NamedTuple):
    """One kind of training: what it holds, or where it failed."""

    memory: Memory | None
    lower_seconds: float
    compile_seconds: float
    error: str | None = None  # phase and message


def plan_command(
    config: Config,
    *,
    devices: int | None,
    tokens: int,
    card: str | None,
    gpu: str | None = None,
    as_json: bool,
) -> int:
    """Compile, print, and return the exit code: 0, or 1 if LoGRA does not compile.

    Args:
        config: its model, sketch, mesh, lengths and batch are used.
        devices: of the mesh; None takes the config's.
        tokens: of a microbatch, on each device.
        card: a name in ``CARDS``, or GiB; None is that of ``gpu``, or all of them.
        gpu: a name in ``GPUS``, which need not be here, to compile for; None is CPUs.
        as_json: print one JSON object instead of a table.

    Raises:
        ValueError: bad input, in one sentence.
    """
    gpu = None if gpu is None else find_gpu(gpu)
    cards = find_cards(gpu if card is None else card)
    result = make_plan(config, devices=devices, tokens=tokens, gpu=gpu)
    result["fits"] = _fits(result, cards)
    result["cards"] = cards
    if as_json:
        print(json.dumps(result))
    else:
        from logra_jax.study.plan_table import print_plan

        print_plan(result)
    return 0 if result["kinds"]["logra"]["error"] is None else 1


def find_cards(card: str | None) -> dict[str, float]:
    """Names and GiB: the card of that name or size, or all.

    Raises:
        ValueError: no such card, and no number.
    """
    if card is None:
        return CARDS
    name = _matching(card, CARDS)
    if name is not None:
        return {name: CARDS[name]}
    try:
        size = float(card.lower().removesuffix("gib").removesuffix("gb"))
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise ValueError(
            f"`--card` must be one of {', '.join(CARDS)} or a size in GiB, got "
            f"{card!r}."
        )
    return {f"{size:g} GiB": size}


def find_gpu(name: str) -> str:
    """The one of ``GPUS`` that is called so, or whose name begins so.

    Raises:
        ValueError: none, or several.
    """
    found = _matching(name, GPUS)
    if found is None:
        raise ValueError(
            f"`--gpu` must be one of {', '.join(GPUS)}, or how one of them alone "
            f"begins, got {name!r}."
        )
    return found


def _matching(start: str, names: Iterable[str]) -> str | None:
    """The name, in upper or lower case; or the only one that begins so."""
    by_lower = {name.lower(): name for name in names}
    for beginning in (f"{start.lower()}-", start.lower()):  # L4 is not L40S
        matches = [n for low, n in by_lower.items() if low.startswith(beginning)]
        if len(matches) == 1:
            return matches[0]
    return by_lower.get(start.lower())


def make_plan(
    config: Config,
    *,
    devices: int | None = None,
    tokens: int = 4096,
    gpu: str | None = None,
) -> dict[str, Any]:
    """What each kind of training holds on each device, for a JSON object.

    Args:
        config: its model, sketch, mesh, lengths and batch are used.
        devices: of the mesh; None takes the config's.
        tokens: of a microbatch, on each device.
        gpu: of ``GPUS``, to compile for; None compiles for CPUs.

    Raises:
        ValueError: bad shapes, too few tokens, more devices than can be had, no plugin
            that compiles for GPUs, or no cuDNN for `model.attention=flash`.
    """
    from rich.console import Console

    config = on_devices(config, devices)
    virtual_devices(1 if gpu else config.mesh.devices)
    target = gpu and compile_only_devices(GPUS[gpu], config.mesh.devices)
    if gpu and config.model.attention == "flash":
        check_flash()
    shapes = shapes_of(config)
    work = workload_of(config, tokens)
    kv_cache = kv_cache_bytes(config, work)
    planned = {}
    # Standard error: standard output is for the result.
    with Display(total_steps=0, console=Console(stderr=True)) as display:
        for kind in KINDS:
            with display.phase(f"compiling the step of {kind}"):
                planned[kind] = _plan_kind(config, kind, work, kv_cache, target)
    logra = planned["logra"].memory
    return {
        "model": model_name(config),
        "devices": config.mesh.devices,
        "mesh": dataclasses.asdict(config.mesh),
        "rank": config.sketch.rank,
        "dtype": config.model.dtype,
        "remat": config.model.remat,
        "peak_gib": None if logra is None else logra.peak,
        "kinds": {kind: _as_json(p) for kind, p in planned.items()},
        "workload": work.describe(),
        "shapes": {
            n: v for n, v in vars(shapes).items() if isinstance(v, int | float | bool)
        },
        "compiled_for": (target or jax.devices("cpu"))[0].device_kind,
        "versions": {n: metadata.version(n) for n in ("logra-jax", "jax", "jaxlib")},
    }


def plan_own(config: Config, *, tokens: int = 4096) -> dict[str, Any]:
    """What the config's own kind of training holds on each device, for a JSON object.

    Args:
        config: of the run, its mesh included.
        tokens: of a microbatch, on each device.

    Raises:
        ValueError: bad shapes, too few tokens, more devices than can be had.
    """
    virtual_devices(config.mesh.devices)
    work = workload_of(config, tokens)
    kind = config.optimizer.kind
    planned = _plan_kind(config, kind, work, kv_cache_bytes(config, work))
    return {
        "kind": kind,
        "workload": work.describe(),
        "compiled_for": jax.devices("cpu")[0].device_kind,
        **_as_json(planned),
    }


def _as_json(planned: Planned) -> dict[str, Any]:
    memory = planned.memory
    gib = {} if memory is None else memory._asdict() | {"needed": memory.needed}
    return {
        "gib": gib,
        "lower_seconds": planned.lower_seconds,
        "compile_seconds": planned.compile_seconds,
        "error": planned.error,
    }


def _fits(result: dict[str, Any], cards: dict[str, float]) -> dict[str, Any]:
    return {
        kind: {
            card: bool(part["gib"]) and part["gib"]["needed"] <= USABLE * size
            for card, size in cards.items()
        }
        for kind, part in result["kinds"].items()
    }


def _plan_kind(
    config: Config,
    kind: Kind,
    work: Workload,
    kv_cache: int,
    target: Sequence[Any] | None = None,
) -> Planned:
    """Compile one kind; an error is part of the answer, not the end of the plan."""
    phase, began, lowered_in = "tracing", time.perf_counter(), 0.0
    try:
        with tracing_for("gpu") if target else nullcontext():
            trial = build_trial(config, kind, work, is_abstract=True, devices=target)
            lowered = trial.step.lower(trial.state, trial.batch)
        lowered_in = time.perf_counter() - began
        phase, began = "compiling", time.perf_counter()
        compiled = lowered.compile(COMPILER_OPTIONS if target else None)
    except (RuntimeError, NotImplementedError) as error:  # the compiler's
        message = f"{phase}: {type(error).__name__}: {' '.join(str(error).split())}"
        seconds = time.perf_counter() - began
        return Planned(None, lowered_in, seconds, message[:500])
    seconds = time.perf_counter() - began
    return Planned(measure(trial, compiled, kv_cache), lowered_in, seconds)


def measure(trial: Trial, compiled: Any, kv_cache: int = 0) -> Memory:
    """What a compiled step holds on one device.

    Its peak is arguments + temporaries + outputs, less outputs that lie in arguments'
    buffers. ``memory_analysis`` speaks of one device: the program is that of a part.
    """
    analysis = compiled.memory_analysis()
    held = analysis.argument_size_in_bytes
    extra = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporary = analysis.temp_size_in_bytes
    weights = device_bytes(trial.state.weights)
    optimizer = device_bytes(trial.state.optimizer)
    sketches = min(trial.gradient_bytes, temporary)
    sizes = {
        "weights": weights,
        "sketches": sketches,
        "optimizer": optimizer,
        "reference": trial.reference_bytes,
        "activations": temporary - sketches,
        "other": held - weights - optimizer + extra,
        "peak": held + temporary + extra + trial.reference_bytes,
        "kv_cache": kv_cache,
        "rollout": weights + optimizer + trial.reference_bytes + kv_cache,
    }
    return Memory(**{name: size / GIB for name, size in sizes.items()})


def kv_cache_bytes(config: Config, work: Workload) -> int:
    """Of the local engine on one device, whose batch is `train.batch` rows."""
    shapes = shapes_of(config)
    dtype = jnp.dtype(config.model.activations or config.model.dtype)
    rows = work.batch // work.parts
    kv_heads = -(-shapes.num_kv_heads // config.mesh.tensor)
    cells = shapes.num_blocks * kv_heads * shapes.head_dim
    size = 2 * rows * (work.prompt + work.new) * cells * dtype.itemsize
    if shapes.delta is None:
        return size
    layers = shapes.num_blocks * shapes.delta_per_block
    return size + rows * layers * shapes.delta.state_bytes(dtype.itemsize)

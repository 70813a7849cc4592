"""`logra bench step`: a whole update by LoGRA, dense AdamW, LoRA and GaLore, in turns.

Same model, batch and rematerialisation, one run. Weights are random: they change no
time. The baselines take their optimizer's step as it is, without predicting its KL.
"""

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import jax
import optax

from logra_jax.algorithm.galore import GAP
from logra_jax.models.presets import PRESETS
from logra_jax.study.plan import GIB, measure
from logra_jax.study.tables import make_table
from logra_jax.study.trial import (
    Kind,
    Trial,
    Workload,
    build_trial,
    configure,
    model_name,
    shapes_of,
    workload_of,
)
from logra_jax.training.assemble import build_optimizer
from logra_jax.training.display import Display
from logra_jax.training.memory import device_bytes
from logra_jax.training.schema import Config

# In the order in which they need memory: a device's peak only ever rises.
METHODS: dict[str, Kind] = {
    "logra, no KL": "logra",
    "logra": "logra",
    "lora": "lora",
    "galore": "galore",
    "adamw": "adamw",
}
# Of a device's memory, that the states of all methods may fill at once.
_SHARE = 0.6


class _Run:
    """One method: compiled, and timed update by update.

    Attributes:
        result: what was measured, for a JSON object.
    """

    def __init__(self, name: str, build: Callable[[bool], Trial]):
        self.name, self._build = name, build
        self.result: dict[str, Any] = {"seconds": [], "error": None}
        self.bytes = (0, 0)  # kept from update to update, and on top of it within one
        self._compiled: Any = None
        self._trial: Trial | None = None

    def compile(self) -> None:
        """Compile for shapes alone."""
        trial = self._build(True)
        began = time.perf_counter()
        lowered = trial.step.lower(trial.state, trial.batch)
        lowered_at = time.perf_counter()
        self._compiled = lowered.compile()
        seconds = {
            "lower_seconds": lowered_at - began,
            "compile_seconds": time.perf_counter() - lowered_at,
        }
        memory = measure(trial, self._compiled)
        kept = device_bytes(trial.state)
        self.bytes = (kept, int(memory.peak * GIB) - kept)
        self.result |= seconds | {"planned_peak_gib": memory.peak}

    def start(self) -> None:
        """Make the state, and run an update that is not timed."""
        self._trial = self._build(False)
        self.update()
        self.result["seconds"].clear()

    def update(self) -> None:
        """One update, timed."""
        trial, self._trial = self._trial, None  # its state is donated
        assert trial is not None
        began = time.perf_counter()
        stepped = jax.block_until_ready(self._compiled(trial.state, trial.batch))
        self.result["seconds"].append(time.perf_counter() - began)
        self._trial = trial._replace(state=stepped[0])

    def stop(self) -> None:
        """Free the state."""
        self._trial = self._compiled = None


class Share(NamedTuple):
    """How the runs share a device."""

    in_turns: bool
    needed: int  # bytes, all states at once and the largest update
    memory: int  # bytes, of the device


def bench_step(
    config: Config,
    *,
    tokens: int,
    repeat: int,
    as_json: bool,
    beside: str | None = None,
) -> int:
    """Measure, print, and return the exit code 0.

    Args:
        config: its model, sketch, loss and lengths are used.
        tokens: of an update, all in one microbatch.
        repeat: timed updates of each method, after one that is not timed.
        as_json: print one JSON object instead of a table.
        beside: another model, a preset or `model.path`, whose update by LoGRA is timed
            too.

    Raises:
        ValueError: no repetition, too few tokens, a bad model.
    """
    from rich.console import Console

    if repeat < 1:
        raise ValueError(f"`--repeat` must be at least 1, got {repeat}.")
    work = workload_of(config, tokens, one_microbatch=True)
    runs = _runs(config, work)
    if beside is not None:
        runs.append(_run_beside(config, beside, work))
    # Standard error: standard output is for the result.
    with Display(total_steps=0, console=Console(stderr=True)) as display:
        for run in runs:
            with display.phase(f"compiling {run.name}"):
                _attempt(run, "compiling", run.compile)
        share = _share(runs)
        if share.in_turns:
            with display.phase("timing updates in turns"):
                _time_in_turns(runs, repeat)
        else:
            for run in runs:
                with display.phase(f"timing {run.name}"):
                    _time_alone(run, repeat)
    result = _summarise(config, work, runs, share, repeat)
    print(json.dumps(result)) if as_json else _print_table(result)
    return 0


def _runs(config: Config, work: Workload) -> list[_Run]:
    def build(name: str) -> Callable[[bool], Trial]:
        optimizer = _galore(config, work) if name == "galore" else None

        def build(is_abstract: bool) -> Trial:
            return build_trial(
                config,
                METHODS[name],
                work,
                is_abstract=is_abstract,
                predicts_kl=name == "logra",
                optimizer=optimizer,
            )

        return build

    return [_Run(name, build(name)) for name in METHODS]


def _run_beside(config: Config, beside: str, work: Workload) -> _Run:
    """LoGRA's update of another model; its batch has as many tokens."""
    key = "preset" if beside.lower() in PRESETS else "path"
    named = {"path": None, "preset": None, key: beside}
    model = dataclasses.replace(config.model, **named)
    config = dataclasses.replace(config, model=model)
    shapes_of(config)  # bad input is found before anything is compiled

    def build(is_abstract: bool) -> Trial:
        return build_trial(config, "logra", work, is_abstract=is_abstract)

    return _Run(model_name(config), build)


def _galore(config: Config, work: Workload) -> optax.GradientTransformation:
    """GaLore between two SVDs, which take a small share of its updates."""
    config = configure(config, "galore", work)
    rule = dataclasses.replace(config.optimizer, projection_gap=GAP)
    return build_optimizer(dataclasses.replace(config, optimizer=rule), first_count=1)


def _attempt(run: _Run, phase: str, action: Callable[[], None]) -> None:
    """Do it, or note the phase and the message: a baseline may not fit."""
    if run.result["error"] is not None:
        return
    try:
        action()
    except (RuntimeError, NotImplementedError) as error:  # out of memory, mostly
        message = " ".join(str(error).split())[:300]
        run.result["error"] = f"{phase}: {type(error).__name__}: {message}"
        run.stop()


def _share(runs: list[_Run]) -> Share:
    """In turns where all states fit at once, one run after the other elsewhere."""
    memory = device_memory()
    needed = sum(r.bytes[0] for r in runs) + max(r.bytes[1] for r in runs)
    return Share(needed < _SHARE * memory, needed, memory)


def device_memory() -> int:
    """Bytes that programs may use: of the first device, or of a CPU's machine."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _time_in_turns(runs: list[_Run], repeat: int) -> None:
    for run in runs:
        _attempt(run, "first update", run.start)
    for _ in range(repeat):
        for run in runs:
            _attempt(run, "update", run.update)
    for run in runs:
        run.stop()


def _time_alone(run: _Run, repeat: int) -> None:
    before = _peak_bytes()
    _attempt(run, "first update", run.start)
    for _ in range(repeat):
        _attempt(run, "update", run.update)
    peak = _peak_bytes()
    # The device's peak since the start: of this method if it has risen.
    if peak is not None and before is not None and peak > before:
        run.result["peak_bytes_in_use"] = peak
    run.stop()


def _peak_bytes() -> int | None:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def _summarise(
    config: Config, work: Workload, runs: list[_Run], share: Share, repeat: int
) -> dict[str, Any]:
    methods = {}
    for run in runs:
        seconds = run.result["seconds"]
        is_whole = run.result["error"] is None and len(seconds) == repeat
        median = statistics.median(seconds) if is_whole else None
        speed = None if median is None else work.tokens / median
        rates = {"median_seconds": median, "tokens_per_second": speed}
        methods[run.name] = run.result | rates
    full, rest = methods["logra"], methods["logra, no KL"]
    kl_ratio = _ratio(rest, full, in_turns=share.in_turns)
    return {
        "model": model_name(config),
        "weights": config.model.dtype,
        "activations": config.model.activations or config.model.dtype,
        "remat": config.model.remat,
        "rank": config.sketch.rank,
        "kl_share": config.kl.share,
        "kl_estimator": config.kl.estimator,
        "workload": work.describe(),
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "cores": os.cpu_count(),
        "versions": {
            n: metadata.version(n) for n in ("logra-jax", "jax", "jaxlib", "optax")
        },
        "in_turns": share.in_turns,
        "repetitions": repeat,
        "galore_svd_every": GAP,
        "methods": methods,
        "ratios": {
            f"logra/{name}": _ratio(full, methods[name], in_turns=share.in_turns)
            for name in methods
            if not name.startswith("logra")
        },
        "kl_share_of_step": None if kl_ratio is None else 1 - kl_ratio,
    }


def _ratio(
    ours: dict[str, Any], theirs: dict[str, Any], *, in_turns: bool
) -> float | None:
    """Of times; in turns, the median over rounds, whatever else the machine did."""
    if ours["median_seconds"] is None or theirs["median_seconds"] is None:
        return None
    if not in_turns:
        return ours["median_seconds"] / theirs["median_seconds"]
    pairs = zip(ours["seconds"], theirs["seconds"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    work = result["workload"]
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    console.print(
        f"{result['model']}, {result['weights']} weights, {result['activations']} "
        f"activations, remat {result['remat']}, rank {result['rank']}; {work['batch']} "
        f"x ({work['prompt']} + {work['new']}) = {work['tokens_per_device']} tokens an "
        f"update\n{result['device']}, {result['cores']} cores; {versions}"
    )
    columns = "", "median (s)", "tokens/s", "logra /", "compiled (s)", "peak (GiB)"
    rows = []
    for name, part in result["methods"].items():
        ratio = result["ratios"].get(f"logra/{name}")
        peak = part.get("peak_bytes_in_use")
        peak = part.get("planned_peak_gib") if peak is None else peak / GIB
        numbers = (
            (part["median_seconds"], ".3f"),
            (part["tokens_per_second"], ".0f"),
            (ratio, ".2f"),
            (part.get("compile_seconds"), ".1f"),
            (peak, ".2f"),
        )
        rows.append([name, *("" if n is None else f"{n:{f}}" for n, f in numbers)])
    console.print(make_table(columns, rows))
    for name, part in result["methods"].items():
        if part["error"]:
            console.print(f"{name} failed; {part['error']}")
    share, order = result["kl_share_of_step"], "one after the other"
    if share is not None:
        console.print(
            f"Predicted KL on {result['kl_share']:.3g} of the responses: "
            f"{100 * share:.1f} % of logra's step."
        )
    if result["in_turns"]:
        order = "in turns; ratios are medians over rounds"
    console.print(
        f"Medians of {result['repetitions']} updates of each, {order}. GaLore's SVDs, "
        f"every {result['galore_svd_every']} updates, are not among them."
    )

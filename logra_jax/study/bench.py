"""`logra bench rollout`: our engine against `transformers` `generate`, side by side.

Same CPU, weights, dtype, prompts, number of new tokens and sampling (temperature 1,
nothing filtered). Two figures: as a run samples, where each engine stops at its ends
of sequence and is paid for the tokens it sampled up to them; and at full length, where
ends of sequence are ignored and both sample exactly the same number of tokens.
"""

import dataclasses
import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from logra_jax.rollout.local import LocalEngine
from logra_jax.rollout.types import Sampling
from logra_jax.study.tables import make_table
from logra_jax.training.assemble import load_task, repeat_to
from logra_jax.training.policy import (
    Policy,
    encode_question,
    load_policy,
    model_directory,
)
from logra_jax.training.schema import Config

PROMPTS = 64
REPETITIONS = 5
# Calls before the timed ones: XLA compiles in the first, and in bfloat16 torch's second
# can still be five times slower than its third.
WARM_UPS = 3

Generate = Callable[[int], int]  # a seed -> tokens sampled, ends of sequence included


@dataclasses.dataclass(frozen=True)
class Timing:
    """One engine in one setting.

    Attributes:
        warm_up_seconds: of the untimed calls; the first one compiles.
        seconds: of each repetition after it.
        tokens: sampled in each repetition, ends of sequence included, padding not.
    """

    warm_up_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def tokens_per_second(self) -> float:
        """Median over the repetitions."""
        return statistics.median(map(_divide, self.tokens, self.seconds))

    def to_json(self) -> dict[str, Any]:
        """Raw timings and medians."""
        return dataclasses.asdict(self) | {
            "median_seconds": statistics.median(self.seconds),
            "median_tokens": statistics.median(self.tokens),
            "tokens_per_second": self.tokens_per_second,
        }


def bench_rollout(
    config: Config,
    as_json: bool,
    *,
    prompts: int = PROMPTS,
    repetitions: int = REPETITIONS,
) -> int:
    """Measure, print, and return the exit code 0.

    Args:
        config: its model, dtype, task and ``rollout.max_new_tokens`` are used.
        as_json: print one JSON object instead of a table.
        prompts: questions of the task's train split, in one batch.
        repetitions: timed calls of each engine, interleaved, after the warm-up.

    Raises:
        ValueError: `torch` or `transformers` is not installed, a bad model or task, a
            GPU (there is nothing to compare on it).
    """
    torch, transformers = _oracles()
    if jax.default_backend() != "cpu":
        raise ValueError(
            "`logra bench rollout` must run both engines on the CPU, got JAX on "
            f"{jax.default_backend()!r}; set JAX_PLATFORMS=cpu."
        )
    task, directory = load_task(config), model_directory(config)
    policy, weights = load_policy(config, task, directory)
    ids = [
        encode_question(policy.tokenizer, question, config.task.system_prompt)
        for question in repeat_to(task.train, prompts)
    ]
    new = config.rollout.max_new_tokens
    dtype = getattr(torch, config.model.dtype)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.eval()

    settings = {}
    for name, stops in (("sampled", True), ("full_length", False)):
        ours = _local(policy, weights, ids, new, stops)
        theirs = _transformers(torch, model, policy, ids, new, stops)
        settings[name] = _compare(ours, theirs, repetitions)
    result = {
        "setup": _setup(config, directory, policy, torch, ids, repetitions),
        **settings,
    }
    if as_json:
        print(json.dumps(result))
    else:
        _print_tables(result)
    return 0


def _oracles() -> tuple[Any, Any]:
    """`torch` and `transformers`, which the library itself never imports."""
    try:
        return importlib.import_module("torch"), importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"`{error.name}` must be installed to compare with, but is not; run "
            "`pip install 'logra-jax[dev]'`."
        ) from None


def _local(
    policy: Policy, weights: nnx.State, ids: list[list[int]], new: int, stops: bool
) -> Generate:
    engine = LocalEngine(
        policy.graph,
        max_positions=policy.engine.max_positions,
        eos_ids=policy.engine.eos_ids if stops else (),
        pad_id=policy.engine.pad_id,
        prefix=policy.engine.prefix,
        bucket=policy.engine.bucket,
    )
    full = nnx.merge_state(policy.probes, weights)

    def generate(seed: int) -> int:
        sampling = Sampling(max_new_tokens=new)
        completions = engine.generate(full, ids, sampling, jax.random.key(seed))
        return int(completions.lengths.sum())

    return generate


def _transformers(
    torch: Any, model: Any, policy: Policy, ids: list[list[int]], new: int, stops: bool
) -> Generate:
    """`generate` over prompts padded on the left, padded once and not at each call."""
    tokenizer = policy.tokenizer
    width = max(map(len, ids))
    tokens = torch.tensor([[tokenizer.pad_id] * (width - len(p)) + p for p in ids])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids])
    options = {
        "max_new_tokens": new,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,  # its default is 50
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": list(tokenizer.eos_ids) if stops else None,
    }
    generation_config = type(model.generation_config)(**options)

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        # In place of the checkpoint's, which `generate` fills None in from.
        model.generation_config = generation_config
        with torch.inference_mode():
            out = model.generate(input_ids=tokens, attention_mask=mask)
        return _sampled(out[:, width:].numpy(), tokenizer.eos_ids if stops else ())

    return generate


def _sampled(completions: np.ndarray, eos_ids: tuple[int, ...]) -> int:
    """Tokens up to and including each row's first end of sequence."""
    is_eos = np.isin(completions, eos_ids)
    lengths = np.where(is_eos.any(1), is_eos.argmax(1) + 1, completions.shape[1])
    return int(lengths.sum())


def _compare(ours: Generate, theirs: Generate, repetitions: int) -> dict[str, Any]:
    """Time both in turns, so that a machine that slows down slows down both."""
    engines = {"logra": ours, "transformers": theirs}
    warm_up = {
        name: tuple(_time(generate, seed)[0] for seed in range(WARM_UPS))
        for name, generate in engines.items()
    }
    calls: dict[str, list[tuple[float, int]]] = {name: [] for name in engines}
    for seed in range(WARM_UPS, WARM_UPS + repetitions):
        for name, generate in engines.items():
            calls[name].append(_time(generate, seed))
    timings = {
        name: Timing(warm_up[name], *zip(*calls[name], strict=True)) for name in engines
    }
    rates = {name: timing.tokens_per_second for name, timing in timings.items()}
    return {
        **{name: timing.to_json() for name, timing in timings.items()},
        "ratio": rates["logra"] / rates["transformers"],
    }


def _time(generate: Generate, seed: int) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = generate(seed)
    return time.perf_counter() - start, tokens


def _divide(tokens: int, seconds: float) -> float:
    return tokens / seconds


def _setup(
    config: Config,
    directory: Path,
    policy: Policy,
    torch: Any,
    ids: list[list[int]],
    repetitions: int,
) -> dict[str, Any]:
    packages = ("logra-jax", "jax", "torch", "transformers")
    shortest, longest = min(map(len, ids)), max(map(len, ids))
    return {
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in packages},
        "model": directory.name,
        "dtype": config.model.dtype,
        "logra_activations": config.model.activations or config.model.dtype,
        "prompts": len(ids),
        "prompt_tokens": [shortest, longest],
        "common_prefix_tokens": len(policy.engine.prefix),
        "max_new_tokens": config.rollout.max_new_tokens,
        "repetitions": repetitions,
    }


def _print_tables(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    setup = result["setup"]
    versions = ", ".join(f"{name} {v}" for name, v in setup["versions"].items())
    shortest, longest = setup["prompt_tokens"]
    console.print(
        f"{setup['model']}, {setup['dtype']}, {setup['prompts']} prompts of {shortest} "
        f"to {longest} tokens ({setup['common_prefix_tokens']} common to all), at most "
        f"{setup['max_new_tokens']} new tokens, temperature 1\n"
        f"{setup['device']}, {setup['cores']} cores; {versions}"
    )
    if setup["logra_activations"] != setup["dtype"]:
        console.print(
            f"logra's activations are {setup['logra_activations']}; its weights, and "
            f"all of transformers, are {setup['dtype']}."
        )
    titles = {
        "sampled": "Stopping at ends of sequence, as a run samples",
        "full_length": "At full length, ends of sequence ignored",
    }
    columns = "engine", "first call (s)", "median (s)", "tokens", "tokens/s"
    for name, title in titles.items():
        rows = [
            (
                engine,
                f"{timing['warm_up_seconds'][0]:.1f}",
                f"{timing['median_seconds']:.2f}",
                f"{timing['median_tokens']:.0f}",
                f"{timing['tokens_per_second']:.0f}",
            )
            for engine in ("logra", "transformers")
            for timing in [result[name][engine]]
        ]
        console.print(make_table(columns, rows, title=title, left=["engine"]))
        console.print(f"ratio of tokens/s: {result[name]['ratio']:.2f}\n")
    console.print(
        f"Medians of {setup['repetitions']} interleaved repetitions after {WARM_UPS} "
        "calls of each to warm up, of which the first compiles."
    )

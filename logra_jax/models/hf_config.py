"""Hugging Face's config.json as the shapes and options of a decoder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logra_jax.models.delta_net import DeltaShape
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.rotary import rope_scaling
from logra_jax.models.weight_files import read_json

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
)
_DELTA_SIZES = {  # and the fields of a DeltaShape
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv_width",
}


def read_config(directory: str | Path) -> DecoderConfig:
    """The shapes in ``config.json``.

    Raises:
        ValueError: no config.json, or an architecture or option that is not supported.
    """
    return decoder_config(read_json(Path(directory) / "config.json"))


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Hugging Face's ``config.json`` (a mapping) as a :class:`DecoderConfig`.

    Of a model that sees, the part that reads and writes text.

    Raises:
        ValueError: an architecture or option that is not supported, named.
    """
    config = text_config(config)
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"`model_type` must be one of {MODEL_TYPES}, got {kind!r}.")
    is_hybrid = kind.startswith("qwen3_5")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _refuse(config, kind, rope)
    missing = [name for name in _SIZES if config.get(name) is None]
    if missing:
        raise ValueError(f"`{missing[0]}` is missing from config.json.")
    heads = config["num_attention_heads"]
    max_positions = config.get("max_position_embeddings", 2048)
    has_bias = bool(config.get("attention_bias"))
    shapes = DecoderConfig(
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
        qkv_bias=kind == "qwen2" or has_bias,
        o_bias=kind != "qwen2" and has_bias,
        qk_norm=kind == "qwen3" or is_hybrid,
        rope_scaling=rope_scaling(rope, max_positions),
    )
    if not is_hybrid:
        return shapes
    return dataclasses.replace(shapes, **_hybrid(config, rope))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is about text: ``text_config``, where it has one.

    Tied embeddings and special tokens come from the whole where the part has none.
    """
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        return config
    shared = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")
    whole = {name: config[name] for name in shared if config.get(name) is not None}
    return whole | {k: v for k, v in part.items() if v is not None}


def _refuse(config: Mapping[str, Any], kind: str, rope: Mapping[str, Any]) -> None:
    """Raise a ValueError for the first option that is not supported."""
    is_hybrid = kind.startswith("qwen3_5")
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    allowed = {"full_attention"} | ({"linear_attention"} if is_hybrid else set())
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "layer_types": not set(config.get("layer_types") or ()) <= allowed,
        "partial_rotary_factor": not is_hybrid and rotated not in (None, 1),
        "quantization_config": bool(config.get("quantization_config")),
        "attn_output_gate": is_hybrid and config.get("attn_output_gate") is False,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"`{name}` of config.json is not supported for {kind}, got "
                f"{config.get(name, rope.get(name))!r}."
            )


def _hybrid(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """What only Qwen3.5 has, as fields of a :class:`DecoderConfig`."""
    layers = config["num_hidden_layers"]
    period = config.get("full_attention_interval", 4)
    usual = ["linear_attention"] * (period - 1) + ["full_attention"]
    kinds = list(config.get("layer_types") or (usual * layers)[:layers])
    between = kinds.index("full_attention") if "full_attention" in kinds else 0
    block = ["linear_attention"] * between + ["full_attention"]
    if between == 0 or kinds != block * (layers // len(block)):
        raise ValueError(
            "`layer_types` of config.json must repeat one block of layers of "
            f"linear_attention that ends with one of full_attention, got {kinds}."
        )
    missing = [name for name in _DELTA_SIZES if config.get(name) is None]
    if missing:
        raise ValueError(f"`{missing[0]}` is missing from config.json.")
    sizes = {field: config[name] for name, field in _DELTA_SIZES.items()}
    head_dim = config.get("head_dim") or 256
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return {
        "head_dim": head_dim,
        "rotary_dim": int(head_dim * (0.25 if rotated is None else rotated)),
        "gated_attention": True,
        "zero_centred_norms": True,
        "delta": DeltaShape(**sizes),
        "delta_per_block": between,
    }

"""Shapes of well-known models by name: enough to plan and to measure, not to sample.

A preset has no weights and no tokenizer.
"""

import dataclasses
import difflib

from logra_jax.models.delta_net import DeltaShape
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.rotary import RopeScaling


def _qwen(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **other
) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        **{"vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6} | other,
    )


def _qwen2(*sizes: int, tied: bool = True, **other) -> DecoderConfig:
    own = {"max_positions": 32768, "qkv_bias": True, "head_dim": sizes[0] // sizes[3]}
    return _qwen(*sizes, tie_embeddings=tied, **own | other)


# What the Math models of Qwen2.5 have of their own.
_MATH = {"max_positions": 4096, "rope_theta": 1e4}


def _qwen3(*sizes: int, tied: bool = True) -> DecoderConfig:
    own = {"max_positions": 40960, "qk_norm": True}
    return _qwen(*sizes, head_dim=128, tie_embeddings=tied, **own)


def _qwen3_5(*sizes: int, value_heads: int) -> DecoderConfig:
    return _qwen(
        *sizes,
        head_dim=256,
        vocab_size=248320,
        max_positions=262144,
        rope_theta=1e7,
        tie_embeddings=False,
        qk_norm=True,
        rotary_dim=64,
        gated_attention=True,
        zero_centred_norms=True,
        delta=DeltaShape(16, value_heads, 128, 128, conv_width=4),
        delta_per_block=3,
    )


def _smollm2(*sizes: int) -> DecoderConfig:
    return _qwen(
        *sizes,
        head_dim=64,
        vocab_size=49152,
        max_positions=8192,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
    )


# hidden, ffn, layers, heads, kv heads
PRESETS = {
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, tied=False, vocab_size=152064),
    "qwen2.5-math-1.5b": _qwen2(1536, 8960, 28, 12, 2, **_MATH),
    "qwen2.5-math-7b": _qwen2(
        3584, 18944, 28, 28, 4, tied=False, vocab_size=152064, **_MATH
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, tied=False),
    "qwen3.8-27b": _qwen3_5(5120, 17408, 64, 24, 4, value_heads=48),
    "llama-3.2-1b": dataclasses.replace(
        _smollm2(2048, 8192, 16, 32, 8),
        vocab_size=128256,
        max_positions=131072,
        rope_theta=5e5,
        rope_scaling=RopeScaling("llama3", 32.0, 8192, slow=1.0, fast=4.0),
    ),
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5),
}


def preset(name: str) -> DecoderConfig:
    """The shapes of the model called ``name``, upper or lower case.

    Raises:
        ValueError: there is no such preset; the nearest is named.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    near = difflib.get_close_matches(name.lower(), PRESETS, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else "or set `model.path`."
    raise ValueError(
        f"`model.preset` must be one of {', '.join(PRESETS)}, got {name!r}; {hint}"
    )

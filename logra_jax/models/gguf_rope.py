"""Rotary positions of a GGUF file as Hugging Face's config.json states them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from logra_jax.models.gguf_tokenizer import Metadata

# What Llama 3.1 and its successors use, by their publisher's config.json.
_LLAMA3_ORIGINAL, _LLAMA3_SLOW, _LLAMA3_FAST = 8192, 1.0, 4.0


def rope_parameters(
    metadata: Metadata, architecture: str, head_dim: int, tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """``rope_theta``, and ``rope_scaling`` where positions are stretched.

    Llama 3's stretching lies in GGUF files as what each frequency is divided by,
    ``rope_freqs.weight``: its parameters are found from that.

    Raises:
        ValueError: a stretching that cannot be represented.
    """
    theta = metadata.float32(f"{architecture}.rope.freq_base", 1e4)
    scaling = f"{architecture}.rope.scaling."
    kind = metadata.get(f"{scaling}type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"`{scaling}type` of {metadata.file} must be none, linear or yarn, got "
            f"{kind}; give the model as a Hugging Face directory."
        )
    found: dict[str, Any] = {"rope_theta": theta}
    divisors = tensors.get("rope_freqs.weight")
    if divisors is not None:
        if kind != "none":
            raise ValueError(
                f"`rope_freqs.weight` of {metadata.file} must not be there beside "
                f"`{scaling}type` ({kind}); both cannot be represented."
            )
        values = np.asarray(divisors.data, np.float64).reshape(-1)
        found["rope_scaling"] = _llama3(values, theta, head_dim, metadata.file)
    elif kind != "none":
        factor = metadata.float32(f"{scaling}factor")
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = metadata[f"{scaling}original_context_length"]
        found["rope_scaling"]["original_max_position_embeddings"] = original
        _check_yarn(metadata, scaling)
    return found


def _check_yarn(metadata: Metadata, scaling: str) -> None:
    usual = {
        "attn_factor": 1.0,
        "yarn_attn_factor": 1.0,
        "yarn_ext_factor": 1.0,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
    }
    for name, value in usual.items():
        if (got := metadata.get(f"{scaling}{name}", value)) != value:
            raise ValueError(
                f"`{scaling}{name}` of {metadata.file} must be {value}, got {got}; "
                "give the model as a Hugging Face directory."
            )


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What Llama 3.1 divides each of a head's head_dim / 2 frequencies by.

    1 for wavelengths below original / fast, ``factor`` above original / slow; between
    them 1 / ((1 - s) / factor + s), s = (original / wavelength - slow) / (fast - slow).
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_SLOW) / (
        _LLAMA3_FAST - _LLAMA3_SLOW
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3(
    divisors: np.ndarray, theta: float, head_dim: int, file: str
) -> dict[str, Any]:
    factor = float(divisors.max(initial=1.0))
    expected = llama3_divisors(theta, head_dim, factor)
    same = divisors.shape == expected.shape
    if not same or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            f"`rope_freqs.weight` of {file} must divide frequencies as Llama 3.1 does, "
            "got other divisors; give the model as a Hugging Face directory."
        )
    return {
        "rope_type": "llama3",
        "factor": float(str(np.float32(factor))),
        "low_freq_factor": _LLAMA3_SLOW,
        "high_freq_factor": _LLAMA3_FAST,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }

"""Rotary positions: how fast each pair of features turns, and turning them.

Stretched ones (:class:`RopeScaling`) make a model serve more positions than it was
pre-trained on.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# By the names of config.json.
SCALINGS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of rotary positions are stretched.

    ``linear`` divides all by ``factor`` (Chen et al., arXiv:2306.15595). ``yarn``
    leaves those that turn more than ``fast`` times within ``original_positions`` as
    they are, divides those that turn less than ``slow`` times, and blends in between
    along the features (Peng et al., arXiv:2309.00071). ``llama3`` blends along the
    number of turns.

    Attributes:
        kind: one of ``SCALINGS``.
        factor: of the stretch.
        original_positions: that the model was pre-trained on.
        slow: turns within them, at most, of a frequency that is divided.
        fast: turns within them, at least, of one that is not.
        magnitude: that rotated queries and keys are multiplied by.
        whole_features: yarn's blend begins and ends at whole features.
    """

    kind: str
    factor: float
    original_positions: int
    slow: float = 1.0
    fast: float = 1.0
    magnitude: float = 1.0
    whole_features: bool = True


def rope_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    """``rope_parameters``, or ``rope_scaling``, of config.json; None if not stretched.

    Args:
        rope: the mapping.
        max_positions: ``max_position_embeddings``.

    Raises:
        ValueError: a kind that is not supported, or a parameter that is missing.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise ValueError(
            f"`rope_scaling` of config.json must be one of {SCALINGS} or default, got "
            f"{kind!r}."
        )

    def number(name: str, default: float | None = None) -> float:
        value: Any = default if rope.get(name) is None else rope[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ValueError(
                f"`{name}` of {kind} rotary positions in config.json must be a "
                f"positive number, got {value!r}."
            )
        return float(value)

    original = int(number("original_max_position_embeddings", float(max_positions)))
    if kind == "linear":
        return RopeScaling(kind, number("factor"), original)
    if kind == "llama3":
        slow, fast = number("low_freq_factor"), number("high_freq_factor")
        return RopeScaling(kind, number("factor"), original, slow, fast)
    factor = number("factor", max_positions / original)
    return RopeScaling(
        kind,
        factor,
        original,
        slow=number("beta_slow", 1.0),
        fast=number("beta_fast", 32.0),
        magnitude=_yarn_magnitude(rope, factor),
        whole_features=bool(rope.get("truncate", True)),
    )


def _yarn_magnitude(rope: Mapping[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    scale, over = rope.get("mscale"), rope.get("mscale_all_dim")
    return magnitude(scale) / magnitude(over) if scale and over else magnitude(1.0)


def rotary_angles(
    positions: Int[Array, "rows time"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> Float[Array, "rows time half"]:
    """``position * theta^(-2i/head_dim)`` in radians, float32 (RoPE); or stretched."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    frequency = theta**-exponent
    if scaling is not None:
        share = _divided_share(frequency, theta, scaling)
        frequency = frequency * (share / scaling.factor + (1 - share))
    frequency = jnp.asarray(frequency, jnp.float32)
    return positions.astype(jnp.float32)[..., None] * frequency[None, None, :]


def _divided_share(
    frequency: np.ndarray, theta: float, scaling: RopeScaling
) -> np.ndarray:
    """Of each frequency, from 0 (left as it is) to 1 (divided by the factor)."""
    if scaling.kind == "linear":
        return np.ones_like(frequency)
    turns = scaling.original_positions * frequency / (2 * math.pi)
    if scaling.kind == "llama3":
        share = (scaling.fast - turns) / (scaling.fast - scaling.slow)
        return np.clip(share, 0.0, 1.0)
    half = len(frequency)

    def feature(turns: float) -> float:
        """The pair of features that turns so often, a real number."""
        ratio = scaling.original_positions / (2 * math.pi * turns)
        return half * math.log(ratio) / math.log(theta)

    first, last = feature(scaling.fast), feature(scaling.slow)
    if scaling.whole_features:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    share = (np.arange(half) - first) / max(last - first, 1e-3)
    return np.clip(share, 0.0, 1.0).astype(np.float32)


def rotate(
    x: Float[Array, "batch time heads head_dim"],
    angles: Float[Array, "_ time half"],
    magnitude: float = 1.0,
) -> Float[Array, "batch time heads head_dim"]:
    """Rotate half-split pairs (Hugging Face's layout) by ``angles``.

    Of a head's first features, two for each angle; the rest stay as they are.
    """
    rotated_dim = 2 * angles.shape[-1]
    x, rest = x[..., :rotated_dim], x[..., rotated_dim:]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    rotated = jnp.concatenate(turned, -1).astype(x.dtype)
    return jnp.concatenate([rotated, rest], -1) if rest.shape[-1] else rotated

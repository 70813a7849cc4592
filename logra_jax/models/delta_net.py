"""Gated DeltaNet, Qwen3.5's linear attention: a state per head in place of a cache.

Each value head carries a matrix ``S`` (key_dim, value_dim), float32, which every token
decays, corrects towards its own value and reads (Yang, Kautz & Hatamizadeh 2024,
"Gated Delta Networks", arXiv 2412.06464):

    S ← exp(g) S,    S ← S + β k (v − Sᵀ k)ᵀ,    o = Sᵀ q.

Many tokens go in chunks (:mod:`logra_jax.models.delta_rule`). Tokens stand in
*segments*, runs of neighbours that see nothing of each other and all start from the
same past: packed responses after a common prefix, or padding.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from logra_jax.models.delta_rule import delta_rule

# Inputs that are convolved at once, whole channels of them: a backward pass holds seven
# times as many in float32, 112 MiB.
_PIECE = 2**22


class DeltaState(NamedTuple):
    """What a run of tokens leaves to the tokens after it; batch 1 serves all rows."""

    memory: Float32[Array, "*layers batch v_heads key_dim value_dim"]
    # The last (conv width − 1) inputs of the convolution, the oldest first.
    tail: Float[Array, "*layers batch taps channels"]


@dataclasses.dataclass(frozen=True)
class DeltaShape:
    """Heads and features of a Gated DeltaNet.

    Raises:
        ValueError: the value heads are not a multiple of the key heads.
    """

    key_heads: int
    value_heads: int  # consecutive ones share a key head
    key_dim: int  # features of a head, of queries too
    value_dim: int
    conv_width: int

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"`value_heads` must be a multiple of the {self.key_heads} key heads, "
                f"got {self.value_heads}; choose one."
            )

    @property
    def keys(self) -> int:
        """Features of all keys, which the queries have too."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def state_bytes(self, itemsize: int) -> int:
        """Of one layer's :class:`DeltaState` of a row; of activations' ``itemsize``."""
        memory = 4 * self.value_heads * self.key_dim * self.value_dim
        return memory + (self.conv_width - 1) * self.channels * itemsize


class DepthwiseConv(nnx.Module):
    """Causal convolution of each channel by itself, then silu.

    Args:
        channels: inputs, and as many outputs.
        width: tokens that an output depends on: its own and those just before.
        dtype: of the weight.
        rngs: for a random weight.
    """

    def __init__(self, channels: int, width: int, dtype: DTypeLike, rngs: nnx.Rngs):
        bound = width**-0.5
        self.weight = nnx.Param(
            jax.random.uniform(
                rngs.params(), (channels, 1, width), dtype, minval=-bound, maxval=bound
            )
        )

    def __call__(
        self,
        x: Float[Array, "batch time channels"],
        position: Int[Array, "_ time"],
        tail: Float[Array, "_ taps channels"] | None,
    ) -> Float[Array, "batch time channels"]:
        """The convolution; nothing is kept for the backward pass but ``x``.

        Args:
            x: inputs.
            position: of each token in its segment.
            tail: inputs just before each segment, the oldest first; None for zeros.
        """
        weight = self.weight[...]
        channels = x.shape[-1]
        least = -(-x.size // _PIECE)
        pieces = next(n for n in range(max(1, least), 1 + channels) if not channels % n)
        if pieces == 1:
            return _convolve(weight, x, position, tail)

        def split(a: Array) -> Array:
            return jnp.moveaxis(a.reshape(*a.shape[:-1], pieces, -1), -2, 0)

        weights = weight.reshape(pieces, -1, *weight.shape[1:])
        out = lax.map(
            lambda piece: _convolve(piece[0], piece[1], position, piece[2]),
            (weights, *jax.tree.map(split, (x, tail))),
        )
        return jnp.moveaxis(out, 0, -2).reshape(x.shape)


@jax.checkpoint
def _convolve(weight: Array, x: Array, position: Array, tail: Array | None) -> Array:
    width = weight.shape[-1]
    out = jnp.zeros(x.shape, jnp.float32)
    for lag in range(width):
        tap = weight[:, 0, width - 1 - lag].astype(jnp.float32)
        out += tap[None, None] * _before(x, position, tail, lag).astype(jnp.float32)
    return jax.nn.silu(out.astype(x.dtype))


def _before(x: Array, position: Array, tail: Array | None, lag: int) -> Array:
    """The input ``lag`` tokens before each token: of its segment or of the past."""
    time = x.shape[1]
    found = jnp.pad(x, ((0, 0), (lag, 0), (0, 0)))[:, :time]
    missing = jnp.zeros((1, 1, 1), x.dtype)
    if tail is not None:
        # What a token at position p lacks is the (lag − p)-th input from the end.
        for p, row in enumerate(range(tail.shape[1] - lag, tail.shape[1])):
            own = tail[:, row : row + 1].astype(x.dtype)
            missing = jnp.where(position[:, :, None] == p, own, missing)
    return jnp.where(position[:, :, None] >= lag, found, missing)


def _next_tail(x: Array, position: Array, tail: Array | None, taps: int) -> Array:
    """The last ``taps`` inputs of the segment of each row's last token."""
    last = x[:, -taps:]
    rows = [
        _before(last, position[:, -last.shape[1] :], tail, lag)[:, -1:]
        for lag in reversed(range(taps))
    ]
    return jnp.concatenate([x[:, :0], *rows], axis=1)


class GatedNorm(nnx.Module):
    """``w · o / rms(o) · silu(z)``, the statistics and the gate in float32.

    Args:
        size: features.
        epsilon: added to the mean square.
        dtype: of the weight.
    """

    def __init__(self, size: int, epsilon: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(size, dtype))
        self.epsilon = epsilon

    def __call__(
        self, o: Float[Array, "*tokens features"], z: Float[Array, "*tokens features"]
    ) -> Float[Array, "*tokens features"]:
        """The normalised and gated ``o``, in its dtype; nothing else is kept."""
        return _gate(self.scale[...], o, z, self.epsilon)


@functools.partial(jax.checkpoint, static_argnums=3)
def _gate(scale: Array, o: Array, z: Array, epsilon: float) -> Array:
    wide = o.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normal = (wide * lax.rsqrt(square + epsilon)).astype(o.dtype)
    scale = jnp.expand_dims(scale, tuple(range(o.ndim - 1)))
    return (scale * normal * jax.nn.silu(z.astype(jnp.float32))).astype(o.dtype)


class GatedDeltaNet(nnx.Module):
    """The token mixer; attribute names are Hugging Face's.

    Args:
        hidden_size: features of a token.
        shape: heads.
        epsilon: of the gated norm.
        dtype: of the weights, but for ``A_log``.
        rngs: for random weights.
    """

    def __init__(
        self,
        hidden_size: int,
        shape: DeltaShape,
        epsilon: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        def linear(d_in: int, d_out: int) -> nnx.Linear:
            return nnx.Linear(d_in, d_out, use_bias=False, param_dtype=dtype, rngs=rngs)

        heads = shape.value_heads
        self.in_proj_qkv = linear(hidden_size, shape.channels)
        self.in_proj_z = linear(hidden_size, shape.values)
        self.in_proj_b = linear(hidden_size, heads)
        self.in_proj_a = linear(hidden_size, heads)
        self.conv1d = DepthwiseConv(shape.channels, shape.conv_width, dtype, rngs)
        decay = jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16)
        self.A_log = nnx.Param(jnp.log(decay))  # float32, as servers hold it
        self.dt_bias = nnx.Param(jnp.ones(heads, dtype))
        self.norm = GatedNorm(shape.value_dim, epsilon, dtype)
        self.out_proj = linear(shape.values, hidden_size)
        self.shape = shape

    def __call__(
        self,
        h: Float[Array, "batch time features"],
        segments: Int[Array, "_ time"],
        past: DeltaState | None = None,
    ) -> tuple[Float[Array, "batch time features"], DeltaState]:
        """The mixed tokens, and what the last one of each row leaves.

        Args:
            h: hidden states.
            segments: a number for each token; neighbours of one number are a segment.
                One row serves the whole batch.
            past: what every segment starts from, of batch 1 if it is the same for all
                rows; None for nothing.

        Returns:
            The mixed tokens in ``h``'s dtype, and the state after each row's last
            token: its segment's, with what that had from ``past``.
        """
        s = self.shape
        start = segment_starts(segments)
        position = jnp.arange(h.shape[1])[None] - start
        tail = None if past is None else past.tail
        qkv = self.in_proj_qkv(h)
        mixed = self.conv1d(qkv, position, tail)
        q, k, v = jnp.split(mixed, [s.keys, 2 * s.keys], axis=-1)
        out, memory = delta_rule(
            q.reshape(*h.shape[:2], s.key_heads, s.key_dim),
            k.reshape(*h.shape[:2], s.key_heads, s.key_dim),
            v.reshape(*h.shape[:2], s.value_heads, s.value_dim),
            self._log_decay(self.in_proj_a(h)),
            jax.nn.sigmoid(self.in_proj_b(h).astype(jnp.float32)),
            start,
            None if past is None else past.memory,
        )
        z = self.in_proj_z(h).reshape(out.shape)
        out = self.norm(out, z).reshape(*h.shape[:2], s.values)
        tail = _next_tail(qkv, position, tail, s.conv_width - 1)
        return self.out_proj(out), DeltaState(memory, tail)

    def _log_decay(self, a: Array) -> Array:
        """``g = −exp(A_log) softplus(a + dt_bias)``, float32, of each value head."""
        rate = jnp.exp(self.A_log[...].astype(jnp.float32))[None, None]
        bias = self.dt_bias[...].astype(jnp.float32)[None, None]
        return -rate * jax.nn.softplus(a.astype(jnp.float32) + bias)


def segment_starts(segments: Int[Array, "rows time"]) -> Int[Array, "rows time"]:
    """Where the segment of each token starts."""
    index = jnp.arange(segments.shape[1])[None]
    is_first = jnp.pad(
        segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True
    )
    return lax.cummax(jnp.where(is_first, index, 0), axis=1)

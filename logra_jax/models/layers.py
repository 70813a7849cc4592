"""The layers of a decoder: attention or a Gated DeltaNet, an MLP, norms.

Attribute names are Hugging Face's.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from logra_jax.algorithm.parallel import enter, split_of
from logra_jax.models.attention import KV, attend
from logra_jax.models.delta_net import DeltaShape, GatedDeltaNet
from logra_jax.models.rotary import RopeScaling, rotate

# Entries of the MLP's features in a piece of the tokens: 64 MiB of float32.
_PIECE = 2**24


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shapes and options of a decoder; sizes in features, heads, tokens.

    Layers come in equal blocks, whose last one has attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    o_bias: bool = False  # Llama's and Qwen3's `attention_bias`
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # features of a head that are rotated, the first
    gated_attention: bool = False  # Qwen3.5
    zero_centred_norms: bool = False  # Qwen3.5: norms are kept less 1
    delta: DeltaShape | None = None  # of Qwen3.5's Gated DeltaNet layers
    delta_per_block: int = 0  # of them before each layer of attention

    @property
    def num_blocks(self) -> int:
        """Of layers: as many as there are layers of attention."""
        return self.num_layers // (self.delta_per_block + 1)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions over past and present tokens."""

    def __init__(self, c: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(d_in: int, d_out: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(d_in, d_out, use_bias=bias, param_dtype=dtype, rngs=rngs)

        query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        gates = 2 if c.gated_attention else 1  # after each head's queries
        self.q_proj = linear(c.hidden_size, gates * query, c.qkv_bias)
        self.k_proj = linear(c.hidden_size, kv, c.qkv_bias)
        self.v_proj = linear(c.hidden_size, kv, c.qkv_bias)
        self.o_proj = linear(query, c.hidden_size, c.o_bias)
        if c.qk_norm:
            self.q_norm = norm(c.head_dim, c, dtype, rngs)
            self.k_norm = norm(c.head_dim, c, dtype, rngs)
        self.config = c

    def __call__(self, h, rotary, span, past, attend=attend):
        """Attention output, and the keys and values of the present tokens."""
        c = self.config
        heads = (*h.shape[:2], -1, c.head_dim)
        h = enter(h, split_of(self.q_proj))
        q, gate = self.q_proj(h), None
        if c.gated_attention:
            q, gate = jnp.split(q.reshape(*h.shape[:2], -1, 2 * c.head_dim), 2, -1)
        q = q.reshape(heads)
        k = self.k_proj(h).reshape(heads)
        v = self.v_proj(h).reshape(heads)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        magnitude = c.rope_scaling.magnitude if c.rope_scaling else 1.0
        present = KV(rotate(k, rotary, magnitude), v)
        q = rotate(q, rotary, magnitude)
        out = attend(q, span, ((present, span), *past))
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(*h.shape[:2], -1)), present


class MLP(nnx.Module):
    """SwiGLU, of a piece of the tokens at a time where that saves memory.

    Args:
        c: shapes.
        dtype: of the weights.
        in_pieces: in the backward pass too, which then computes each piece again.
        rngs: for random weights.
    """

    def __init__(
        self, c: DecoderConfig, dtype: DTypeLike, in_pieces: bool, rngs: nnx.Rngs
    ):
        def linear(d_in: int, d_out: int) -> nnx.Linear:
            return nnx.Linear(d_in, d_out, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.gate_proj = linear(c.hidden_size, c.intermediate_size)
        self.up_proj = linear(c.hidden_size, c.intermediate_size)
        self.down_proj = linear(c.intermediate_size, c.hidden_size)
        self.in_pieces = in_pieces

    def __call__(self, h):
        """``down(silu(gate(h)) * up(h))``."""
        layers = self.gate_proj, self.up_proj, self.down_proj
        h = enter(h, split_of(layers[0]))
        if split_of(layers[0]) or not all(
            getattr(x, "takes_pieces", True) for x in layers
        ):
            return self._activate(h)  # on a mesh each piece would gather anew
        limit = _PIECE // self.gate_proj.kernel.shape[-1]
        if h.size // h.shape[-1] <= limit:
            return self._activate(h)
        if self.in_pieces:
            return map_pieces(jax.checkpoint(self._activate), h, limit)
        if getattr(layers[0], "plain", False):
            # nothing is kept, but forward mode holds all terms of a sum together
            return map_pieces(self._activate, h, limit)
        return self._activate(h)

    def _activate(self, h):
        return self.down_proj(jax.nn.silu(self.gate_proj(h)) * self.up_proj(h))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, c: DecoderConfig, dtype: DTypeLike, remat: str, rngs: nnx.Rngs):
        self.input_layernorm = norm(c.hidden_size, c, dtype, rngs)
        self.self_attn = Attention(c, dtype, rngs)
        self.post_attention_layernorm = norm(c.hidden_size, c, dtype, rngs)
        self.mlp = MLP(c, dtype, remat in ("layer", "offload"), rngs)

    def __call__(self, h, rotary, span, past, attend=attend):
        """The next hidden states, and the keys and values of the present tokens."""
        out, present = self.self_attn(
            self.input_layernorm(h), rotary, span, past, attend
        )
        h = h + out
        return h + self.mlp(self.post_attention_layernorm(h)), present


class DeltaLayer(nnx.Module):
    """The same, with a Gated DeltaNet in place of attention."""

    def __init__(self, c: DecoderConfig, dtype: DTypeLike, remat: str, rngs: nnx.Rngs):
        assert c.delta is not None
        self.input_layernorm = norm(c.hidden_size, c, dtype, rngs)
        self.linear_attn = GatedDeltaNet(
            c.hidden_size, c.delta, c.rms_norm_eps, dtype, rngs
        )
        self.post_attention_layernorm = norm(c.hidden_size, c, dtype, rngs)
        self.mlp = MLP(c, dtype, remat in ("layer", "offload"), rngs)

    def __call__(self, h, segments, past):
        """The next hidden states, and what the tokens leave to those after them."""
        out, state = self.linear_attn(self.input_layernorm(h), segments, past)
        h = h + out
        return h + self.mlp(self.post_attention_layernorm(h)), state


class ZeroCentredRMSNorm(nnx.Module):
    """``x / rms(x) * (1 + scale)``, computed in float32 (Qwen3.5)."""

    def __init__(self, size: int, epsilon: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.zeros((size,), dtype))
        self.epsilon = epsilon

    def __call__(self, x):
        """Of each vector of features; ``x``'s dtype."""
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(mean + self.epsilon)
        scale = 1 + self.scale[...].astype(jnp.float32)
        return (wide * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def norm(
    size: int, c: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.RMSNorm | ZeroCentredRMSNorm:
    """A norm of the kind that the model has."""
    if c.zero_centred_norms:
        return ZeroCentredRMSNorm(size, c.rms_norm_eps, dtype)
    return nnx.RMSNorm(
        size,
        epsilon=c.rms_norm_eps,
        param_dtype=dtype,
        use_fast_variance=False,
        rngs=rngs,
    )


def map_pieces(
    f: Callable[[Array], Array], h: Float[Array, "*rows features"], limit: int
) -> Array:
    """``f(h)`` of a function of single tokens, at most ``limit`` of them at a time."""
    tokens = h.reshape(-1, h.shape[-1])
    pieces = -(-len(tokens) // max(1, limit))
    size = -(-len(tokens) // pieces)
    padded = jnp.pad(tokens, ((0, pieces * size - len(tokens)), (0, 0)))
    found = jax.lax.map(f, padded.reshape(pieces, size, -1))
    return found.reshape(pieces * size, -1)[: len(tokens)].reshape(*h.shape[:-1], -1)

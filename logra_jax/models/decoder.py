"""One decoder family: Llama, Qwen2 and Qwen3, its layers stacked and scanned.

Attribute names are Hugging Face's, so that a path in the model is a tensor name once
the layer index is put back (:meth:`Decoder.tensor_name`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from logra_jax.algorithm.parallel import enter, gather_rows, parts, split_of
from logra_jax.models.attention import (
    KV,
    Span,
    attend,
    check_attention,
)
from logra_jax.models.head import logits_of
from logra_jax.models.rotary import RopeScaling, rotary_angles, rotate
from logra_jax.models.stack import REMAT, scan_layers

# Entries of the MLP's features in a piece of the tokens: 64 MiB of float32.
_PIECE = 2**24

# Where a decoder keeps its layers, each a stack along axis 0.
STACKS = ("layers",)

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shapes and options of a decoder; sizes in features, heads, tokens."""

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
    rope_scaling: RopeScaling | None = None


class Past(NamedTuple):
    """Tokens computed earlier. Batch 1 means shared by all rows, computed once."""

    kv: KV
    span: Span


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions over past and present tokens."""

    def __init__(self, c: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(d_in: int, d_out: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(d_in, d_out, use_bias=bias, param_dtype=dtype, rngs=rngs)

        query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = linear(c.hidden_size, query, c.qkv_bias)
        self.k_proj = linear(c.hidden_size, kv, c.qkv_bias)
        self.v_proj = linear(c.hidden_size, kv, c.qkv_bias)
        self.o_proj = linear(query, c.hidden_size, False)
        if c.qk_norm:
            self.q_norm = _norm(c.head_dim, c, dtype, rngs)
            self.k_norm = _norm(c.head_dim, c, dtype, rngs)
        self.config = c

    def __call__(self, h, rotary, span, past, attend=attend):
        """Attention output, and the keys and values of the present tokens."""
        c = self.config
        heads = (*h.shape[:2], -1, c.head_dim)
        h = enter(h, split_of(self.q_proj))
        q = self.q_proj(h).reshape(heads)
        k = self.k_proj(h).reshape(heads)
        v = self.v_proj(h).reshape(heads)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        magnitude = c.rope_scaling.magnitude if c.rope_scaling else 1.0
        present = KV(rotate(k, rotary, magnitude), v)
        q = rotate(q, rotary, magnitude)
        out = attend(q, span, ((present, span), *past))
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
        self.input_layernorm = _norm(c.hidden_size, c, dtype, rngs)
        self.self_attn = Attention(c, dtype, rngs)
        self.post_attention_layernorm = _norm(c.hidden_size, c, dtype, rngs)
        self.mlp = MLP(c, dtype, remat in ("layer", "offload"), rngs)

    def __call__(self, h, rotary, span, past, attend=attend):
        """The next hidden states, and the keys and values of the present tokens."""
        out, present = self.self_attn(
            self.input_layernorm(h), rotary, span, past, attend
        )
        h = h + out
        return h + self.mlp(self.post_attention_layernorm(h)), present


class Decoder(nnx.Module):
    """A causal language model; ``layers`` holds every layer, stacked along axis 0.

    Args:
        config: shapes and options.
        dtype: of the weights.
        activations: dtype of the activations, the weights' by default.
        attention: how scores are held, one of ``ATTENTION``: see :func:`attend`.
        remat: what each layer keeps for the backward pass: ``"none"`` keeps everything
            (before jax 0.12 the scores of chunked attention too), ``"dots"`` the
            products with weights, ``"layer"`` only the layer's input, ``"offload"``
            that input in the host's memory.
        rngs: for random weights; build under ``nnx.eval_shape`` to load real ones.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        activations: DTypeLike | None = None,
        attention: str = "auto",
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        check_attention("attention", attention)
        if remat not in REMAT:
            raise ValueError(f"`remat` must be one of {REMAT}, got {remat!r}.")
        activations = jnp.dtype(dtype if activations is None else activations)
        if jnp.promote_types(activations, dtype) != activations:
            raise ValueError(
                f"`activations` must be at least as wide as the weights "
                f"({jnp.dtype(dtype).name}), got {activations.name}; leave it out."
            )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return DecoderLayer(config, dtype, remat, rngs)

        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, param_dtype=dtype, rngs=rngs
        )
        self.layers = stack(rngs)
        self.norm = _norm(config.hidden_size, config, dtype, rngs)
        if not config.tie_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size,
                config.vocab_size,
                use_bias=False,
                param_dtype=dtype,
                rngs=rngs,
            )
        self.config = config
        # Inside jax.shard_map, the mesh axes that cut the vocabulary.
        self.vocab_axes: tuple[str, ...] = ()
        self.activations = activations
        self.attention = attention
        self.remat = remat

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "_ time"],
        span: Span,
        past: Sequence[Past] = (),
        *,
        dtype: DTypeLike | None = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "batch time features"], KV]:
        """Final hidden states (normalised), and the keys and values of ``tokens``.

        Args:
            tokens: token ids.
            positions: of each token; one row serves the whole batch.
            span: of the tokens, which says who sees whom.
            past: tokens computed before, seen where their spans say so.
            dtype: of the activations in place of the model's own.
            window: see :func:`attend`.

        Returns:
            Hidden states for :meth:`logits`, and a :class:`KV` of (layers, batch,
            time, kv_heads, head_dim).
        """
        h = gather_rows(self.embed_tokens.embedding[...], self.vocab_axes, tokens)
        h = h.astype(dtype or self.activations)
        c = self.config
        rotary = rotary_angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        see = functools.partial(attend, kind=self.attention, window=window)
        graph, weights = nnx.split(self.layers)

        def layer(h, inputs):
            weights, kvs = inputs
            parts = [(kv, p.span) for kv, p in zip(kvs, past, strict=True)]
            return nnx.merge(graph, weights)(h, rotary, span, parts, see)

        h, present = scan_layers(
            layer, h, weights, [p.kv for p in past], remat=self.remat
        )
        return self.norm(h), present

    def logits(
        self, hidden: Float[Array, "*tokens features"]
    ) -> Float[Array, "*tokens vocab"]:
        """float32 logits of final hidden states; best a chunk of tokens at a time."""
        return self.head()(hidden)

    def head(self) -> Callable[[Array], Array]:
        """:meth:`logits` as a function; a head cut over a mesh is gathered once."""
        return self.head_after(())[0]

    def head_after(self, arrays: Tree) -> tuple[Callable[[Array], Array], Tree]:
        """:meth:`head`, not gathered before there are ``arrays``; and the arrays.

        The gathered head is the largest matrix of the model. Left alone, XLA gathers it
        once for all that use it, and holds it until the last one has. So it waits for
        what it will be used on, and is gathered anew for the next.

        Args:
            arrays: a tree, to be used from then on as it is returned.
        """
        is_tied = self.config.tie_embeddings
        if not is_tied and not isinstance(self.lm_head, nnx.Linear):
            return lambda hidden: self.lm_head(hidden).astype(jnp.float32), arrays
        head = (self.embed_tokens.embedding if is_tied else self.lm_head.kernel)[...]
        if parts(self.vocab_axes) > 1:
            head, arrays = jax.lax.optimization_barrier((head, arrays))
        after = next(iter(jax.tree.leaves(arrays)), None)
        logits = logits_of(head, is_tied=is_tied, names=self.vocab_axes, after=after)
        return logits, arrays

    def tensor_name(self, path: str, layer: tuple[int, ...] = ()) -> str:
        """Hugging Face's name of the weight matrix at a dotted path of this model."""
        if layer:
            path = path.replace("layers.", f"layers.{layer[0]}.", 1)
        return f"{path}.weight" if path == "lm_head" else f"model.{path}.weight"


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


def _norm(size: int, c: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
    return nnx.RMSNorm(
        size,
        epsilon=c.rms_norm_eps,
        param_dtype=dtype,
        use_fast_variance=False,
        rngs=rngs,
    )

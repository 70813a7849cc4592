"""One decoder family: Llama, Qwen2, Qwen3 and Qwen3.5, layers stacked and scanned.

Attribute names are Hugging Face's, so that a path in the model is a tensor name once
the layer index is put back (:meth:`Decoder.tensor_name`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from logra_jax.algorithm.parallel import gather_rows, parts
from logra_jax.models.attention import KV, Span, attend, check_attention
from logra_jax.models.delta_net import DeltaState
from logra_jax.models.head import logits_of
from logra_jax.models.layers import DecoderConfig, DecoderLayer, DeltaLayer, norm
from logra_jax.models.rotary import rotary_angles
from logra_jax.models.stack import REMAT, Run, scan_layers

# Where a decoder keeps its layers, each a stack along axis 0.
STACKS = ("layers", "delta_layers")

Tree = TypeVar("Tree")
Layer = TypeVar("Layer")


class Cache(NamedTuple):
    """What tokens leave to those after them, of all layers."""

    kv: KV
    state: DeltaState | None = None  # of a model with Gated DeltaNet layers

    def grow(self, tokens: int) -> "Cache":
        """With room for the keys and values of so many more."""
        room = ((0, 0), (0, 0), (0, tokens), (0, 0), (0, 0))
        return self._replace(kv=jax.tree.map(lambda a: jnp.pad(a, room), self.kv))

    def write(self, column: int | Array, later: "Cache") -> "Cache":
        """With ``later`` tokens from ``column`` on, after which states are theirs."""
        kv = jax.tree.map(
            lambda a, new: lax.dynamic_update_slice_in_dim(a, new, column, 2),
            self.kv,
            later.kv,
        )
        return Cache(kv, later.state)


class Past(NamedTuple):
    """Tokens computed earlier. Batch 1 means shared by all rows, computed once."""

    cache: Cache
    span: Span


class Decoder(nnx.Module):
    """A causal language model.

    ``layers`` holds every layer of attention, stacked along axis 0, ``delta_layers``
    those with a Gated DeltaNet.

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

        def stack(kind: Callable[..., Layer], count: int) -> Layer:
            @nnx.split_rngs(splits=count)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def build(rngs):
                return kind(config, dtype, remat, rngs)

            return build(rngs)

        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, param_dtype=dtype, rngs=rngs
        )
        self.layers = stack(DecoderLayer, config.num_blocks)
        if config.delta is not None:
            count = config.num_blocks * config.delta_per_block
            self.delta_layers = stack(DeltaLayer, count)
        self.norm = norm(config.hidden_size, config, dtype, rngs)
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
    ) -> tuple[Float[Array, "batch time features"], Cache]:
        """Final hidden states (normalised), and what ``tokens`` leave to later ones.

        Args:
            tokens: token ids.
            positions: of each token; one row serves the whole batch.
            span: of the tokens, which says who sees whom.
            past: tokens computed before, seen where their spans say so. In Gated
                DeltaNet layers every segment of ``tokens`` goes on from the last of
                them.
            dtype: of the activations in place of the model's own.
            window: see :func:`attend`.

        Returns:
            Hidden states for :meth:`logits`, and a :class:`Cache` of (layers, batch,
            time, kv_heads, head_dim) keys and values.
        """
        h = gather_rows(self.embed_tokens.embedding[...], self.vocab_axes, tokens)
        h = h.astype(dtype or self.activations)
        runs = [self._attention_run(positions, span, past, window)]
        if self.config.delta is not None:
            runs = [self._delta_run(span, past), *runs]
        h, present = scan_layers(runs, h, remat=self.remat)
        state = present[0] if self.config.delta is not None else None
        return self.norm(h), Cache(present[-1], state)

    def _attention_run(
        self,
        positions: Int[Array, "_ time"],
        span: Span,
        past: Sequence[Past],
        window: int | None,
    ) -> Run:
        """The layers of attention, each with keys and values computed before."""
        c = self.config
        rotary = rotary_angles(
            positions, c.rotary_dim or c.head_dim, c.rope_theta, c.rope_scaling
        )
        see = functools.partial(attend, kind=self.attention, window=window)
        graph, weights = nnx.split(self.layers)

        def layer(h, inputs):
            weights, kvs = inputs
            parts = [(kv, p.span) for kv, p in zip(kvs, past, strict=True)]
            return nnx.merge(graph, weights)(h, rotary, span, parts, see)

        return Run(layer, weights, [p.cache.kv for p in past])

    def _delta_run(self, span: Span, past: Sequence[Past]) -> Run:
        """The layers with a Gated DeltaNet, each with the state it goes on from."""
        graph, weights = nnx.split(self.delta_layers)

        def layer(h, inputs):
            weights, state = inputs
            return nnx.merge(graph, weights)(h, span.segment, state)

        return Run(layer, weights, past[-1].cache.state if past else None)

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
        logits = logits_of(head, is_tied=is_tied, names=self.vocab_axes, after=arrays)
        return logits, arrays

    def tensor_name(self, path: str, layer: tuple[int, ...] = ()) -> str:
        """Hugging Face's name of the weight matrix at a dotted path of this model."""
        if layer:
            stack, _, rest = path.partition(".")
            attended, between = stack == "layers", self.config.delta_per_block
            block, i = divmod(layer[0], 1 if attended else between)
            index = block * (between + 1) + (between if attended else i)
            path = f"layers.{index}.{rest}"
        return f"{path}.weight" if path == "lm_head" else f"model.{path}.weight"

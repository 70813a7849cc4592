"""Log-probabilities of chosen tokens, without the logits of all tokens at once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from logra_jax.algorithm.divergence import Head, chunk_size, map_chunks

Held = tuple[Array, ...]  # the temperature, and what the head closes over


def token_logprobs(
    hidden: Float[Array, "tokens features"],
    targets: Int[Array, " tokens"],
    head: Head,
    *,
    temperature: float | Array = 1.0,
    chunk: int = 256,
    needed: Bool[Array, " tokens"] | None = None,
) -> Float32[Array, " tokens"]:
    """``log p(target)`` in nats under ``softmax(head(hidden) / temperature)``.

    At most ``chunk`` tokens have logits at a time. A token's log-prob depends on its
    own hidden state alone: where only those are differentiated, the forward pass makes
    the slopes too, (tokens, features), and neither logits nor head are seen again.
    Where the head is trained, the backward pass computes the logits once more.

    Args:
        hidden: final hidden states, one per token to predict.
        targets: the tokens that followed.
        head: hidden states -> logits (tokens, vocab).
        temperature: of the policy.
        chunk: tokens per chunk.
        needed: chunks without such a token are not computed, but 0; None computes all.
    """
    if needed is None:
        needed = jnp.ones(targets.shape, bool)
    temperature = jnp.asarray(temperature, jnp.float32)
    piece = (chunk_size(len(hidden), chunk), hidden.shape[1])
    head, held = jax.closure_convert(head, jnp.zeros(piece, hidden.dtype))
    tokens = (targets[:, None], needed[:, None])
    return _logprobs(hidden, (temperature, *held), tokens, head, chunk)


def _plain_logprobs(
    hidden: Array, held: Held, tokens: tuple[Array, Array], head: Head, chunk: int
) -> Array:
    piece = jax.checkpoint(partial(_piece, held=held, head=head))
    return map_chunks(piece, (hidden, *tokens), chunk)


_logprobs = jax.custom_vjp(_plain_logprobs, nondiff_argnums=(3, 4))


def _logprobs_fwd(hidden, held, tokens, head, chunk):
    # Only what is trained is differentiated: a sketched kernel, held too, must not be.
    moved = tuple(part.value if part.perturbed else None for part in held)
    hidden, tokens = hidden.value, tuple(part.value for part in tokens)
    held = tuple(part.value for part in held)
    if any(part is not None for part in moved):

        def logprobs(hidden: Array, moved: tuple[Array | None, ...]) -> Array:
            pairs = zip(held, moved, strict=True)
            parts = tuple(still if new is None else new for still, new in pairs)
            return _plain_logprobs(hidden, parts, tokens, head, chunk)

        values, pull = jax.vjp(logprobs, hidden, moved)
        return values, (pull, None)
    piece = partial(_piece, held=held, head=head, has_slope=True)
    values, slopes = map_chunks(piece, (hidden, *tokens), chunk)
    return values, (None, slopes)


def _logprobs_bwd(head, chunk, residuals, g):
    del head, chunk
    pull, slopes = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        g = jnp.zeros(g.shape)
    if pull is not None:
        return *pull(g), None
    return (g[:, None] * slopes).astype(slopes.dtype), None, None


_logprobs.defvjp(_logprobs_fwd, _logprobs_bwd, symbolic_zeros=True)


def _piece(
    args: tuple[Array, ...],
    *,
    held: Held,
    head: Callable[..., Array],
    has_slope: bool = False,
) -> Any:
    """Log-probs (size,) of a chunk; or those and their slopes (size, features)."""
    hidden, targets, needed = args
    temperature, *weights = held

    def logprob(hidden: Array) -> Array:
        z = head(hidden, *weights).astype(jnp.float32) / temperature
        chosen = jnp.take_along_axis(z, targets, axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(z, -1)

    def logprob_and_slope(hidden: Array) -> tuple[Array, Array]:
        values, pull = jax.vjp(logprob, hidden)
        return values, *pull(jnp.ones_like(values))

    compute = logprob_and_slope if has_slope else logprob
    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(compute, hidden))
    return lax.cond(jnp.any(needed), compute, lambda _: nothing, hidden)

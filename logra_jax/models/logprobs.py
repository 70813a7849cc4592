"""Log-probabilities of chosen tokens, without the logits of all tokens at once."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from logra_jax.algorithm.divergence import Head, map_chunks


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

    At most ``chunk`` tokens have logits at a time, also in the backward pass, which
    computes them again.

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

    def logprob(h: Array, target: Array) -> Array:
        z = head(h).astype(jnp.float32) / temperature
        chosen = jnp.take_along_axis(z, target, axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(z, -1)

    @jax.checkpoint
    def piece(args):
        h, target, needed = args
        return lax.cond(
            jnp.any(needed),
            logprob,
            lambda h, _: jnp.zeros(len(h), jnp.float32),
            h,
            target,
        )

    return map_chunks(piece, (hidden, targets[:, None], needed[:, None]), chunk)

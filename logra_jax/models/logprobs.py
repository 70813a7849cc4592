"""Log-probabilities of chosen tokens, without the logits of all tokens at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from logra_jax.algorithm.divergence import Head, map_chunks


def token_logprobs(
    hidden: Float[Array, "tokens features"],
    targets: Int[Array, " tokens"],
    head: Head,
    *,
    temperature: float | Array = 1.0,
    chunk: int = 256,
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
    """

    @jax.checkpoint
    def logprob(args):
        h, target = args
        z = head(h).astype(jnp.float32) / temperature
        chosen = jnp.take_along_axis(z, target, axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(z, -1)

    return map_chunks(logprob, (hidden, targets[:, None]), chunk)

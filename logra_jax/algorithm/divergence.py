"""KL divergences of two policies, measured in chunks of tokens.

:func:`realised_kl` sums over the vocabulary, :func:`sampled_kl` knows nothing but the
log-probs of sampled tokens. A KL over no token at all is NaN: no context, no estimate.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, PyTree

from logra_jax.algorithm.parallel import AxisNames, Tree, total

Head = Callable[[Array], Array]

_NEAR = 0.25  # below, five terms of exp_excess's series are exact to 4e-7


class LateHead(NamedTuple):
    """A head that is made, from parts on several devices say, when it is used.

    Attributes:
        after: arrays -> the head, not made before there are such; and the arrays, to
            be used from then on.
    """

    after: Callable[[PyTree], tuple[Head, PyTree]]


def realised_kl(
    hidden_before: Float[Array, "tokens features"],
    hidden_after: Float[Array, "tokens features"],
    head: Head | LateHead,
    mask: Bool[Array, " tokens"] | Float[Array, " tokens"],
    *,
    temperature: float | Array = 1.0,
    chunk: int = 256,
    axis_name: AxisNames = None,
) -> Float32[Array, ""]:
    """``KL(p_before || p_after)`` in nats per token, in chunks like predict_kl.

    Both policies share ``head``. Use float32 hidden states: bfloat16 activations put a
    floor of several 1e-4 nats under it. NaN for an empty mask. With ``axis_name`` the
    mean is over the tokens of all devices along those mesh axes.

    Example:
        >>> import jax.numpy as jnp, logra_jax as logra
        >>> before, after = jnp.zeros((1, 2)), jnp.array([[0.1, 0.0]])
        >>> head = lambda h: h  # hidden states are the logits of two words here
        >>> kl = logra.realised_kl(before, after, head, jnp.ones(1))
        >>> round(float(kl), 5)
        0.00125
    """
    return change_of_policy(
        hidden_before,
        hidden_after,
        head,
        mask,
        temperature=temperature,
        chunk=chunk,
        axis_name=axis_name,
    )[0]


def change_of_policy(
    hidden_before: Float[Array, "tokens features"],
    hidden_after: Float[Array, "tokens features"],
    head: Head | LateHead,
    mask: Bool[Array, " tokens"] | Float[Array, " tokens"],
    *,
    temperature: float | Array = 1.0,
    chunk: int = 256,
    axis_name: AxisNames = None,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    r"""The :func:`realised_kl`, and the entropy of the policy before; nats per token.

    .. math:: H = -\operatorname{mean}_t \sum_v p_t(v) \log p_t(v)
    """

    hidden = hidden_before, hidden_after
    logits, hidden = head_for(head, hidden)

    def measure(args):
        log_p, log_q = (log_policy(logits(h), temperature) for h in args)
        return divergence(log_p, log_q), _entropy(log_p)

    both = map_chunks(measure, hidden, chunk)
    kl, entropy = (masked_mean(values, mask, axis_name) for values in both)
    return kl, entropy


def head_for(head: Head | LateHead, arrays: Tree) -> tuple[Head, Tree]:
    """The head to use on ``arrays``, a tree, and the arrays to use it on."""
    return head.after(arrays) if isinstance(head, LateHead) else (head, arrays)


def _entropy(
    log_p: Float32[Array, "*tokens vocab"],
) -> Float32[Array, "*tokens"]:
    # p may be 0, of a token that does not exist
    return -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), -1)


def sampled_kl(
    engine_logprobs: Float[Array, "*tokens"],
    logprobs: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | Float[Array, "*tokens"],
) -> Float32[Array, ""]:
    r"""``KL(engine || policy)`` in nats per token, estimated from sampled tokens.

    .. math::
        \operatorname{mean}_t \; r_t - 1 - \log r_t, \qquad
        r_t = p(v_t) / e(v_t), \quad v_t \sim e

    Never negative, and unbiased where the engine samples from the very distribution
    that it reports: :math:`E_e[r] = 1`, so :math:`r - 1` only lowers the variance of
    :math:`-\log r`. Filters (top-p, top-k) break that. With log-probs of the unfiltered
    engine the mean runs over kept tokens only; with renormalised ones :math:`E_e[r]` is
    the mass :math:`m` that the policy puts on kept tokens, and the estimate is too
    small by :math:`1 - m`. A rare token with :math:`p \gg e` makes it heavy-tailed.

    Args:
        engine_logprobs: of the sampled tokens, as the engine reported them, nats.
        logprobs: of the same tokens under the policy, at the same temperature.
        mask: weight of each token in the mean; padding may hold NaN.

    Returns:
        Nats per token, NaN for an empty mask.

    Example:
        >>> import jax.numpy as jnp, logra_jax as logra
        >>> engine, policy = jnp.log(jnp.array([[0.5, 0.25], [0.5, 0.5]]))
        >>> kl = logra.sampled_kl(engine, policy, jnp.array([True, True]))
        >>> round(float(kl), 4)  # the mean of 0 and of 2 - 1 - log 2
        0.1534
    """
    return masked_mean(exp_excess(logprobs - engine_logprobs), mask)


def exp_excess(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``e^x - 1 - x`` without cancellation: never negative, ``x^2 / 2`` near zero."""
    return jnp.where(jnp.abs(x) < _NEAR, _exp_excess_near_zero(x), jnp.expm1(x) - x)


def _exp_excess_near_zero(x: Array) -> Array:
    terms = 1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720)))
    return jnp.square(x) * terms


def divergence(
    log_p: Float32[Array, "*tokens vocab"], log_q: Float32[Array, "*tokens vocab"]
) -> Float32[Array, "*tokens"]:
    """``KL(p || q)`` over the last axis in nats, a sum of terms that are not negative.

    ``sum p (q/p - 1 - log(q/p))`` equals ``sum p log(p/q)`` because both sum to 1, but
    an error of epsilon in a log-prob costs epsilon squared in place of epsilon.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    # p may be 0, by underflow or for a token that does not exist
    x = jnp.where(p > 0, log_q - log_p, 0.0)
    is_near = (p > 0) & (jnp.abs(x) < _NEAR)
    # no q/p where they are far apart: it may overflow
    return jnp.sum(jnp.where(is_near, p * _exp_excess_near_zero(x), q - p - p * x), -1)


def log_policy(
    logits: Float[Array, "*tokens vocab"], temperature: float | Array
) -> Float32[Array, "*tokens vocab"]:
    """Log-probs of every token of the vocabulary at ``temperature``, nats."""
    return jax.nn.log_softmax(scaled_logits(logits, temperature))


def scaled_logits(
    logits: Float[Array, "*tokens vocab"], temperature: float | Array
) -> Float32[Array, "*tokens vocab"]:
    """``logits / temperature``, in float32 whatever the model computes in."""
    return logits.astype(jnp.float32) / temperature


def chunk_size(tokens: int, chunk: int) -> int:
    """Tokens in each piece of :func:`map_chunks`: pieces of one size, few as may be."""
    if chunk < 1:
        raise ValueError(f"`chunk` must be at least 1 token, got {chunk}.")
    return -(-tokens // -(-tokens // chunk))


def map_chunks(
    f: Callable[[tuple[Array, ...]], PyTree], arrays: tuple[Array, ...], chunk: int
) -> PyTree:
    """Apply ``f`` to at most ``chunk`` tokens at a time, one piece after the other.

    Args:
        f: maps arrays (size, features) to a tree of arrays (size, ...).
        arrays: each (tokens, features); padded with zeros to a whole number of pieces.
        chunk: upper bound of ``size``.

    Returns:
        ``f``'s values, a tree of arrays (tokens, ...).
    """
    tokens = arrays[0].shape[0]
    size = chunk_size(tokens, chunk)
    chunks = -(-tokens // size)
    padding = chunks * size - tokens
    pieces = [
        jnp.pad(a, ((0, padding), (0, 0))).reshape(chunks, size, -1) for a in arrays
    ]

    def whole(values: Array) -> Array:
        return values.reshape(-1, *values.shape[2:])[:tokens]

    return jax.tree.map(whole, lax.map(f, tuple(pieces)))


def masked_mean(
    values: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | Float[Array, "*tokens"],
    axis_name: AxisNames = None,
) -> Float32[Array, ""]:
    """Mean weighted by ``mask``; NaN where it is empty, never from padding."""
    mask = mask.astype(jnp.float32)
    # where, not a product: padding may hold what is not finite
    sums = jnp.sum(jnp.where(mask > 0, values * mask, 0.0)), jnp.sum(mask)
    value, count = total(sums, axis_name)
    return value / count

"""The predicted-KL controller: how far one update moves the policy, before it lands.

The prediction (:func:`predict_kl`) is apart from the rule that scales the update by it
(:func:`scale_by_predicted_kl`), so either can be used or replaced alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree

Head = Callable[[Array], Array]


class PredictedKLState(NamedTuple):
    """State of :func:`scale_by_predicted_kl`; float32 scalars but for the count."""

    count: Int32[Array, ""]  # pyright: ignore  updates seen
    q: Float32[Array, ""]  # nats per token: KL of the unscaled proposal
    budget: Float32[Array, ""]  # nats per token
    alpha: Float32[Array, ""]  # factor that the last update was scaled by


def scale_by_predicted_kl(
    budget: optax.ScalarOrSchedule | None, alpha_max: float | Array = 1.0
) -> optax.GradientTransformationExtraArgs:
    r"""Scale an update so that its predicted KL stays within a budget.

    With :math:`q` the predicted KL of the update as it comes in (:math:`\alpha = 1`)
    and the KL growing as :math:`\alpha^2 q`:

    .. math::
        \alpha = \min\big(\alpha_{max}, \sqrt{\delta / q}\big)

    A ``q`` of zero gives ``alpha_max``; a ``q`` that is not finite gives 0, so that
    the update is dropped rather than merged.

    Args:
        budget: :math:`\delta` in nats per token: a float, an optax schedule, or
            ``None`` for no control (:math:`\alpha = \alpha_{max}`; q is recorded).
        alpha_max: bound that keeps a tiny ``q`` from blowing up the step.

    Returns:
        A transform whose ``update`` takes ``predicted_kl=``: the scalar ``q``, or a
        function from the updates to it.

    Example:
        >>> import jax.numpy as jnp, logra_jax as logra
        >>> tx = logra.scale_by_predicted_kl(budget=1e-3)
        >>> updates = {"w": jnp.ones((2, 2))}
        >>> scaled, state = tx.update(updates, tx.init(updates), predicted_kl=4e-3)
        >>> round(float(state.alpha), 6)
        0.5

    Reference: LoGRA, arXiv:2610.06647 (predicted-KL step control).
    """
    # Arrays are values of the running program (optax.inject_hyperparams): unchecked.
    if not isinstance(alpha_max, Array) and not 0 < alpha_max < float("inf"):
        raise ValueError(f"`alpha_max` must be positive and finite, got {alpha_max}.")
    if isinstance(budget, float | int) and not budget > 0:
        raise ValueError(
            f"`budget` must be positive (nats per token), got {budget}; pass None for "
            "no control."
        )

    def init(params: PyTree) -> PredictedKLState:
        del params
        zero = jnp.zeros((), jnp.float32)
        return PredictedKLState(jnp.zeros((), jnp.int32), zero, zero, zero)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        predicted_kl: Callable[[PyTree], Array] | Array | float | None = None,
        **extra_args,
    ):
        del params, extra_args
        if predicted_kl is None:
            raise ValueError(
                "`predicted_kl` must be given to `update`, got None; pass the scalar "
                "q of the updates, or a function from updates to q."
            )
        q = predicted_kl(updates) if callable(predicted_kl) else predicted_kl
        q = jnp.asarray(q, jnp.float32)
        if budget is None:
            delta = jnp.float32(jnp.inf)
        else:
            delta = budget(state.count) if callable(budget) else budget
            delta = jnp.asarray(delta, jnp.float32)
        within_budget = jnp.where(q > 0, jnp.sqrt(delta / q), jnp.inf)
        alpha = jnp.minimum(jnp.float32(alpha_max), within_budget)
        alpha = jnp.where(jnp.isfinite(q), alpha, 0.0)
        scaled = jax.tree.map(
            # where, not a product: alpha = 0 must drop an update that is not finite
            lambda u: jnp.where(alpha > 0, alpha * u, 0.0).astype(u.dtype),
            updates,
        )
        count = jnp.asarray(optax.safe_increment(state.count))
        return scaled, PredictedKLState(count, q, delta, alpha)

    return optax.GradientTransformationExtraArgs(init, update)


def predict_kl(
    hidden: Callable[[PyTree], Float[Array, "tokens features"]],
    head: Head,
    probes: PyTree,
    updates: PyTree,
    mask: Bool[Array, " tokens"] | Float[Array, " tokens"],
    *,
    temperature: float | Array = 1.0,
    chunk: int = 256,
) -> tuple[Float32[Array, ""], Float[Array, "tokens features"]]:
    r"""Predicted KL of the unscaled proposal, by one forward-mode pass.

    .. math::
        q = \operatorname{mean}_t \tfrac12 \operatorname{Var}_{v \sim p_t}(\dot z_{tv})

    with :math:`\dot z` the rate of change of ``logits / temperature`` along the update
    and :math:`p_t` the current policy: the second-order term of
    :math:`KL(p_\alpha \| p_0)`, which grows as :math:`\alpha^2 q`.

    Args:
        hidden: probes -> final hidden states; must use the plain form of the sketched
            layers (:func:`logra_jax.perturbed`).
        head: hidden states -> logits (tokens, vocab); called on ``chunk`` tokens at a
            time, so that logits of all tokens never exist.
        probes: the point of expansion, zeros.
        updates: the proposal, a tree like ``probes``.
        mask: 1 for tokens that are contexts of a response, 0 for padding.
        temperature: of the policy.
        chunk: tokens per chunk.

    Returns:
        ``q`` in nats per token, and the hidden states at ``probes``.

    Reference: LoGRA, arXiv:2610.06647.
    """
    h, h_rate = jax.jvp(hidden, (probes,), (updates,))

    def variance(args):
        z, z_rate = jax.jvp(lambda h: _scaled(head(h), temperature), args[:1], args[1:])
        p = jax.nn.softmax(z)
        mean = jnp.sum(p * z_rate, -1, keepdims=True)
        return 0.5 * jnp.sum(p * jnp.square(z_rate - mean), -1)

    return _masked_mean(map_chunks(variance, (h, h_rate), chunk), mask), h


def realised_kl(
    hidden_before: Float[Array, "tokens features"],
    hidden_after: Float[Array, "tokens features"],
    head: Head,
    mask: Bool[Array, " tokens"] | Float[Array, " tokens"],
    *,
    temperature: float | Array = 1.0,
    chunk: int = 256,
) -> Float32[Array, ""]:
    """``KL(p_before || p_after)`` in nats per token, in chunks like predict_kl.

    Both policies share ``head``. Use float32 hidden states: bfloat16 activations put a
    floor of several 1e-4 nats under it.
    """

    def divergence(args):
        before, after = (
            jax.nn.log_softmax(_scaled(head(h), temperature)) for h in args
        )
        return jnp.sum(jnp.exp(before) * (before - after), -1)

    kl = map_chunks(divergence, (hidden_before, hidden_after), chunk)
    return _masked_mean(kl, mask)


def _scaled(logits: Array, temperature: float | Array) -> Array:
    return logits.astype(jnp.float32) / temperature


def map_chunks(
    f: Callable[[tuple[Array, ...]], Array], arrays: tuple[Array, ...], chunk: int
) -> Array:
    """Apply ``f`` to at most ``chunk`` tokens at a time, one piece after the other.

    Args:
        f: maps arrays (size, features) to one value for each of ``size`` tokens.
        arrays: each (tokens, features); padded with zeros to a whole number of pieces.
        chunk: upper bound of ``size``.

    Returns:
        ``f``'s values, (tokens,).
    """
    if chunk < 1:
        raise ValueError(f"`chunk` must be at least 1 token, got {chunk}.")
    tokens = arrays[0].shape[0]
    chunks = -(-tokens // chunk)
    size = -(-tokens // chunks)
    padding = chunks * size - tokens
    pieces = [
        jnp.pad(a, ((0, padding), (0, 0))).reshape(chunks, size, -1) for a in arrays
    ]
    return lax.map(f, tuple(pieces)).reshape(-1)[:tokens]


def _masked_mean(values: Array, mask: Array) -> Array:
    mask = mask.astype(jnp.float32)
    # where, not a product: padding may hold what is not finite
    total = jnp.sum(jnp.where(mask > 0, values * mask, 0.0))
    return total / jnp.maximum(jnp.sum(mask), 1.0)

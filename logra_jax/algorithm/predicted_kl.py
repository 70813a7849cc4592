r"""The predicted-KL controller: how far one update may move the policy.

The rule from :math:`q`, the KL per squared step of the proposal, to a step size,
:func:`kl_step_size`, and the optax transform around it, :func:`scale_by_predicted_kl`.
Estimates of :math:`q` are made in :mod:`logra_jax.algorithm.kl_prediction`; what really
happened is measured in :mod:`logra_jax.algorithm.divergence`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32, PyTree


class PredictedKLState(NamedTuple):
    """State of :func:`scale_by_predicted_kl`; float32 scalars but for the count."""

    count: Int32[Array, ""]  # pyright: ignore  updates seen
    q: Float32[Array, ""]  # nats per token: KL of the unscaled proposal
    budget: Float32[Array, ""]  # nats per token
    alpha: Float32[Array, ""]  # factor that the last update was scaled by


def kl_step_size(
    q: float | Array, budget: float | Array | None, alpha_max: float | Array = 1.0
) -> Float32[Array, ""]:
    r"""The factor that keeps an update's predicted KL within a budget.

    With :math:`q` the predicted KL of the update as it is (:math:`\alpha = 1`), the KL
    grows as :math:`\alpha^2 q`, so

    .. math::
        \alpha = \min\big(\alpha_{max}, \sqrt{\delta / q}\big)

    =========================  ===============  ====================================
    q                          alpha            because
    =========================  ===============  ====================================
    zero                       ``alpha_max``    the policy does not move: any step
                                                is within the budget
    negative, NaN or infinite  0                not a KL but noise, an overflow or
                                                no token at all: a step of unknown
                                                size is worth less than none
    =========================  ===============  ====================================

    A budget of zero, negative or NaN (the tail of a schedule) allows nothing: 0.

    Args:
        q: nats per token.
        budget: :math:`\delta` in nats per token; ``None`` sets no limit, so that
            alpha is ``alpha_max`` wherever ``q`` is a KL.
        alpha_max: bound that keeps a tiny ``q`` from blowing up the step.

    Returns:
        Alpha; 0 means that the update should be dropped.

    Example:
        >>> import logra_jax as logra
        >>> [float(logra.kl_step_size(q, budget=1.0)) for q in (0.0, 4.0, float("nan"))]
        [1.0, 0.5, 0.0]

    Reference: LoGRA, arXiv:2610.06647 (predicted-KL step control).
    """
    _check_alpha_max(alpha_max)
    q = jnp.asarray(q, jnp.float32)
    delta = jnp.asarray(jnp.inf if budget is None else budget, jnp.float32)
    within = jnp.where(q > 0, jnp.sqrt(delta / q), jnp.inf)
    alpha = jnp.minimum(jnp.asarray(alpha_max, jnp.float32), within)
    return jnp.where(jnp.isfinite(q) & (q >= 0) & (delta > 0), alpha, 0.0)


def scale_by_predicted_kl(
    budget: optax.ScalarOrSchedule | None, alpha_max: float | Array = 1.0
) -> optax.GradientTransformationExtraArgs:
    r"""Scale an update so that its predicted KL stays within a budget.

    The factor is :func:`kl_step_size`'s. Where it is 0 the update is dropped, even one
    that holds NaN, rather than merged.

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
    _check_alpha_max(alpha_max)
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
        delta = budget(state.count) if callable(budget) else budget
        delta = jnp.asarray(jnp.inf if delta is None else delta, jnp.float32)
        alpha = kl_step_size(q, delta, alpha_max)
        scaled = jax.tree.map(
            # where, not a product: alpha = 0 must drop an update that is not finite
            lambda u: jnp.where(alpha > 0, alpha * u, 0.0).astype(u.dtype),
            updates,
        )
        count = jnp.asarray(optax.safe_increment(state.count))
        return scaled, PredictedKLState(count, q, delta, alpha)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_alpha_max(alpha_max: float | Array) -> None:
    # Arrays are values of the running program (optax.inject_hyperparams): unchecked.
    if not isinstance(alpha_max, Array) and not 0 < alpha_max < float("inf"):
        raise ValueError(
            f"`alpha_max` must be positive and finite, got {alpha_max}; 1.0 never "
            "enlarges an update."
        )

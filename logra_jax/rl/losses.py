"""Policy-gradient losses on the log-probabilities of sampled tokens."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

MAX_LOG_RATIO = 80.0  # nats; exp of it is finite in float32


def ppo_clip(
    logprobs: Float[Array, "batch time"],
    sampled_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, " batch"],
    mask: Bool[Array, "batch time"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float32[Array, "batch time"], Bool[Array, "batch time"]]:
    r"""PPO's clipped surrogate per token, to be minimised.

    .. math::
        L_t = -\min\big(\rho_t A,\;
              \operatorname{clip}(\rho_t, 1 - c_{low}, 1 + c_{high}) A\big), \qquad
        \rho_t = \exp(\log p_t - \log p^{sampled}_t)

    Args:
        logprobs: of the trained policy.
        sampled_logprobs: of the policy that sampled, at the same temperature.
        advantages: of each response, spread over its tokens.
        mask: True on sampled tokens; elsewhere the loss is 0.
        clip_low: c_low.
        clip_high: c_high.

    Returns:
        Loss per token, and where the clip cut the gradient off.

    Reference: PPO, arXiv:1707.06347; apart clip bounds: DAPO, arXiv:2503.14476.
    """
    # Padding may hold any log-probability: exp of it must not turn into inf * 0.
    log_ratio = jnp.where(mask, logprobs - sampled_logprobs, 0.0)
    # Nor may a ratio beyond float32: the clipped branch would give inf * 0 backward.
    ratio = jnp.exp(jnp.minimum(log_ratio.astype(jnp.float32), MAX_LOG_RATIO))
    advantage = advantages.astype(jnp.float32)[:, None]
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    objective = jnp.minimum(ratio * advantage, clipped * advantage)
    is_clipped = mask & (clipped * advantage < ratio * advantage)
    return jnp.where(mask, -objective, 0.0), is_clipped


class Correction(NamedTuple):
    """How much each token counts, sampled as it was from another policy."""

    weights: Float32[Array, "batch time"]  # constants; 0 at padding and where masked
    is_capped: Bool[Array, "batch time"]  # the weight was cut
    is_masked: Bool[Array, "batch time"]  # a sampled token that does not count


def correct_mismatch(
    logprobs: Float[Array, "batch time"],
    engine_logprobs: Float[Array, "batch time"],
    mask: Bool[Array, "batch time"],
    *,
    level: str = "token",
    cap: float = 2.0,
    keep: tuple[float, float] | None = None,
    total: Callable[[Array], Array] | None = None,
) -> Correction:
    r"""Truncated importance weights of a policy whose samples an engine drew.

    An engine with other kernels, or with weights a few updates old, samples from
    another distribution than the policy that is differentiated. For each token, or for
    each response with :math:`d` summed over its tokens,

    .. math::
        w = \min(\rho, C)\; 1[low \le \rho \le high], \qquad
        \rho = e^d, \quad d = \log p - \log p^{engine}

    Without cap and interval, ``sequence`` is unbiased, at a variance that grows with
    the response's length; ``token`` is biased, because it leaves the change of what
    came before a token alone, and scatters far less.

    Args:
        logprobs: of the policy now, in nats.
        engine_logprobs: as the engine reported them, at the same temperature.
        mask: True on sampled tokens.
        level: what has a ratio of its own: each ``token``, or each ``sequence``.
        cap: C.
        keep: (low, high); None keeps all.
        total: sums values (batch, time) over each token's response, where that is not
            its row.

    Returns:
        The weights, through which nothing is differentiated, and where cap and interval
        acted. Each log-ratio is clamped to ``MAX_LOG_RATIO``, so that an engine's
        -inf leaves them finite; NaN gives NaN.

    Raises:
        ValueError: an unknown ``level``.

    References:
        The cap: Ionides, Truncated Importance Sampling, JCGS 17(2), 2008; against the
        engine, by token: Yao et al., Your Efficient RL Framework Secretly Brings You
        Off-Policy RL Training, 2025; by sequence, with a mask: Liu, Li et al., When
        Speed Kills Stability, 2025 (and GSPO, arXiv:2507.18071, on the response as the
        unit of the ratio); the interval by token: IcePop, arXiv:2510.18855.
    """
    d = logprobs.astype(jnp.float32) - engine_logprobs.astype(jnp.float32)
    # Each difference before the sum: one of inf and one of -inf would make NaN.
    d = _clamp(jnp.where(mask, lax.stop_gradient(d), 0.0))
    if level == "sequence":
        total = total or (lambda d: jnp.sum(d, axis=-1, keepdims=True))
        d = _clamp(total(d))
    elif level != "token":
        raise ValueError(f"`level` must be 'token' or 'sequence', got {level!r}.")
    ratio = jnp.broadcast_to(jnp.exp(d), mask.shape)
    low, high = keep or (0.0, jnp.inf)
    # Outside, and not "not inside": NaN must stay to be seen.
    is_masked = mask & ((ratio < low) | (ratio > high))
    is_kept = mask & ~is_masked
    weights = jnp.where(is_kept, jnp.minimum(ratio, cap), 0.0)
    return Correction(weights, is_kept & (ratio > cap), is_masked)


def corrected_policy_gradient(
    logprobs: Float[Array, "batch time"],
    advantages: Float[Array, " batch"],
    correction: Correction,
) -> Float32[Array, "batch time"]:
    r"""The policy gradient's surrogate per token, weighted; to be minimised.

    .. math::
        L_t = -w_t \rho_t A, \qquad \rho_t = p_t / \operatorname{stop\_gradient}(p_t)

    This is :func:`ppo_clip` against the policy itself: one update per batch starts
    where the ratio is 1, and no clip acts.

    Args:
        logprobs: of the trained policy.
        advantages: of each response, spread over its tokens.
        correction: of :func:`correct_mismatch`; where its weight is 0 the loss is 0.
    """
    weights = correction.weights
    counts = weights != 0  # NaN counts, and shows
    loss, _ = ppo_clip(logprobs, lax.stop_gradient(logprobs), advantages, counts)
    return weights * loss


def _clamp(log_ratio: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)

"""Policy-gradient losses on the log-probabilities of sampled tokens."""

import jax.numpy as jnp
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

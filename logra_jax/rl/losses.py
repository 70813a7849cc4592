"""Policy-gradient losses on the log-probabilities of sampled tokens."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from logra_jax.algorithm.divergence import exp_excess

LOSSES = ("ppo", "reinforce", "cispo", "gspo")
AGGREGATIONS = ("token", "sequence", "constant")
KL_ESTIMATORS = ("k3", "k2")
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

    Example:
        >>> now, then = jnp.log(jnp.array([[[0.5, 0.4]], [[0.25, 0.4]]]))
        >>> mask = jnp.array([[True, True]])
        >>> loss, is_clipped = ppo_clip(now, then, jnp.array([1.0]), mask)
        >>> [round(x, 3) for x in loss[0].tolist()]  # a ratio of 2 counts as 1.2
        [-1.2, -1.0]
        >>> is_clipped.tolist()
        [[True, False]]

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

    Example:
        >>> now, engine = jnp.log(jnp.array([[[0.9, 0.4]], [[0.3, 0.4]]]))
        >>> found = correct_mismatch(now, engine, jnp.array([[True, True]]), cap=2.0)
        >>> found.weights.tolist(), found.is_capped.tolist()  # of 3 and 1
        ([[2.0, 1.0]], [[True, False]])

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


def policy_loss(
    kind: str,
    logprobs: Float[Array, "batch time"],
    old_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, " batch"],
    mask: Bool[Array, "batch time"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    total: Callable[[Array], Array] | None = None,
    weights: Float[Array, "batch time"] | None = None,
) -> tuple[Float32[Array, "batch time"], Bool[Array, "batch time"]]:
    """One of ``LOSSES`` per token, each token weighted; to be minimised.

    Against the policy itself (``old_logprobs`` its own, held constant) the ratio is 1,
    no clip acts, and all of them are the policy gradient.

    Args:
        kind: of the loss.
        logprobs: of the trained policy.
        old_logprobs: of the policy that the ratio is to.
        advantages: of each response, spread over its tokens.
        mask: True on sampled tokens; elsewhere the loss is 0.
        clip_low: see the loss.
        clip_high: see the loss.
        total: sums values (batch, time) over each token's response, where that is not
            its row.
        weights: of :func:`correct_mismatch`, constants; where one is 0 so is the loss.

    Returns:
        Loss per token, and where the clip acted.

    Raises:
        ValueError: an unknown ``kind``.

    Example:
        >>> now, then = jnp.log(jnp.array([[[0.5, 0.4]], [[0.25, 0.4]]]))
        >>> mask = jnp.array([[True, True]])
        >>> loss, _ = policy_loss("cispo", now, then, jnp.array([1.0]), mask)
        >>> [round(x, 3) for x in loss[0].tolist()]  # -1.2 log 0.5, and -log 0.4
        [0.832, 0.916]
    """
    # NaN counts, and shows.
    counts = mask if weights is None else mask & (weights != 0)
    policies = (logprobs, old_logprobs, advantages, counts)
    if kind == "reinforce":
        loss, clipped = reinforce(logprobs, advantages, counts), jnp.zeros_like(mask)
    elif kind == "ppo":
        loss, clipped = ppo_clip(*policies, clip_low=clip_low, clip_high=clip_high)
    elif kind == "cispo":
        loss, clipped = cispo(*policies, clip_low=clip_low, clip_high=clip_high)
    elif kind == "gspo":
        bounds = {"clip_low": clip_low, "clip_high": clip_high}
        loss, clipped = gspo(*policies, **bounds, total=total)
    else:
        raise ValueError(f"`kind` must be one of {', '.join(LOSSES)}, got {kind!r}.")
    return (loss if weights is None else weights * loss), clipped


def reinforce(
    logprobs: Float[Array, "batch time"],
    advantages: Float[Array, " batch"],
    mask: Bool[Array, "batch time"],
) -> Float32[Array, "batch time"]:
    r"""The score-function surrogate per token: :math:`L_t = -A \log p_t`.

    No ratio and no clip: several updates on one batch, or responses of older weights,
    bias it.

    Example:
        >>> logprobs, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[True, True]])
        >>> reinforce(logprobs, jnp.array([0.5]), mask).tolist()
        [[0.5, 1.0]]

    Reference: REINFORCE, Williams, Machine Learning 8, 1992.
    """
    logprobs = jnp.where(mask, logprobs.astype(jnp.float32), 0.0)
    return -advantages.astype(jnp.float32)[:, None] * logprobs


def cispo(
    logprobs: Float[Array, "batch time"],
    old_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, " batch"],
    mask: Bool[Array, "batch time"],
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
) -> tuple[Float32[Array, "batch time"], Bool[Array, "batch time"]]:
    r"""REINFORCE with a clipped importance weight: no token loses its gradient.

    .. math::
        L_t = -\operatorname{stop\_gradient}\big(
              \operatorname{clip}(\rho_t, 1 - c_{low}, 1 + c_{high})\big) A \log p_t,
        \qquad \rho_t = \exp(\log p_t - \log p^{old}_t)

    Its paper has no lower bound: ``clip_low`` 1. Arguments are those of
    :func:`ppo_clip`.

    Returns:
        Loss per token, and where the weight was clipped.

    Example:
        >>> now, then = jnp.log(jnp.array([[[0.5, 0.4]], [[0.25, 0.4]]]))
        >>> mask = jnp.array([[True, True]])
        >>> loss, is_clipped = cispo(now, then, jnp.array([1.0]), mask)
        >>> [round(x, 3) for x in loss[0].tolist()]  # -1.2 log 0.5, and -log 0.4
        [0.832, 0.916]
        >>> is_clipped.tolist()
        [[True, False]]

    Reference: CISPO, MiniMax-M1, arXiv:2506.13585.
    """
    d = jnp.where(mask, logprobs - old_logprobs, 0.0).astype(jnp.float32)
    ratio = lax.stop_gradient(jnp.exp(_clamp(d)))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    is_clipped = mask & (weight != ratio)
    return weight * reinforce(logprobs, advantages, mask), is_clipped


def gspo(
    logprobs: Float[Array, "batch time"],
    old_logprobs: Float[Array, "batch time"],
    advantages: Float[Array, " batch"],
    mask: Bool[Array, "batch time"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    total: Callable[[Array], Array] | None = None,
) -> tuple[Float32[Array, "batch time"], Bool[Array, "batch time"]]:
    r"""PPO's clipped surrogate with the ratio of whole responses, per token.

    .. math::
        L_t = -\min\big(s_t A,\; \operatorname{clip}(s_t, 1 - c_{low}, 1 + c_{high})
              A\big), \qquad
        s_t = \operatorname{stop\_gradient}(s / p_t)\, p_t, \quad
        s = \exp\Big(\tfrac{1}{|y|} \sum_t \log p_t - \log p^{old}_t\Big)

    Averaged over each response's tokens (``rl.aggregation=sequence``) this has the
    value and the gradient of its paper's sequence loss. Its ratios are means of many
    tokens: the clip is hundreds of times narrower than PPO's.

    Args:
        logprobs: of the trained policy.
        old_logprobs: of the policy that sampled, at the same temperature.
        advantages: of each response.
        mask: True on sampled tokens; elsewhere the loss is 0.
        clip_low: c_low.
        clip_high: c_high.
        total: sums values (batch, time) over each token's response, where that is not
            its row.

    Returns:
        Loss per token, and where the clip cut the gradient off: whole responses.

    Example:
        >>> now, then = jnp.log(jnp.array([[[0.5, 0.4]], [[0.25, 0.4]]]))
        >>> mask = jnp.array([[True, True]])
        >>> loss, _ = gspo(now, then, jnp.array([1.0]), mask, clip_high=0.2)
        >>> [round(x, 3) for x in loss[0].tolist()]  # the root of 2 * 1, clipped
        [-1.2, -1.2]

    Reference: GSPO, and its token form, arXiv:2507.18071.
    """
    total = total or (lambda values: jnp.sum(values, axis=-1, keepdims=True))
    logprobs = jnp.where(mask, logprobs.astype(jnp.float32), 0.0)
    d = jnp.where(mask, logprobs - old_logprobs, 0.0)
    mean = total(d) / jnp.maximum(total(mask.astype(jnp.float32)), 1.0)
    held = lax.stop_gradient(jnp.broadcast_to(mean, mask.shape))
    # As if each token's log-ratio were the mean, with a gradient of its own.
    log_ratio = held + logprobs - lax.stop_gradient(logprobs)
    zeros = jnp.zeros_like(log_ratio)
    return ppo_clip(
        log_ratio, zeros, advantages, mask, clip_low=clip_low, clip_high=clip_high
    )


def token_scale(
    mask: Bool[Array, "batch time"],
    counts: Bool[Array, " batch"] | None = None,
    *,
    aggregation: str = "token",
    length: int = 0,
) -> Float32[Array, " batch"]:
    r"""The weight of each of a response's tokens in the loss of the batch.

    With N responses that count, of :math:`n_i` tokens each:

    - ``token``: :math:`1 / \sum_j n_j`, every token alike (DAPO, arXiv:2503.14476);
    - ``sequence``: :math:`1 / (N n_i)`, every response alike (GRPO, arXiv:2402.03300);
    - ``constant``: :math:`1 / (N L)`, the sum of a response's tokens over a constant
      length L (Dr. GRPO, arXiv:2503.20783).

    Args:
        mask: sampled tokens.
        counts: responses that count; 0 for the others. None counts all.
        aggregation: one of ``AGGREGATIONS``.
        length: L, tokens.

    Raises:
        ValueError: an unknown ``aggregation``, or no ``length`` for ``constant``.

    Example:
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> token_scale(mask).tolist()
        [0.25, 0.25]
        >>> token_scale(mask, aggregation="constant", length=4).tolist()
        [0.125, 0.125]
    """
    counts = jnp.ones(mask.shape[0], bool) if counts is None else counts
    lengths = jnp.sum(mask, axis=-1) * counts
    responses = jnp.maximum(jnp.sum(counts), 1)
    if aggregation == "token":
        tokens = jnp.maximum(jnp.sum(lengths), 1)
        scale = jnp.broadcast_to(1.0 / tokens, lengths.shape)
    elif aggregation == "sequence":
        scale = 1.0 / (responses * jnp.maximum(lengths, 1))
    elif aggregation == "constant":
        if length < 1:
            raise ValueError(f"`length` must be at least 1 token, got {length}.")
        scale = jnp.broadcast_to(1.0 / (responses * length), lengths.shape)
    else:
        known = ", ".join(AGGREGATIONS)
        raise ValueError(f"`aggregation` must be one of {known}, got {aggregation!r}.")
    return jnp.where(counts, scale, 0.0).astype(jnp.float32)


def reference_kl(
    logprobs: Float[Array, "batch time"],
    reference_logprobs: Float[Array, "batch time"],
    mask: Bool[Array, "batch time"],
    *,
    estimator: str = "k3",
) -> Float32[Array, "batch time"]:
    r"""An estimate of ``KL(policy || reference)`` from each sampled token, in nats.

    With :math:`d = \log p^{ref}_t - \log p_t`:

    - ``k3``: :math:`e^d - 1 - d`, unbiased where the policy itself sampled, and never
      negative; as a loss its gradient is that of the KL the other way round;
    - ``k2``: :math:`d^2 / 2`, biased, and as a loss its gradient is that of this KL,
      where the policy itself sampled.

    Args:
        logprobs: of the trained policy; the gradient goes through them.
        reference_logprobs: of the same tokens, at the same temperature.
        mask: True on sampled tokens; 0 elsewhere.
        estimator: one of ``KL_ESTIMATORS``.

    Raises:
        ValueError: an unknown ``estimator``.

    Example:
        >>> now, base = jnp.log(jnp.array([[[0.5, 0.5]], [[0.5, 0.25]]]))
        >>> kl = reference_kl(now, base, jnp.array([[True, True]]))
        >>> [round(x, 3) for x in kl[0].tolist()]
        [0.0, 0.193]

    References:
        Schulman, Approximating KL Divergence, 2020; in the loss, k3: GRPO,
        arXiv:2402.03300; gradients: Tang and Munos, arXiv:2506.09477.
    """
    d = reference_logprobs - logprobs
    d = _clamp(jnp.where(mask, d.astype(jnp.float32), 0.0))
    if estimator == "k3":
        return exp_excess(d)
    if estimator == "k2":
        return jnp.square(d) / 2
    known = ", ".join(KL_ESTIMATORS)
    raise ValueError(f"`estimator` must be one of {known}, got {estimator!r}.")


def _clamp(log_ratio: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)

"""The loss of an update as a function of the model: for the step and its monitor."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from logra_jax.models.attention import Span
from logra_jax.models.decoder import Decoder
from logra_jax.models.logprobs import token_logprobs
from logra_jax.rl.advantages import RunningMean, grpo, running_mean
from logra_jax.rl.losses import (
    Correction,
    correct_mismatch,
    corrected_policy_gradient,
    ppo_clip,
)
from logra_jax.rollout.local import prefill, run_prefix
from logra_jax.training.packing import PackedRows
from logra_jax.training.state import Batch, rows


class LossOptions(NamedTuple):
    """Static choices of the policy-gradient loss, from the config."""

    temperature: float
    advantage: str
    group: int  # responses per prompt
    baseline_decay: float
    clip_low: float
    clip_high: float
    correction: str = "none"  # for the engine's mismatch: none, token or sequence
    correction_cap: float = 2.0
    correction_mask: tuple[float, float] | None = None  # ratios that count


class PolicyTerms(NamedTuple):
    """The loss before it is averaged, token by token; 0 where there is no token."""

    loss: Float32[Array, "rows tokens"]
    is_clipped: Bool[Array, "rows tokens"]
    log_ratio: Float32[Array, "rows tokens"]  # trainer's log-prob less the engine's
    correction: Correction | None  # what the loss was weighted by


def advantages_of(
    rewards: Float32[Array, " batch"], baseline: RunningMean, options: LossOptions
) -> tuple[Float32[Array, " batch"], RunningMean]:
    """The responses' advantages, and the baseline after them."""
    if options.advantage == "grpo":
        return grpo(rewards, options.group), baseline
    return running_mean(rewards, baseline, options.baseline_decay)


def policy_terms(
    model: Decoder,
    batch: Batch,
    advantages: Float[Array, " batch"],
    options: LossOptions,
) -> PolicyTerms:
    """The policy-gradient loss of each completion token.

    Without a correction the PPO ratio is to the engine's log-probs, and clipped. With
    one it is to the trainer's own, and each token weighs what the correction says.
    """
    head, hidden = model.head_after(response_hidden(model, batch))
    logprobs = token_logprobs(
        hidden,
        batch.completions.reshape(-1),
        head,
        temperature=options.temperature,
    ).reshape(batch.completions.shape)
    return _terms(logprobs, batch.logprobs, batch.mask, advantages, options)


def packed_terms(
    model: Decoder,
    prefix: Int[Array, " prefix"],
    packed: PackedRows,
    advantages: Float[Array, " batch"],
    options: LossOptions,
    *,
    longest: int | None = None,
) -> PolicyTerms:
    """:func:`policy_terms` of packed rows, one of each device.

    Args:
        model: the policy.
        prefix: tokens common to all responses.
        packed: rows of shape (devices, time).
        advantages: of all responses of the batch.
        options: of the loss.
        longest: tokens that no response has more of, where that is known.

    Returns:
        The terms of the tokens to predict, (devices * time, 1).
    """
    shared, start = run_prefix(model, prefix), prefix.shape[0]
    order = start + jnp.arange(packed.tokens.shape[1])[None]
    hidden, _ = model(
        packed.tokens,
        start + packed.positions,
        Span(order, packed.segments),
        shared,
        window=longest,
    )
    # Only what predicts a token goes through the head, which is most of the work.
    hidden = jnp.take_along_axis(hidden, packed.column[..., None], axis=1)
    head, hidden = model.head_after(hidden)
    slots = jnp.arange(packed.column.shape[1])[None]
    logprobs = token_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        packed.target.reshape(-1),
        head,
        temperature=options.temperature,
        needed=(slots < packed.targets[:, None]).reshape(-1),
    )
    response = packed.response.reshape(-1)

    def of_response(values: Array) -> Array:
        sums = jax.ops.segment_sum(values[:, 0], response, len(advantages))
        return sums[response][:, None]

    return _terms(
        logprobs[:, None],
        packed.logprob.reshape(-1, 1),
        packed.mask.reshape(-1, 1),
        advantages[response],
        options,
        of_response,
    )


def _terms(
    logprobs: Float[Array, "rows tokens"],
    engine_logprobs: Float[Array, "rows tokens"],
    mask: Bool[Array, "rows tokens"],
    advantages: Float[Array, " rows"],
    options: LossOptions,
    total: Callable[[Array], Array] | None = None,
) -> PolicyTerms:
    """The loss of each token; ``total`` sums over responses that are not rows."""
    log_ratio = jnp.where(mask, logprobs - engine_logprobs, 0.0)
    if options.correction != "none":
        correction = correct_mismatch(
            logprobs,
            engine_logprobs,
            mask,
            level=options.correction,
            cap=options.correction_cap,
            keep=options.correction_mask,
            total=total,
        )
        loss = corrected_policy_gradient(logprobs, advantages, correction)
        nowhere = jnp.zeros_like(mask)
        return PolicyTerms(loss, nowhere, log_ratio, correction)
    loss, is_clipped = ppo_clip(
        logprobs,
        engine_logprobs,
        advantages,
        mask,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )
    return PolicyTerms(loss, is_clipped, log_ratio, None)


def response_hidden(
    model: Decoder, batch: Batch, dtype: DTypeLike | None = None
) -> Float[Array, "tokens features"]:
    """Hidden states that predict each completion token, (batch * new, features)."""
    width, new = batch.prompts.shape[1], batch.completions.shape[1]
    tokens = jnp.concatenate([batch.prompts, batch.completions[:, :-1]], axis=1)
    hidden, _, _ = prefill(
        model,
        batch.prefix,
        tokens,
        batch.prompt_lengths,
        prompt_width=width,
        dtype=dtype,
    )
    return hidden[:, width - 1 : width - 1 + new].reshape(-1, hidden.shape[-1])


def hidden_in_parts(
    model: Decoder, batch: Batch, most: int, dtype: DTypeLike | None = None
) -> Float[Array, "tokens features"]:
    """:func:`response_hidden`, of at most ``most`` rows at a time, and as many each.

    Two rows of 4,096 tokens at once, and their rates of change, can be more than all
    else that an update holds.
    """
    count = len(batch.mask)
    size = next(n for n in range(min(most, count), 0, -1) if count % n == 0)
    if size == count:
        return response_hidden(model, batch, dtype)

    def part(few: Batch) -> Array:
        return response_hidden(model, few._replace(prefix=batch.prefix), dtype)

    split = rows(batch, lambda a: a.reshape(-1, size, *a.shape[1:]))
    hidden = lax.map(part, split._replace(prefix=None))
    return hidden.reshape(-1, hidden.shape[-1])

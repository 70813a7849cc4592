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
from logra_jax.rl.advantages import (
    STD_FLOOR,
    RunningMean,
    batch_mean,
    dr_grpo,
    grpo,
    reinforce_pp,
    rloo,
    running_mean,
    whiten,
)
from logra_jax.rl.losses import (
    Correction,
    correct_mismatch,
    policy_loss,
    reference_kl,
    token_scale,
)
from logra_jax.rollout.local import prefill, run_prefix
from logra_jax.training.packing import PackedRows
from logra_jax.training.state import Batch, Credit, rows


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
    std_floor: float = STD_FLOOR
    whiten: bool = False  # advantages, over the batch
    loss: str = "ppo"
    aggregation: str = "token"
    length: int = 0  # tokens that the constant aggregation divides by
    reference_weight: float = 0.0  # of the KL to the reference; at 0 there is none
    reference_estimator: str = "k3"


class PolicyTerms(NamedTuple):
    """The loss token by token, 0 where there is no token; its sum is the batch's."""

    loss: Float32[Array, "rows tokens"]
    is_clipped: Bool[Array, "rows tokens"]
    log_ratio: Float32[Array, "rows tokens"]  # trainer's log-prob less the engine's
    correction: Correction | None  # what the loss was weighted by
    reference_kl: Float32[Array, "rows tokens"] | None  # nats, before its weight


class Judged(NamedTuple):
    """What the loss of some responses needs beside their tokens, a row each."""

    credit: Credit
    scale: Float32[Array, " rows"]  # of each token's loss, see `token_scale`


def advantages_of(
    rewards: Float32[Array, " batch"], baseline: RunningMean, options: LossOptions
) -> tuple[Float32[Array, " batch"], RunningMean]:
    """The responses' advantages, and the baseline after them."""
    group, floor = options.group, options.std_floor
    match options.advantage:
        case "running_mean":
            found, baseline = running_mean(rewards, baseline, options.baseline_decay)
        case "batch_mean":
            found = batch_mean(rewards)
        case "reinforce_pp":
            found = reinforce_pp(rewards, group, floor)
        case "grpo":
            found = grpo(rewards, group, floor)
        case "dr_grpo":
            found = dr_grpo(rewards, group)
        case "rloo":
            found = rloo(rewards, group)
        case unknown:
            raise ValueError(f"`advantage` must be a known one, got {unknown!r}.")
    return (whiten(found, floor) if options.whiten else found), baseline


def judge(batch: Batch, credit: Credit, options: LossOptions) -> Judged:
    """All responses of a batch, those whose tokens count and those that do not."""
    scale = token_scale(
        batch.mask,
        batch.counts,
        aggregation=options.aggregation,
        length=options.length,
    )
    return Judged(credit, scale)


def policy_terms(
    model: Decoder,
    batch: Batch,
    judged: Judged,
    options: LossOptions,
) -> PolicyTerms:
    """The policy-gradient loss of each completion token.

    Without a correction the ratio is to the engine's log-probs. With one it is to the
    trainer's own before the batch, and each token weighs what the correction says.
    """
    logprobs = response_logprobs(model, batch, options.temperature)
    return _terms(logprobs, batch.logprobs, batch.mask, judged, options)


def response_logprobs(
    model: Decoder, batch: Batch, temperature: float
) -> Float32[Array, "batch new"]:
    """Log-probs of the completion tokens; anything where none was sampled."""
    head, hidden = model.head_after(response_hidden(model, batch))
    return token_logprobs(
        hidden, batch.completions.reshape(-1), head, temperature=temperature
    ).reshape(batch.completions.shape)


def packed_terms(
    model: Decoder,
    prefix: Int[Array, " prefix"],
    packed: PackedRows,
    judged: Judged,
    options: LossOptions,
    *,
    longest: int | None = None,
) -> PolicyTerms:
    """:func:`policy_terms` of packed rows, one of each device.

    Args:
        model: the policy.
        prefix: tokens common to all responses.
        packed: rows of shape (devices, time).
        judged: all responses of the batch.
        options: of the loss.
        longest: tokens that no response has more of, where that is known.

    Returns:
        The terms of the tokens to predict, (devices * time, 1).
    """
    shared, tokens = run_prefix(model, prefix, packed.tokens)
    start = prefix.shape[0]
    order = start + jnp.arange(tokens.shape[1])[None]
    hidden, _ = model(
        tokens,
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
    response, place = packed.response.reshape(-1), packed.place.reshape(-1)

    def of_response(values: Array) -> Array:
        sums = jax.ops.segment_sum(values[:, 0], response, len(judged.scale))
        return sums[response][:, None]

    def of_token(values: Array) -> Array:
        return (
            values[response] if values.ndim == 1 else values[response, place][:, None]
        )

    return _terms(
        logprobs[:, None],
        packed.logprob.reshape(-1, 1),
        packed.mask.reshape(-1, 1),
        jax.tree.map(of_token, judged),
        options,
        of_response,
    )


def _terms(
    logprobs: Float[Array, "rows tokens"],
    engine_logprobs: Float[Array, "rows tokens"],
    mask: Bool[Array, "rows tokens"],
    judged: Judged,
    options: LossOptions,
    total: Callable[[Array], Array] | None = None,
) -> PolicyTerms:
    """The loss of each token; ``total`` sums over responses that are not rows."""
    advantages, old, reference = judged.credit
    correction = None
    if options.correction != "none":
        old = lax.stop_gradient(logprobs) if old is None else old
        correction = correct_mismatch(
            old,
            engine_logprobs,
            mask,
            level=options.correction,
            cap=options.correction_cap,
            keep=options.correction_mask,
            total=total,
        )
    loss, is_clipped = policy_loss(
        options.loss,
        logprobs,
        engine_logprobs if old is None else old,
        advantages,
        mask,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        total=total,
        weights=correction and correction.weights,
    )
    kl = None
    if options.reference_weight:
        # Without one of its own, the reference is the policy that sampled.
        other = engine_logprobs if reference is None else reference
        estimator = options.reference_estimator
        kl = reference_kl(logprobs, other, mask, estimator=estimator)
        loss += options.reference_weight * kl
    loss *= judged.scale[:, None]
    log_ratio = jnp.where(mask, logprobs - engine_logprobs, 0.0)
    return PolicyTerms(loss, is_clipped, log_ratio, correction, kl)


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

    def hidden(few: Batch) -> Array:
        return response_hidden(model, few, dtype)

    found = _in_parts(hidden, batch, most)
    return found.reshape(-1, found.shape[-1])


def logprobs_in_parts(
    model: Decoder, batch: Batch, most: int, temperature: float
) -> Float32[Array, "batch new"]:
    """:func:`response_logprobs`, of at most ``most`` rows at a time."""
    found = _in_parts(
        lambda few: response_logprobs(model, few, temperature), batch, most
    )
    return found.reshape(batch.completions.shape)


def _in_parts(f: Callable[[Batch], Array], batch: Batch, most: int) -> Array:
    """``f`` of at most ``most`` rows at a time, and as many each; stacked, if parts."""
    count = len(batch.mask)
    size = next(n for n in range(min(most, count), 0, -1) if count % n == 0)
    if size == count:
        return f(batch)
    split = rows(batch, lambda a: a.reshape(-1, size, *a.shape[1:]))
    return lax.map(
        lambda few: f(few._replace(prefix=batch.prefix)), split._replace(prefix=None)
    )

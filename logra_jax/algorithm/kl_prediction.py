r"""Estimates of :math:`q`, the KL per squared step of a proposal, before it lands.

:func:`predict_kl` takes it from one forward-mode pass; :func:`predict_kl_by_difference`
from probes of a finite size, also against a rollout engine of slightly different
probabilities. Either can be replaced: what :mod:`logra_jax.algorithm.predicted_kl`
makes a step size of is the number alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, PyTree

from logra_jax.algorithm.divergence import (
    Head,
    LateHead,
    divergence,
    exp_excess,
    head_for,
    log_policy,
    map_chunks,
    masked_mean,
    scaled_logits,
)
from logra_jax.algorithm.parallel import AxisNames, total

# The search for a step that is neither lost in rounding nor beyond the quadratic term.
_WINDOW = 10.0  # a measured KL within this factor of the target will do
_STRIDE = 1e3  # largest factor by which one round changes the step
_ROUNDS = 10


def predict_kl(
    hidden: Callable[[PyTree], Float[Array, "tokens features"]],
    head: Head | LateHead,
    probes: PyTree,
    updates: PyTree,
    mask: Bool[Array, " tokens"] | Float[Array, " tokens"],
    *,
    temperature: float | Array = 1.0,
    chunk: int = 256,
    axis_name: AxisNames = None,
) -> tuple[Float32[Array, ""], Float[Array, "tokens features"]]:
    r"""Predicted KL of the unscaled proposal, by one forward-mode pass.

    .. math::
        q = \operatorname{mean}_t \tfrac12 \operatorname{Var}_{v \sim p_t}(\dot z_{tv})

    with :math:`\dot z` the rate of change of ``logits / temperature`` along the update
    and :math:`p_t` the current policy: the second-order term of
    :math:`KL(p_0 \| p_\alpha)`, which grows as :math:`\alpha^2 q`.

    Args:
        hidden: probes -> final hidden states; must use the plain form of the sketched
            layers (:func:`logra_jax.perturbed`).
        head: hidden states -> logits (tokens, vocab), of both policies: a change of the
            head itself has no say in q. Called on ``chunk`` tokens at a time, so that
            logits of all tokens never exist. A :class:`LateHead` is made once the
            hidden states are there.
        probes: the point of expansion, zeros.
        updates: the proposal, a tree like ``probes``.
        mask: weight of each token in the mean: 1 for contexts of a response, 0 for
            padding (which may hold NaN).
        temperature: of the policy.
        chunk: tokens per chunk.
        axis_name: mesh axes, inside ``jax.shard_map``, whose devices' tokens the mean
            is over.

    Returns:
        ``q`` in nats per token, NaN for an empty mask, and the hidden states at
        ``probes``.

    Example:
        >>> import jax.numpy as jnp, logra_jax as logra
        >>> hidden = lambda probe: jnp.zeros((3, 2)) + probe  # of three tokens
        >>> head = lambda h: h  # they are the logits of two words here
        >>> probe, update = jnp.zeros((1, 2)), jnp.array([[0.1, 0.0]])
        >>> q, _ = logra.predict_kl(hidden, head, probe, update, jnp.ones(3))
        >>> round(float(q), 6)  # half the variance of 0.1 and 0.0, as likely
        0.00125

    Reference: LoGRA, arXiv:2610.06647.
    """
    rates = jax.jvp(hidden, (probes,), (updates,))
    logits, (h, h_rate) = head_for(head, rates)

    def variance(args):
        z, z_rate = jax.jvp(
            lambda h: scaled_logits(logits(h), temperature), args[:1], args[1:]
        )
        p = jax.nn.softmax(z)
        mean = jnp.sum(p * z_rate, -1, keepdims=True)
        return 0.5 * jnp.sum(p * jnp.square(z_rate - mean), -1)

    return masked_mean(map_chunks(variance, (h, h_rate), chunk), mask, axis_name), h


def predict_kl_by_difference(
    hidden: Callable[[PyTree], Float[Array, "tokens features"]],
    head: Head | LateHead,
    probes: PyTree,
    updates: PyTree,
    mask: Bool[Array, " tokens"] | Float[Array, " tokens"],
    *,
    temperature: float | Array = 1.0,
    chunk: int = 256,
    step: float | Array = 1.0,
    target: float | None = 1e-4,
    engine: tuple[Int[Array, " tokens"], Float[Array, " tokens"]] | None = None,
    axis_name: AxisNames = None,
) -> tuple[Float32[Array, ""], Float[Array, "tokens features"]]:
    r"""Predicted KL of the unscaled proposal, from probes of a finite size.

    The policy :math:`p_s` at ``probes + s * updates`` is measured on both sides:

    .. math::
        q = \frac{KL(p_0 \| p_s) + KL(p_0 \| p_{-s})}{2 s^2}

    The cubic terms cancel, so this is :func:`predict_kl`'s ``q`` up to
    :math:`O(s^2)`. It needs forward passes only: three, against one that carries
    tangents.

    **Size of the probe.** Too small a step drowns in rounding, too large a one leaves
    the quadratic range, and the right one depends on the scale of the update. So the
    step is judged by the KL that it makes: from ``step`` on, it is multiplied by
    :math:`\sqrt{target / KL}` (at most by 1,000 either way, ten times) until the
    measured KL lies within a factor of 10 of ``target``. A good start, such as
    :math:`\sqrt{target / q}` of the last update, makes that one round. The default
    target suits float32 activations. bfloat16 activations alone move the policy by
    several 1e-4 nats: use float32, or a target well above that.

    **Against a rollout engine.** An engine with other kernels samples from :math:`e`,
    which differs from :math:`p_0` under the same weights. Its sampled tokens
    :math:`v` and their log-probs give :math:`KL(e \| p_s)` without bias as the mean
    over tokens of

    .. math::
        K(s) = r_s - 1 - \log r_s, \qquad r_s = p_s(v) / e(v)

    :math:`K(0)` is the mismatch. It is not the update's doing and is subtracted:

    .. math::
        q = \frac{K(s) + K(-s) - 2 K(0)}{2 s^2}

    The mismatch also meets the update in a first-order cross term,
    :math:`-s \sum_v (e - p_0)_v z'_v` with :math:`z` the scaled logits, which a
    one-sided :math:`K(s) - K(0)` would keep; between :math:`s` and :math:`-s` it
    cancels. Since :math:`KL(e \| p_s)'' = -\sum_v e_v (\log p_s)''_v` and
    :math:`(\log p)'' = z'' - E_p z'' - Var_p z'`,

    .. math::
        E[q] = \tfrac12 \Big[ \operatorname{Var}_{p_0}(z')
               + \sum_v (p_0 - e)_v z''_v \Big] + O(s^2)

    so the bias is of second order, mismatch times curvature. With
    :math:`a_\pm = \log p_{\pm s}(v) - \log p_0(v)` the numerator is, exactly,

    .. math::
        r_0 (e^{a_+} - 1 - a_+) + r_0 (e^{a_-} - 1 - a_-) + (r_0 - 1) (a_+ + a_-)

    which is how it is computed: no two large numbers are subtracted. The first two
    terms are never negative and have the mean :math:`KL(p_0 \| p_{\pm s})` (they judge
    the step); the last carries the bias and, once the mismatch is large, noise enough
    to make ``q`` negative. Even without mismatch a mean over sampled tokens
    (:math:`\tfrac12 (\log p)'^2`) scatters more than one over the vocabulary.

    Sampling with top-p or top-k leaves :math:`e` a smaller support than :math:`p`.
    With log-probs of the unfiltered policy, ``q`` is then the mean of
    :math:`\tfrac12 (\log p)'^2` over kept tokens only: what the update does to the
    tail is unseen. With renormalised log-probs :math:`r_0` is the kept mass
    :math:`m < 1` everywhere, and :math:`\tfrac12 (1 - m)(-(\log p)'' - (\log p)'^2)`
    is added.

    Args:
        hidden: probes -> final hidden states; as in :func:`predict_kl`.
        head: hidden states -> logits (tokens, vocab), ``chunk`` tokens at a time.
        probes: the point of expansion, zeros.
        updates: the proposal, a tree like ``probes``.
        mask: weight of each token in the mean; padding may hold NaN.
        temperature: of the policy.
        chunk: tokens per chunk.
        step: where the search for :math:`s` starts, or :math:`s` itself.
        target: KL that the probe should make, nats per token; ``None`` takes ``step``
            as it is.
        engine: the sampled token that followed each context, and its log-prob in nats
            as the engine reported it, at the same temperature; ``None`` measures the
            trainer's policy against itself, over the whole vocabulary.
        axis_name: as in :func:`predict_kl`.

    Returns:
        ``q`` in nats per token, NaN for an empty mask, and the hidden states at
        ``probes``.

    Example:
        >>> import jax.numpy as jnp, logra_jax as logra
        >>> hidden = lambda probe: jnp.zeros((3, 2)) + probe  # of three tokens
        >>> head = lambda h: h  # they are the logits of two words here
        >>> probe, update = jnp.zeros((1, 2)), jnp.array([[0.1, 0.0]])
        >>> q, _ = logra.predict_kl_by_difference(
        ...     hidden, head, probe, update, jnp.ones(3)
        ... )
        >>> round(float(q), 6)  # half the variance of 0.1 and 0.0, as likely
        0.00125

    Reference: LoGRA, arXiv:2610.06647 (finite-difference probe, mismatch subtraction).
    """
    for name, value in (("step", step), ("target", target)):
        is_number = isinstance(value, float | int)
        if is_number and not 0 < value < float("inf"):
            raise ValueError(
                f"`{name}` must be positive and finite, got {value}; leave it out for "
                "the default."
            )
    before = hidden(probes)

    def moved(s: Array) -> Array:
        return hidden(
            jax.tree.map(lambda p, u: (p + s * u).astype(p.dtype), probes, updates)
        )

    policy = _Policy(head, temperature, chunk, mask, axis_name)
    if engine is None:
        measure = _measure_vocabulary(policy, before, moved)
    else:
        measure = _measure_tokens(policy, before, moved, *engine)
    if target is None:
        end = _measure_once(measure, _Search.start(step), 1.0)
    else:
        count = total(jnp.sum(mask), axis_name)
        # Devices may hold different rows of the updates: all search, or none.
        has_lost = total(jnp.int32(~_is_finite_and_not_zero(updates)), axis_name) > 0
        is_measurable = (count > 0) & ~has_lost
        end = _search_step(measure, step, target, is_measurable)
    return (end.size + end.cross) / jnp.square(end.step), before


class _Policy(NamedTuple):
    """How hidden states become a policy, and which tokens it is measured on."""

    head: Head | LateHead
    temperature: float | Array
    chunk: int
    mask: Array
    axis_name: AxisNames

    def mean(self, values: Array) -> Array:
        return masked_mean(values, self.mask, self.axis_name)


class _Search(NamedTuple):
    """The last measurement of a search for the step; float32 scalars but for rounds."""

    step: Array
    size: Array  # KL(p_0 || p_s) in nats per token, mean of both sides
    cross: Array  # mismatch times second difference, nats per token
    rounds: Array  # int32, measurements so far

    @classmethod
    def start(cls, step: float | Array) -> "_Search":
        zero = jnp.float32(0)
        return cls(jnp.asarray(step, jnp.float32), zero, zero, jnp.int32(0))


# Steps (s, -s) -> size and cross, means over tokens of both sides.
_Measure = Callable[[Array], tuple[Array, Array]]


def _measure_vocabulary(
    policy: _Policy, before: Array, moved: Callable[[Array], Array]
) -> _Measure:
    def measure(steps: Array) -> tuple[Array, Array]:
        head, states = head_for(policy.head, (before, *lax.map(moved, steps)))

        def mean_divergence(args):
            p, forth, back = (log_policy(head(h), policy.temperature) for h in args)
            return 0.5 * (divergence(p, forth) + divergence(p, back))

        kl = map_chunks(mean_divergence, states, policy.chunk)
        return policy.mean(kl), jnp.float32(0)

    return measure


def _measure_tokens(
    policy: _Policy,
    before: Array,
    moved: Callable[[Array], Array],
    tokens: Array,
    reported: Array,
) -> _Measure:
    def logprob(h: Array) -> Array:
        head, h = head_for(policy.head, h)

        def pick(args):
            logprobs = log_policy(head(args[0]), policy.temperature)
            return jnp.take_along_axis(logprobs, args[1], -1)[:, 0]

        return map_chunks(pick, (h, tokens[:, None]), policy.chunk)

    log_p = logprob(before)
    log_r = log_p - reported

    def measure(steps: Array) -> tuple[Array, Array]:
        a = lax.map(lambda s: logprob(moved(s)) - log_p, steps)
        size = jnp.exp(log_r) * jnp.mean(exp_excess(a), 0)
        cross = jnp.expm1(log_r) * jnp.mean(a, 0)
        return policy.mean(size), policy.mean(cross)

    return measure


def _search_step(
    measure: _Measure, step: float | Array, target: float, is_measurable: Array
) -> _Search:
    """Measure until the KL is near ``target``; once where it never will be."""

    def should_go_on(search: _Search) -> Array:
        ratio = search.size / target
        is_near = (ratio > 1 / _WINDOW) & (ratio < _WINDOW)
        is_open = is_measurable & ~is_near & (search.rounds < _ROUNDS)
        return (search.rounds == 0) | is_open

    return lax.while_loop(
        should_go_on,
        lambda search: _measure_once(measure, search, target),
        _Search.start(step),
    )


def _measure_once(measure: _Measure, search: _Search, target: float) -> _Search:
    factor = jnp.clip(jnp.sqrt(target / search.size), 1 / _STRIDE, _STRIDE)
    # A policy that cannot be computed lies too far away.
    factor = jnp.where(jnp.isnan(factor), 1 / _STRIDE, factor)
    step = search.step * jnp.where(search.rounds == 0, 1.0, factor)
    return _Search(step, *measure(jnp.stack([step, -step])), search.rounds + 1)


def _is_finite_and_not_zero(tree: PyTree) -> Array:
    largest = jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)])
    return jnp.all(jnp.isfinite(largest)) & jnp.any(largest > 0)

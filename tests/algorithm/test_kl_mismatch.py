"""Mismatch subtraction: the estimate of q against an engine of known mismatch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.algorithm.kl_prediction import predict_kl, predict_kl_by_difference
from logra_jax.algorithm.sketch import perturbed_matmul

TOKENS, K, D, R, VOCAB = 13, 12, 10, 4, 17
TEMPERATURE = 0.7


def log_softmax(logits) -> np.ndarray:
    z = np.asarray(logits, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


class Engine:
    """An engine of known mismatch, and every (context, token) pair as one sample.

    Weighted by the engine's probabilities, a mean over the pairs is an expectation:
    nothing is left to chance.
    """

    def __init__(self, mismatch: float, kept: int = VOCAB):
        keys = jax.random.split(jax.random.key(5), 5)
        x = jax.random.normal(keys[0], (TOKENS, K))
        w = jax.random.normal(keys[1], (K, D)) / K**0.5
        w_out = jax.random.normal(keys[2], (D, VOCAB)) / D**0.5
        self.hidden = lambda p: jnp.tanh(perturbed_matmul(x, w, p, keys[3]))
        self.head = lambda h: h @ w_out
        self.update = jax.random.normal(keys[4], (D, R)) * 0.1
        self.zero = jnp.zeros_like(self.update)
        z = np.asarray(self.logits(0.0), np.float64)
        rng = np.random.default_rng(0)
        self.log_e = log_softmax(z + mismatch * rng.normal(size=z.shape))
        sampled = self.log_e.copy()  # filtered by top-k, renormalised
        np.put_along_axis(sampled, np.argsort(z, -1)[:, : VOCAB - kept], -np.inf, -1)
        self.log_g = log_softmax(sampled)
        self.context = jnp.repeat(jnp.arange(TOKENS), VOCAB)
        self.tokens = jnp.tile(jnp.arange(VOCAB), TOKENS)

        @functools.partial(jax.jit, static_argnames="target")
        def measure(weights, reported, step, target):
            return predict_kl_by_difference(
                lambda p: self.hidden(p)[self.context],
                self.head,
                self.zero,
                self.update,
                weights,
                temperature=TEMPERATURE,
                step=step,
                target=target,
                engine=(self.tokens, reported),
            )[0]

        self.measure = measure

    def logits(self, s: float):
        return self.head(self.hidden(self.zero + s * self.update)) / TEMPERATURE

    def q(self, weights: np.ndarray, reported: np.ndarray, step=1.0, target=1e-4):
        """The estimate over pairs; ``reported`` log-probs, (contexts, vocab) both."""
        flat = (jnp.float32(a.reshape(-1)) for a in (weights, reported))
        return float(self.measure(*flat, jnp.float32(step), target))

    def k(self, s: float) -> float:
        """KL(engine || p_s), mean over contexts, float64."""
        log_p = log_softmax(self.logits(s))
        return (np.exp(self.log_e) * (self.log_e - log_p)).sum(-1).mean()

    def derivatives(self):
        """p_0, and first and second derivatives of the scaled logits."""

        def rate(p):
            return jax.jvp(
                lambda p: self.head(self.hidden(p)) / TEMPERATURE, (p,), (self.update,)
            )[1]

        first, second = jax.jvp(rate, (self.zero,), (self.update,))
        p = np.exp(log_softmax(self.logits(0.0)))
        return p, np.float64(first), np.float64(second)

    def log_derivatives(self):
        """First and second derivatives of the log-probs."""
        p, first, second = self.derivatives()
        mean = (p * first).sum(-1, keepdims=True)
        variance = (p * (first - mean) ** 2).sum(-1, keepdims=True)
        curvature = second - (p * second).sum(-1, keepdims=True) - variance
        return first - mean, curvature


@pytest.mark.parametrize("mismatch", [0.0, 0.02, 0.3])
def test_engine_estimate_has_the_stated_mean_at_a_small_step(mismatch):
    engine = Engine(mismatch)
    p, first, second = engine.derivatives()
    e = np.exp(engine.log_e)
    variance = (p * first**2).sum(-1) - (p * first).sum(-1) ** 2
    stated = 0.5 * (variance + ((p - e) * second).sum(-1)).mean()
    ours = engine.q(e, engine.log_e)
    np.testing.assert_allclose(ours, stated, rtol=1e-3)
    # The bias is mismatch times curvature: nothing without mismatch.
    q = 0.5 * variance.mean()
    assert abs(ours / q - 1) < 1e-3 + mismatch


@pytest.mark.parametrize("s", [0.05, 0.5])
def test_engine_estimate_is_the_second_difference_of_its_kl_at_any_step(s):
    engine = Engine(0.3)
    second = (engine.k(s) + engine.k(-s) - 2 * engine.k(0.0)) / (2 * s**2)
    e = np.exp(engine.log_e)
    ours = engine.q(e, engine.log_e, step=s, target=None)
    np.testing.assert_allclose(ours, second, rtol=2e-3)


def test_without_subtraction_or_from_one_side_the_mismatch_eats_the_budget():
    engine = Engine(0.3)
    q, _ = predict_kl(
        engine.hidden,
        engine.head,
        engine.zero,
        engine.update,
        jnp.ones(TOKENS),
        temperature=TEMPERATURE,
    )
    s = float(np.sqrt(1e-4 / q))
    assert engine.k(s) / s**2 > 100 * q
    assert abs((engine.k(s) - engine.k(0.0)) / s**2 / q - 1) > 0.3  # cross term
    ours = engine.q(np.exp(engine.log_e), engine.log_e)
    assert abs(ours / q - 1) < 0.1


def test_engine_estimate_from_real_samples_scatters_around_its_mean():
    engine = Engine(0.3)
    e = np.exp(engine.log_e)
    mean = engine.q(e, engine.log_e)
    rng = np.random.default_rng(1)
    counts = rng.multinomial(2000, e, size=(30, TOKENS))
    draws = [engine.q(n.astype(np.float64), engine.log_e) for n in counts]
    error = np.std(draws, ddof=1) / np.sqrt(len(draws))
    assert 1e-4 < error / mean < 0.02
    assert abs(np.mean(draws) - mean) < 4 * error


@pytest.mark.parametrize("renormalised", [False, True])
def test_truncated_sampling_biases_the_engine_estimate_as_stated(renormalised):
    engine = Engine(0.0, kept=5)
    g = np.exp(engine.log_g)
    first, second = engine.log_derivatives()
    stated = 0.5 * first**2
    reported = engine.log_e
    if renormalised:
        reported = np.where(g > 0, engine.log_g, 0.0)
        kept = (np.exp(engine.log_e) * (g > 0)).sum(-1, keepdims=True)
        assert kept.max() < 0.9
        stated = stated + 0.5 * (1 - kept) * (-second - first**2)
    stated = (g * stated).sum(-1).mean()
    np.testing.assert_allclose(engine.q(g, reported), stated, rtol=2e-3)
    full = engine.q(np.exp(engine.log_e), engine.log_e)
    assert abs(stated / full - 1) > 0.05


def test_padding_has_no_say_in_the_engine_estimate():
    engine = Engine(0.3)
    e = np.exp(engine.log_e)
    e[3] = 0.0
    reported = engine.log_e.copy()
    clean = engine.q(e, reported)
    reported[3] = -np.inf
    assert engine.q(e, reported) == clean

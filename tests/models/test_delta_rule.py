"""The chunked delta rule where gates and keys are extreme, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.models.delta_rule import CHUNK, _decay, _invert, delta_rule

BATCH, TIME, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 100, 1, 2, 4, 6
START = jnp.zeros((1, TIME), jnp.int32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs():
    return {
        "q": normal(BATCH, TIME, KEY_HEADS, KEY_DIM),
        "k": normal(BATCH, TIME, KEY_HEADS, KEY_DIM, seed=1),
        "v": normal(BATCH, TIME, HEADS, VALUE_DIM, seed=2),
        "g": -np.abs(normal(BATCH, TIME, HEADS, seed=3)),
        "beta": np.full((BATCH, TIME, HEADS), 0.5, np.float32),
    }


def recur(q, k, v, g, beta):
    q, k, v, g, beta = (np.asarray(a, np.float64) for a in (q, k, v, g, beta))
    q, k = (
        np.repeat(a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6), HEADS, axis=2)
        for a in (q, k)
    )
    state, out = np.zeros((BATCH, HEADS, KEY_DIM, VALUE_DIM)), np.zeros(v.shape)
    for t in range(TIME):
        state *= np.exp(g[:, t])[..., None, None]
        wrong = v[:, t] - np.einsum("bhd,bhde->bhe", k[:, t], state)
        u = beta[:, t, :, None] * wrong
        state += k[:, t, ..., None] * u[..., None, :]
        out[:, t] = np.einsum("bhd,bhde->bhe", q[:, t], state) * KEY_DIM**-0.5
    return out, state


@jax.jit
def value_and_gradients(arguments):
    def f(arguments):
        return delta_rule(**arguments, start=START, past=None)

    out, pull = jax.vjp(f, arguments)
    return out, pull(jax.tree.map(jnp.ones_like, out))[0]


ONE_KEY = np.broadcast_to(normal(1, 1, 1, KEY_DIM), (BATCH, TIME, KEY_HEADS, KEY_DIM))
EXTREMES = {
    "nothing is forgotten": {"g": 0.0},
    "everything is forgotten": {"g": -1e9},
    "some tokens forget everything": {"g": np.where(np.arange(TIME) % 7, -1e-3, -1e6)},
    "decays of every size": {"g": -np.logspace(-6, 3, TIME)},
    "nothing is corrected": {"beta": 0.0},
    "everything is corrected": {"beta": 1.0, "g": 0.0},
    "one key": {"k": ONE_KEY, "beta": 1.0, "g": 0.0},
    "one key and its opposite": {
        "k": ONE_KEY * np.where(np.arange(TIME) % 2, 1, -1)[:, None, None],
        "beta": 1.0,
        "g": 0.0,
    },
    "no key": {"k": 0.0, "q": 0.0},
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_gates_and_keys(name):
    arguments = inputs()
    for key, a in EXTREMES[name].items():
        a = np.asarray(a, np.float32)
        if key == "g" and a.ndim:
            a = a[:, None]
        arguments[key] = np.array(np.broadcast_to(a, arguments[key].shape))
    (out, state), gradients = value_and_gradients(arguments)
    expected, expected_state = recur(**arguments)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state, expected_state, rtol=0, atol=1e-5)
    for key, gradient in gradients.items():
        assert np.all(np.isfinite(gradient)), key


def test_decays_are_as_exact_as_their_exponents():
    """Small ones after large ones, where differences of plain sums are off by 1e-4."""
    g = -np.array([90.3, 1e-4, 77.7, 3e-3, 110.1, 1e-5, 0.3, 20.2], np.float32)
    g = np.tile(g, CHUNK // len(g))
    see = np.tri(CHUNK, dtype=bool)
    sums = [
        [g[j + 1 : i + 1].sum(dtype=np.float64) for j in range(CHUNK)]
        for i in range(CHUNK)
    ]
    sums = np.where(see, sums, -np.inf)
    got = np.asarray(_decay(jnp.asarray(g), jnp.asarray(see)), np.float64)
    exact = np.exp(sums)
    seen = sums > -20
    assert np.abs(got[seen] / exact[seen] - 1).max() <= 3e-6
    assert np.all(got[~seen] <= np.exp(-19.9))


@pytest.mark.parametrize("time", [1, 2, 5, 8, 17, 33, CHUNK])
def test_the_inverse_is_numpys(time):
    k = normal(3, time, 4) + 1
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    below = np.tril(k @ k.swapaxes(1, 2), -1)
    move = np.tril(normal(3, time, time, seed=1), -1)
    got, moved = jax.jit(lambda a, t: jax.jvp(_invert, (a,), (t,)))(below, move)
    exact = np.linalg.inv(np.eye(time) + below.astype(np.float64))
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6)
    np.testing.assert_allclose(moved, -exact @ move @ exact, rtol=0, atol=1e-4)

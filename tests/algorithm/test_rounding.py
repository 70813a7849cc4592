"""Landing a change on a weight, in numpy, JAX and torch."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.algorithm.arrays import jax_library, numpy_library, torch_library
from logra_jax.algorithm.rounding import (
    land,
    nearest_noise,
    round_to_bfloat16,
    stochastic_noise,
)

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def bits_of(values) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.int32)


def values_of(bits) -> np.ndarray:
    return np.asarray(bits).view(np.float32)


def draws(value: float, count: int = 4096) -> np.ndarray:
    """One float32 rounded with ``count`` words of hashed noise, in float64."""
    library = numpy_library()
    address = tuple(library.constant([word]) for word in (1, 2, 3))
    noise = stochastic_noise(
        address, library.arange(0, count)[:, None], library.arange(0, 1)[None, :], 1
    )
    rounded = round_to_bfloat16(bits_of(np.full((count, 1), value)), noise)
    return values_of(rounded).astype(np.float64)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("base", [1.0, 0.0234375, 1e-37, 255 / 128])
def test_stochastic_rounding_is_unbiased_between_the_two_neighbours(
    base, fraction, sign
):
    low = float(jnp.bfloat16(base))
    gap = float(np.spacing(np.float32(low))) * 2.0**16
    x = sign * (low + fraction * gap)
    out = draws(x)
    assert set(np.unique(out)) == {sign * low, sign * (low + gap)}
    error = gap * np.sqrt(fraction * (1 - fraction) / out.size)
    assert abs(out.mean() - x) < 4 * error


@pytest.mark.parametrize(
    "value", [0.0, 1.0, -1.5, 3.3895314e38, -1e-38, np.inf, -np.inf]
)
def test_what_bfloat16_holds_stays(value):
    value = float(jnp.bfloat16(value))
    assert np.all(draws(value, 64) == value)


def test_nan_stays_nan_and_overflow_goes_to_infinity_or_the_largest():
    # one with a payload that noise would carry into the sign, one that would vanish
    for payload in (0x7FFFFFFF, 0x7F800001, 0x7FC00000):
        value = np.uint32(payload).view(np.float32)
        assert np.all(np.isnan(draws(value, 64)))
    largest = float(jnp.finfo(jnp.bfloat16).max)
    beyond = largest * (1 + 2.0**-9)  # half a gap above the largest
    assert set(np.unique(draws(beyond))) == {largest, np.inf}


@given(FLOATS)
def test_nearest_is_ml_dtypes_nearest(value):
    bits = bits_of([value])
    rounded = values_of(round_to_bfloat16(bits, nearest_noise(bits)))
    expected = np.array([value], np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded, expected.astype(np.float32))


def test_noise_is_numbered_by_row_and_column_so_a_shard_draws_its_own():
    library = numpy_library()
    address = tuple(library.constant([word]) for word in (9, 8, 7))
    rows, columns = library.arange(0, 12)[:, None], library.arange(0, 20)[None, :]
    whole = stochastic_noise(address, rows, columns, 20)
    assert whole.min() >= 0
    assert whole.max() < 2**16
    part = stochastic_noise(address, rows[3:7], columns[:, 5:11], 20)
    np.testing.assert_array_equal(part, whole[3:7, 5:11])


# --- land

# A change is an integer times a power of two of at least 2**-111: never subnormal.
CHANGES = [0.0, -0.0, 1.2e-38, -1.3e-38, 3e-10, 1.0, -2.5, 3e38]
HARD = [0.0, -0.0, 1e-39, -1e-39, 1.2e-38, -1.3e-38, 1.0, -2.5, 3e38, np.inf, np.nan]


def landed_everywhere(weights, changes, noise):
    """Bits of the result in numpy, checked to be those of JAX and torch."""
    w, c = bits_of(weights), np.asarray(changes, np.float32)
    ours = land(numpy_library(), w, c, noise)
    jitted = jax.jit(lambda w, c: land(jax_library(), w, c, noise))(w, c)
    theirs = land(torch_library(), torch.tensor(w), torch.tensor(c), noise)
    np.testing.assert_array_equal(ours, jitted)
    np.testing.assert_array_equal(ours, theirs.numpy())
    return ours


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
@pytest.mark.parametrize("noise", [None, nearest_noise, 0x1234])
def test_the_three_libraries_agree_on_hard_numbers(noise):
    weights, changes = (v.ravel() for v in np.meshgrid(HARD, CHANGES))
    bits = landed_everywhere(weights, changes, noise)
    ordinary = np.abs(weights) >= 2.0**-126
    ordinary &= np.abs(changes) >= 2.0**-126
    sums = np.float32(weights) + np.float32(changes)
    ordinary &= np.isfinite(sums) & (np.abs(sums) >= 2.0**-126)
    if noise is None:
        np.testing.assert_array_equal(values_of(bits)[ordinary], sums[ordinary])


@given(st.lists(FLOATS, min_size=4, max_size=4), st.integers(0, 2**16 - 1))
def test_a_zero_change_leaves_every_bit(values, noise):
    w = bits_of(values) & -0x10000  # what bfloat16 holds
    for zero in (0.0, -0.0):
        zeros = np.full(4, zero, np.float32)
        np.testing.assert_array_equal(landed_everywhere(values_of(w), zeros, noise), w)


def test_subnormal_weights_and_sums_are_zero():
    change = np.float32(2.0**-100)
    bits = landed_everywhere(
        [1e-39, 1.2e-38, -1.2e-38, 1e-39],
        [change, -1.3e-38, 1.3e-38, 0.0],
        None,
    )
    np.testing.assert_array_equal(bits, [*bits_of([change, 0.0, 0.0, 1e-39])])

"""The factor on its grid, and products that are exact in any order of summation."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import logra_jax as logra
from logra_jax.algorithm.arrays import (
    Library,
    jax_library,
    numpy_library,
    torch_library,
)
from logra_jax.algorithm.basis import GAUSSIAN, entry_scale
from logra_jax.algorithm.factor import LOWEST_EXPONENT, lift

D, K = 6, 40


def factor_and_entries(rank, kind="rademacher", dtype=np.int16, extreme=False):
    """Random integers, exponents and basis entries; or the worst for exact sums."""
    rng = np.random.default_rng(rank)
    limit = np.iinfo(dtype).max
    integers = rng.integers(-limit, limit, (D, rank), endpoint=True).astype(dtype)
    exponents = rng.integers(LOWEST_EXPONENT, 100, D).astype(np.int8)
    values = [-1, 1] if kind == "rademacher" else GAUSSIAN
    entries = rng.choice(np.array(values, np.int32), (rank, K))
    if extreme:
        integers[...], entries[...] = limit, max(values)
    return integers, exponents, entries


def exact(integers, exponents, entries) -> np.ndarray:
    """The sum of the halves in whole numbers, rounded to float32 once."""
    q = integers.astype(np.int64)
    low = (q + 128 & 255) - 128
    high = (q - low) // 256
    b = entries.astype(np.int64)
    total = np.float32(256 * (high @ b)) + np.float32(low @ b)
    return np.ldexp(total, exponents[:, None].astype(np.int32))


def in_numpy(q, e, b):
    return lift(numpy_library(), q, e, b)


def in_jax(dtype, transposed=False):
    def run(q, e, b):
        library = jax_library(dtype)
        out = jax.jit(lambda *a: lift(library, *a, transposed=transposed))(q, e, b)
        return np.asarray(out).T if transposed else np.asarray(out)

    return run


def in_torch(q, e, b):
    return lift(torch_library(), *map(torch.tensor, (q, e, b))).numpy()


def one_term_at_a_time(q, e, b):
    """Each partial sum rounded to float32, one term after the other."""

    def product(a, b):
        total = np.zeros((a.shape[0], b.shape[1]), np.float32)
        for j in range(a.shape[1]):
            total += a[:, j, None].astype(np.float32) * b[j].astype(np.float32)
        return total

    library = numpy_library()
    return lift(library._replace(product=product), q, e, b)


WAYS = {
    "numpy": in_numpy,
    "jax_float32": in_jax(jnp.float32),
    "jax_halves_in_bfloat16": in_jax(jnp.bfloat16),
    "jax_transposed": in_jax(None, transposed=True),
    "torch": in_torch,
    "one_term_at_a_time": one_term_at_a_time,
}


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("dtype", [np.int16, np.int8])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("rank", [1, 16, 256])
def test_every_library_and_precision_gives_the_exact_product(
    rank, kind, dtype, extreme
):
    arrays = factor_and_entries(rank, kind, dtype, extreme)
    expected = exact(*arrays)
    for name, way in WAYS.items():
        np.testing.assert_array_equal(way(*arrays), expected, err_msg=name)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_the_order_of_the_rank_axis_and_its_splits_do_not_matter(kind):
    q, e, b = factor_and_entries(256, kind)
    expected = exact(q, e, b)
    rng = np.random.default_rng(0)
    for _ in range(3):
        order = rng.permutation(256)
        for way in WAYS.values():
            np.testing.assert_array_equal(way(q[:, order], e, b[order]), expected)

    for cuts in ([128], [1, 7, 200], list(range(1, 256))):

        def split(library: Library, cuts=cuts) -> Library:
            def product(a, b):
                pieces = zip(
                    np.split(np.arange(256), cuts),
                    strict=True,
                )
                return sum(library.product(a[:, i], b[i]) for (i,) in pieces)

            return library._replace(product=product)

        np.testing.assert_array_equal(lift(split(numpy_library()), q, e, b), expected)
        tensors = tuple(map(torch.tensor, (q, e, b)))
        out = lift(split(torch_library()), *tensors)
        np.testing.assert_array_equal(out.numpy(), expected)


def test_signs_are_exact_to_the_last_integer():
    q, e, b = factor_and_entries(256, extreme=True)
    whole = (q.astype(object) @ b.astype(object))[0, 0] * Fraction(2) ** int(e[0])
    assert Fraction(float(in_numpy(q, e, b)[0, 0])) == whole


# --- the grid


def quantised(u, bits=16, kind="rademacher"):
    updates = nnx.State({"probe": logra.Probe(jnp.asarray(u, jnp.float32))})
    factors = logra.quantise(updates, logra.Basis(kind=kind), bits)
    return (np.asarray(factors[n][...]) for n in ("integers", "exponents"))


@given(
    st.lists(
        st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
        min_size=2,
        max_size=4,
    ),
    st.sampled_from([16, 8]),
    st.sampled_from(["rademacher", "gaussian"]),
)
def test_entries_move_by_at_most_half_a_step_of_their_rows_grid(rows, bits, kind):
    u = np.array(rows, np.float32)
    q, e = quantised(u, bits, kind)
    assert q.dtype == f"int{bits}"
    assert e.dtype == np.int8
    scaled = (u * np.float32(entry_scale(kind, 3))).astype(np.float64)
    step = 2.0 ** e.astype(np.float64)[:, None]
    # at the very end of the range the integer is clipped, by less than a whole step
    slack = np.where(np.abs(q) == 2 ** (bits - 1) - 1, 1.0, 0.5)
    assert np.all(np.abs(q * step - scaled) <= slack * step * (1 + 1e-6))
    largest = np.abs(scaled).max(-1)
    fills = np.abs(q).max(-1) >= 2 ** (bits - 2)
    assert np.all(fills | (largest < 2.0 ** (LOWEST_EXPONENT + bits)))


def test_each_row_has_the_finest_grid_that_holds_it():
    u = np.array([[1.0, 0.5], [1e-6, -1e-6], [3e4, 1.0], [0.0, 0.0]]) * np.sqrt(2)
    q, e = quantised(u)
    values = q * 2.0 ** e.astype(float)[:, None]
    np.testing.assert_allclose(values, u / np.sqrt(2), rtol=2.0**-15)
    assert np.all(q[3] == 0)


def test_a_row_that_is_not_finite_becomes_zero_and_spares_the_others():
    u = np.ones((4, 3), np.float32)
    u[1, 2], u[2, 0] = np.nan, np.inf
    q, _ = quantised(u)
    np.testing.assert_array_equal(q.any(-1), [True, False, False, True])


def test_numbers_below_the_lowest_grid_are_zero():
    q, e = quantised(np.full((1, 2), 1e-39))
    assert not q.any()
    assert e[0] == LOWEST_EXPONENT


def test_stacked_updates_keep_their_axes_under_jit():
    updates = nnx.State({"a": {"probe": logra.Probe(jnp.ones((2, 5, 4, 3)))}})
    factors = jax.jit(lambda u: logra.quantise(u, logra.Basis()))(updates)
    assert factors["a"]["integers"].shape == (2, 5, 4, 3)
    assert factors["a"]["exponents"].shape == (2, 5, 4)


def test_bits_and_ranks_outside_the_proof_are_refused():
    updates = nnx.State({"probe": logra.Probe(jnp.ones((2, 3)))})
    with pytest.raises(ValueError, match="`bits` must be 16 or 8, got 4"):
        logra.quantise(updates, logra.Basis(), 4)
    wide = nnx.State({"probe": logra.Probe(jnp.ones((2, 1025)))})
    with pytest.raises(ValueError, match="at most 1024, got 1025 for 'probe'"):
        logra.quantise(wide, logra.Basis())

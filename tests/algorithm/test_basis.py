import zlib
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logra_jax.algorithm.arrays import jax_library, numpy_library, torch_library
from logra_jax.algorithm.basis import (
    GAUSSIAN,
    KINDS,
    Basis,
    basis_entries,
    basis_matrix,
    entry_scale,
    jax_entries,
)
from logra_jax.algorithm.random_bits import signed

NAME = "model.layers.3.self_attn.q_proj.weight"
# Of the address (seed 1, step 2, NAME), by `threefry` below: they never change.
GOLDEN_KEY = [28216977, 1844587685]
GOLDEN_SIGNS = [[1, 1, -1, 1, 1, 1, -1, -1], [-1, 1, 1, 1, -1, 1, -1, 1]]
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def random_signs(key, rank, width):
    return jax_entries(key, rank, width, "rademacher", jnp.float32)


def threefry(key: tuple[int, int], high: np.ndarray, low: np.ndarray):
    """threefry2x32, 20 rounds, from its paper (Salmon et al., 2011): two words."""
    k = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (np.asarray(v, np.uint64) for v in (high, low))
    x, y = (x + k[0]) % 2**32, (y + k[1]) % 2**32
    for block in range(5):
        for turn in ROTATIONS[block % 2]:
            x = (x + y) % 2**32
            y = ((y << turn) | (y >> (32 - turn))) % 2**32 ^ x
        x = (x + k[(block + 1) % 3]) % 2**32
        y = (y + k[(block + 2) % 3] + block + 1) % 2**32
    return x, y


def fold_in(key: tuple[int, int], word: int) -> tuple[int, int]:
    x, y = threefry(key, np.array(0), np.array(word))
    return int(x), int(y)


def words_of(basis: Basis, *address: int) -> np.ndarray:
    key = basis.key(jnp.array(address, jnp.uint32))
    return np.asarray(jax.random.key_data(key))


@settings(max_examples=10)
@given(*[st.integers(0, 2**32 - 1)] * 3)
def test_key_of_an_address_is_seed_then_step_then_matrix_in_threefry(seed, step, crc):
    expected = fold_in(fold_in((0, seed), step), crc)
    np.testing.assert_array_equal(words_of(Basis(), seed, step, crc), expected)
    fixed = fold_in(fold_in((0, seed), 0), crc)
    np.testing.assert_array_equal(
        words_of(Basis(refresh=False), seed, step, crc), fixed
    )


def test_signs_are_the_bits_of_threefry_words_counted_in_rows():
    address = Basis(seed=7).address(NAME, step=5)
    assert address == (7, 5, zlib.crc32(NAME.encode()))
    rank, width = 3, 70  # three words a row, the last one cut
    index = np.arange(rank * 3)
    b0, b1 = threefry(fold_in(fold_in((0, 7), 5), address[2]), index * 0, index)
    words = (b0 ^ b1).reshape(rank, 3)
    key = Basis(seed=7).key(jnp.array(address, jnp.uint32))
    np.testing.assert_array_equal(jax.random.bits(key, (rank, 3), jnp.uint32), words)
    j = np.arange(width)
    signs = 2.0 * (words[:, j // 32] >> (j % 32).astype(np.uint64) & 1) - 1
    np.testing.assert_array_equal(random_signs(key, rank, width), signs)
    np.testing.assert_allclose(
        basis_matrix(key, rank, width), signs / np.sqrt(3), rtol=1e-6
    )


def test_one_address_keeps_its_golden_numbers():
    words = words_of(Basis(), *Basis(seed=1).address(NAME, step=2))
    np.testing.assert_array_equal(words, GOLDEN_KEY)
    key = Basis().key(jnp.array(Basis(seed=1).address(NAME, step=2), jnp.uint32))
    np.testing.assert_array_equal(random_signs(key, 2, 8), GOLDEN_SIGNS)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_a_traced_address_gives_the_key_of_a_python_seed(seed):
    address = jnp.array(Basis(seed).address(NAME), jnp.uint32)
    key = jax.jit(Basis().key)(address)
    expected = jax.random.key(np.uint32(seed), impl="threefry2x32")
    for word in (0, zlib.crc32(NAME.encode())):
        expected = jax.random.fold_in(expected, np.uint32(word))
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(expected))


def test_key_is_threefry_whatever_the_default_generator():
    with jax.default_prng_impl("rbg"):
        words = words_of(Basis(), 1, 2, 3)
    np.testing.assert_array_equal(words, words_of(Basis(), 1, 2, 3))


def test_seeds_steps_and_names_give_different_bases_unless_the_basis_is_fixed():
    addresses = [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)]
    keys = {tuple(words_of(Basis(), *a)) for a in addresses}
    assert len(keys) == 4
    fixed = {tuple(words_of(Basis(refresh=False), 0, s, 1)) for s in (0, 1, 9)}
    assert fixed == {tuple(words_of(Basis(), 0, 0, 1))}


@pytest.mark.parametrize("rank", [1, 4, 7])
@pytest.mark.parametrize("width", [1, 31, 32, 33])
def test_entries_are_signs_over_the_root_of_the_rank(rank, width, getkey):
    a = basis_matrix(getkey(), rank, width)
    assert a.shape == (rank, width)
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(jnp.abs(a), rank**-0.5, rtol=1e-6)


def test_signs_are_balanced_and_rows_and_columns_uncorrelated(getkey):
    signs = np.asarray(random_signs(getkey(), 64, 1024))
    assert abs(signs.mean()) < 4 / np.sqrt(signs.size)
    correlation = signs @ signs.T / 1024 - np.eye(64)
    assert np.abs(correlation).max() < 5 / np.sqrt(1024)
    across = signs.T @ signs / 64 - np.eye(1024)
    assert abs(np.mean(across)) < 1e-3
    assert np.mean(across**2) == pytest.approx(1 / 64, rel=0.05)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_32_bits_is_refused(seed):
    with pytest.raises(ValueError, match="`seed` must be in"):
        Basis(seed)


# --- the same entries in every library, whole or in part

LIBRARIES = {"numpy": numpy_library, "jax": jax_library, "torch": torch_library}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_any_library_draws_the_entries_of_an_address(name, kind):
    basis = Basis(seed=2**32 - 1, kind=kind)
    address = basis.address(NAME, step=2**31 + 5)
    library = LIBRARIES[name]()
    words = tuple(library.constant([signed(word)]) for word in address)
    if name == "jax":  # scalars there: its arrays of one entry do not broadcast
        words = tuple(word[0] for word in words)
    entries = basis_entries(
        library, basis.key_words(library, words), (0, 5), (0, 77), 77, basis.kind
    )
    key = basis.key(jnp.array(address, jnp.uint32))
    expected = jax_entries(key, 5, 77, kind, jnp.int32)
    np.testing.assert_array_equal(np.asarray(entries), expected)


@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_are_drawn_without_the_whole(kind, data):
    width, rank = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 6))

    def span(size):
        start = data.draw(st.integers(0, size - 1))
        return start, data.draw(st.integers(start + 1, size))

    rows, columns = span(rank), span(width)
    library = numpy_library()
    whole = basis_entries(library, (3, -4), (0, rank), (0, width), width, kind)
    part = basis_entries(library, (3, -4), rows, columns, width, kind)
    np.testing.assert_array_equal(part, whole[slice(*rows), slice(*columns)])


# --- Gaussian bases


def test_gaussian_entries_are_bytes_of_threefry_words_through_the_table():
    rank, width = 3, 10  # three words a row
    words = np.asarray(
        jax.random.bits(jax.random.wrap_key_data(jnp.array([1, 2], jnp.uint32)), (9,))
    )
    entries = basis_entries(
        numpy_library(), (1, 2), (0, rank), (0, width), width, "gaussian"
    )
    for i in range(rank):
        for j in range(width):
            byte = int(words[3 * i + j // 4]) >> 8 * (j % 4) & 255
            assert entries[i, j] == GAUSSIAN[byte]


def test_the_gaussian_table_is_the_stated_approximation():
    values, counts = np.unique(GAUSSIAN, return_counts=True)
    assert values.min() == -127
    assert values.max() == 127
    table = np.array(GAUSSIAN, np.float64)
    deviation = np.sqrt(np.mean(table**2))
    assert np.sum(table) == 0
    assert entry_scale("gaussian", 9) == pytest.approx(1 / (3 * deviation), rel=1e-12)
    after = np.cumsum(counts) / 256
    exact = np.array([NormalDist().cdf(v / deviation) for v in values])
    distance = max(np.max(after - exact), np.max(exact - (after - counts / 256)))
    assert 0.006 < distance < 0.0065
    assert np.mean(table**4) / deviation**4 == pytest.approx(2.92, abs=0.005)
    assert 127 / deviation == pytest.approx(2.9, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_both_kinds_have_mean_zero_and_unit_columns(kind, getkey):
    rank, width = 64, 4096
    a = np.asarray(basis_matrix(getkey(), rank, width, kind), np.float64)
    assert abs(a.mean()) < 4 / np.sqrt(rank * a.size)
    # E[Aᵀ A] = I: the mean square of a column's norm, and of two columns' product
    norms = np.sum(a**2, 0)
    assert abs(norms.mean() - 1) < 4 * np.sqrt(2 / a.size)
    inner = np.sum(a[:, 1:] * a[:, :-1], 0)
    assert abs(inner.mean()) < 4 / np.sqrt(rank * width)
    assert np.mean(inner**2) == pytest.approx(1 / rank, rel=0.1)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"`kind` must be one of .*, got 'cauchy'"):
        Basis(kind="cauchy")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.algorithm.arrays import jax_library, numpy_library, torch_library
from logra_jax.algorithm.random_bits import (
    fold_in,
    hashed_words,
    mix,
    random_words,
    signed,
    threefry2x32,
)

LIBRARIES = {"numpy": numpy_library, "jax": jax_library, "torch": torch_library}
WORDS = st.integers(0, 2**32 - 1)
GOLDEN_HASHES = [2877974829, 815450465, 2563456816, 4185566128]


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]()


def unsigned(words) -> np.ndarray:
    return np.asarray(words).view(np.uint32)


def test_threefry_is_its_papers_known_answer(library):
    # kat_vectors of Random123, threefry2x32 with 20 rounds
    for key, counter, expected in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((-1, -1), (-1, -1), (0x1CB996FC, 0xBB002BE7)),
        (
            (signed(0x13198A2E), signed(0x03707344)),
            (signed(0x243F6A88), signed(0x85A308D3)),
            (0xC4923A9C, 0x483DF7A0),
        ),
    ):
        high, low = (library.constant([c]) for c in counter)
        for threefry in (threefry2x32, library.threefry):  # ours, and the library's own
            words = threefry(key, high, low)
            assert tuple(int(unsigned(w).ravel()[0]) for w in words) == expected


@given(WORDS, WORDS)
def test_fold_in_is_jax_random_s(seed, word):
    expected = jax.random.fold_in(
        jax.random.key(np.uint32(seed), impl="threefry2x32"), np.uint32(word)
    )
    for make in LIBRARIES.values():
        library = make()
        for threefry in (threefry2x32, library.threefry):
            key = fold_in((0, signed(seed)), library.constant([signed(word)]), threefry)
            np.testing.assert_array_equal(
                np.concatenate([unsigned(k) for k in key]),
                jax.random.key_data(expected),
            )


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_words_are_jax_random_bits_in_c_order(library, seed):
    key = jax.random.key(np.uint32(seed), impl="threefry2x32")
    expected = jax.random.bits(key, (7, 9), jnp.uint32)
    index = library.arange(0, 63).reshape(7, 9)
    for threefry in (threefry2x32, library.threefry):
        words = random_words((0, signed(seed)), index, threefry)
        np.testing.assert_array_equal(unsigned(words), expected)


def test_words_far_into_the_stream_need_nothing_before_them(library):
    start = 2**31 - 3
    index = np.arange(start, start + 6, dtype=np.uint32)
    high, low = np.zeros(6, np.int32), index.view(np.int32)
    b0, b1 = threefry2x32((3, 4), high, low)
    for threefry in (threefry2x32, library.threefry):
        words = random_words((3, 4), library.constant([int(i) for i in low]), threefry)
        np.testing.assert_array_equal(unsigned(words), unsigned(b0 ^ b1))


def test_the_hash_keeps_its_golden_numbers(library):
    def reference(x):
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    stream = reference((reference((reference(1) + 2) % 2**32) + 3) % 2**32)
    expected = [reference(reference(i) ^ stream) for i in range(4)]
    assert expected == GOLDEN_HASHES
    address = tuple(library.constant([word]) for word in (1, 2, 3))
    words = hashed_words(address, library.arange(0, 4))
    np.testing.assert_array_equal(unsigned(words), expected)


def test_mix_is_a_bijection_of_words():
    x = np.arange(2**20, dtype=np.int32) * 4093  # spread over all 32 bits
    assert len(np.unique(mix(x))) == len(x)


def hashes(*address, count=8192) -> np.ndarray:
    library = numpy_library()
    words = tuple(library.constant([signed(word)]) for word in address)
    return unsigned(hashed_words(words, library.arange(0, count)))


def test_hashes_are_uniform_in_every_bit_and_byte():
    w = hashes(0, 0, 0)
    assert len(np.unique(w)) == w.size
    for bit in range(32):
        assert abs(np.mean(w >> bit & 1) - 0.5) < 4 * 0.5 / np.sqrt(w.size)
    for byte in range(4):
        counts = np.bincount(w >> 8 * byte & 255, minlength=256)
        expected = w.size / 256
        chi_square = np.sum((counts - expected) ** 2) / expected
        assert abs(chi_square - 255) < 4 * np.sqrt(2 * 255)


@pytest.mark.parametrize("other", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 2**31, 0)])
def test_hashes_of_other_seeds_steps_and_matrices_are_unrelated(other):
    a, b = hashes(0, 0, 0), hashes(*other)
    assert np.mean(a == b) < 1e-3
    u, v = a / 2.0**32 - 0.5, b / 2.0**32 - 0.5
    assert abs(np.corrcoef(u, v)[0, 1]) < 4 / np.sqrt(a.size)
    agreement = np.mean(np.unpackbits((a ^ b).view(np.uint8)))
    assert abs(agreement - 0.5) < 4 * 0.5 / np.sqrt(32 * a.size)


def test_hashes_of_neighbouring_indices_and_steps_are_unrelated():
    u = np.stack([hashes(7, s, 9).reshape(64, 128) for s in range(4)]) / 2.0**32 - 0.5
    for axis in range(3):
        a, b = np.delete(u, 0, axis), np.delete(u, -1, axis)
        assert abs(np.mean(a * b)) * 12 < 4 / np.sqrt(a.size)


def test_hashes_are_unrelated_to_the_threefry_bits_of_the_same_address():
    index = np.arange(8192, dtype=np.int32)
    for step in range(3):
        words = [np.array([w], np.int32) for w in (5, step, 77)]
        key = fold_in(fold_in((0, 5), words[1]), words[2])
        a = unsigned(random_words(key, index))
        b = unsigned(hashed_words(tuple(words), index))
        bits_a, bits_b = (np.unpackbits(x.view(np.uint8)) for x in (a, b))
        shifts = [0, 1, 7, 16, 32, 33]
        for shift in shifts:  # bit against bit, and against its neighbours
            agreement = np.mean(bits_a == np.roll(bits_b, shift))
            assert abs(agreement - 0.5) < 4 * 0.5 / np.sqrt(bits_a.size)

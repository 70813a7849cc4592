import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logra_jax.algorithm.digest import (
    TensorDigest,
    digest_array,
    digest_stack,
    model_digest,
)

ROWS, COLUMNS = 24, 40


def weights(dtype=jnp.bfloat16, seed=0, shape=(ROWS, COLUMNS)) -> np.ndarray:
    return np.array(jax.random.normal(jax.random.key(seed), shape, dtype))


def in_jax(array, **options) -> int:
    return int(digest_stack(jnp.asarray(array), 0, transposed=False, **options))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (COLUMNS,)])
def test_numpy_jax_and_torch_agree_with_the_formula(dtype, shape):
    w = weights(dtype, shape=shape)

    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    size = f"uint{8 * w.dtype.itemsize}"
    words = w.view(size).ravel().tolist()
    expected = sum(mix(mix(i) ^ word) for i, word in enumerate(words)) % 2**32
    assert digest_array(w) == expected
    assert in_jax(w) == expected
    kind = {2: torch.bfloat16, 4: torch.float32}[w.dtype.itemsize]
    tensor = torch.tensor(w.view(size.lstrip("u"))).view(kind)
    assert digest_array(tensor) == expected
    if w.dtype.itemsize == 2:
        assert digest_array(w.view(np.uint16)) == expected


def test_a_transposed_stack_has_the_digests_of_its_matrices():
    w = weights(shape=(3, ROWS, COLUMNS))
    expected = [digest_array(m) for m in w]
    kernels = jnp.swapaxes(jnp.asarray(w), -1, -2)
    words = jax.jit(lambda k: digest_stack(k, 1, transposed=True))(kernels)
    assert words.dtype == jnp.uint32
    np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("spec", [("a", None), (None, "a"), ("a", "b")])
def test_sharding_does_not_matter(spec):
    w = weights()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharded = jax.device_put(w, NamedSharding(mesh, PartitionSpec(*spec)))
    assert in_jax(sharded) == digest_array(w)


def test_blocks_of_rows_do_not_matter(monkeypatch):
    w = weights(shape=(3, ROWS, COLUMNS))
    expected = [digest_array(m) for m in w]
    for limit in (1, 4 * COLUMNS, 10**6):
        monkeypatch.setattr("logra_jax.algorithm.digest._BLOCK", limit)
        words = digest_stack(jnp.asarray(w), 1, transposed=False)
        np.testing.assert_array_equal(words, expected)
        monkeypatch.setattr("logra_jax.algorithm.replay.CPU_BLOCK", limit)
        assert [digest_array(m) for m in w] == expected


def test_digests_of_shards_add_up():
    w = weights()
    total = sum(
        digest_array(
            w[rows, columns], rows=rows.start, columns=columns.start, width=COLUMNS
        )
        for rows in (slice(0, 5), slice(5, ROWS))
        for columns in (slice(0, 32), slice(32, COLUMNS))
    )
    assert total % 2**32 == digest_array(w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_single_flipped_bit_is_caught(dtype):
    w = weights(dtype)
    clean = digest_array(w)
    view = w.view(f"uint{8 * w.dtype.itemsize}")
    rng = np.random.default_rng(0)
    for i in rng.choice(w.size, 40, replace=False):
        for bit in range(8 * w.dtype.itemsize):
            view.flat[i] ^= view.dtype.type(1 << bit)
            assert digest_array(w) != clean
            view.flat[i] ^= view.dtype.type(1 << bit)
    assert digest_array(w) == clean


def test_swapped_rows_columns_and_entries_and_a_transpose_are_caught():
    w = weights()
    clean = digest_array(w)
    for i in range(ROWS - 1):
        swapped = w.copy()
        swapped[[i, i + 1]] = w[[i + 1, i]]
        assert digest_array(swapped) != clean
    for j in range(COLUMNS - 1):
        swapped = w.copy()
        swapped[:, [j, j + 1]] = w[:, [j + 1, j]]
        assert digest_array(swapped) != clean
        entry = w.copy()
        entry[3, [j, j + 1]] = w[3, [j + 1, j]]
        assert digest_array(entry) != clean
    assert digest_array(np.ascontiguousarray(w.T)) != clean


def test_one_pass_holds_no_copy_of_the_weights():
    shape = jax.ShapeDtypeStruct((8, 1024, 2048), jnp.bfloat16)
    digest = jax.jit(lambda w: digest_stack(w, 1, transposed=True))
    memory = digest.lower(shape).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * 2 * 8 * 1024 * 2048


def test_a_model_s_digest_depends_on_names_dtypes_shapes_and_words_not_on_order():
    a, b = TensorDigest("bfloat16", (2, 3), 1), TensorDigest("float32", (4,), 2)
    clean = model_digest({"a": a, "b": b})
    assert len(clean) == 16
    assert clean == model_digest({"b": b, "a": a})
    for other in (
        {"a": b, "b": a},
        {"a": a},
        {"a": a._replace(word=3), "b": b},
        {"a": a._replace(shape=(3, 2)), "b": b},
        {"a": a._replace(dtype="float32"), "b": b},
        {"c": a, "b": b},
    ):
        assert model_digest(other) != clean

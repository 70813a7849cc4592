import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.algorithm import slicing
from logra_jax.algorithm.slicing import rows_within, take_layer, take_rows

TABLE = jax.random.normal(jax.random.key(0), (7, 3, 4))
INDICES = jnp.array([[2, 0], [2, 6]])


@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_slices_and_their_derivatives_are_those_of_indexing(
    dtype, converted, monkeypatch
):
    monkeypatch.setattr(slicing, "BFLOAT16_SLICES_ARE_CONVERTED", converted)
    table = TABLE.astype(dtype)
    for ours, index in ((take_layer, jnp.int32(3)), (take_rows, INDICES)):

        def value(f, table, index=index):
            return jnp.sum(jnp.sin(f(table, index).astype(jnp.float32)))

        def plain(table, index):
            return table[index]

        np.testing.assert_array_equal(ours(table, index), plain(table, index))
        gradients = (
            jax.jit(jax.grad(value, 1), static_argnums=0)(f, table)
            for f in (ours, plain)
        )
        a, b = (np.asarray(g, np.float32) for g in gradients)
        np.testing.assert_array_equal(a, b)
        assert np.any(a)  # reading bits must not make it vanish


def test_no_copy_of_a_table_is_made_inside_a_loop():
    table = jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16)

    def total(table):
        def add(sum_, i):
            rows = take_rows(table.reshape(-1, 128), i + jnp.arange(4))
            part = jnp.sum(take_layer(table, i).astype(jnp.float32))
            return sum_ + part + jnp.sum(rows.astype(jnp.float32)), None

        return jax.lax.scan(add, 0.0, jnp.arange(64))[0]

    memory = jax.jit(total).lower(table).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.2 * 2 * 64 * 32 * 128


@pytest.mark.parametrize(
    ("shape", "limit", "expected"),
    [
        ((12, 5), 30, 6),
        ((12, 5), 29, 4),
        ((7, 5), 30, 1),
        ((12, 5), 4, 1),
        ((6, 1), 99, 6),
    ],
)
def test_blocks_of_rows_divide_the_matrix_and_stay_within_the_limit(
    shape, limit, expected
):
    assert rows_within(shape, limit) == expected

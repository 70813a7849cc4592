import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.algorithm.row_adam import scale_by_row_adam


def row_adam_numpy(sketches, b2, eps):
    v, out = 0.0, []
    for t, s in enumerate(sketches, 1):
        v = b2 * v + (1 - b2) * np.mean(np.square(s), -1)
        out.append(s / (np.sqrt(v / (1 - b2**t)) + eps)[..., None])
    return out


@pytest.mark.parametrize(("b2", "eps"), [(0.95, 1e-12), (0.0, 1e-3), (0.999, 0.0)])
@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (3, 1)])
def test_equals_ten_lines_of_numpy_over_several_steps(shape, b2, eps):
    random = np.random.default_rng(0)
    scales = 10.0 ** random.uniform(-6, 2, shape[:-1])[..., None]
    sketches = [scales * random.normal(size=shape) for _ in range(5)]
    tx = scale_by_row_adam(b2, eps)
    update = jax.jit(tx.update)
    state = tx.init({"w": jnp.zeros(shape)})
    for s, expected in zip(sketches, row_adam_numpy(sketches, b2, eps), strict=True):
        updates, state = update({"w": jnp.asarray(s, jnp.float32)}, state)
        np.testing.assert_allclose(updates["w"], expected, rtol=2e-5)
    assert state.count == 5


def test_the_first_update_has_rows_of_unit_rms_whatever_their_scale():
    sketch = jnp.array([[3.0, 4.0], [3e-9, -4e-9], [3e9, 4e9]])
    tx = scale_by_row_adam()
    updates, _ = tx.update(sketch, tx.init(sketch))
    np.testing.assert_allclose(jnp.mean(updates**2, -1), 1.0, rtol=1e-3)


@pytest.mark.parametrize("eps", [0.0, 1e-12])
@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_zero_and_vanishing_rows_stay_finite_and_small(eps, size):
    sketch = jnp.array([[size, -size], [1.0, 1.0]])
    tx = scale_by_row_adam(eps=eps)
    state = tx.init(sketch)
    for _ in range(3):
        updates, state = tx.update(sketch, state)
        assert jnp.all(jnp.isfinite(updates))
        assert jnp.all(jnp.abs(updates[0]) <= 1.0)
        if size == 0.0:
            assert jnp.all(updates[0] == 0)


def test_state_has_one_float32_per_row_and_keeps_shapes_and_dtypes():
    sketches = {"a": jnp.ones((2, 5, 3), jnp.bfloat16), "b": jnp.ones((4, 2))}
    tx = scale_by_row_adam()
    state = tx.init(sketches)
    spec = jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert spec.row_square["a"] == ((2, 5), jnp.float32)
    assert spec.count == ((), jnp.int32)
    updates, state = jax.jit(tx.update)(sketches, state)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == spec
    assert {name: u.dtype for name, u in updates.items()} == {
        name: s.dtype for name, s in sketches.items()
    }


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"b2": 1.0}, "b2"),
        ({"b2": -0.1}, "b2"),
        ({"b2": float("nan")}, "b2"),
        ({"eps": -1e-9}, "eps"),
        ({"eps": float("nan")}, "eps"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        scale_by_row_adam(**arguments)

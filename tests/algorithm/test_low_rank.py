import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.low_rank import (
    BFLOAT16_SLICES_ARE_CONVERTED,
    merge,
    round_stochastically,
    rounding_bits,
)

LAYERS, K, D, R = 3, 40, 24, 4
GOLDEN_WORDS = [2877974829, 815450465, 2563456816, 4185566128]


class Stack(nnx.Module):
    """A stacked linear layer beside one that is not sketched."""

    def __init__(self, rngs: nnx.Rngs, dtype=jnp.float32):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(K, D, param_dtype=dtype, rngs=rngs)

        self.proj = make(rngs)
        self.other = nnx.Linear(D, K, param_dtype=dtype, rngs=rngs)


def state_of(dtype=jnp.float32, basis=None, scale=0.01):
    """Weights, and random updates like the probes."""
    model = logra.sketch(Stack(nnx.Rngs(0), dtype), R, "proj", basis)
    _, probes, weights = nnx.split(model, logra.Probe, ...)
    noise = jax.random.normal(jax.random.key(1), (LAYERS, D, R)) * scale
    return weights, jax.tree.map(lambda p: p + noise, probes)


def dense_update(weights, updates, basis):
    """The oracle: (U A)ᵀ per layer, in float64."""
    addresses = weights["proj"]["address"][...]
    u = np.asarray(updates["proj"]["probe"][...], np.float64)
    bases = [logra.basis_matrix(basis.key(a), R, K) for a in addresses]
    return np.stack([(u @ np.asarray(a)).T for u, a in zip(u, bases, strict=True)])


# --- what is merged


@pytest.mark.parametrize("refresh", [True, False])
def test_float32_weights_move_by_the_lifted_update(refresh):
    basis = logra.Basis(seed=5, refresh=refresh)
    weights, updates = state_of(basis=basis)
    for _ in range(2):  # the second step draws from the address that the first left
        expected = np.asarray(weights["proj"]["kernel"][...]) + dense_update(
            weights, updates, basis
        )
        weights = jax.jit(merge, static_argnums=2)(weights, updates, basis)
        np.testing.assert_allclose(weights["proj"]["kernel"][...], expected, atol=1e-7)


def test_a_fixed_basis_repeats_its_update_and_a_refreshed_one_does_not():
    for refresh in (True, False):
        basis = logra.Basis(refresh=refresh)
        weights, updates = state_of(basis=basis)
        first = dense_update(weights, updates, basis)
        second = dense_update(merge(weights, updates, basis), updates, basis)
        assert np.array_equal(first, second) == (not refresh)


def test_the_step_in_each_address_moves_on_by_one_and_the_rest_stays():
    basis = logra.Basis(seed=5)
    weights, updates = state_of(basis=basis)
    merged = merge(weights, updates, basis)
    before, after = (np.asarray(w["proj"]["address"][...]) for w in (weights, merged))
    np.testing.assert_array_equal(after - before, [[0, 1, 0]] * LAYERS)
    assert jax.tree.structure(merged) == jax.tree.structure(weights)
    for path in (("proj", "bias"), ("other", "kernel"), ("other", "bias")):
        a, b = (dict(nnx.to_flat_state(w))[path][...] for w in (weights, merged))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_a_zero_update_leaves_bfloat16_weights_bit_for_bit(rounding):
    weights, updates = state_of(jnp.bfloat16, scale=0.0)
    merged = merge(weights, updates, logra.Basis(), rounding=rounding)
    a, b = (w["proj"]["kernel"][...] for w in (weights, merged))
    assert b.dtype == jnp.bfloat16
    np.testing.assert_array_equal(a, b)


def test_nearest_rounds_to_nearest_and_stochastic_to_a_neighbour():
    basis = logra.Basis()
    weights, updates = state_of(jnp.bfloat16)
    exact = np.asarray(weights["proj"]["kernel"][...], np.float64) + dense_update(
        weights, updates, basis
    )
    nearest = merge(weights, updates, basis, rounding="nearest")["proj"]["kernel"][...]
    rounded = jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16)
    # in float32 sums a tie may fall the other way; not in more than a few entries
    assert np.mean(np.asarray(nearest != rounded)) < 1e-3
    drawn = merge(weights, updates, basis)["proj"]["kernel"][...]
    gap = np.spacing(np.abs(exact).astype(np.float32)) * 2.0**16
    error = np.asarray(drawn, np.float64) - exact
    assert np.all(np.abs(error) <= gap * 1.001)
    # unbiased: mean of n errors, each uniform-ish with a deviation below gap / 2
    assert abs(np.mean(error / gap)) < 4 * 0.5 / np.sqrt(error.size)


def test_tiny_updates_survive_on_average_where_nearest_loses_them():
    model = logra.sketch(
        nnx.Linear(K, D, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), R
    )
    _, probes, weights = nnx.split(model, logra.Probe, ...)
    weights["kernel"] = weights["kernel"].replace(jnp.ones((K, D), jnp.bfloat16))
    basis = logra.Basis(refresh=False)  # the same A, so that steps add up
    updates = jax.tree.map(lambda p: p + 2.0**-14, probes)
    steps = 200

    def final(rounding):
        def body(_, w):
            return merge(w, updates, basis, rounding=rounding)

        run = jax.jit(lambda w: jax.lax.fori_loop(0, steps, body, w))
        return np.asarray(run(weights)["kernel"][...], np.float64)

    a = np.asarray(logra.basis_matrix(basis.key(weights["address"][...]), R, K))
    intended = steps * 2.0**-14 * a.sum(0)[:, None] * np.ones((1, D))
    assert np.all(final("nearest") == 1.0)
    moved = final("stochastic") - 1.0
    landed = np.sum(moved * intended) / np.sum(intended**2)
    assert landed == pytest.approx(1.0, abs=0.05)


def test_the_same_address_gives_the_same_weights_under_jit_and_eagerly():
    weights, updates = state_of(jnp.bfloat16)
    eager = merge(weights, updates, logra.Basis())
    jitted = jax.jit(merge, static_argnums=2)(weights, updates, logra.Basis())
    jax.tree.map(np.testing.assert_array_equal, eager, jitted)


# --- rounding


def draws(value, count=4096):
    """One float32 rounded with ``count`` hashed words."""
    bits = rounding_bits(jnp.array([1, 2, 3], jnp.uint32), (count, 1))
    x = jnp.full((count, 1), value, jnp.float32)
    return np.asarray(round_stochastically(x, bits), np.float64)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("base", [1.0, 0.0234375, 1e-38, 255 / 128])
def test_rounding_is_unbiased_between_the_two_neighbours(base, fraction, sign):
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
    assert np.all(np.isnan(draws(np.nan, 64)))
    # a NaN whose payload the added bits would carry into the sign
    payload = np.uint32(0x7FFFFFFF).view(np.float32)
    assert np.all(np.isnan(draws(payload, 64)))
    largest = float(jnp.finfo(jnp.bfloat16).max)
    beyond = largest * (1 + 2.0**-9)  # half a gap above the largest
    assert set(np.unique(draws(beyond))) == {largest, np.inf}


def words(*address, shape=(64, 128)):
    return np.asarray(rounding_bits(jnp.array(address, jnp.uint32), shape))


def test_rounding_bits_are_uniform_in_every_bit_and_byte():
    w = words(0, 0, 0).ravel()
    assert len(np.unique(w)) == w.size  # a bijection of the index
    for bit in range(32):
        assert abs(np.mean(w >> bit & 1) - 0.5) < 4 * 0.5 / np.sqrt(w.size)
    for byte in range(4):
        counts = np.bincount(w >> 8 * byte & 255, minlength=256)
        expected = w.size / 256
        chi_square = np.sum((counts - expected) ** 2) / expected
        assert abs(chi_square - 255) < 4 * np.sqrt(2 * 255)


@pytest.mark.parametrize("other", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 2**31, 0)])
def test_rounding_bits_of_other_seeds_steps_and_matrices_are_unrelated(other):
    a, b = words(0, 0, 0), words(*other)
    assert np.mean(a == b) < 1e-3
    u, v = a / 2.0**32 - 0.5, b / 2.0**32 - 0.5
    assert abs(np.corrcoef(u.ravel(), v.ravel())[0, 1]) < 4 / np.sqrt(a.size)
    agreement = np.mean(np.unpackbits((a ^ b).view(np.uint8)))
    assert abs(agreement - 0.5) < 4 * 0.5 / np.sqrt(32 * a.size)


def test_rounding_bits_of_neighbouring_rows_columns_and_steps_are_unrelated():
    u = np.stack([words(7, s, 9) for s in range(4)]) / 2.0**32 - 0.5
    for axis in range(3):
        a, b = np.delete(u, 0, axis), np.delete(u, -1, axis)
        assert abs(np.mean(a * b)) * 12 < 4 / np.sqrt(a.size)


def test_rounding_bits_count_in_hugging_face_order():
    w = words(1, 2, 3, shape=(5, 4))
    flat = words(1, 2, 3, shape=(20, 1)).ravel()
    np.testing.assert_array_equal(w.T.ravel(), flat)


def test_rounding_bits_keep_their_golden_numbers():
    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    stream = mix((mix((mix(1) + 2) % 2**32) + 3) % 2**32)
    expected = [mix(mix(i) ^ stream) for i in range(4)]
    assert expected == GOLDEN_WORDS
    np.testing.assert_array_equal(words(1, 2, 3, shape=(4, 1)).ravel(), expected)


# --- memory


def test_merge_works_in_place_one_layer_at_a_time():
    layers, k, d = 16, 64, 96
    model = logra.sketch(nnx.Linear(k, d, use_bias=False, rngs=nnx.Rngs(0)), R)
    _, probes, weights = nnx.split(model, logra.Probe, ...)

    def stacked(state):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((layers, *a.shape), a.dtype), state
        )

    weights, probes = stacked(weights), stacked(probes)
    kernel = jax.ShapeDtypeStruct((layers, k, d), jnp.bfloat16)
    weights["kernel"] = weights["kernel"].replace(kernel)
    compiled = (
        jax.jit(lambda w, u: merge(w, u, logra.Basis()), donate_argnums=0)
        .lower(weights, probes)
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * layers * k * d  # every byte of the weights
    # a few layers' float32 and bits; before jax 0.12 also the bits of the weights once
    allowed = 3 * 4 * k * d + BFLOAT16_SLICES_ARE_CONVERTED * 2 * layers * k * d
    assert memory.temp_size_in_bytes < allowed
    # the stack as a whole is never converted, layer after layer
    assert f" f32[{layers},{k},{d}]" not in compiled.as_text()


# --- what is refused


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match=r"`rounding` must be one of .* got 'up'"):
        merge(*state_of(), logra.Basis(), rounding="up")


def test_updates_of_another_model_are_refused():
    weights, updates = state_of()
    foreign = nnx.State({"elsewhere": updates["proj"]})
    with pytest.raises(ValueError, match=r"`updates` must hold .*'elsewhere.probe'"):
        merge(weights, foreign, logra.Basis())
    plain = nnx.state(Stack(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"`updates` must hold .*'proj.probe'"):
        merge(plain, updates, logra.Basis())
    with pytest.raises(ValueError, match=r"`updates` must hold .*"):
        merge(weights, weights, logra.Basis())


@pytest.mark.parametrize("shape", [(LAYERS + 1, D, R), (LAYERS, D + 1, R), (D, R)])
def test_updates_of_another_shape_are_refused(shape):
    weights, updates = state_of()
    updates = jax.tree.map(lambda _: jnp.zeros(shape), updates)
    with pytest.raises(ValueError, match="`updates` must have the shapes"):
        merge(weights, updates, logra.Basis())

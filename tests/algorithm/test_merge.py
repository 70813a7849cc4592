from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import logra_jax as logra
from logra_jax.algorithm.basis import entry_scale
from logra_jax.algorithm.merge import (
    combine,
    merge,
    merge_measured,
)
from logra_jax.algorithm.slicing import BFLOAT16_SLICES_ARE_CONVERTED

LAYERS, K, D, R = 3, 40, 24, 4


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
    """The oracle: (U A)ᵀ per layer, in float64, of the update or of its factor."""
    addresses = weights["proj"]["address"][...]
    bases = [np.asarray(basis.matrix(a, R, K), np.float64) for a in addresses]
    if "integers" in updates["proj"]:
        q, e = (
            np.asarray(updates["proj"][n][...], np.float64)
            for n in ("integers", "exponents")
        )
        u = q * 2.0 ** e[..., None] / entry_scale(basis.kind, R)
    else:
        u = np.asarray(updates["proj"]["probe"][...], np.float64)
    return np.stack([(u @ a).T for u, a in zip(u, bases, strict=True)])


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
        # entries of up to .04 on a grid of 2**-15 of their row's largest, four summed
        np.testing.assert_allclose(weights["proj"]["kernel"][...], expected, atol=3e-6)


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
    updates = logra.quantise(updates, basis)
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


# --- how much of it landed


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_landing_is_the_update_against_what_the_weights_moved_by(dtype):
    basis = logra.Basis()
    weights, updates = state_of(dtype)
    after, landings = jax.jit(merge_measured, static_argnums=2)(weights, updates, basis)
    jax.tree.map(
        np.testing.assert_array_equal, after, logra.merge(weights, updates, basis)
    )
    assert set(landings) == {"proj"}
    intended = dense_update(weights, updates, basis)
    before, moved = (
        np.asarray(w["proj"]["kernel"][...], np.float64) for w in (weights, after)
    )
    moved = moved - before
    landing = landings["proj"]
    expected = {
        "intended": np.sum(intended**2, (1, 2)),
        "landed": np.sum(moved**2, (1, 2)),
        "inner": np.sum(moved * intended, (1, 2)),
        "changed": np.sum(moved != 0, (1, 2)),
        "size": np.full(LAYERS, K * D),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(landing, name), value, rtol=1e-3)
    total = combine([landing, landing])
    assert total["norm_ratio"] == pytest.approx(
        np.linalg.norm(moved) / np.linalg.norm(intended), rel=1e-3
    )
    assert total["cosine"] == pytest.approx(
        np.sum(moved * intended) / np.linalg.norm(moved) / np.linalg.norm(intended),
        rel=1e-3,
    )
    assert total["changed"] == pytest.approx(np.mean(moved != 0))


def test_nearest_rounding_loses_a_tiny_update_and_the_landing_says_so():
    weights, updates = state_of(jnp.bfloat16, scale=1e-3)
    ones = jnp.ones_like(weights["proj"]["kernel"][...])  # half a step is .002 there
    weights["proj"]["kernel"] = weights["proj"]["kernel"].replace(ones)

    def landed(rounding):
        landing = merge_measured(weights, updates, logra.Basis(), rounding=rounding)[1]
        return combine(list(landing.values()))

    assert landed("nearest")["changed"] < 0.05
    assert landed("nearest")["norm_ratio"] < 1
    stochastic = landed("stochastic")
    # E[moved] = intended: its projection is one, give or take the rounding noise
    assert stochastic["cosine"] * stochastic["norm_ratio"] == pytest.approx(1, abs=0.2)
    assert stochastic["changed"] > 0.1


# --- what is merged is the factor


def test_updates_and_their_factors_merge_to_the_same_bits():
    weights, updates = state_of(jnp.bfloat16)
    basis = logra.Basis()
    factors = logra.quantise(updates, basis)
    jax.tree.map(
        np.testing.assert_array_equal,
        merge(weights, updates, basis),
        merge(weights, factors, basis),
    )


def test_a_gaussian_basis_merges_its_own_lift():
    basis = logra.Basis(kind="gaussian")
    weights, updates = state_of(basis=basis)
    lifted = dense_update(weights, updates, basis)
    expected = np.asarray(weights["proj"]["kernel"][...]) + lifted
    merged = merge(weights, updates, basis)["proj"]["kernel"][...]
    np.testing.assert_allclose(merged, expected, atol=3e-6)


def test_one_program_serves_every_step():
    weights, updates = state_of(jnp.bfloat16)
    step = jax.jit(lambda w, u: merge(w, u, logra.Basis()))
    for _ in range(3):
        weights = step(weights, updates)
    assert step._cache_size() == 1


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize(
    "spec", [(None, "a", None), (None, None, "a"), (None, "b", "a")]
)
def test_shards_of_a_kernel_merge_to_the_bits_of_the_whole(spec, kind):
    basis = logra.Basis(seed=9, kind=kind)
    weights, updates = state_of(jnp.bfloat16, basis)
    step = jax.jit(lambda w, u: merge(w, u, basis))
    expected = step(weights, updates)["proj"]["kernel"][...]
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    kernel = weights["proj"]["kernel"]
    sharded = jax.tree.map(lambda x: x, weights)
    sharded["proj"]["kernel"] = kernel.replace(jax.device_put(kernel[...], sharding))
    found = step(sharded, updates)["proj"]["kernel"][...]
    assert len(found.sharding.device_set) == 4
    np.testing.assert_array_equal(found, expected)


# --- memory


class Stacks(nnx.Module):
    """So many linear layers of one shape, to be stacked."""

    def __init__(self, count: int, k: int, d: int):
        self.linears = nnx.List(
            nnx.Linear(k, d, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            for _ in range(count)
        )


def compiled_merge(count: int, layers: int, k: int, d: int) -> Any:
    """The merge of so many stacks of bfloat16 kernels (layers, k, d), from shapes."""
    model = logra.sketch(Stacks(count, k, d), R)
    _, probes, weights = nnx.split(model, logra.Probe, ...)

    def stacked(state):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((layers, *a.shape), a.dtype), state
        )

    return (
        jax.jit(lambda w, u: merge(w, u, logra.Basis()), donate_argnums=0)
        .lower(stacked(weights), stacked(probes))
        .compile()
    )


def test_merge_works_in_place_one_layer_at_a_time():
    layers, k, d = 16, 64, 96
    compiled = compiled_merge(1, layers, k, d)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * layers * k * d  # every byte of the weights
    # one layer's update, in two halves and whole, and its weights' numbers, all in four
    # bytes, and the next layer; before jax 0.12 also a quarter of the weights' bits
    allowed = (4 * 4 + 2) * k * d + BFLOAT16_SLICES_ARE_CONVERTED * layers * k * d // 2
    assert memory.temp_size_in_bytes < allowed
    # The stack as a whole is never converted, layer after layer; before jax 0.12 within
    # the reading and the writing of each quarter: two conversions and the write.
    converted = compiled.as_text().count(f" f32[{layers},{k},{d}]")
    assert converted <= 3 * BFLOAT16_SLICES_ARE_CONVERTED


def test_what_merge_holds_does_not_grow_with_the_number_of_stacks():
    layers, k, d = 16, 64, 96
    one, many = (
        compiled_merge(count, layers, k, d).memory_analysis().temp_size_in_bytes
        for count in (1, 5)
    )
    factors = 4 * layers * d * R  # in four bytes; they are there before they land
    assert many < one + 4 * factors


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

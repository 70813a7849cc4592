"""The merge of JAX, repeated by numpy and torch: the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.replay import replay

K, D = 52, 36  # neither a multiple of 32


def merged(basis, rank=4, dtype=jnp.bfloat16, rounding="stochastic", bits=16):
    """Kernel before and after one merge (out, in), its factor and its address."""
    linear = nnx.Linear(K, D, use_bias=False, param_dtype=dtype, rngs=nnx.Rngs(0))
    _, probes, weights = nnx.split(
        logra.sketch(linear, rank, basis=basis), logra.Probe, ...
    )
    rows = 10.0 ** jax.random.randint(jax.random.key(2), (D, 1), -9, 0)
    updates = jax.tree.map(
        lambda p: rows * jax.random.normal(jax.random.key(1), p.shape), probes
    )
    kernel = weights["kernel"][...]
    kernel = kernel.at[0].set(jnp.array(1e-39, dtype)).at[1].set(-0.0)
    weights["kernel"] = weights["kernel"].replace(kernel)
    factors = logra.quantise(updates, basis, bits)
    address = tuple(int(word) for word in weights["address"][...])
    after = jax.jit(lambda w, f: logra.merge(w, f, basis, rounding=rounding))(
        weights, factors
    )["kernel"][...]
    factor = (np.asarray(factors[n][...]) for n in ("integers", "exponents"))
    return np.asarray(kernel).T.copy(), np.asarray(after).T.copy(), *factor, address


def integer_view(array):
    size = {2: "int16", 4: "int32"}[array.dtype.itemsize]
    return (
        array.view(size)
        if isinstance(array, np.ndarray)
        else array.view(getattr(torch, size))
    )


def to_torch(array):
    kind = {2: torch.bfloat16, 4: torch.float32}[array.dtype.itemsize]
    return torch.tensor(integer_view(array)).view(kind)


CASES = [
    {"basis": logra.Basis(seed=2**32 - 1)},
    {"basis": logra.Basis(refresh=False), "rounding": "nearest"},
    {"basis": logra.Basis(kind="gaussian"), "rank": 36},
    {"basis": logra.Basis(3), "bits": 8},
    {"basis": logra.Basis(3), "dtype": jnp.float32},
    {"basis": logra.Basis(4, kind="gaussian"), "dtype": jnp.float32, "bits": 8},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("where", ["numpy", "torch"])
def test_a_merge_is_replayed_bit_for_bit(where, case):
    before, after, integers, exponents, address = merged(**case)
    weight, factor = before.copy(), (integers, exponents)
    if where == "torch":
        weight, factor = to_torch(before), tuple(map(torch.tensor, factor))
    replay(
        weight,
        *factor,
        address,
        case["basis"],
        rounding=case.get("rounding", "stochastic"),
    )
    np.testing.assert_array_equal(integer_view(weight), integer_view(after))
    assert np.any(integer_view(after) != integer_view(before))


@pytest.mark.parametrize("basis", [logra.Basis(7), logra.Basis(7, kind="gaussian")])
def test_each_rank_replays_its_own_rows_and_columns(basis):
    before, after, integers, exponents, address = merged(basis)
    for rows in (slice(0, 11), slice(11, D)):
        for columns in (slice(0, 33), slice(33, 40), slice(40, K)):
            shard = before[rows, columns].copy()
            replay(
                shard,
                integers[rows],
                exponents[rows],
                address,
                basis,
                rows=rows.start,
                columns=columns.start,
                width=K,
            )
            np.testing.assert_array_equal(
                integer_view(shard), integer_view(after[rows, columns].copy())
            )


def test_bits_of_bfloat16_are_taken_as_such():
    before, after, integers, exponents, address = merged(logra.Basis())
    weight = before.view(np.uint16).copy()
    replay(weight, integers, exponents, address, logra.Basis())
    np.testing.assert_array_equal(weight, after.view(np.uint16))


def test_blocks_of_rows_do_not_matter(monkeypatch):
    before, after, integers, exponents, address = merged(logra.Basis())
    for size in (1, 5 * K, 10**6):
        monkeypatch.setattr("logra_jax.algorithm.replay.CPU_BLOCK", size)
        weight = before.copy()
        replay(weight, integers, exponents, address, logra.Basis())
        np.testing.assert_array_equal(integer_view(weight), integer_view(after))


def test_an_unknown_rounding_is_refused_before_anything_changes():
    before, _, integers, exponents, address = merged(logra.Basis())
    weight = before.copy()
    with pytest.raises(ValueError, match=r"`rounding` must be one of .* got 'up'"):
        replay(weight, integers, exponents, address, logra.Basis(), rounding="up")
    np.testing.assert_array_equal(weight, before)

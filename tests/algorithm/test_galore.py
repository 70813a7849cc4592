"""GaLore on stacks of kernels against optax's on each matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logra_jax.algorithm.dense import dense, widen
from logra_jax.algorithm.galore import GAP, stacked_galore

OPTIONS = {"b1": 0.8, "b2": 0.99, "eps": 1e-6}


@pytest.mark.parametrize("gap", [GAP, 2])
def test_on_a_stack_it_is_optax_galore_on_each_of_its_matrices(getkey, gap):
    """Wide and tall ones, decay and moments, before and after the second SVD."""
    params = {
        "a": jax.random.normal(getkey(), (3, 8, 6)),
        "b": jax.random.normal(getkey(), (2, 1, 3, 5)),
        "c": jax.random.normal(getkey(), (4, 4)),
    }
    ours = stacked_galore(0.1, rank=2, gap=gap, weight_decay=0.1, **OPTIONS)
    theirs = optax.contrib.galore(
        0.1,
        rank=2,
        update_proj_gap=gap,
        base_optimizer=optax.scale_by_adam(**OPTIONS),
        weight_decay=0.1,
    )
    gradients = [
        jax.tree.map(lambda p: jax.random.normal(getkey(), p.shape), params)
        for _ in range(3)
    ]
    state, update = ours.init(params), jax.jit(ours.update)
    their_update = jax.jit(theirs.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
    for name, stack in params.items():
        k, d = stack.shape[-2:]
        found = updates[name].reshape(-1, k, d)
        its = [gradient[name].reshape(-1, k, d) for gradient in gradients]
        for i, matrix in enumerate(stack.reshape(-1, k, d)):
            one = theirs.init(matrix)
            for gradient in its:
                expected, one = their_update(gradient[i], one, matrix)
            np.testing.assert_allclose(found[i], expected, 1e-4, 1e-6)


def test_the_svd_stays_in_a_branch_that_most_updates_skip():
    params = [jnp.ones((3, 8, 6))]
    tx = stacked_galore(0.1, rank=2, first_count=1)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    outside = {e.primitive.name for e in jaxpr.jaxpr.eqns}
    assert "cond" in outside
    assert "svd" not in outside


def test_gradients_that_are_cut_over_devices_give_the_same_updates(getkey):
    """By inputs, by outputs and both, as a step on a mesh has them."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
    params = [jax.random.normal(getkey(), (2, 8, n)) for n in (4, 6, 12)]
    cuts = [(None, "fsdp", None), (None, None, "tensor"), (None, "fsdp", "tensor")]
    cut = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in cuts]
    whole = NamedSharding(mesh, PartitionSpec())
    tx = stacked_galore(0.1, rank=3, gap=2, eps=1e-4)
    one, many = tx.init(params), jax.device_put(tx.init(params), whole)
    update = jax.jit(tx.update)
    where = (cut, jax.tree.map(lambda _: whole, many))
    on_mesh = jax.jit(tx.update, out_shardings=where)
    for _ in range(3):
        gradients = [jax.random.normal(getkey(), p.shape) for p in params]
        expected, one = update(gradients, one, params)
        parts = jax.device_put((gradients, params), (cut, cut))
        found, many = on_mesh(parts[0], many, parts[1])
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert on_mesh._cache_size() == 1


@pytest.mark.parametrize(("gap", "svds"), [(1, 4), (2, 2), (3, 2), (GAP, 1)])
def test_the_projection_is_drawn_anew_after_as_many_updates(getkey, gap, svds):
    params = jnp.ones((2, 5, 4))
    tx = stacked_galore(0.1, rank=2, gap=gap)
    state, update = tx.init(params), jax.jit(tx.update)
    seen = []
    for _ in range(4):
        _, state = update(jax.random.normal(getkey(), params.shape), state, params)
        seen.append(np.asarray(state.stacks[0][0].projector).tobytes())
    assert len(set(seen)) == svds


def test_ranks_by_expression_are_found_in_the_names_of_layers():
    """Which end with the layer, whatever it calls its kernel; the first hit decides."""

    class Model(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
            self.down = nnx.Linear(5, 6, rngs=nnx.Rngs(0))

    wide = jax.eval_shape(widen, nnx.state(dense(Model())))
    names = nnx.to_pure_dict(wide)
    plain = {name: {"kernel": layer["wide"]} for name, layer in names.items()}
    for params in (wide, plain):
        state = jax.eval_shape(
            stacked_galore(0.1, {"up$": 3, ".": 2}).init,
            params,
        )
        shapes = [one[0].projector.shape for one in state.stacks]
        assert shapes == [(1, 6, 2), (1, 6, 3)]  # of "down", then "up"


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (5, r"`rank` must be in \[1, min\(k, d\)\] = \[1, 4\] for layer 'up', got 5; "),
        ({"down": 2}, "`rank` must cover every layer, .* says nothing of 'up'"),
    ],
)
def test_a_rank_that_does_not_fit_is_one_sentence(rank, message):
    with pytest.raises(ValueError, match=message):
        stacked_galore(0.1, rank).init({"up": {"kernel": jnp.ones((2, 6, 4))}})


def test_updates_need_the_weights():
    params = [jnp.ones((3, 8, 6))]
    tx = stacked_galore(0.1, rank=2)
    with pytest.raises(ValueError, match="`params` must be given"):
        tx.update(params, tx.init(params))

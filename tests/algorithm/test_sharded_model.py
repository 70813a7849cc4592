"""A model of Flax on a mesh under GSPMD: metadata of its kernels, sketches, merge."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import logra_jax as logra

LAYERS, WIDTH, HEADS, SIZE, R = 2, 8, 2, 4, 3
BASIS = logra.Basis(seed=1)

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def spread(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.heads = nnx.LinearGeneral(
            WIDTH, (HEADS, SIZE), kernel_init=spread("fsdp", "tensor", None), rngs=rngs
        )
        self.out = nnx.LinearGeneral(
            (HEADS, SIZE),
            WIDTH,
            axis=(-2, -1),
            kernel_init=spread("tensor", None, "fsdp"),
            rngs=rngs,
        )
        self.plain = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.plain(self.out(jnp.tanh(self.heads(x))))


class Model(nnx.Module):
    """Blocks stacked by ``nnx.vmap`` and run by ``nnx.scan``, with metadata."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)
        self.fan = nnx.Einsum(
            "nd,edf->nef",
            (4, WIDTH, 6),
            kernel_init=spread("tensor", "fsdp", None),
            rngs=rngs,
        )

    def __call__(self, x):
        @nnx.scan(
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        def run(x, block):
            return block(x)

        return self.fan(run(x, self.blocks))


@pytest.fixture
def mesh():
    return jax.make_mesh(
        (2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )


@pytest.fixture
def model(mesh):
    with jax.set_mesh(mesh):
        return logra.sketch(nnx.jit(lambda: Model(nnx.Rngs(0)))(), R, basis=BASIS)


def assert_close(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert np.linalg.norm(expected) > 0
    assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)


def specs(state):
    flat = nnx.to_flat_state(nnx.get_partition_spec(state))
    return {".".join(map(str, path)): v.get_value() for path, v in flat}


def test_probes_have_the_names_of_their_kernels_outputs(model):
    _, probes, weights = nnx.split(model, logra.Probe, ...)
    assert specs(probes) == {
        "blocks.heads.probe": PartitionSpec(None, "tensor", None),
        "blocks.out.probe": PartitionSpec(None, "fsdp", None),
        "blocks.plain.probe": PartitionSpec(),
        "fan.probe": PartitionSpec("tensor", None),
    }
    kernels = specs(weights)
    assert kernels["blocks.heads.kernel"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert kernels["blocks.out.kernel"] == PartitionSpec(None, "tensor", None, "fsdp")


def test_a_sharded_model_has_the_sketches_and_weights_of_the_whole_one(mesh, model):
    graph, probes, weights = nnx.split(model, logra.Probe, ...)
    x = jax.random.normal(jax.random.key(0), (8, WIDTH))
    noise = jax.tree.map(lambda p: p + 0.01, probes)

    def step(probes, weights, noise, x):
        def loss(probes):
            y = nnx.merge(graph, probes, weights, copy=True)(x)
            return jnp.mean(jnp.sin(3 * y))

        return jax.grad(loss)(probes), logra.merge(weights, noise, BASIS)

    one = jax.devices()[0]
    arguments = jax.device_put((probes, weights, noise, x), one)
    sketches, merged = jit(step)(*arguments)

    def shard(state):
        return jax.device_put(state, nnx.get_named_sharding(state, mesh))

    rows = jax.NamedSharding(mesh, PartitionSpec("fsdp"))
    with jax.set_mesh(mesh):
        spread = (*map(shard, (probes, weights, noise)), jax.device_put(x, rows))
        assert spread[1]["fan"]["kernel"].sharding.spec[0] == "tensor"
        sharded, moved = jit(step)(*spread)

    jax.tree.map(assert_close, sharded, sketches)
    # the same update lands to the same bits, however the kernel is cut
    kernels = nnx.PathContains("kernel")
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.filter_state(moved, kernels),
        nnx.filter_state(merged, kernels),
    )


LAYERS_CUT_ALONG_OUTPUTS = {
    "linear": (lambda **given: nnx.Linear(8, 4, **given), (None, "tensor")),
    "into heads": (
        lambda **given: nnx.LinearGeneral(8, (2, 4), **given),
        (None, "tensor", None),
    ),
    "einsum": (
        lambda **given: nnx.Einsum("nd,fd->nf", (4, 8), **given),
        ("tensor", None),
    ),
}


@pytest.mark.parametrize("name", LAYERS_CUT_ALONG_OUTPUTS)
def test_a_mesh_of_explicit_axes_gives_the_same_sketches_and_weights(name):
    make, names = LAYERS_CUT_ALONG_OUTPUTS[name]
    x = jax.random.normal(jax.random.key(0), (6, 8))

    def run(x, **given):
        model = logra.sketch(make(rngs=nnx.Rngs(0), **given), R, basis=BASIS)
        graph, probes, weights = nnx.split(model, logra.Probe, ...)

        @jit
        def step(probes, weights, x):
            def loss(probes, x):
                return jnp.mean(jnp.sin(3 * nnx.merge(graph, probes, weights)(x)))

            sketch, dx = jax.grad(loss, argnums=(0, 1))(probes, x)
            merged = logra.merge(weights, sketch, BASIS)
            return sketch["probe"][...], dx, merged["kernel"][...]

        return step(probes, weights, x)

    expected = run(x)
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("data")))
        actual = run(x, kernel_metadata={"out_sharding": names})
        assert jax.typeof(actual[1]).sharding.spec == PartitionSpec("data", None)
        assert jax.typeof(actual[2]).sharding.spec == PartitionSpec(*names)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)

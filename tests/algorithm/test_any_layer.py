"""Linear layers of Flax of every kind, against the dense gradient of the original."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import logra_jax as logra
from logra_jax.algorithm.capture import Tap, measurements, raw, tapped
from logra_jax.algorithm.dense import dense
from logra_jax.algorithm.lora import lora

R = 2
BASIS = logra.Basis(seed=3)

# Compile time is what these tests cost, so XLA is told not to try hard.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def assert_close(actual, expected, rtol=1e-5):
    """Relative error in norm, which no single tiny entry decides."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.linalg.norm(expected) > 0
    assert np.linalg.norm(actual - expected) <= rtol * np.linalg.norm(expected)


class Case(NamedTuple):
    make: Callable[[], nnx.Module]
    x: tuple[int, ...]
    matrices: tuple[int, ...]  # (*batch, k, d)
    # The oracle's reading of a kernel: an einsum that puts batch, inputs, outputs in
    # that order.
    order: str


BIAS = nnx.initializers.normal(1.0)


def linear(*args, **kwargs):
    return lambda: nnx.Linear(*args, bias_init=BIAS, rngs=nnx.Rngs(0), **kwargs)


def general(*args, **kwargs):
    return lambda: nnx.LinearGeneral(*args, bias_init=BIAS, rngs=nnx.Rngs(0), **kwargs)


def einsum(*args, **kwargs):
    return lambda: nnx.Einsum(*args, bias_init=BIAS, rngs=nnx.Rngs(0), **kwargs)


CASES = {
    "linear": Case(linear(5, 3), (2, 4, 5), (5, 3), "kd->kd"),
    "linear of a vector": Case(linear(5, 3, use_bias=False), (5,), (5, 3), "kd->kd"),
    "into heads": Case(general(6, (2, 5)), (4, 3, 6), (6, 10), "khd->khd"),
    "out of heads": Case(
        general((2, 5), 6, axis=(-2, -1)), (4, 3, 2, 5), (10, 6), "hdk->hdk"
    ),
    "axes here and there, not in order": Case(
        general((2, 3), (4, 5), axis=(-1, 1)), (3, 2, 7, 3), (6, 20), "abcd->abcd"
    ),
    "batch axes": Case(
        general(5, (3, 2), batch_axis={0: 4, 1: 2}),
        (4, 2, 3, 5),
        (4, 2, 5, 6),
        "abkij->abkij",
    ),
    "einsum of a moved kernel": Case(
        einsum("nta,hab->nthb", (3, 6, 4), (3, 4)), (2, 5, 6), (6, 12), "hab->ahb"
    ),
    "einsum of two sums": Case(
        einsum("...hd, dhf -> ...f", (4, 3, 5), (5,)), (2, 6, 3, 4), (12, 5), "dhf->dhf"
    ),
    "einsum of a moved output": Case(
        einsum("n...a,hab->h...bn", (3, 6, 4), (3, 4, 1)),
        (2, 5, 2, 6),
        (6, 12),
        "hab->ahb",
    ),
    "einsum of experts": Case(
        einsum("ect,efc->tef", (3, 6, 4), (3, 6)), (3, 4, 5), (3, 4, 6), "efc->ecf"
    ),
}


def loss(y):
    return jnp.sum(jnp.sin(3 * y))


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_sketched_perturbed_and_merged_as_its_matrix(name, getkey):
    case = CASES[name]
    model = case.make()
    *batch, k, d = case.matrices
    x = jax.random.normal(getkey(), case.x)
    sketched = logra.sketch(model, R, basis=BASIS)
    graph, probes, weights = nnx.split(sketched, logra.Probe, ...)
    twin, _, _ = nnx.split(logra.perturbed(sketched), logra.Probe, ...)
    original, params = nnx.split(model)
    assert probes["probe"].shape == (*batch, d, R)
    assert weights["kernel"].shape == params["kernel"].shape

    def matrices(kernel):
        return jnp.einsum(case.order, kernel).reshape(-1, k, d)

    def kernel(matrices):
        own = jax.eval_shape(lambda: jnp.einsum(case.order, params["kernel"][...]))
        y, z = case.order.split("->")
        return jnp.einsum(f"{z}->{y}", matrices.reshape(own.shape))

    def original_of(w, x):
        state = params | {"kernel": params["kernel"].replace(w)}
        return nnx.merge(original, state)(x)

    @jit
    def ours(weights, probes, u, x):
        def run(graph, probes, x):
            return nnx.merge(graph, probes, weights)(x)

        sketch, dx = jax.grad(lambda p, x: loss(run(graph, p, x)), argnums=(0, 1))(
            probes, x
        )
        _, rate = jax.jvp(lambda p: run(twin, p, x), (probes,), (u,))
        merged = logra.merge(weights, u, BASIS)["kernel"][...]
        forward = run(graph, probes, x), run(twin, probes, x), run(twin, u, x)
        return *forward, sketch["probe"][...], dx, rate, merged

    @jit
    def theirs(w, words, u, x):
        A = jnp.stack([BASIS.matrix(a, R, k) for a in words.reshape(-1, 3)])
        G, dx = jax.grad(lambda w, x: loss(original_of(w, x)), argnums=(0, 1))(w, x)
        sketch = jnp.einsum("nkd,nrk->ndr", matrices(G), A)
        change = kernel(jnp.einsum("ndr,nrk->nkd", u.reshape(-1, d, R), A))
        y, rate = jax.jvp(lambda w: original_of(w, x), (w,), (change,))
        moved = w + change
        return y, y, original_of(moved, x), sketch.reshape(u.shape), dx, rate, moved

    noise = 0.1 * jax.random.normal(getkey(), probes["probe"].shape)
    u = nnx.State({"probe": probes["probe"].replace(noise)})
    w, words = params["kernel"][...], weights["address"][...]
    actual, expected = ours(weights, probes, u, x), theirs(w, words, noise, x)
    # updates of up to .4 on a grid of 2**-15 of their row's largest: 1.2e-5 of it
    bounds = [1e-6, 1e-6, 1e-5, 1e-5, 1e-5, 1e-5, 2e-5]
    for one, other, bound in zip(actual, expected, bounds, strict=True):
        assert_close(one, other, bound)


def test_matrices_of_a_batch_have_a_basis_each():
    model = logra.sketch(CASES["einsum of experts"].make(), R, basis=BASIS)
    words = [BASIS.address(f".{i}") for i in range(3)]
    np.testing.assert_array_equal(model.address[...], words)


def products(jaxpr):
    """Every dot_general's equation, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from products(inner)


@pytest.mark.parametrize("twin", [False, True])
def test_the_precision_of_a_layer_is_that_of_its_products(twin):
    precision = (lax.Precision.HIGH, lax.Precision.DEFAULT)
    layer = nnx.Linear(5, 3, precision=precision, rngs=nnx.Rngs(0))
    model = logra.sketch(layer, R)
    graph, probes, weights = nnx.split(
        logra.perturbed(model) if twin else model, logra.Probe, ...
    )

    def gradient(probes, x):
        return jax.grad(lambda x: loss(nnx.merge(graph, probes, weights)(x)))(x)

    jaxpr = jax.make_jaxpr(gradient)(probes, jnp.ones((7, 5)))
    with_kernel = [
        eqn.params["precision"]
        for eqn in products(jaxpr.jaxpr)
        if (5, 3) in [v.aval.shape for v in eqn.invars]
    ]
    assert with_kernel == [precision, precision]  # y and dx


@pytest.mark.parametrize("kind", ["linear", "into heads", "einsum of experts"])
@pytest.mark.parametrize(
    "dtypes",
    [
        {"dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
    ],
    ids=str,
)
def test_dtypes_of_a_layer_are_kept(kind, dtypes):
    if kind == "linear":
        layer = nnx.Linear(5, 3, **dtypes, rngs=nnx.Rngs(0))
    elif kind == "into heads":
        layer = general(6, (2, 5), **dtypes)()
    else:
        layer = einsum("ect,efc->tef", (3, 6, 4), (3, 6), **dtypes)()
    model = logra.sketch(layer, R)
    x = jax.random.normal(jax.random.key(0), CASES[kind].x)
    for inputs in (x, x.astype(jnp.bfloat16)):
        ours, theirs = model(inputs), layer(inputs)
        assert ours.dtype == theirs.dtype
        assert_close(*(y.astype(jnp.float32) for y in (ours, theirs)), rtol=1e-6)

        graph, probes, rest = nnx.split(model, logra.Probe, ...)

        def total(probes, inputs, graph=graph, rest=rest):
            y = nnx.merge(graph, probes, rest)(inputs)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        sketch, dx = jax.grad(total, argnums=(0, 1))(probes, inputs)
        assert sketch["probe"].dtype == jnp.float32
        assert dx.dtype == inputs.dtype


def test_integers_are_taken_as_the_layer_took_them():
    layer = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    x = jnp.arange(10).reshape(2, 5)
    assert_close(logra.sketch(layer, R)(x), layer(x), 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_merging_a_kernel_of_heads_gives_the_bits_of_its_matrix(dtype, getkey):
    heads = general((2, 3), (4, 5), axis=(-2, -1), param_dtype=dtype)()
    flat = nnx.Linear(6, 20, param_dtype=dtype, rngs=nnx.Rngs(0))
    flat.kernel.set_value(heads.kernel[...].reshape(6, 20))
    noise = 1e-3 * jax.random.normal(getkey(), (20, R))
    merged = []
    for layer in (heads, flat):
        _, probes, weights = nnx.split(logra.sketch(layer, R), logra.Probe, ...)
        u = jax.tree.map(lambda p: p + noise, probes)
        merged.append(logra.merge(weights, u, logra.Basis())["kernel"][...])
    np.testing.assert_array_equal(merged[0].reshape(6, 20), merged[1])
    assert not np.array_equal(merged[1], flat.kernel[...])


def test_a_stack_of_heads_is_merged_in_place():
    layers, k, heads, size, rank = 6, 96, 8, 16, 4

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(seeds):
        return nnx.LinearGeneral(k, (heads, size), rngs=nnx.Rngs(0))

    model = logra.sketch(nnx.eval_shape(make, jnp.arange(layers)), rank)
    _, probes, weights = nnx.split(model, logra.Probe, ...)
    weights = jax.tree.map(jnp.zeros_like, weights)
    merge = jax.jit(logra.merge, static_argnums=2, donate_argnums=0)
    analysis = merge.lower(weights, probes, logra.Basis()).compile().memory_analysis()
    # a few matrices' worth, of six: a copy of the stack would be all of them
    assert analysis.temp_size_in_bytes < 4 * 4 * k * heads * size
    assert analysis.alias_size_in_bytes >= 4 * layers * k * heads * size


def test_backward_keeps_the_kernel_that_the_model_holds_and_not_a_moved_copy():
    model = logra.sketch(CASES["einsum of a moved kernel"].make(), R)
    graph, probes, weights = nnx.split(model, logra.Probe, ...)
    x = jnp.ones((2, 5, 6))
    _, pull = jax.vjp(lambda p: nnx.merge(graph, p, weights)(x), probes)
    kept = [a.shape for a in jax.tree.leaves(pull)]
    assert sorted(kept) == [(2, 5, R), (3, 6, 4)]


def test_a_tapped_layer_of_heads_measures_its_matrix(getkey):
    layer = general((2, 3), (4, 5), axis=(1, -1))()
    x = jax.random.normal(getkey(), (3, 2, 7, 3))
    model = tapped(logra.sketch(layer, R), raw, tokens=21)
    assert_close(model(x), layer(x), 1e-6)
    graph, taps, rest = nnx.split(model, Tap, ...)
    found = jax.grad(lambda taps: loss(nnx.merge(graph, taps, rest)(x)))(taps)
    found = measurements(found)[""]
    graph, params = nnx.split(layer)
    gradient = jax.grad(lambda params: loss(nnx.merge(graph, params)(x)))(params)
    expected = gradient["kernel"][...].reshape(6, 20)
    assert_close(found["x"].T @ found["g"], expected)


# --- what is refused


class Scaled(nnx.Linear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs)


class Named(nnx.Linear):
    """A subclass that computes as its parent does."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.title = "named"


REFUSED = {
    "a __call__ of its own": lambda: Scaled(5, 3, rngs=nnx.Rngs(0)),
    "LoRALinear that computes in a __call__": lambda: nnx.LoRALinear(
        5, 3, lora_rank=2, rngs=nnx.Rngs(0)
    ),
    "whose `dot_general` is": linear(5, 3, dot_general=lambda *a: lax.dot_general(*a)),
    "whose `promote_dtype` is": linear(5, 3, promote_dtype=lambda args, dtype: args),
    "whose `dot_general_cls` is": general(5, 3, dot_general_cls=lambda: None),
    "whose `einsum_op` is": einsum("ab,bc->ac", (5, 3), einsum_op=np.einsum),
    "an axis occurs twice": einsum("ab,bb->ab", (5, 5)),
    "`...` must be in the input and the output": einsum("...b,bc->c", (5, 3)),
    "summed by itself": einsum("abe,bc->ac", (5, 3)),
    "of one operand is summed": einsum("ab,bce->ac", (5, 3, 2)),
    "no axis that is summed, or none that it adds": einsum("abc,cb->abc", (5, 3)),
    "must be the kernel's first": einsum("tec,cef->tef", (6, 3, 4)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_layer_that_would_compute_something_else_is_refused(why):
    model = nnx.List([REFUSED[why](), nnx.Linear(5, 3, rngs=nnx.Rngs(0))])
    with pytest.raises(ValueError, match=rf"`match` must hit .* got '0', a .*{why}"):
        logra.sketch(model, R)
    assert logra.sketch(model, R, match="1")[1].probe.shape == (3, R)


@pytest.mark.parametrize("replace", [lora, dense], ids=["lora", "dense"])
def test_baselines_refuse_what_they_do_not_compute_and_leave_other_kinds(replace):
    given = {"rank": R} if replace is lora else {}
    model = nnx.List([linear(5, 3, precision="highest")(), general(5, (3, 2))()])
    with pytest.raises(ValueError, match="got '0', a Linear whose `precision` is high"):
        replace(model, **given)
    with pytest.raises(ValueError, match="hits none of: 0"):
        replace(model, match="1", **given)


def test_a_subclass_that_computes_as_its_parent_is_sketched():
    assert logra.sketch(Named(5, 3, rngs=nnx.Rngs(0)), R).probe.shape == (3, R)


def test_a_stack_along_another_axis_than_the_first_is_refused():
    @nnx.vmap(in_axes=0, out_axes=1)
    def make(seeds):
        return nnx.Linear(5, 3, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"kernel \(5, 2, 3\) does not end in its own"):
        logra.sketch(make(jnp.arange(2)), R)


def test_an_input_whose_axes_do_not_fit_is_refused():
    model = logra.sketch(general((2, 3), 5, axis=(-2, -1))(), R)
    with pytest.raises(ValueError, match=r"`x` must have the kernel's size 2 along"):
        model(jnp.ones((4, 3, 2)))
    model = logra.sketch(CASES["einsum of experts"].make(), R)
    with pytest.raises(ValueError, match=r"`x` must have the axes 'ect' .* 2 axes"):
        model(jnp.ones((3, 6)))


def test_an_output_sharding_is_refused():
    model = logra.sketch(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), R)
    with pytest.raises(ValueError, match="`out_sharding` must be None"):
        model(jnp.ones((4, 5)), out_sharding=jax.P(None, "x"))


def test_a_probe_of_the_stack_beside_one_layer_s_kernel_is_refused():
    model = logra.sketch(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), R)
    model.probe.set_value(jnp.zeros((4, 3, R)))
    with pytest.raises(ValueError, match="`model` must slice the probe and address"):
        model(jnp.ones((4, 5)))

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import logra_jax as logra
from logra_jax.algorithm.sketch import perturbed_matmul, sketched_matmul
from logra_jax.models.attention import Span
from logra_jax.models.decoder import REMAT, Decoder
from logra_jax.models.layers import DecoderConfig

N, K, D, R = 7, 13, 11, 3  # tokens, in, out, rank: all distinct, and unlike LAYERS
LAYERS = 4
NO_WEIGHT = r"`w` of a sketched projection must not be differentiated"


def assert_close(actual, expected, rtol=1e-5):
    """Relative error in norm, which no single tiny entry decides."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= rtol * np.linalg.norm(expected)


def project(gradient, key, rank):
    """The oracle: S = G Aᵀ from the dense gradient of a kernel (k, d)."""
    return gradient.T @ logra.basis_matrix(key, rank, gradient.shape[0]).T


def loss(y):
    return jnp.sum(jnp.sin(3 * y))


@pytest.fixture
def layer(getkey):
    """x, w, a zero probe and a key."""
    x = jax.random.normal(getkey(), (N, K))
    w = jax.random.normal(getkey(), (K, D)) / K**0.5
    return x, w, jnp.zeros((D, R)), getkey()


# --- one projection


@settings(max_examples=6)
@given(
    batch=st.lists(st.integers(1, 4), max_size=2),
    k=st.integers(1, 40),
    d=st.integers(1, 9),
    data=st.data(),
)
def test_sketch_is_the_dense_gradient_times_the_basis(batch, k, d, data):
    rank = data.draw(st.integers(1, min(k, d)))
    keys = jax.random.split(jax.random.key(data.draw(st.integers(0, 2**16))), 3)
    x = jax.random.normal(keys[0], (*batch, k))
    w = jax.random.normal(keys[1], (k, d))

    @jax.jit
    def both(x, w, p):
        sketch, dx = jax.grad(
            lambda p, x: loss(sketched_matmul(x, w, p, keys[2])), argnums=(0, 1)
        )(p, x)
        gradient, dense_dx = jax.grad(lambda w, x: loss(x @ w), argnums=(0, 1))(w, x)
        return (sketch, dx), (project(gradient, keys[2], rank), dense_dx)

    for actual, expected in zip(*both(x, w, jnp.zeros((d, rank))), strict=True):
        assert_close(actual, expected)


def as_is(f):
    return f


def microbatched(f):
    """Gradient of a sum, accumulated over single tokens by a scan."""

    def accumulate(p, x, w, key):
        def body(total, row):
            return total + f(p, row[None], w, key), None

        return lax.scan(body, jnp.zeros_like(p), x)[0]

    return accumulate


def per_example(f):
    def total(p, x, w, key):
        rows = jax.vmap(lambda row: f(p, row[None], w, key))(x)
        assert rows.shape == (N, D, R)
        return rows.sum(0)

    return total


GRADIENTS = {
    "plain": (as_is, as_is),
    "jit": (jax.jit, as_is),
    "checkpoint": (jax.jit, jax.checkpoint),
    "microbatch": (microbatched, as_is),
    "vmap": (jax.jit, as_is),
}


@pytest.mark.parametrize("how", GRADIENTS)
def test_sketch_survives(how, layer):
    x, w, p, key = layer
    outer, inner = GRADIENTS[how]

    def apply(p, x, w, key):
        return loss(inner(lambda x, w, p: sketched_matmul(x, w, p, key))(x, w, p))

    gradient = outer(jax.grad(apply))
    if how == "vmap":
        gradient = per_example(jax.grad(apply))
    expected = project(jax.grad(lambda w: loss(x @ w))(w), key, R)
    assert_close(gradient(p, x, w, key), expected)


def test_sketches_of_a_stack_under_vmap_are_each_layer_s_own(layer, getkey):
    x, _, _, _ = layer
    w = jax.random.normal(getkey(), (LAYERS, K, D))
    keys = jax.random.split(getkey(), LAYERS)

    def total(p):
        return loss(jax.vmap(sketched_matmul, (None, 0, 0, 0))(x, w, p, keys))

    sketches = jax.grad(total)(jnp.zeros((LAYERS, D, R)))
    for s, w_i, key in zip(sketches, w, keys, strict=True):
        assert_close(s, project(jax.grad(lambda w: loss(x @ w))(w_i), key, R))


def test_forward_is_the_plain_product_bit_for_bit_whatever_the_probe(layer):
    x, w, p, key = layer
    np.testing.assert_array_equal(sketched_matmul(x, w, p, key), x @ w)
    np.testing.assert_array_equal(sketched_matmul(x, w, p + 1, key), x @ w)


def test_a_raw_key_means_the_typed_one(layer):
    x, w, p, key = layer
    sketches = [
        jax.grad(lambda p, k=k: loss(sketched_matmul(x, w, p, k)))(p)
        for k in (key, jax.random.key_data(key))
    ]
    np.testing.assert_array_equal(*sketches)


def test_bfloat16_activations_give_a_float32_sketch_near_the_exact_one(layer):
    x, w, p, key = layer
    x16, w16 = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)

    def grads(x, w):
        return jax.grad(
            lambda p, x: loss(sketched_matmul(x, w, p, key)).astype(jnp.float32),
            argnums=(0, 1),
        )(p, x)

    sketch, dx = grads(x16, w16)
    assert sketch.dtype == jnp.float32
    assert dx.dtype == jnp.bfloat16
    exact, _ = grads(x16.astype(jnp.float32), w16.astype(jnp.float32))
    assert_close(sketch, exact, rtol=0.02)


def test_a_float32_input_and_a_bfloat16_kernel_compute_in_float32(layer):
    x, w, p, key = layer
    w16 = w.astype(jnp.bfloat16)
    sketch = jax.grad(lambda p: loss(sketched_matmul(x, w16, p, key)))(p)
    dense = jax.grad(lambda w: loss(x @ w))(w16.astype(jnp.float32))
    assert_close(sketch, project(dense, key, R))


def test_sketch_accumulates_in_float32_over_many_bfloat16_tokens():
    tokens = 2**12  # bfloat16 would stop counting at 256
    x, w = jnp.ones((tokens, 2), jnp.bfloat16), jnp.ones((2, 3), jnp.bfloat16)
    key = jax.random.key(0)
    s = jax.grad(lambda p: jnp.sum(sketched_matmul(x, w, p, key).astype(jnp.float32)))(
        jnp.zeros((3, 1))
    )
    assert_close(s, np.full((3, 1), tokens * logra.basis_matrix(key, 1, 2).sum()))


def test_an_unused_output_gives_a_zero_sketch(layer):
    x, w, p, key = layer
    s = jax.grad(lambda p: (0 * sketched_matmul(x, w, p, key)).sum() + p.sum() * 0)(p)
    np.testing.assert_array_equal(s, jnp.zeros_like(p))


# --- memory: what backward keeps, and what it never forms


def residuals(f, *primals):
    return sorted(a.shape for a in jax.tree.leaves(jax.vjp(f, *primals)[1]))


def test_backward_keeps_the_projected_input_and_not_the_input(layer):
    x, w, p, key = layer
    kept = residuals(lambda p: sketched_matmul(jnp.tanh(x), w, p, key), p)
    assert kept == [(N, R), (K, D)]
    assert (N, K) in residuals(lambda w: jnp.tanh(x) @ w, w)


def made(jaxpr):
    """(primitive, shape) of every value computed, at any depth."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        for out in eqn.outvars:
            yield eqn.primitive.name, getattr(out.aval, "shape", ())
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                yield from made(value)


def dense_gradients(f, arguments, shapes):
    """Values computed by ``f`` that end in a kernel's shape, or its transpose's."""
    forbidden = {s for k, d in shapes for s in ((k, d), (d, k))}
    jaxpr = jax.make_jaxpr(f)(*arguments)
    return [m for m in made(jaxpr) if m[1][-2:] in forbidden]


def test_no_kernel_shaped_value_is_ever_computed(layer):
    x, w, p, key = layer

    def sketched(p, x):
        return loss(jax.checkpoint(sketched_matmul)(jnp.tanh(x), w, p, key))

    def dense(w, x):
        return loss(jax.checkpoint(jnp.matmul)(jnp.tanh(x), w))

    gradient = jax.jit(jax.grad(sketched, argnums=(0, 1)))
    assert dense_gradients(gradient, (p, x), [(K, D)]) == []
    # and the walk does find what it looks for
    found = dense_gradients(jax.jit(jax.grad(dense)), (w, x), [(K, D)])
    assert {"dot_general"} <= {name for name, _ in found}


# --- asking for the gradient of a kernel


TRANSFORMS = {
    "plain": as_is,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda w: jax.vmap(f)(w[None]).sum(),
    "scan": lambda f: (
        lambda w: lax.scan(lambda c, w: (c + f(w), None), 0.0, w[None])[0]
    ),
    "carried": lambda f: (
        lambda w: lax.scan(lambda w, _: (w, f(w)), w, None, length=2)[1].sum()
    ),
    "cond": lambda f: lambda w: lax.cond(w[0, 0] > 0, f, lambda w: 0.0, w),
    "remat in scan": lambda f: (
        lambda w: lax.scan(jax.checkpoint(lambda c, w: (c + f(w), None)), 0.0, w[None])[
            0
        ]
    ),
}


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("jit", [False, True])
def test_differentiating_a_kernel_raises_under(how, jit, layer):
    x, w, p, key = layer
    f = TRANSFORMS[how](lambda w: loss(sketched_matmul(x, w, p, key)))
    gradient = jax.grad(f)
    with pytest.raises(ValueError, match=NO_WEIGHT):
        (jax.jit(gradient) if jit else gradient)(w)


@pytest.mark.parametrize("how", TRANSFORMS)
def test_a_kernel_that_only_passes_through_a_transform_does_not_raise(how, layer):
    x, w, p, key = layer

    def total(p):
        return TRANSFORMS[how](lambda w: loss(sketched_matmul(x, w, p, key)))(w)

    sketch = jax.grad(total)(p)
    assert jnp.all(jnp.isfinite(sketch))


# --- the plain twin


def test_perturbed_is_the_forward_of_the_merged_kernel(layer, getkey):
    x, w, p, key = layer
    p = 0.1 * jax.random.normal(getkey(), p.shape)
    merged = w + (p @ logra.basis_matrix(key, R, K)).T
    assert_close(perturbed_matmul(x, w, p, key), x @ merged, rtol=1e-6)
    zero = jnp.zeros_like(p)
    np.testing.assert_array_equal(perturbed_matmul(x, w, zero, key), x @ w)


def test_jvp_of_the_twin_is_the_finite_difference_and_the_transposed_sketch(
    layer, getkey
):
    x, w, p, key = layer
    u = jax.random.normal(getkey(), p.shape)

    def f(p):
        return loss(perturbed_matmul(x, w, p, key))

    _, rate = jax.jvp(f, (p,), (u,))
    step = 1e-2
    difference = (f(step * u) - f(-step * u)) / (2 * step)
    np.testing.assert_allclose(rate, difference, rtol=0.01)
    sketch = jax.grad(lambda p: loss(sketched_matmul(x, w, p, key)))(p)
    np.testing.assert_allclose(rate, jnp.vdot(sketch, u), rtol=1e-4)
    assert_close(jax.grad(f)(p), sketch)


def test_jvp_of_the_sketched_form_raises(layer):
    x, w, p, key = layer
    with pytest.raises(TypeError, match=r"jvp.*custom_vjp"):
        jax.jvp(lambda p: sketched_matmul(x, w, p, key), (p,), (p,))


# --- the estimate


def test_the_lifted_sketch_has_the_cosine_of_the_law_and_the_sketch_the_norm():
    k, d, r, draws = 128, 24, 8, 64
    gradient = jax.random.normal(jax.random.key(0), (d, k))

    def draw(key):
        a = logra.basis_matrix(key, r, k)
        s = gradient @ a.T
        lifted = s @ a
        cosine = jnp.vdot(gradient, lifted) / jnp.linalg.norm(lifted)
        return cosine / jnp.linalg.norm(gradient), jnp.sum(s**2), lifted

    keys = jax.random.split(jax.random.key(1), draws)
    cosines, squares, lifted = jax.jit(jax.vmap(draw))(keys)
    np.testing.assert_allclose(cosines.mean(), (1 + (k - 1) / r) ** -0.5, rtol=0.02)
    np.testing.assert_allclose(squares.mean(), jnp.sum(gradient**2), rtol=0.02)
    # unbiased: the error of the mean is sqrt((k - 1) / (r draws)) of the norm
    error = jnp.linalg.norm(lifted.mean(0) - gradient) / jnp.linalg.norm(gradient)
    np.testing.assert_allclose(error, ((k - 1) / (r * draws)) ** 0.5, rtol=0.1)


# --- models


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(K, D, rngs=rngs)
        self.down = nnx.Linear(D, K, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Stack(nnx.Module):
    """Blocks stacked along axis 0 and scanned."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        graph, state = nnx.split(self.layers)
        return lax.scan(lambda h, s: (nnx.merge(graph, s)(h), None), x, state)[0]


CONFIG = DecoderConfig(
    vocab_size=19,
    hidden_size=16,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_positions=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
)
BATCH, TIME = 3, 5


@functools.cache
def stack_and_loss():
    x = jax.random.normal(jax.random.key(5), (N, K))
    return nnx.jit(lambda: Stack(nnx.Rngs(0)))(), lambda model: loss(model(x))


@functools.cache
def decoder():
    @nnx.jit  # one compile in place of hundreds of small ones
    def make():
        return Decoder(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))

    return make()


@functools.cache
def decoder_and_loss(remat="none"):
    model = nnx.clone(decoder())
    model.remat = remat
    tokens = jax.random.randint(jax.random.key(6), (BATCH, TIME), 0, 19)

    def nll(model):
        hidden, _ = model(tokens, jnp.arange(TIME)[None], Span.causal(TIME))
        logprobs = jax.nn.log_softmax(model.logits(hidden[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1))

    return model, nll


# Compile time is what these tests cost, so XLA is told not to try hard.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def gradients(model, loss, wrt):
    """A gradient function with respect to one type of variable, and its arguments."""
    graph, chosen, rest = nnx.split(model, wrt, ...)
    f = jax.grad(lambda chosen, rest: loss(nnx.merge(graph, chosen, rest)))
    return f, (chosen, rest)


@functools.cache
def dense_gradients_of(model, loss):
    f, arguments = gradients(model, loss, nnx.Param)
    return dict(nnx.to_flat_state(jit(f)(*arguments)))


def check_every_projection(model, loss, rank, match, dense=None):
    """Each sketch against the dense gradient; returns the layers' paths."""
    dense = dense or dense_gradients_of(model, loss)
    sketched = logra.sketch(model, rank, match, logra.Basis(seed=3))
    f, arguments = gradients(sketched, loss, logra.Probe)
    sketches = dict(nnx.to_flat_state(jit(f)(*arguments)))
    weights = dict(nnx.to_flat_state(arguments[1]))
    layers = [path[:-1] for path in sketches]

    @jit
    def oracle(kernels, addresses):
        def one(gradient, address):
            return project(gradient, logra.Basis().key(address), rank)

        return [
            (one if g.ndim == 2 else jax.vmap(one))(g, a)
            for g, a in zip(kernels, addresses, strict=True)
        ]

    expected = oracle(
        [dense[*layer, "kernel"][...] for layer in layers],
        [weights[*layer, "address"][...] for layer in layers],
    )
    for sketch, project_of_dense in zip(sketches.values(), expected, strict=True):
        s = sketch[...].reshape(-1, *sketch.shape[-2:])
        for actual, wanted in zip(s, project_of_dense.reshape(s.shape), strict=True):
            assert np.linalg.norm(actual) > 0
            assert_close(actual, wanted)
    return {".".join(map(str, layer)) for layer in layers}


def test_every_layer_of_a_scanned_stack_has_its_sketch():
    names = check_every_projection(*stack_and_loss(), rank=R, match=".*")
    assert names == {"layers.up", "layers.down"}


@pytest.mark.parametrize("remat", REMAT)
def test_every_projection_of_a_decoder_has_its_sketch(remat):
    dense = dense_gradients_of(*decoder_and_loss())  # without remat
    model, loss = decoder_and_loss(remat)
    names = check_every_projection(model, loss, R, r"_proj|lm_head", dense)
    assert len(names) == 8


def kernel_shapes(model):
    state = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    return {v.shape[-2:] for path, v in state.items() if path[-1] == "kernel"}


@pytest.mark.parametrize(
    "make", [stack_and_loss, *(lambda r=r: decoder_and_loss(r) for r in REMAT)]
)
def test_no_gradient_of_a_model_s_kernel_is_ever_computed(make):
    model, loss = make()
    shapes = kernel_shapes(model)
    f, arguments = gradients(logra.sketch(model, R), loss, logra.Probe)
    assert dense_gradients(f, arguments, shapes) == []
    found = dense_gradients(*gradients(model, loss, nnx.Param), shapes)
    assert {s for _, s in found if s in shapes} == shapes


@pytest.mark.parametrize("make", [stack_and_loss, decoder_and_loss])
def test_differentiating_a_sketched_model_s_parameters_raises(make):
    model, loss = make()
    model = logra.sketch(model, R)
    with pytest.raises(ValueError, match=NO_WEIGHT):
        nnx.jit(nnx.value_and_grad(loss))(model)
    f, arguments = gradients(model, loss, nnx.Param)
    with pytest.raises(ValueError, match=NO_WEIGHT):
        jit(f)(*arguments)
    graph, state = nnx.split(model)
    with pytest.raises(ValueError, match=NO_WEIGHT):
        jit(jax.value_and_grad(lambda s: loss(nnx.merge(graph, s)), allow_int=True))(
            state
        )


def test_what_is_not_sketched_keeps_its_gradient():
    model, loss = decoder_and_loss()
    norms = nnx.PathContains("norm")
    f, arguments = gradients(model, loss, norms)
    dense = jit(f)(*arguments)
    f, arguments = gradients(logra.sketch(model, R), loss, norms)
    jax.tree.map(assert_close, jit(f)(*arguments), dense)


def test_sketching_changes_neither_forward_nor_the_model_and_copies_no_kernel():
    model, loss = decoder_and_loss()
    sketched = logra.sketch(model, R)
    assert not any(isinstance(m, logra.SketchedLinear) for m in modules(model))
    kernels = [m.layers.mlp.up_proj.kernel[...] for m in (model, sketched)]
    assert len({k.unsafe_buffer_pointer() for k in kernels}) == 1
    before, after = (nnx.jit(loss)(m) for m in (model, sketched))
    np.testing.assert_allclose(after, before, rtol=1e-6)


def modules(model):
    return [m for _, m in nnx.iter_modules(model)]


def test_the_twin_of_a_model_moves_like_merged_weights(getkey):
    model, loss = stack_and_loss()
    model = logra.sketch(model, R)
    graph, probes, weights = nnx.split(model, logra.Probe, ...)
    twin, twin_probes, _ = nnx.split(logra.perturbed(model), logra.Probe, ...)
    assert jax.tree.structure(twin_probes) == jax.tree.structure(probes)
    u = jax.tree.map(lambda p: 0.05 * jax.random.normal(getkey(), p.shape), probes)
    merged = logra.merge(weights, u, logra.Basis())
    np.testing.assert_allclose(
        loss(nnx.merge(twin, u, weights)),
        loss(nnx.merge(graph, probes, merged)),
        rtol=1e-4,
    )
    sketches = jax.grad(lambda p: loss(nnx.merge(graph, p, weights)))(probes)
    _, rate = jax.jvp(lambda p: loss(nnx.merge(twin, p, weights)), (probes,), (u,))
    terms = jax.tree.map(jnp.vdot, sketches, u)
    np.testing.assert_allclose(rate, sum(jax.tree.leaves(terms)), rtol=1e-4)


def test_addresses_are_the_crc_of_each_matrix_s_hugging_face_name():
    model = logra.sketch(decoder_and_loss()[0], R, basis=logra.Basis(seed=8))
    words = model.layers.self_attn.q_proj.address[...]
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    np.testing.assert_array_equal(words, [logra.Basis(8).address(n) for n in names])
    np.testing.assert_array_equal(
        model.lm_head.address[...], logra.Basis(8).address("lm_head.weight")
    )


def test_ranks_may_differ_by_layer_and_the_first_expression_wins():
    model = logra.sketch(stack_and_loss()[0], rank={"up": 2, "p|down": 5})
    assert model.layers.up.probe.shape == (LAYERS, D, 2)
    assert model.layers.down.probe.shape == (LAYERS, K, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, r"`rank` must be in .* \[1, 11\] .* got 0"),
        ({"rank": D + 1}, r"`rank` must be in .* got 12"),
        ({"rank": {"up": 2}}, r"`rank` must cover .*'layers.down'"),
        ({"rank": 2, "match": "q_proj"}, r"`match` must hit .*layers.down, layers.up"),
        (
            {"rank": 2, "match": lambda path, layer: path == "layers"},
            r"`match` must hit .* got a predicate, .*: layers.down, layers.up",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        logra.sketch(stack_and_loss()[0], **arguments)


def test_a_predicate_chooses_by_path_and_layer():
    model = logra.sketch(
        stack_and_loss()[0], 2, lambda path, layer: "." in path and layer.use_bias
    )
    assert isinstance(model.layers.up, logra.SketchedLinear)
    assert isinstance(model.layers.down, nnx.Linear)


def test_layers_that_are_no_matrices_are_left_as_they_are():
    rngs = nnx.Rngs(0)
    model = nnx.Dict(
        conv=nnx.Conv(K, D, (3,), rngs=rngs),
        embed=nnx.Embed(K, D, rngs=rngs),
        out=nnx.Linear(K, D, rngs=rngs),
    )
    sketched = logra.sketch(model, R)
    kinds = [type(sketched[name]) for name in ("conv", "embed", "out")]
    assert kinds == [nnx.Conv, nnx.Embed, logra.SketchedLinear]
    with pytest.raises(ValueError, match="hits none of: out"):
        logra.sketch(model, R, "conv|embed")


def test_a_layer_used_in_two_places_is_sketched_in_both():
    class Twice(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(K, K, rngs=nnx.Rngs(0))
            self.b = self.a

        def __call__(self, x):
            return self.b(jnp.tanh(self.a(x)))

    x = jax.random.normal(jax.random.key(1), (N, K))
    names = check_every_projection(Twice(), lambda m: loss(m(x)), R, ".*")
    assert names == {"a"}


class Containers(nnx.Module):
    """Layers wherever Flax permits them, one in two places."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.modules = nnx.List([nnx.Linear(K, D, rngs=rngs)])
        self.named = nnx.Dict({"down": nnx.Linear(D, K, rngs=rngs)})
        self.pair = nnx.data((nnx.Linear(K, D, rngs=rngs), 1.0))
        self.plain = nnx.data([{"down": nnx.Linear(D, K, rngs=rngs)}, self.pair[0]])

    def __call__(self, x):
        x = self.named["down"](jnp.tanh(self.modules[0](x)))
        x = self.plain[0]["down"](jnp.tanh(self.pair[0](x)))
        return self.plain[1](x) * self.pair[1]


def test_layers_in_any_container_are_sketched():
    x = jax.random.normal(jax.random.key(1), (N, K))
    model = Containers()
    names = check_every_projection(model, lambda m: loss(m(x)), R, ".*")
    assert names == {"modules.0", "named.down", "pair.0", "plain.0.down"}
    sketched = logra.sketch(model, R)
    assert sketched.plain[1] is sketched.pair[0]
    assert isinstance(model.pair[0], nnx.Linear)

"""A model of Flax that knows nothing of us, in the shape of GPT-2, sketched whole."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import logra_jax as logra

LAYERS, WIDTH, HEADS, VOCAB, HALF = 2, 32, 4, 8, 4
LENGTH = 2 * HALF - 1  # a word and its copy; the last letter is only predicted
PROJECTIONS = {
    "blocks.attn.query": (WIDTH, WIDTH),
    "blocks.attn.key": (WIDTH, WIDTH),
    "blocks.attn.value": (WIDTH, WIDTH),
    "blocks.attn.out": (WIDTH, WIDTH),
    "blocks.up": (WIDTH, 4 * WIDTH),
    "blocks.down": (4 * WIDTH, WIDTH),
}
BASIS = logra.Basis(seed=2)

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.before = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.between = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attn(self.before(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class GPT(nnx.Module):
    """Blocks stacked by ``nnx.vmap`` and run by ``nnx.scan``; the head is tied."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = make(rngs)
        self.after = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        return self.tokens.attend(self.after(run(x, self.blocks)))


def words(key, count):
    """Random words, each followed by itself."""
    word = jax.random.randint(key, (count, HALF), 0, VOCAB)
    return jnp.concatenate([word, word], axis=1)


def copy_loss(logits, tokens):
    """Nats per letter of the copies."""
    logprobs = jax.nn.log_softmax(logits[:, HALF - 1 :])
    return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, HALF:, None], -1))


@pytest.fixture(scope="module")
def model():
    return nnx.jit(lambda: GPT(nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def tokens():
    return words(jax.random.key(1), 3)


def test_every_projection_in_a_scan_of_flax_has_its_sketch(model, tokens):
    sketched = logra.sketch(model, 4, basis=BASIS)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    own_graph, probes, weights = nnx.split(sketched, logra.Probe, ...)

    @jit
    def both(params, probes, weights):
        def dense(params):
            model = nnx.merge(graph, params, rest, copy=True)
            return copy_loss(model(tokens[:, :-1]), tokens)

        def ours(probes):
            model = nnx.merge(own_graph, probes, weights, copy=True)
            return copy_loss(model(tokens[:, :-1]), tokens)

        expected, actual = {}, {}
        loss, gradients = jax.value_and_grad(dense)(params)
        own_loss, sketches = jax.value_and_grad(ours)(probes)
        gradients = dict(nnx.to_flat_state(gradients))
        words = dict(nnx.to_flat_state(weights))
        for (*layer, _), sketch in nnx.to_flat_state(sketches):
            name = ".".join(layer)
            k, d = PROJECTIONS[name]
            G = gradients[*layer, "kernel"][...].reshape(LAYERS, k, d)
            A = jax.vmap(lambda a, k=k: BASIS.matrix(a, 4, k))(
                words[*layer, "address"][...]
            )
            expected[name] = jnp.einsum("nkd,nrk->ndr", G, A)
            actual[name] = sketch[...]
        return (own_loss, actual), (loss, expected)

    (own_loss, actual), (loss, expected) = both(params, probes, weights)
    np.testing.assert_allclose(own_loss, loss, rtol=1e-6)
    assert actual.keys() == PROJECTIONS.keys()
    for name, sketch in actual.items():
        error = np.linalg.norm(sketch - expected[name])
        assert 0 < error <= 1e-4 * np.linalg.norm(expected[name])


def test_the_gradient_functions_of_flax_give_the_same_sketches(model, tokens):
    sketched = logra.sketch(model, 4, basis=BASIS)
    graph, probes, weights = nnx.split(sketched, logra.Probe, ...)

    def loss(model):
        return copy_loss(model(tokens[:, :-1]), tokens)

    of_probes = nnx.DiffState(0, logra.Probe)
    theirs = nnx.jit(nnx.grad(loss, argnums=of_probes))(sketched)
    ours = jit(jax.grad(lambda p, w: loss(nnx.merge(graph, p, w, copy=True))))(
        probes, weights
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
        theirs,
        ours,
    )


def equations(jaxpr):
    """Every equation, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from equations(inner)


def of_kernels(model, wrt, tokens):
    """Products in the shape of a kernel, and stacks of kernels that a scan returns."""
    graph, chosen, rest = nnx.split(model, wrt, ...)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    stacks = {v.shape for path, v in flat if path[-1] == "kernel"}
    shapes = {s for k, d in PROJECTIONS.values() for s in ((k, d), (d, k))}
    # and with the axes of heads, in any order
    shapes |= {p for s in stacks for p in itertools.permutations(s[1:])}

    def loss(chosen, rest):
        model = nnx.merge(graph, chosen, rest, copy=True)
        return copy_loss(model(tokens[:, :-1]), tokens)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(chosen, rest).jaxpr
    made = [
        (e.primitive.name, v.aval.shape) for e in equations(jaxpr) for v in e.outvars
    ]
    products = {s for name, s in made if name == "dot_general" and s in shapes}
    kept = {s for name, s in made if name == "scan" and s in stacks}
    return products, kept


def test_neither_a_kernel_s_gradient_is_formed_nor_a_kernel_kept_by_the_scan(
    model, tokens
):
    products, kept = of_kernels(logra.sketch(model, 4), logra.Probe, tokens)
    assert not products
    assert not kept
    products, kept = of_kernels(model, nnx.Param, tokens)
    assert products
    assert kept


def test_a_scan_that_does_not_slice_the_probes_is_told_so(model, tokens):
    sketched = logra.sketch(model, 4)
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})

    @nnx.scan(in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
    def run(x, block):
        return block(x)

    with pytest.raises(ValueError, match="`model` must slice the probe and address"):
        run(jnp.ones((1, LENGTH, WIDTH)), sketched.blocks)


def test_a_model_like_gpt2_learns_to_copy_with_an_optax_chain(model):
    sketched = logra.sketch(model, 16, basis=BASIS)
    graph, probes, weights = nnx.split(sketched, logra.Probe, ...)
    plain, _, _ = nnx.split(logra.perturbed(sketched), logra.Probe, ...)
    budget = 0.02
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        logra.scale_by_row_adam(b2=0.95),
        optax.scale_by_learning_rate(0.02),
        logra.scale_by_predicted_kl(budget),
    )

    def logits(graph, probes, weights, tokens):
        return nnx.merge(graph, probes, weights, copy=True)(tokens[:, :-1])

    def step(carry, key):
        weights, state = carry
        tokens = words(key, 32)
        loss, sketches = jax.value_and_grad(
            lambda p: copy_loss(logits(graph, p, weights, tokens), tokens)
        )(probes)

        def q(updates):
            def flat(p):
                return logits(plain, p, weights, tokens).reshape(-1, VOCAB)

            mask = jnp.ones(32 * LENGTH)
            return logra.predict_kl(flat, lambda z: z, probes, updates, mask)[0]

        updates, state = tx.update(sketches, state, predicted_kl=q)
        weights = logra.merge(weights, updates, BASIS)
        alpha = state[-1].alpha
        return (weights, state), (loss, state[-1].q * alpha**2)

    keys = jax.random.split(jax.random.key(3), 200)
    carry = (weights, tx.init(probes))
    _, (losses, kl) = jax.jit(lambda c, k: lax.scan(step, c, k))(carry, keys)
    assert losses[0] > 1.5  # about log(8) = 2.08 nats, of letters unknown
    assert losses[-10:].mean() < 0.1 * losses[0]
    assert np.all(kl <= budget * (1 + 1e-5))

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import logra_jax as logra
from logra_jax.algorithm.lora import LoRAFactor, lora
from logra_jax.models.logprobs import token_logprobs

TOKENS, FEATURES, VOCAB = 21, 6, 37


@pytest.fixture
def problem(getkey):
    """Hidden states, targets, the head's matrix."""
    hidden = jax.random.normal(getkey(), (TOKENS, FEATURES))
    targets = jax.random.randint(getkey(), (TOKENS,), 0, VOCAB)
    return hidden, targets, jax.random.normal(getkey(), (FEATURES, VOCAB))


def direct(hidden, targets, w, temperature):
    logprobs = jax.nn.log_softmax(hidden @ w / temperature)
    return jnp.take_along_axis(logprobs, targets[:, None], 1)[:, 0]


def chunked(hidden, targets, w, temperature, chunk):
    return token_logprobs(
        hidden, targets, lambda h: h @ w, temperature=temperature, chunk=chunk
    )


def shapes_in(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of every value in a jaxpr and in those nested in it."""
    found = set()
    for eqn in jaxpr.eqns:
        found |= {v.aval.shape for v in eqn.outvars}
        for sub in jaxprs_in_params(eqn.params):
            found |= shapes_in(sub)
    return found


# One piece, a whole number of pieces, a padded last one, single tokens.
@pytest.mark.parametrize("chunk", [256, 21, 7, 8, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_direct_log_softmax(problem, chunk, temperature):
    hidden, targets, w = problem
    weights = jnp.linspace(-1.0, 1.0, TOKENS)

    def total(f, *args):
        return lambda hidden, w: jnp.vdot(weights, f(hidden, targets, w, *args))

    np.testing.assert_allclose(
        chunked(hidden, targets, w, temperature, chunk),
        direct(hidden, targets, w, temperature),
        rtol=1e-5,
        atol=1e-5,
    )
    got = jax.grad(total(chunked, temperature, chunk), (0, 1))(hidden, w)
    expected = jax.grad(total(direct, temperature), (0, 1))(hidden, w)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_logits_of_all_tokens_never_exist_forward_or_backward(problem):
    hidden, targets, w = problem

    def loss(f, *args):
        return jax.grad(lambda h, w: jnp.sum(f(h, targets, w, *args)), (0, 1))

    def sizes(f):
        shapes = shapes_in(jax.make_jaxpr(f)(hidden, w).jaxpr)
        return {int(np.prod(shape)) for shape in shapes if VOCAB in shape}

    assert TOKENS * VOCAB in sizes(loss(direct, 1.0))  # it would be seen
    # 7 tokens' logits, and the gradient of the head.
    assert max(sizes(loss(chunked, 1.0, 7))) == max(7 * VOCAB, FEATURES * VOCAB)


def head_products(jaxpr) -> int:
    """Products with the head's matrix, or of its shape, in a jaxpr."""
    count = sum(
        eqn.primitive.name == "dot_general"
        and any(VOCAB in v.aval.shape for v in (*eqn.invars, *eqn.outvars))
        for eqn in jaxpr.eqns
    )
    nested = (sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params))
    return count + sum(map(head_products, nested))


def test_a_frozen_head_is_multiplied_twice_and_not_by_the_backward_pass(problem):
    """Also where it comes from outside a jit and a scan, as in a microbatched step."""
    hidden, targets, w = problem

    @jax.jit
    def total(hidden, w):
        def add(total, hidden):
            return total + jnp.sum(chunked(hidden, targets, w, 0.7, 8)), None

        return jax.lax.scan(add, 0.0, jnp.stack([hidden, -hidden]))[0]

    def count(f):
        return head_products(jax.make_jaxpr(f)(hidden, w).jaxpr)

    assert count(total) == 1
    assert count(jax.grad(total)) == 2
    _, pull = jax.vjp(lambda h: total(h, w), hidden)
    assert head_products(jax.make_jaxpr(pull)(1.0).jaxpr) == 0
    # A trained one: computed again, then the two gradients.
    assert count(jax.grad(total, (0, 1))) == 4


def test_tokens_that_are_not_needed_have_no_slope(problem):
    hidden, targets, w = problem
    needed = jnp.arange(TOKENS) < 5
    frozen = jax.grad(
        lambda h: token_logprobs(
            h, targets, lambda h: h @ w, chunk=7, needed=needed
        ).sum()
    )(hidden)
    everywhere = jax.grad(lambda h: direct(h, targets, w, 1.0).sum())(hidden)
    np.testing.assert_allclose(frozen[:7], everywhere[:7], rtol=1e-4, atol=1e-5)
    assert not frozen[7:].any()


def test_bfloat16_hidden_states_give_float32_logprobs(problem):
    hidden, targets, w = problem
    half = hidden.astype(jnp.bfloat16)
    got = token_logprobs(half, targets, lambda h: h @ w.astype(h.dtype))
    assert got.dtype == jnp.float32
    expected = direct(half.astype(jnp.float32), targets, w, 1.0)
    np.testing.assert_allclose(got, expected, rtol=0.05, atol=0.05)


def test_large_logits_stay_finite(problem):
    hidden, targets, w = problem
    got = chunked(1e4 * hidden, targets, w, 1.0, 8)
    assert np.isfinite(got).all()
    assert (np.asarray(got) <= 0).all()


@pytest.mark.parametrize("kind", [logra.Probe, LoRAFactor])
def test_a_trained_head_is_differentiated_beside_its_frozen_kernel(getkey, kind):
    """Inside ``jax.jit``, where the kernel is an argument and not a constant."""
    model = nnx.Linear(8, 12, rngs=nnx.Rngs(0))
    model = (logra.sketch if kind is logra.Probe else lora)(model, 2)
    graph, trained, rest = nnx.split(model, kind, ...)
    hidden = jax.random.normal(getkey(), (6, 8))
    targets = jnp.arange(6)

    def chunked(trained, rest):
        head = nnx.merge(graph, trained, rest, copy=True)
        return token_logprobs(hidden, targets, head, chunk=2).sum()

    def whole(trained, rest):
        logits = nnx.merge(graph, trained, rest, copy=True)(hidden)
        return jnp.trace(jax.nn.log_softmax(logits))

    got, expected = (jax.jit(jax.grad(f))(trained, rest) for f in (chunked, whole))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

"""Logits of a head, whole or cut over a mesh, and their derivatives."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from logra_jax.algorithm.target import tracing_for
from logra_jax.models import head as head_module
from logra_jax.models.head import logits_of
from logra_jax.models.sharding import make_mesh

TOKENS, FEATURES, VOCAB, PARTS = 6, 8, 24, 4


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """The head as a GPU computes it, in its own dtype."""
    with tracing_for("gpu"):
        yield


@pytest.fixture(params=[True, False], ids=["tied", "own"])
def problem(request: pytest.FixtureRequest, getkey):
    """Hidden states (tokens, h), (vocab, h) or (h, vocab), and whether it is tied."""
    shape = (VOCAB, FEATURES) if request.param else (FEATURES, VOCAB)
    hidden = jax.random.normal(getkey(), (TOKENS, FEATURES)).astype(jnp.bfloat16)
    head = jax.random.normal(getkey(), shape).astype(jnp.bfloat16)
    return hidden, head, request.param


def wide(hidden, head, *, is_tied: bool):
    """The same in float32."""
    head = head.astype(jnp.float32)
    return hidden.astype(jnp.float32) @ (head.T if is_tied else head)


def whole(hidden, head, *, is_tied: bool):
    return logits_of(head, is_tied=is_tied)(hidden)


def cut(hidden, head, *, is_tied: bool):
    """Each device with its part of the vocabulary, and with all tokens."""
    spec = P("fsdp", None) if is_tied else P(None, "fsdp")

    @partial(
        jax.shard_map,
        mesh=make_mesh(1, PARTS, 1),
        in_specs=(P(), spec),
        out_specs=P(),
        check_vma=False,
    )
    def logits(hidden, head):
        return logits_of(head, is_tied=is_tied, names=("fsdp",))(hidden)

    return jax.jit(logits)(hidden, head)


@pytest.mark.parametrize("form", [whole, cut])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_logits_are_float32_products_of_what_is_given(problem, form, platform):
    hidden, head, is_tied = problem
    with tracing_for(platform):
        got = form(hidden, head, is_tied=is_tied)
    assert got.dtype == jnp.float32
    expected = wide(hidden, head, is_tied=is_tied)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("form", [whole, cut])
def test_derivatives_are_those_of_the_wide_product_to_bfloat16(problem, form, on_gpu):
    hidden, head, is_tied = problem

    def surprise(form, hidden, head):
        return jax.nn.logsumexp(form(hidden, head, is_tied=is_tied), axis=-1).sum()

    arguments = (0, 1) if form is whole else (0,)  # a head that is cut is not trained
    got = jax.grad(partial(surprise, form), arguments)(hidden, head)
    expected = jax.grad(partial(surprise, wide), arguments)(hidden, head)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.bfloat16
        scale = float(jnp.abs(b.astype(jnp.float32)).max())
        np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), atol=0.01 * scale
        )

    moved, fixed = (hidden, head)[: len(arguments)], (hidden, head)[len(arguments) :]
    tangents = tuple(a[::-1] for a in moved)
    rates = [
        jax.jvp(lambda *a, f=f: surprise(f, *a, *fixed), moved, tangents)
        for f in (form, wide)
    ]
    np.testing.assert_allclose(*rates, rtol=0.02)


def factors_in(jaxpr):
    """Dtypes of the factors of every product in a jaxpr and in those nested in it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield {v.aval.dtype for v in eqn.invars}
        for sub in jaxprs_in_params(eqn.params):
            yield from factors_in(sub)


@pytest.mark.parametrize("form", [whole, cut])
def test_no_float32_copy_of_the_head_is_multiplied_for_the_gradient(
    problem, form, on_gpu
):
    """Factors of two dtypes are multiplied in the wider one."""
    hidden, head, is_tied = problem

    def factors(form):
        slope = jax.grad(lambda h: form(h, head, is_tied=is_tied).sum())
        return list(factors_in(jax.make_jaxpr(slope)(hidden).jaxpr))

    assert {jnp.dtype("float32")} in factors(wide)  # it would be seen
    assert len(factors(form)) == 2
    assert all(dtypes == {jnp.dtype("bfloat16")} for dtypes in factors(form))


def test_a_gradient_may_be_mapped_over(problem, on_gpu):
    hidden, head, is_tied = problem

    def total(hidden):
        return jnp.square(whole(hidden, head, is_tied=is_tied)).sum()

    one_by_one = jax.vmap(jax.grad(total))(hidden[:, None])[:, 0]
    np.testing.assert_array_equal(one_by_one, jax.grad(total)(hidden))


@pytest.mark.parametrize("is_tied", [True, False])
def test_gradients_of_many_blocks_are_rounded_once(monkeypatch, getkey, is_tied):
    """Not at each block, as a sum in the hidden states' bfloat16 is."""
    monkeypatch.setattr(head_module, "_HEAD_BLOCK", 8 * FEATURES)  # 128 blocks
    vocab = 1024
    head = jax.random.normal(
        getkey(), (vocab, FEATURES) if is_tied else (FEATURES, vocab)
    )
    hidden = jnp.zeros((TOKENS, FEATURES), jnp.bfloat16)
    weight = jax.random.normal(getkey(), (TOKENS, vocab))

    def slope(form):
        found = jax.grad(lambda h: (weight * form(h, head, is_tied=is_tied)).sum())
        return found(hidden).astype(jnp.float32)

    got, expected = slope(whole), weight @ (head if is_tied else head.T)
    error = jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)
    assert error < 0.004  # half a unit in bfloat16's last place is 0.2 to 0.4 %

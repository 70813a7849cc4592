"""From final hidden states to logits, from a head that may be cut over a mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from logra_jax.algorithm.parallel import from_bits, gather_bits, parts
from logra_jax.algorithm.slicing import rows_within, take_block
from logra_jax.algorithm.target import platform

# Entries of the head that are widened at once: 16 MiB of float32.
_HEAD_BLOCK = 2**22


def logits_of(
    head: Float[Array, "..."],
    *,
    is_tied: bool,
    names: tuple[str, ...] = (),
    after: Any = (),
) -> Callable[[Array], Array]:
    """Hidden states (..., h) -> float32 logits (..., vocab).

    A head that is cut is gathered here, once for all calls; it is the largest matrix of
    the model.

    Args:
        head: (vocab, h) if tied, else (h, vocab); inside ``jax.shard_map`` this
            device's part of the vocabulary.
        is_tied: which of the two.
        names: mesh axes that cut the vocabulary.
        after: a tree that the gather waits for, see :func:`gather_bits`.
    """
    dtype, is_cut = head.dtype, parts(names) > 1
    if is_cut:
        # Parts of a head that is not tied stay apart, (parts, h, vocab / parts): side
        # by side they would be a copy more.
        head = gather_bits(head, names, after, tiled=is_tied)

    def logits(hidden: Array) -> Array:
        is_widened = dtype != hidden.dtype
        if platform() == "cpu" and dtype == jnp.bfloat16:
            is_widened = True  # a CPU multiplies in float32, whatever it is given
        if is_widened:
            return _wide_logits(hidden, head, is_tied, dtype)
        kernel = from_bits(head, dtype)
        if not is_cut or is_tied:
            kind = "...h,vh->...v" if is_tied else "...h,hv->...v"
            return _narrow_logits(kind, hidden, kernel)
        # A product for each part: one with all would take a transposed copy of them.
        hidden = jnp.broadcast_to(hidden, (len(kernel), *hidden.shape))
        found = _narrow_logits("n...h,nhv->n...v", hidden, kernel)
        return jnp.moveaxis(found, 0, -2).reshape(*hidden.shape[1:-1], -1)

    return logits


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _narrow_logits(kind: str, hidden: Array, head: Array) -> Array:
    """float32 logits of a head in the hidden states' own dtype, by :func:`jnp.einsum`.

    Derivatives are products with narrow results: the transpose of a float32 product is
    one of float32 factors, which takes a float32 copy of the whole head, anew for each
    chunk of tokens.
    """
    return jnp.einsum(kind, hidden, head, preferred_element_type=jnp.float32)


@partial(_narrow_logits.defjvp, symbolic_zeros=True)
def _narrow_logits_jvp(kind, primals, tangents):
    (hidden, head), found = primals, _narrow_logits(kind, *primals)
    parts = ((tangents[0], head), (hidden, tangents[1]))
    changes = [
        jnp.einsum(kind, *part).astype(found.dtype)
        for part in parts
        if not any(isinstance(x, jax.custom_derivatives.SymbolicZero) for x in part)
    ]
    return found, sum(changes[1:], changes[0])


def _wide_logits(hidden: Array, head: Array, is_tied: bool, dtype: jnp.dtype) -> Array:
    """float32 logits from a narrower head, or its bits.

    A block of the head is widened at a time, in the backward pass once more: a float32
    copy of all of it would be as large as several layers. The gradient in the hidden
    states is summed over blocks in float32, whatever their dtype.

    Args:
        hidden: (..., h).
        head: (vocab, h) if tied, else (h, vocab), perhaps in parts (parts, h, vocab).
        is_tied: which of the two.
        dtype: of the head's numbers.
    """
    stack = head if head.ndim == 3 else head[None]
    width, features = stack.shape[1:] if is_tied else stack.shape[:0:-1]
    some = rows_within((width, features), _HEAD_BLOCK)
    number = width // some  # of blocks in a part

    def widen(index: Array) -> Array:
        """The block (h, some)."""
        part, first = index // number, index % number * some
        if is_tied:
            block = take_block(stack, (part, first, 0), (1, some, features))[0].T
        else:
            block = take_block(stack, (part, 0, first), (1, features, some))[0]
        return from_bits(block, dtype).astype(hidden.dtype)

    @jax.checkpoint
    def some_logits(index: Array, wide: Array) -> Array:
        narrow = wide.astype(hidden.dtype)
        return jnp.matmul(narrow, widen(index), preferred_element_type=jnp.float32)

    indices, wide = jnp.arange(stack.shape[0] * number), hidden.astype(jnp.float32)
    found = lax.map(lambda i: some_logits(i, wide), indices)
    return jnp.moveaxis(found, 0, -2).reshape(*hidden.shape[:-1], -1)

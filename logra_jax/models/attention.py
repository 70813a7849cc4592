"""Attention of tokens to tokens before them, without a time x time mask or value.

Who sees whom is two integers per token (:class:`Span`). Forms of one softmax: ``full``
holds the scores of all queries at once, ``chunked`` those of a few queries, in the
backward pass once more; both for every mode of differentiation. ``flash`` is cuDNN's
kernel on NVIDIA GPUs, which holds no scores: in 16 bits, forwards and in reverse.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# How scores are held: all at once, of a few queries at a time, whichever of the two
# fits, or not at all.
ATTENTION = ("auto", "full", "chunked", "flash")

EVERYONE = -1  # the segment that tokens of all segments see

# Scores are held at once up to so many keys, and entries (128 MiB of float32).
_FULL_KEYS, _FULL_SCORES = 1024, 2**25
_CHUNK_QUERIES = 256  # at most
_CHUNK_SCORES = 2**24  # entries of one chunk's scores: 64 MiB of float32
_FLASH = "cudnn"  # of the implementations of jax.nn.dot_product_attention
_FLASH_DTYPES = (jnp.bfloat16, jnp.float16)


class KV(NamedTuple):
    """Keys (rotated) and values of some tokens, for all layers or for one."""

    k: Float[Array, "*layers batch time kv_heads head_dim"]
    v: Float[Array, "*layers batch time kv_heads head_dim"]


class Span(NamedTuple):
    """Where tokens stand: one sees keys of its segment, of no later order.

    Keys of the segment ``EVERYONE`` are seen by all, where their order allows it. One
    row serves the whole batch.
    """

    order: Int[Array, "rows time"]
    segment: Int[Array, "rows time"]

    @classmethod
    def causal(cls, time: int, start: int = 0) -> "Span":
        """``time`` tokens one after the other, which all later ones see."""
        order = start + jnp.arange(time)[None]
        return cls(order, jnp.full_like(order, EVERYONE))


Part = tuple[KV, Span]  # keys and values (batch or 1, keys, kv_heads, head_dim)


def visible(queries: Span, keys: Span) -> Bool[Array, "_ queries keys"]:
    """Which keys each query sees; the rows are 1 or the batch."""
    own, other = queries.segment[:, :, None], keys.segment[:, None, :]
    is_before = keys.order[:, None, :] <= queries.order[:, :, None]
    return is_before & ((other == own) | (other == EVERYONE))


def attend(
    q: Float[Array, "batch time heads head_dim"],
    span: Span,
    parts: Sequence[Part],
    *,
    kind: str = "full",
    window: int | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Attention of ``q`` over several runs of keys under one softmax.

    Runs are never concatenated: a cache stays where it lies, and one of batch 1 (a
    prefix common to all rows) is one matmul over all rows. Each query sees a key at
    least.

    Args:
        q: rotated queries; ``heads`` is a multiple of the parts' ``kv_heads``.
        span: of the queries.
        parts: keys and values with their spans. The first are the queries' own.
        kind: one of ``ATTENTION``; ``"auto"`` is chunked beyond 1,024 keys, or 2^25
            scores. ``"flash"`` is so too for a single query, and for float32, which the
            kernel does not take; it has no forward-mode derivative.
        window: no query sees more of its own keys than so many up to itself, and the
            chunked form reads no others; None where that is not known.

    Raises:
        ValueError: an unknown ``kind``.
    """
    check_attention("kind", kind)
    batch, time, heads, _ = q.shape
    keys = sum(kv.k.shape[1] for kv, _ in parts)
    scores = batch * time * heads * keys
    if kind == "flash" and time > 1 and q.dtype in _FLASH_DTYPES:
        return _attend_flash(q, span, parts)
    if kind in ("auto", "flash"):
        is_small = keys <= _FULL_KEYS and scores <= _FULL_SCORES
        kind = "full" if is_small else "chunked"
    size = _chunk_size(time, scores // time)
    if kind == "full" or time <= size:
        return _attend_at_once(q, span, parts)
    return _attend_in_chunks(q, span, parts, size, window)


def check_attention(name: str, kind: str) -> None:
    """Raise a ValueError unless ``kind`` is one of ``ATTENTION``."""
    if kind not in ATTENTION:
        raise ValueError(f"`{name}` must be one of {ATTENTION}, got {kind!r}.")


def _chunk_size(time: int, scores: int) -> int:
    """Queries of a chunk, at ``scores`` for each."""
    most = max(1, min(_CHUNK_QUERIES, _CHUNK_SCORES // scores))
    chunks = -(-time // most)
    return -(-time // chunks)


def _attend_in_chunks(
    q: Array, span: Span, parts: Sequence[Part], size: int, window: int | None
) -> Array:
    """``size`` queries at a time; nothing is kept of a chunk but its output."""
    (own, own_span), *past = parts
    batch, time, *_ = q.shape
    keys = time if window is None else min(time, window - 1 + size)
    # Gradients of keys are summed over chunks: in float32.
    own, past_kv = jax.tree.map(
        lambda a: a.astype(jnp.float32), (own, [kv for kv, _ in past])
    )
    past_spans = [past_span for _, past_span in past]

    @jax.checkpoint
    def chunk(args: tuple[Array, Array, Span]) -> Array:
        index, q, span = args
        start = jnp.clip((index + 1) * size - keys, 0, time - keys)
        near, near_span = jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, start, keys, axis=1), (own, own_span)
        )
        kvs = jax.tree.map(lambda a: a.astype(q.dtype), [near, *past_kv])
        return _attend_at_once(
            q, span, list(zip(kvs, [near_span, *past_spans], strict=True))
        )

    chunks = -(-time // size)
    rest = chunks * size - time

    def split(a: Array, **how) -> Array:
        a = jnp.pad(a, [(0, 0), (0, rest), *[(0, 0)] * (a.ndim - 2)], **how)
        return jnp.moveaxis(a.reshape(a.shape[0], chunks, size, *a.shape[2:]), 1, 0)

    # Queries of the padding see what the last one sees: a softmax over nothing is NaN.
    spans = jax.tree.map(lambda a: split(a, mode="edge"), span)
    out = lax.map(chunk, (jnp.arange(chunks), split(q), spans))
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, *q.shape[2:])[:, :time]


def _attend_flash(q: Array, span: Span, parts: Sequence[Part]) -> Array:
    """By one kernel, which is told who sees whom by a mask (rows, queries, keys)."""
    batch, time, *_ = q.shape
    masks = [visible(span, keys) for _, keys in parts]
    rows = max(len(mask) for mask in masks)

    def joined(arrays: list[Array], axis: int, rows: int) -> Array:
        alike = [jnp.broadcast_to(a, (rows, *a.shape[1:])) for a in arrays]
        return jnp.concatenate(alike, axis)

    k = joined([kv.k for kv, _ in parts], 1, batch)
    v = joined([kv.v for kv, _ in parts], 1, batch)
    mask = joined(masks, 2, rows)
    # The kernel's backward pass takes even lengths. A query of the padding sees what
    # the last one sees, nobody sees a key of it.
    odd, odd_keys = time % 2, k.shape[1] % 2
    q = jnp.pad(q, ((0, 0), (0, odd), (0, 0), (0, 0)))
    k, v = (jnp.pad(a, ((0, 0), (0, odd_keys), (0, 0), (0, 0))) for a in (k, v))
    mask = jnp.pad(mask, ((0, 0), (0, odd), (0, 0)), mode="edge")
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, odd_keys)))[:, None]
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=_FLASH)
    return out[:, :time]


def _attend_at_once(q: Array, span: Span, parts: Sequence[Part]) -> Array:
    batch, time, heads, head_dim = q.shape
    kv_heads = parts[0][0].k.shape[2]
    q = (q * head_dim**-0.5).reshape(batch, time, kv_heads, -1, head_dim)
    scores = []
    for kv, keys in parts:
        if kv.k.shape[0] == 1:
            score = jnp.einsum("btkgd,skd->btkgs", q, kv.k[0])
        else:
            score = jnp.einsum("btkgd,bskd->btkgs", q, kv.k)
        score = score.astype(jnp.float32)
        mask = visible(span, keys)
        scores.append(jnp.where(mask[:, :, None, None, :], score, -jnp.inf))
    weights = jax.nn.softmax(jnp.concatenate(scores, -1), axis=-1).astype(q.dtype)
    out = jnp.zeros_like(q)
    start = 0
    for kv, _ in parts:
        stop = start + kv.v.shape[1]
        part = lax.slice_in_dim(weights, start, stop, axis=-1)
        if kv.v.shape[0] == 1:
            out += jnp.einsum("btkgs,skd->btkgd", part, kv.v[0])
        else:
            out += jnp.einsum("btkgs,bskd->btkgd", part, kv.v)
        start = stop
    return out.reshape(batch, time, heads, head_dim)

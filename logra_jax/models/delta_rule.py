"""The gated delta rule of many tokens, a chunk at a time.

Each value head carries a state ``S`` (key_dim, value_dim) that every token decays,
corrects towards its own value and reads:

    S ← exp(g) S,    S ← S + k uᵀ with u = β (v − Sᵀ k),    o = Sᵀ q.

The corrections ``u`` of a chunk solve one unit lower triangular system (Yang, Kautz &
Hatamizadeh 2024, "Gated Delta Networks", arXiv 2412.06464, section 3.3). With ``G`` the
sum of ``g`` since the chunk's start, or since the segment's if that is later, and ``S``
the state there,

    (I + A) U = β (V − exp(G) K S),    A_ij = β_i exp(G_i − G_j) k_iᵀ k_j,    j < i,
    O = exp(G) Q S + M U,              M_ij = exp(G_i − G_j) q_iᵀ k_j,        j ≤ i,

where entries between segments are 0. ``(I + A)⁻¹`` and ``M`` need no state, so they are
formed for a group of chunks at once; the rest goes from chunk to chunk.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

CHUNK = 64  # tokens, at most
# Entries of M of the chunks that are prepared together, at most: 8 MiB of float32.
_GROUP = 2**21
_BLOCK = 8  # rows of a triangular system that are solved for at once
_NORM_EPSILON = 1e-6  # of the sum of squares of queries and keys

# float32's exp is 0 below this. Decays down to it, in steps of 2^-8, have exact sums
# over a chunk: 64 · 2^7 · 2^8 < 2^24.
_LEAST_LOG_DECAY, _STEP = -128.0, 2.0**-8

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """All tokens, or chunks of them with the chunk before the batch."""

    q: Float[Array, "*chunk batch time k_heads key_dim"]  # as projected
    k: Float[Array, "*chunk batch time k_heads key_dim"]
    v: Float[Array, "*chunk batch time k_heads share value_dim"]
    g: Float32[Array, "*chunk batch time k_heads share"]
    beta: Float32[Array, "*chunk batch time k_heads share"]
    # Where the token's segment starts, counted from the chunk's first token.
    start: Int[Array, "*chunk rows time"]


class Prepared(NamedTuple):
    """What a chunk needs besides the state that it starts from; float32."""

    k: Float[Array, "*chunk batch k_heads time key_dim"]  # of length 1
    q: Float[Array, "*chunk batch k_heads time key_dim"]  # of length key_dim^-½
    v: Float[Array, "*chunk batch k_heads share time value_dim"]
    beta: Float[Array, "*chunk batch k_heads share time"]
    inverse: Float[Array, "*chunk batch k_heads share time time"]  # of I + A
    mix: Float[Array, "*chunk batch k_heads share time time"]  # M
    # exp(G) of tokens that start from the carried state, and of those that do not.
    carried: Float[Array, "*chunk batch k_heads share time"]
    fresh: Float[Array, "*chunk batch k_heads share time"]
    to_end: Float[Array, "*chunk batch k_heads share time"]  # exp(G_last − G)


Reads = tuple[Array, Array]  # of the state, by keys and by queries


def delta_rule(
    q: Float[Array, "batch time k_heads key_dim"],
    k: Float[Array, "batch time k_heads key_dim"],
    v: Float[Array, "batch time v_heads value_dim"],
    g: Float32[Array, "batch time v_heads"],
    beta: Float32[Array, "batch time v_heads"],
    start: Int[Array, "_ time"],
    past: Float32[Array, "_ v_heads key_dim value_dim"] | None,
) -> tuple[
    Float[Array, "batch time v_heads value_dim"],
    Float32[Array, "batch v_heads key_dim value_dim"],
]:
    """What tokens read of their states, in float32, and the state after the last one.

    For the backward pass the arguments are kept, and the state that each group of
    chunks starts from; all else is computed once more, a group at a time.

    Args:
        q: queries; they are scaled to the length key_dim^-½ here.
        k: keys, scaled to length 1 here. A head serves ``v_heads / k_heads``
            consecutive value heads.
        v: values.
        g: logarithms of the decay, at most 0.
        beta: the share of a correction that is made, 0 to 1.
        start: index of the first token of each token's segment.
        past: the state that every segment starts from; None for zeros.

    Returns:
        The readings in ``v``'s dtype, and the state after each row's last token.
    """
    batch, time, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    share = heads // key_heads
    if past is not None:
        past = past.reshape(-1, key_heads, share, key_dim, value_dim)

    def per_key_head(a: Array) -> Array:
        return a.reshape(batch, time, key_heads, share, *a.shape[3:])

    v, g, beta = (per_key_head(a) for a in (v, g, beta))
    tokens = Tokens(q, k, v, g, beta, start)
    chunks = -(-time // CHUNK)
    if chunks == 1:
        out, state = jax.checkpoint(_one_chunk)(tokens, past)
    else:
        out, state = _all_chunks(tokens, past, chunks)
    out = out.reshape(batch, time, heads, value_dim)
    return out, state.reshape(batch, heads, key_dim, value_dim)


def _one_chunk(tokens: Tokens, past: Array | None) -> tuple[Array, Array]:
    """All tokens are one chunk, to which no state is carried."""
    chunk = _prepare(tokens)
    out, state = _finish(chunk, _read(chunk, chunk.fresh, past))
    if past is not None:
        state += chunk.fresh[..., -1, None, None] * past
    return _tokens_first(out, tokens.v), state


def _all_chunks(tokens: Tokens, past: Array | None, chunks: int):
    batch, time, key_heads, share, value_dim = tokens.v.shape
    size = -(-time // chunks)
    most = max(1, _GROUP // (batch * key_heads * share * size**2))
    groups = -(-chunks // most)
    chunks = -(-chunks // groups)  # of a group

    def step(state: Array, inputs: tuple[Prepared, Reads | None]):
        chunk, read = inputs
        own = _read(chunk, chunk.carried, state)
        out, new = _finish(chunk, _add(own, read))
        state = chunk.carried[..., -1, None, None] * state + new
        if past is not None:
            state += chunk.fresh[..., -1, None, None] * past
        return state, out

    @functools.partial(jax.checkpoint, prevent_cse=False)  # a scan's body needs none
    def group(state: Array, tokens: Tokens):
        prepared = jax.vmap(_prepare)(tokens)
        read = jax.vmap(lambda chunk: _read(chunk, chunk.fresh, past))(prepared)
        state, out = lax.scan(step, state, (prepared, read))
        return state, _tokens_first(out, tokens.v)

    rest = groups * chunks * size - time

    def split(a: Array, **how) -> Array:
        a = jnp.pad(a, [(0, 0), (0, rest), *[(0, 0)] * (a.ndim - 2)], **how)
        a = a.reshape(a.shape[0], groups, chunks, size, *a.shape[2:])
        return jnp.moveaxis(a, 0, 2)

    # Padding is of the last token's segment, and changes nothing: g and β are 0.
    first = size * jnp.arange(groups * chunks).reshape(groups, chunks, 1, 1)
    parts = Tokens(
        *map(split, tokens[:-1]), start=split(tokens.start, mode="edge") - first
    )
    zeros = jnp.zeros(
        (batch, key_heads, share, tokens.k.shape[-1], value_dim), jnp.float32
    )
    state, out = lax.scan(group, zeros, parts)
    return jnp.moveaxis(out, 2, 0).reshape(batch, -1, *out.shape[4:])[:, :time], state


def _prepare(tokens: Tokens) -> Prepared:
    """All that does not depend on the state."""
    q, k = (jnp.swapaxes(_normalise(a), 1, 2) for a in (tokens.q, tokens.k))
    q *= q.shape[-1] ** -0.5
    v, g, beta = (
        jnp.moveaxis(a.astype(jnp.float32), 1, 3)
        for a in (tokens.v, tokens.g, tokens.beta)
    )
    column = jnp.arange(k.shape[2])[None]
    see = column[:, None, :] <= column[:, :, None]
    see &= column[:, None, :] >= tokens.start[:, :, None]
    see = see[:, None, None]  # rows, k_heads, share, time, time
    decay = _decay(g, see)
    # Per key head: the value heads differ in decay and β alone.
    kk = _einsum("bkid,bkjd->bkij", k, k)[:, :, None]
    qk = _einsum("bkid,bkjd->bkij", q, k)[:, :, None]
    earlier = jnp.where(jnp.eye(k.shape[2], dtype=bool)[None, None, None], 0, decay)
    since = jnp.exp(jnp.sum(jnp.where(see, g[..., None, :], 0), axis=-1))
    is_carried = (tokens.start < 0)[:, None, None]
    return Prepared(
        k=k,
        q=q,
        v=v,
        beta=beta,
        inverse=_invert(beta[..., None] * kk * earlier),
        mix=qk * decay,
        carried=jnp.where(is_carried, since, 0),
        fresh=jnp.where(is_carried, 0, since),
        to_end=decay[..., -1, :],
    )


def _normalise(a: Array) -> Array:
    a = a.astype(jnp.float32)
    square = jnp.sum(a * a, axis=-1, keepdims=True)
    return a * lax.rsqrt(square + _NORM_EPSILON)


def _decay(g: Array, see: Bool[Array, "..."]) -> Array:
    """``exp(G_i − G_j)`` where i sees j, else 0, as exact as if summed from j to i.

    A difference of two sums loses what small decays add to large ones. So ``g`` is
    summed in two parts: multiples of 2^-8, exact in float32, and the small remainders.
    """
    g = jnp.maximum(g, _LEAST_LOG_DECAY)
    coarse = lax.stop_gradient(jnp.round(g / _STEP) * _STEP)
    sums = [jnp.cumsum(part, axis=-1) for part in (coarse, g - coarse)]
    coarse, fine = (s[..., :, None] - s[..., None, :] for s in sums)
    # Masked before exp: what it is not to see may overflow, and its gradient be NaN.
    return jnp.exp(jnp.where(see, coarse + fine, -jnp.inf))


@jax.custom_jvp
def _invert(below: Float[Array, "*rows time time"]) -> Float[Array, "*rows time time"]:
    """``(I + A)⁻¹`` of an ``A`` below the diagonal, by substitution of ``_BLOCK`` rows.

    For a delta rule with β ≤ 1 its entries stay within ±1, while powers of ``A`` would
    grow and cancel. The derivative is ``−(I + A)⁻¹ Ȧ (I + A)⁻¹``. All are products: a
    CPU's library of triangular solves takes several times as long, forward and
    backward, and may wait for threads that wait for it.
    """
    time = below.shape[-1]
    if time == 1:
        return jnp.ones_like(below)
    size = min(_BLOCK, time)
    rest = -time % size
    below = jnp.pad(below, [*[(0, 0)] * (below.ndim - 2), (0, rest), (0, rest)])
    starts = range(0, time, size)
    corners = jnp.stack([below[..., i : i + size, i : i + size] for i in starts])
    corners = _substitute(corners, 1, lambda _, row: row)

    def solve(block: Array, rows: Array) -> Array:
        corner = lax.dynamic_index_in_dim(corners, block, keepdims=False)
        return _einsum("...ij,...jl->...il", corner, rows)

    return _substitute(below, size, solve)[..., :time, :time]


def _substitute(
    below: Array, size: int, solve: Callable[[Array, Array], Array]
) -> Array:
    """``(I + A)⁻¹``, ``size`` rows after the other; ``solve`` knows what they share."""
    one = jnp.eye(below.shape[-1], dtype=below.dtype)

    def rows(i: Array, inverse: Array) -> Array:
        own = lax.dynamic_slice_in_dim(below, i * size, size, axis=-2)
        unit = lax.dynamic_slice_in_dim(one, i * size, size, axis=0)
        # Rows from these on are still 0.
        known = _einsum("...ij,...jl->...il", own, inverse)
        new = solve(i, jnp.broadcast_to(unit, known.shape) - known)
        return lax.dynamic_update_slice_in_dim(inverse, new, i * size, axis=-2)

    return lax.fori_loop(0, len(one) // size, rows, jnp.zeros_like(below))


@_invert.defjvp
def _invert_jvp(primals, tangents):
    inverse = _invert(*primals)
    return inverse, -_einsum("...ij,...jl,...lm->...im", inverse, tangents[0], inverse)


def _read(chunk: Prepared, decay: Array, state: Array | None) -> Reads | None:
    """``exp(G) K S`` and ``exp(G) Q S``; None of no state."""
    if state is None:
        return None
    if state.shape[0] == 1:
        kind, state = "bkcd,krde->bkrce", state[0]
    else:
        kind = "bkcd,bkrde->bkrce"
    # One product: of a single token, the time goes into reading the state.
    both = _einsum(kind, jnp.concatenate([chunk.k, chunk.q], axis=-2), state)
    of_k, of_q = jnp.split(both, 2, axis=-2)
    return decay[..., None] * of_k, decay[..., None] * of_q


def _finish(chunk: Prepared, read: Reads | None) -> tuple[Array, Array]:
    """The chunk's readings, and what its tokens add to the state."""
    of_k, of_q = (0, 0) if read is None else read
    wanted = chunk.beta[..., None] * (chunk.v - of_k)
    u = _einsum("bkrij,bkrje->bkrie", chunk.inverse, wanted)
    out = of_q + _einsum("bkrij,bkrje->bkrie", chunk.mix, u)
    new = _einsum("bkcd,bkrce->bkrde", chunk.k, chunk.to_end[..., None] * u)
    return out, new


def _add(own: Reads | None, other: Reads | None) -> Reads | None:
    if own is None or other is None:
        return own or other
    return own[0] + other[0], own[1] + other[1]


def _tokens_first(out: Array, v: Array) -> Array:
    """(..., k_heads, share, time, value_dim) in the order and dtype of ``v``."""
    return jnp.moveaxis(out, -2, -4).astype(v.dtype)

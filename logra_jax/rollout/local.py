"""The in-process engine: jitted prefill and decode over the trainer's own weights."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key, UInt32

from logra_jax.algorithm.parallel import ROWS, not_before, own_part, parts
from logra_jax.models.attention import Span
from logra_jax.models.decoder import Cache, Decoder, Past
from logra_jax.models.sharding import put_everywhere, specs_of
from logra_jax.rollout.types import Completions, Sampling, pack_prompts

_BLOCK = 256  # vocabulary entries per block of the two-level sampler

# Segments of spans: a row's own tokens, and (with all below) what no token of it sees.
_ROW, _NOBODY = 0, -2


class LocalEngine:
    """Samples from a :class:`Decoder` whose weights are passed to each call.

    Nothing is copied: ``generate`` reads the buffers it is given. One program is
    compiled for each (batch, padded prompt length, sampling filter).

    Args:
        graph: graph definition of the decoder; its split must be one state.
        max_positions: the model's context, in tokens.
        eos_ids: tokens that end a completion.
        pad_id: fills positions past the end.
        prefix: tokens common to all prompts, computed once per batch.
        bucket: prompts are padded to a multiple of it.
        mesh: that the weights lie on, cut as ``models.sharding`` says, or None for one
            device; ``graph`` is then a placed decoder's. Rows of a batch are divided
            among devices (filled up with copies of the last one), and sampled as they
            are on one device.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        *,
        max_positions: int,
        eos_ids: Sequence[int],
        pad_id: int = 0,
        prefix: Sequence[int] = (),
        bucket: int = 8,
        mesh: Mesh | None = None,
    ):
        self.graph = graph
        self.max_positions = max_positions
        self.eos_ids = tuple(eos_ids)
        self.pad_id = pad_id
        self.prefix = tuple(prefix)
        self.bucket = bucket
        self.mesh = mesh

    def generate(
        self,
        weights: nnx.State,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        key: Key[Array, ""],
    ) -> Completions:
        """Sample one completion for each prompt.

        Args:
            weights: every variable of the decoder (probes included).
            prompts: token ids, each starting with the engine's prefix.
            sampling: temperature, filters, length.
            key: of this batch; the same key and weights give the same tokens.

        Raises:
            ValueError: see :func:`pack_prompts`.
        """
        packed = pack_prompts(
            prompts,
            prefix=self.prefix,
            bucket=self.bucket,
            pad_id=self.pad_id,
            limit=self.max_positions - sampling.max_new_tokens,
        )
        count = len(packed.tokens)
        shares = math.prod(self.mesh.shape[n] for n in ROWS) if self.mesh else 1
        rows = np.minimum(np.arange(-(-count // shares) * shares), count - 1)
        arrays = (packed.prefix, packed.tokens[rows], packed.lengths[rows])
        inputs = (*arrays, np.float32(sampling.temperature))
        key_data = jax.random.key_data(key)
        # Explicit, so that no transfer is hidden in the call.
        if self.mesh:
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            inputs = (*inputs, jax.device_get(key_data))
            inputs = [put_everywhere(value, everywhere) for value in inputs]
        else:
            inputs = (*jax.device_put(inputs), key_data)
        out = _generate(
            self.graph,
            weights,
            *inputs,
            mesh=self.mesh,
            eos_ids=self.eos_ids,
            pad_id=self.pad_id,
            new=sampling.max_new_tokens,
            least=sampling.min_new_tokens,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        return Completions(packed, *(a[:count] for a in jax.device_get(out)))


class _Loop(NamedTuple):
    """Carry of the decode loop; row ``i`` of ``tokens`` is filled up to ``t``."""

    t: Int32[Array, ""]
    tokens: Int32[Array, "batch new"]
    logprobs: Float32[Array, "batch new"]
    ended: Bool[Array, " batch"]
    lengths: Int32[Array, " batch"]
    running: Int32[Array, ""]  # rows that have not ended, on all devices
    cache: Cache  # keys and values of suffix + new tokens


@functools.partial(
    jax.jit,
    static_argnames=(
        *("graph", "mesh", "eos_ids", "pad_id", "new", "least", "top_p", "top_k"),
    ),
)
def _generate(graph, weights, *arrays, mesh: Mesh | None, **options):
    if mesh is None:
        return _generate_rows(graph, weights, *arrays, **options)
    everywhere, rows = PartitionSpec(), PartitionSpec(ROWS)
    generate = jax.shard_map(
        functools.partial(_generate_rows, graph, axis_name=ROWS, **options),
        mesh=mesh,
        in_specs=(specs_of(weights), everywhere, rows, rows, everywhere, everywhere),
        out_specs=rows,
        check_vma=False,
    )
    out = generate(weights, *arrays)
    return lax.with_sharding_constraint(out, NamedSharding(mesh, everywhere))


def _generate_rows(
    graph,
    weights,
    prefix: Int[Array, " prefix"],
    prompt: Int[Array, "batch suffix"],
    prompt_lengths: Int[Array, " batch"],
    temperature: Float[Array, ""],
    key_data: UInt32[Array, " words"],
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
    new: int,
    least: int,
    top_p: float,
    top_k: int,
    axis_name: tuple[str, ...] = (),
):
    """The completions of some rows; of a device's, which is one of ``axis_name``."""
    key = jax.random.wrap_key_data(key_data)
    model: Decoder = nnx.merge(graph, weights)
    if jax.default_backend() == "cpu":
        # Once for all tokens: a CPU computes in the activations' dtype, and widening
        # every matrix for every token would cost a third of the time.
        weights = jax.tree.map(
            lambda w: (
                w.astype(jnp.promote_types(w.dtype, model.activations))
                if jnp.issubdtype(w.dtype, jnp.floating)
                else w
            ),
            weights,
        )
        model = nnx.merge(graph, weights)
    batch, width = prompt.shape
    hidden, cache, shared = prefill(model, prefix, prompt, prompt_lengths)
    columns = jnp.arange(width + new)[None]
    first = width - prompt_lengths[:, None]

    def choose(loop: _Loop, hidden: Array) -> _Loop:
        """Sample token ``t`` of every row from the hidden state before it."""
        logits = model.logits(hidden)
        barred = None
        if least:
            is_end = jnp.zeros(logits.shape[1], bool).at[jnp.array(eos_ids)].set(True)
            barred = is_end & (loop.t < least)
        token, logprob = sample(
            logits,
            temperature,
            jax.random.fold_in(key, loop.t),
            top_p,
            top_k,
            barred=barred,
            axis_name=axis_name,
        )
        token = jnp.where(loop.ended, pad_id, token)
        ended = loop.ended | jnp.isin(token, jnp.array(eos_ids, jnp.int32))
        running = jnp.sum(~ended)
        return loop._replace(
            t=loop.t + 1,
            tokens=loop.tokens.at[:, loop.t].set(token),
            logprobs=loop.logprobs.at[:, loop.t].set(
                jnp.where(loop.ended, 0.0, logprob)
            ),
            lengths=loop.lengths + ~loop.ended,
            ended=ended,
            running=lax.psum(running, axis_name) if axis_name else running,
        )

    def decode(loop: _Loop) -> _Loop:
        """Run the model on token ``t - 1`` of every row, then sample token ``t``."""
        column = width + loop.t - 1
        token = lax.dynamic_index_in_dim(loop.tokens, loop.t - 1, 1)
        position = prefix.shape[0] + prompt_lengths[:, None] + loop.t - 1
        written = (columns >= first) & (columns < column)
        order = prefix.shape[0] + columns
        cached = Span(order, jnp.where(written, _ROW, _NOBODY))
        now = (prefix.shape[0] + column)[None, None]
        hidden, present = model(
            token,
            position,
            Span(now, jnp.full_like(now, _ROW)),
            [*shared, Past(loop.cache, cached)],
        )
        cache = loop.cache.write(column, present)
        return choose(loop._replace(cache=cache), hidden[:, 0])

    loop = _Loop(
        t=jnp.int32(0),
        tokens=jnp.full((batch, new), pad_id, jnp.int32),
        logprobs=jnp.zeros((batch, new), jnp.float32),
        ended=jnp.zeros((batch,), bool),
        lengths=jnp.zeros((batch,), jnp.int32),
        running=jnp.int32(batch),
        cache=cache.grow(new),
    )
    loop = choose(loop, hidden[:, -1])
    loop = lax.while_loop(lambda s: (s.t < new) & (s.running > 0), decode, loop)
    return loop.tokens, loop.logprobs, loop.lengths, loop.ended


def prefill(
    model: Decoder,
    prefix: Int[Array, " prefix"],
    tokens: Int[Array, "batch time"],
    prompt_lengths: Int[Array, " batch"],
    *,
    prompt_width: int | None = None,
    dtype=None,
):
    """Run a shared prefix once, then rows padded on the left: rollout and training.

    Args:
        model: the decoder.
        prefix: tokens common to all rows; may be empty.
        tokens: the rest of each prompt, padded on the left to ``prompt_width``, and in
            training the completion after it.
        prompt_lengths: real prompt tokens of each row, of ``prompt_width``.
        prompt_width: columns of ``tokens`` that are prompt; all by default.
        dtype: of the activations.

    Returns:
        Hidden states (batch, time, features), what the rows leave to later tokens, and
        the prefix as a list of at most one :class:`Past`.
    """
    width = tokens.shape[1] if prompt_width is None else prompt_width
    shared, tokens = run_prefix(model, prefix, tokens, dtype)
    columns = jnp.arange(tokens.shape[1])[None]
    first = width - prompt_lengths[:, None]
    positions = prefix.shape[0] + jnp.maximum(columns - first, 0)
    # A padded query sees itself, so that no softmax is over nothing.
    segment = jnp.where(columns >= first, _ROW, _NOBODY - columns)
    span = Span(prefix.shape[0] + columns, segment)
    hidden, cache = model(tokens, positions, span, shared, dtype=dtype)
    return hidden, cache, shared


def run_prefix(
    model: Decoder,
    prefix: Int[Array, " prefix"],
    tokens: Int[Array, "batch time"],
    dtype=None,
) -> tuple[list[Past], Int[Array, "batch time"]]:
    """The tokens common to all rows, run once, and then those of the rows.

    Returns:
        None or one :class:`Past`, and ``tokens``, which are there only after it: on a
        mesh the embedding is gathered for one at a time.
    """
    if not prefix.shape[0]:
        return [], tokens
    causal = Span.causal(prefix.shape[0])
    positions = jnp.arange(prefix.shape[0])[None]
    _, cache = model(prefix[None], positions, causal, dtype=dtype)
    if parts(model.vocab_axes) > 1:
        tokens, cache = not_before(tokens, cache)
    return [Past(cache, causal)], tokens


def sample(
    logits: Float[Array, "batch vocab"],
    temperature: Float[Array, ""],
    key: Key[Array, ""],
    top_p: float = 1.0,
    top_k: int = 0,
    *,
    barred: Bool[Array, " vocab"] | None = None,
    axis_name: tuple[str, ...] = (),
) -> tuple[Int32[Array, " batch"], Float32[Array, " batch"]]:
    """One token per row, and its log-probability.

    Args:
        logits: float32.
        temperature: 0 takes the likeliest token.
        key: one uniform number per row is drawn from it.
        top_p: see :class:`Sampling`.
        top_k: see :class:`Sampling`.
        barred: tokens that are not sampled; None bars none.
        axis_name: inside ``jax.shard_map``, mesh axes that the rows are cut over; each
            row's number is the one that it has among all.

    Returns:
        Tokens, and their log-probabilities in nats at ``temperature`` (at 1 when
        greedy) under the *unfiltered* distribution, which is what a trainer computes.
    """
    z = logits / jnp.where(temperature > 0, temperature, 1.0)
    logprobs = jax.nn.log_softmax(z)
    if barred is None:
        kept = jnp.exp(_filter(z, logprobs, top_p, top_k))
    else:
        logits = jnp.where(barred, -jnp.inf, logits)
        left = jnp.where(barred, -jnp.inf, z)
        kept = jnp.exp(_filter(left, jax.nn.log_softmax(left), top_p, top_k))
    uniform = jax.random.uniform(key, (logits.shape[0] * parts(axis_name),))
    drawn = _draw(kept, own_part(uniform, axis_name, 0))
    token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, -1)).astype(jnp.int32)
    return token, jnp.take_along_axis(logprobs, token[:, None], -1)[:, 0]


def _filter(z: Array, logprobs: Array, top_p: float, top_k: int) -> Array:
    if top_k and top_k < z.shape[-1]:
        threshold = lax.top_k(z, top_k)[0][:, -1:]
        logprobs = jnp.where(z >= threshold, logprobs, -jnp.inf)
    if top_p < 1.0:
        # Computed once: a threshold that misses its own token by a bit keeps nothing.
        probabilities = lax.optimization_barrier(jax.nn.softmax(logprobs))
        descending = -jnp.sort(-probabilities, -1)
        before = jnp.cumsum(descending, -1) - descending
        last = jnp.sum(before < top_p, -1, keepdims=True) - 1
        threshold = jnp.take_along_axis(descending, last, -1)
        logprobs = jnp.where(probabilities >= threshold, logprobs, -jnp.inf)
    return logprobs


def _draw(weights: Float[Array, "batch vocab"], uniform: Float[Array, " batch"]):
    """Index with probability proportional to its weight, by inverting the CDF.

    Two levels, block then entry, in place of one random number per vocabulary entry
    (Gumbel) or a cumulative sum over the whole vocabulary.
    """
    batch, vocab = weights.shape
    blocks = -(-vocab // _BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - vocab)))
    weights = weights.reshape(batch, blocks, _BLOCK)
    block, rest = _invert(weights.sum(-1), uniform)
    rows = jnp.arange(batch)
    entry, _ = _invert(weights[rows, block], rest)
    return block * _BLOCK + entry


def _invert(weights: Float[Array, "batch n"], uniform: Float[Array, " batch"]):
    """The entry that ``uniform`` falls into, and where within it (0 to 1)."""
    above = jnp.cumsum(weights, -1)
    target = (uniform * above[:, -1])[:, None]
    # Rounding must never pick an entry of weight 0: only positive ones are candidates,
    # the last of them where rounding put the target past all.
    entries = jnp.arange(weights.shape[1])[None]
    last = jnp.max(jnp.where(weights > 0, entries, 0), -1)
    reached = (weights > 0) & (above > target)
    index = jnp.min(jnp.where(reached, entries, last[:, None]), -1)
    chosen = jnp.take_along_axis(weights, index[:, None], -1)
    below = jnp.take_along_axis(above, index[:, None], -1) - chosen
    within = (target - below) / jnp.maximum(chosen, jnp.finfo(weights.dtype).tiny)
    return index, jnp.clip(within[:, 0], 0.0, 1.0)

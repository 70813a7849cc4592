"""What goes into a rollout engine and what comes out: token ids, never text."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float32, Int, Int32, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the fewest tokens whose mass reaches it; 1 keeps all.
        top_k: keep the k likeliest tokens; 0 keeps all.
        max_new_tokens: a completion without end of sequence is cut there.
        min_new_tokens: no end of sequence is sampled before so many other tokens; 0
            allows an empty answer.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 24
    min_new_tokens: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:  # NaN as well
            raise ValueError(
                "`temperature` must be finite and not negative, got "
                f"{self.temperature}."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be in (0, 1], got {self.top_p}.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` must not be negative, got {self.top_k}.")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"`max_new_tokens` must be at least 1, got {self.max_new_tokens}."
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"`min_new_tokens` must be in [0, {self.max_new_tokens}], which is "
                f"`max_new_tokens`, got {self.min_new_tokens}."
            )


class Prompts(NamedTuple):
    """A batch of prompts: one prefix common to all, the rest padded on the left."""

    prefix: Int32[np.ndarray, " prefix"]
    tokens: Int32[np.ndarray, "batch suffix"]
    lengths: Int32[np.ndarray, " batch"]  # real tokens of each suffix


class Completions(NamedTuple):
    """A batch of completions; positions at and past ``lengths`` are padding."""

    prompts: Prompts
    tokens: Int32[np.ndarray, "batch new"]
    logprobs: Float32[
        np.ndarray, "batch new"
    ]  # at the sampling temperature, unfiltered
    lengths: Int32[np.ndarray, " batch"]  # up to and including the end of sequence
    finished: Bool[np.ndarray, " batch"]  # an end of sequence came before the limit
    # Version of the weights that each token was sampled from, -1 at padding; None from
    # an engine that samples from the weights it is given.
    versions: Int32[np.ndarray, "batch new"] | None = None

    @property
    def mask(self) -> Bool[np.ndarray, "batch new"]:
        """True where a token was sampled."""
        return np.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


class Engine(Protocol):
    """What every rollout engine does."""

    def generate(
        self,
        weights: nnx.State,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        key: Key[jax.Array, ""],
    ) -> Completions:
        """Sample one completion for each prompt, in order."""
        ...


def take_rows(completions: Completions, rows: Int[np.ndarray, " rows"]) -> Completions:
    """Some of the completions, in the order of ``rows``."""
    prompts = completions.prompts
    few = jax.tree.map(lambda a: a[rows], completions._replace(prompts=None))
    return few._replace(
        prompts=Prompts(prompts.prefix, prompts.tokens[rows], prompts.lengths[rows])
    )


def concatenate(parts: Sequence[Completions]) -> Completions:
    """Completions of several batches as one, prompts padded to the widest.

    Raises:
        ValueError: they do not share a prefix.
    """
    first, *others = parts
    if not others:
        return first
    prefix = first.prompts.prefix
    if any(not np.array_equal(prefix, other.prompts.prefix) for other in others):
        raise ValueError("`parts` must share one prefix; sample them with one engine.")
    width = max(part.prompts.tokens.shape[1] for part in parts)

    def widened(prompts: Prompts) -> np.ndarray:
        missing = width - prompts.tokens.shape[1]
        return np.pad(prompts.tokens, ((0, 0), (missing, 0)))

    prompts = Prompts(
        prefix,
        np.concatenate([widened(part.prompts) for part in parts]),
        np.concatenate([part.prompts.lengths for part in parts]),
    )
    bare = [part._replace(prompts=None) for part in parts]
    whole = jax.tree.map(lambda *a: np.concatenate(a), *bare)
    return whole._replace(prompts=prompts)


def common_prefix(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The tokens all ``prompts`` start with, leaving at least one to each of them."""
    if not prompts:
        return ()
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    shared = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
    return tuple(column[0] for column in shared)


def pack_prompts(
    prompts: Sequence[Sequence[int]],
    *,
    prefix: Sequence[int] = (),
    bucket: int = 1,
    pad_id: int = 0,
    limit: int | None = None,
) -> Prompts:
    """Put prompts into arrays: the shared prefix once, the rest padded on the left.

    Args:
        prompts: token ids.
        prefix: tokens that every prompt starts with.
        bucket: the padded length is a multiple of it, so that batches of similar
            prompts share a compiled program.
        pad_id: fills the padding; never seen by attention.
        limit: longest prompt in tokens that leaves room for the completion.

    Raises:
        ValueError: no prompt, or one that is empty, too long, or does not start with
            ``prefix``.
    """
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt, got none.")
    start = len(prefix)
    for i, prompt in enumerate(prompts):
        if len(prompt) <= start or tuple(prompt[:start]) != tuple(prefix):
            raise ValueError(
                f"`prompts[{i}]` must start with the common prefix of {start} tokens "
                f"and go on after it, got {len(prompt)} tokens."
            )
        if limit is not None and len(prompt) > limit:
            raise ValueError(
                f"`prompts[{i}]` must have at most {limit} tokens to leave room for "
                f"the completion in the model's context, got {len(prompt)}; shorten "
                "the prompt or `max_new_tokens`."
            )
    lengths = np.array([len(p) - start for p in prompts], np.int32)
    width = -(-int(lengths.max()) // bucket) * bucket
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - (len(prompt) - start) :] = prompt[start:]
    return Prompts(np.array(prefix, np.int32), tokens, lengths)

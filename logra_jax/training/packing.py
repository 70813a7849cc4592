"""Responses of any length packed into rows of a fixed number of tokens, on the host.

A row holds whole responses one after the other, each prompt (less what is common to
all) with its completion; a segment number says which token belongs to which. Tokens,
not padding, then fill a microbatch, and its shape does not hang on the lengths.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

_PADDING = -2  # segments of padding: from here down, each token its own


class PackedRows(NamedTuple):
    """Rows of tokens, and the tokens to predict in each, from the left.

    Leading axes are (devices, rows) of a batch, (devices,) of one microbatch.
    """

    tokens: Int[Array, "*rows time"]
    positions: Int[Array, "*rows time"]  # within the response; after the prefix
    segments: Int[Array, "*rows time"]  # number of the response in its row
    column: Int[Array, "*rows time"]  # of the token before the one to predict
    target: Int[Array, "*rows time"]  # which token that is
    mask: Bool[Array, "*rows time"]  # is there one to predict
    logprob: Float[Array, "*rows time"]  # the engine's
    response: Int[Array, "*rows time"]  # the row of the batch it comes from
    place: Int[Array, "*rows time"]  # and which token of that row's completion it is
    targets: Int[Array, "*rows"]  # to predict in the row; most of all devices


class Packed(NamedTuple):
    """A batch in rows, those of each device that hold tokens first."""

    rows: PackedRows
    count: Int32[Array, ""]  # pyright: ignore  rows of each device that hold tokens

    def microbatch(self, index: int | Array) -> PackedRows:
        """One row of every device."""
        return jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, index, axis=1, keepdims=False),
            self.rows,
        )


class Fields(NamedTuple):
    """A batch as the engine packed it; see :class:`Batch`."""

    prompts: Int[np.ndarray, "batch suffix"]
    prompt_lengths: Int[np.ndarray, " batch"]
    completions: Int[np.ndarray, "batch new"]
    mask: Bool[np.ndarray, "batch new"]
    logprobs: Float[np.ndarray, "batch new"]


def pack(fields: Fields, row_tokens: int, devices: int = 1) -> Packed:
    """Put responses into rows, the longest first, each where it fits first.

    The last token of a completion is predicted and never read. A response without a
    token to predict is left out.

    Args:
        fields: the responses.
        row_tokens: tokens of a row.
        devices: that the rows are dealt to, one after the other.

    Returns:
        Rows of shape (devices, :func:`most_rows`, row_tokens): it depends on the shape
        of ``fields`` alone.

    Raises:
        ValueError: a response does not fit into a row.
    """
    last = np.where(fields.mask, np.arange(fields.mask.shape[1]), -1).max(axis=1)
    lengths = np.where(last >= 0, fields.prompt_lengths + last, 0)
    check_row("The longest response", int(lengths.max()), row_tokens)
    placed = first_fit(lengths, row_tokens)
    batch, suffix = fields.prompts.shape
    longest = suffix + fields.mask.shape[1] - 1
    most = most_rows(batch, longest, row_tokens, devices)
    rows = _empty((devices, most, row_tokens))
    for index, responses in enumerate(placed):
        where = index % devices, index // devices
        _fill(jax.tree.map(lambda a, at=where: a[at], rows), fields, responses, lengths)
    filled = rows.mask.sum(axis=-1).max(axis=0, keepdims=True)
    rows = rows._replace(targets=np.repeat(filled.astype(np.int32), devices, axis=0))
    count: Any = np.array(-(-len(placed) // devices), np.int32)
    return Packed(rows, count)


def first_fit(lengths: Int[np.ndarray, " batch"], size: int) -> list[list[int]]:
    """Indices by row: first-fit decreasing; those of length 0 are in none.

    At most 11/9 of the fewest rows possible, and 6/9 (Dosa, 2007).
    """
    rows: list[list[int]] = []
    free = np.full(len(lengths), size)
    for index in np.argsort(-lengths, kind="stable"):
        if lengths[index] == 0:
            break
        row = int(np.argmax(free >= lengths[index]))
        free[row] -= lengths[index]
        if row == len(rows):
            rows.append([])
        rows[row].append(int(index))
    return rows


def most_rows(batch: int, longest: int, row_tokens: int, devices: int = 1) -> int:
    """Rows of each device that are enough for any ``batch`` responses.

    First fit opens a row when no other has room for as much as the ``longest``: all
    but the last hold as many responses as fit at that length.
    """
    fit = max(1, row_tokens // longest)
    return -(-batch // (fit * devices))


def check_row(what: str, longest: int, row_tokens: int) -> None:
    """Refuse responses that are longer than a row.

    Args:
        what: is that long, to begin the sentence with.
        longest: tokens of it, less the prefix and the last token.
        row_tokens: of a row.

    Raises:
        ValueError: they are.
    """
    if longest > row_tokens:
        raise ValueError(
            f"{what} must fit into `train.microbatch_tokens` ({row_tokens}), got "
            f"{longest} tokens; raise it, or lower `rollout.max_new_tokens`."
        )


def _empty(shape: tuple[int, int, int]) -> PackedRows:
    padding = _PADDING - np.arange(shape[-1], dtype=np.int32)
    # numpy's, until they are put on a device
    arrays: dict[str, Any] = {
        name: np.zeros(shape, np.int32)
        for name in ("tokens", "positions", "column", "target", "response", "place")
    }
    arrays |= {
        "segments": np.broadcast_to(padding, shape).copy(),
        "mask": np.zeros(shape, bool),
        "logprob": np.zeros(shape, np.float32),
        "targets": np.zeros(shape[:-1], np.int32),
    }
    return PackedRows(**arrays)


def _fill(
    row: PackedRows,
    fields: Fields,
    responses: list[int],
    lengths: Int[np.ndarray, " batch"],
) -> None:
    """Write ``responses`` into the views of one row."""
    start, filled = 0, 0
    for segment, i in enumerate(responses):
        prompt, stop = int(fields.prompt_lengths[i]), start + int(lengths[i])
        asked = fields.prompts[i, fields.prompts.shape[1] - prompt :]
        answered = fields.completions[i, : stop - start - prompt]
        row.tokens[start:stop] = np.concatenate([asked, answered])
        row.positions[start:stop] = np.arange(stop - start)
        row.segments[start:stop] = segment
        sampled = np.flatnonzero(fields.mask[i])
        here = slice(filled, filled + len(sampled))
        row.column[here] = start + prompt - 1 + sampled
        row.target[here] = fields.completions[i, sampled]
        row.logprob[here] = fields.logprobs[i, sampled]
        row.response[here] = i
        row.place[here] = sampled
        row.mask[here] = True
        start, filled = stop, here.stop

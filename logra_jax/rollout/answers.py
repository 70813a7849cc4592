"""What comes back from SGLang's /generate: checked once, then trusted."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from logra_jax.rollout.servers import ServerError

_NOT_FINITE = "NaN happened"  # what SGLang says in place of a stop token


class AbortedError(Exception):
    """The server gave the request up: nobody is at fault, it is asked again."""


class Answer(NamedTuple):
    """One completion, checked."""

    tokens: list[int]
    logprobs: list[float]
    versions: Int32[np.ndarray, " length"]
    finished: bool


def read_answer(answer: Any, url: str, parameters: dict[str, Any]) -> Answer:
    """What a server's answer says.

    Args:
        answer: of /generate, as it was parsed.
        url: of the server, for messages.
        parameters: the `sampling_params` of the request.

    Raises:
        AbortedError: the request was aborted.
        ServerError: "refused" where every server would answer alike: one that is asked
            again would only hide it; "unreachable" where this one is at fault.
    """
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort":
            raise AbortedError(f"{url} aborted the request: {reason.get('message')}.")
        tokens = answer["output_ids"]
        logprobs, named, *_ = zip(*meta["output_token_logprobs"], strict=True)
        if (
            reason["type"] not in ("stop", "length")
            or not 1 <= len(tokens) <= parameters["max_new_tokens"]
            or not all(type(token) is int and token >= 0 for token in tokens)
            or tokens != list(named)
        ):
            raise ValueError(reason)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ServerError(
            url,
            "unreachable",
            f"{url} answered /generate with something else than a completion with "
            f"log-probabilities: {str(answer)[:200]!r}.",
        ) from None
    _check_end(url, reason, tokens, logprobs, parameters)
    versions = _versions(url, meta, len(tokens))
    return Answer(tokens, list(logprobs), versions, reason["type"] == "stop")


def _check_end(
    url: str,
    reason: dict[str, Any],
    tokens: list[int],
    logprobs: Sequence[Any],
    parameters: dict[str, Any],
) -> None:
    """The completion ends where it should, and has numbers up to there."""
    problem = None
    if reason.get("matched") == _NOT_FINITE or not all(
        isinstance(value, float | int) and math.isfinite(value) for value in logprobs
    ):
        problem = "its logits are not finite; its weights, or the dtype, are broken"
    elif reason["type"] == "length":
        if len(tokens) < parameters["max_new_tokens"]:
            problem = (
                f"it cut a completion after {len(tokens)} tokens of "
                f"{parameters['max_new_tokens']}; start it with a larger "
                "--context-length or --max-total-tokens"
            )
    elif tokens[-1] not in parameters["stop_token_ids"]:
        problem = (
            f"it ended a completion at {reason.get('matched')!r}, which is not an end "
            f"of sequence here ({parameters['stop_token_ids']}); name it in "
            "`eos_token_id` of generation_config.json, and start the server with "
            "--skip-tokenizer-init"
        )
    if problem is not None:
        raise ServerError(url, "refused", f"{url} cannot be used: {problem}.")


def _versions(url: str, meta: dict[str, Any], length: int):
    """The weights' version of each token; a server that knows none lost its weights."""
    whole = [{"version": meta.get("weight_version"), "start": 0, "end": length}]
    versions = np.full(length, -1, np.int32)
    try:
        for span in meta.get("weight_versions") or whole:
            versions[span["start"] : span["end"]] = int(span["version"])
    except (KeyError, TypeError, ValueError, OverflowError):
        versions[:] = -1
    if (versions < 0).any():
        found = meta.get("weight_versions") or meta.get("weight_version")
        raise ServerError(
            url,
            "unreachable",
            f"{url} no longer holds the trainer's weights: it must name their version, "
            f"an integer, got {found!r}; it was probably restarted.",
        )
    return versions

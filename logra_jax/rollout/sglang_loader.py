"""Runs inside an SGLang server: applies a trainer's updates to the weights it serves.

    python -m sglang.launch_server ... --custom-weight-loader \
        logra_jax.rollout.sglang_loader.apply

Needs numpy and torch, no JAX. SGLang calls :func:`apply` in every tensor-parallel rank
of the server; :mod:`logra_jax.rollout.protocol` says with what, and how the trainer
learns what came of it. Weights change in place, on the device where they lie, one
matrix at a time, to the bits of the trainer's.
"""

import dataclasses
import logging
import weakref
from typing import Any

from logra_jax.rollout.protocol import STATUS_PREFIX, Command, Status
from logra_jax.rollout.replica import Replica, together
from logra_jax.rollout.sharding import shards_of
from logra_jax.rollout.wire import Refused

_logger = logging.getLogger(__name__)

# What each model in this process holds, since it was last identified.
_replicas: "weakref.WeakKeyDictionary[Any, Replica]" = weakref.WeakKeyDictionary()


def apply(model: Any, named_tensors: list[tuple[Any, Any]]) -> None:
    """Obey one command and leave its status; never raises.

    An exception here would end the server. Whatever goes wrong becomes the status, and
    weights that may be damaged refuse every further update until they are loaded again
    and identified.

    Args:
        model: the ``torch.nn.Module`` that SGLang serves; bfloat16 or float32.
        named_tensors: one entry, from :class:`~logra_jax.rollout.protocol.Command`.
    """
    try:
        status = _obey(model, named_tensors)
    except Exception as error:
        _logger.exception("a weight update failed")
        status = Status("", "failed", f"{type(error).__name__}: {error}")
    if status.reason is not None:
        _logger.warning("weight update refused (%s): %s", status.reason, status.message)
    try:
        _leave(model, status)
    except Exception:  # the trainer finds no answer to its command
        _logger.exception("the status of a weight update could not be left")


def _obey(model: Any, named_tensors: list[tuple[Any, Any]]) -> Status:
    group = _Group()
    # The other ranks' entries hold no body. Nothing may fail on one rank alone.
    command, fault = group.from_first(lambda: _read(named_tensors))
    if command is None:
        return Status("", "command", fault)
    status = Status(command.nonce)
    replica = None
    try:
        if command.action == "identify":
            replica = _identify(model, command.known, group)
            tensors = {name: tuple(d) for name, d in replica.digests.items()}
            status = dataclasses.replace(status, tensors=tensors)
        else:
            replica = _held(model)
            replica.apply(command.body)
            _after_load(model)
    except Refused as error:
        status = dataclasses.replace(status, reason=error.reason, message=str(error))
    except ValueError as error:
        status = dataclasses.replace(status, reason="failed", message=str(error))
    if replica is None or replica.diverged:
        return status
    version = replica.version if replica.version >= 0 else None
    return dataclasses.replace(status, version=version, digest=replica.digest)


def _read(named_tensors: list[tuple[Any, Any]]) -> Command:
    if len(named_tensors) != 1:
        raise ValueError(f"A command must be one entry, got {len(named_tensors)}.")
    return Command.read(named_tensors[0][0])


def _identify(model: Any, known: dict[str, int], group: "_Group") -> Replica:
    """All weights read; of the version that ``known`` has for their digest.

    One that is not known there stays what it was: it may be another trainer that asks.
    """
    before = _replicas.pop(model, None)
    own: dict[str, Any] = {}
    together(group.gather, lambda: own.update(shards_of(model)))
    replica = Replica(own, -1, gather=group.gather)
    stays = before is not None and before.digest == replica.digest
    held = before.version if before is not None and stays else -1
    replica.version = known.get(replica.digest, held)
    _replicas[model] = replica
    return replica


def _held(model: Any) -> Replica:
    if model not in _replicas:
        raise Refused(
            "base_version",
            "The version of the weights must be known before an update, but they have "
            "not been identified since the server started, or could not be.",
        )
    return _replicas[model]


def _after_load(model: Any) -> None:
    """What SGLang's own loaders do last, and custom ones are left to do."""
    from sglang.srt.model_loader.loader import post_load_weights  # pyright: ignore[reportMissingImports]

    post_load_weights(model)


def _leave(model: Any, status: Status) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    for name in [n for n in model._buffers if n.startswith(STATUS_PREFIX)]:
        delattr(model, name)
    # On the host: SGLang hashes tensors of accelerators by kernels of their own.
    empty = torch.zeros(1, dtype=torch.uint8)
    model.register_buffer(status.name(), empty, persistent=False)


class _Group:
    """The tensor-parallel ranks of this server."""

    def __init__(self):
        from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

        self._group = get_parallel().tp_group
        self.size = self._group.world_size

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        return [value] if self.size == 1 else self._group.all_gather_object(value)

    def from_first(self, work) -> tuple[Any, str]:
        """What ``work`` gave on rank 0, or None and why it failed there."""
        result = None, ""
        if self._group.rank_in_group == 0:
            try:
                result = work(), ""
            except Exception as error:
                result = None, str(error)
        return result if self.size == 1 else self._group.broadcast_object(result)

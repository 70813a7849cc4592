"""A run of several processes: how they meet, and what one tells the others.

    start(config.distributed)            # before anything asks JAX for its devices
    rewards = from_leader(score, texts)  # called in the leader, known to all
    policy = together(load)              # called in all; fails in all if in one
    signal = agree(interrupt.number)     # the largest of all processes'
    if is_leader():
        ...                              # write files, show rows

Every process must make the same calls in the same order. With one process they are what
they look like, and cost nothing.

An error inside :func:`from_leader` or :func:`together` is everyone's. After any other
in one process the rest wait for what will not come: JAX ends them 30 s after it. It
ends them after 100 s where a process was killed, or as soon as that is seen: at once
where it led, and on CPUs.
"""

import pickle
import socket
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from logra_jax.training.schema_distributed import DistributedConfig

Tree = TypeVar("Tree")
T = TypeVar("T")
P = ParamSpec("P")

_SMALLEST_MESSAGE = 4096  # bytes: what is said each step has one size, compiled once
# Seconds that the first process to end waits for the others. They end together, unless
# one of them failed alone.
_SHUTDOWN = 30


def start(config: DistributedConfig) -> None:
    """Meet the other processes of the run; nothing where there are none.

    JAX ends the process where they do not come within 300 s.

    Raises:
        ValueError: no cluster manager that JAX knows says who and where they are, or
            there is no such host or no such port free.
    """
    if not config.enabled or jax.distributed.is_initialized():
        return
    # JAX would take SIGTERM for itself; a run stops for it as for SIGINT.
    jax.config.update("jax_enable_preemption_service", False)
    if config.coordinator is not None:
        _check_host(config.coordinator)
        if config.process == 0:
            _check_port(config.coordinator)
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            config.process,
            shutdown_timeout_seconds=_SHUTDOWN,
        )
    except ValueError as error:
        raise ValueError(
            "`distributed.coordinator`, `processes` and `process` must be given where "
            "neither SLURM, Kubernetes nor Open MPI gives them, got null: "
            f"{' '.join(str(error).split())}"
        ) from None


def _check_host(address: str) -> None:
    """Find the host at once; JAX would try for minutes, and end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise ValueError(
            "`distributed.coordinator` must name the host of process 0, got "
            f"{address!r}: {error.strerror}; give a name or number that every host "
            "knows it by."
        ) from None


def _check_port(address: str) -> None:
    """See that process 0 can listen; JAX would raise without a name, or crash."""
    try:
        socket.create_server(("", int(address.rpartition(":")[2]))).close()
    except OSError as error:
        raise ValueError(
            "`distributed.coordinator` must be a free port of the host of process 0, "
            f"got {address!r}: {error.strerror}; choose another port, or stop the run "
            "that has it."
        ) from None


def is_leader() -> bool:
    """Whether this process is the one that writes files, shows rows and scores."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """The largest of all processes' values: a flag is true if it is for any.

    All wait for each other.

    Args:
        value: of 32 bits.
    """
    if jax.process_count() == 1:
        return value
    # What goes to the devices here is a few bytes.
    with jax.transfer_guard("allow"):
        values = multihost_utils.process_allgather(np.array([value], np.int32))
    return int(values.max())


def together(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``make`` gives in this process, once it has given something in all.

    Raises:
        Exception: its own.
        ValueError: it failed in another process.
    """
    if jax.process_count() == 1:
        return make(*args, **kwargs)
    try:
        made = make(*args, **kwargs)
    except Exception:
        agree(True)
        raise
    if agree(False):
        raise ValueError(
            "Another process of the run failed here; its own output says why."
        )
    return made


def from_leader(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``make`` gives in the leader, which alone calls it, in every process.

    Raises:
        Exception: its own, in the leader; elsewhere, a ValueError or a RuntimeError
            that says the same.
    """
    if jax.process_count() == 1:
        return make(*args, **kwargs)
    if not is_leader():
        made, failure = pickle.loads(_from_leader(b""))
        if failure is not None:
            kind, message = failure
            raise kind(message)
        return made
    try:
        made = make(*args, **kwargs)
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        _from_leader(pickle.dumps((None, (kind, str(error)))))
        raise
    _from_leader(pickle.dumps((made, None)))
    return made


def _from_leader(message: bytes) -> bytes:
    """The leader's message, padded."""
    room = max(_SMALLEST_MESSAGE, 1 << len(message).bit_length())
    room = int(broadcast(np.array(room, np.int32)))
    padded = np.zeros(room, np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    return broadcast(padded).tobytes()


def broadcast(tree: Tree) -> Tree:
    """The leader's numpy arrays and numbers, in every process, bit for bit.

    Args:
        tree: of arrays, with the same shapes and dtypes in every process; what the
            others hold does not matter. A number comes back as an array of no
            dimensions.
    """
    if jax.process_count() == 1:
        return tree
    # JAX turns 64 bits into 32: bytes go as they are.
    arrays = jax.tree.map(np.asarray, tree)
    as_bytes = jax.tree.map(lambda a: np.frombuffer(a.tobytes(), np.uint8), arrays)
    with jax.transfer_guard("allow"):
        found = multihost_utils.broadcast_one_to_all(as_bytes, is_source=is_leader())
    return jax.tree.map(
        lambda got, like: np.asarray(got).view(like.dtype).reshape(like.shape),
        found,
        arrays,
    )

"""A run of several processes: how they meet, and what one tells the others.

    start(config.distributed)       # before anything asks JAX for its devices
    if is_leader():
        ...                         # write files, show rows
    values = broadcast(rewards)     # the leader's
    stop = agree(interrupted)       # True for all as soon as it is for one

Every process must make the same calls in the same order. With one process they are what
they look like, and cost nothing.
"""

from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from logra_jax.training.schema_distributed import DistributedConfig

Tree = TypeVar("Tree")


def start(config: DistributedConfig) -> None:
    """Meet the other processes of the run; nothing where there are none.

    Raises:
        ValueError: no cluster manager that JAX knows says who and where they are.
    """
    if not config.enabled or jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(config.coordinator, config.processes, config.process)
    except ValueError as error:
        raise ValueError(
            "`distributed.coordinator`, `processes` and `process` must be given where "
            "neither SLURM, Kubernetes nor Open MPI gives them, got null: "
            f"{' '.join(str(error).split())}"
        ) from None


def is_leader() -> bool:
    """Whether this process is the one that writes files, shows rows and scores."""
    return jax.process_index() == 0


def agree(flag: bool) -> bool:
    """Whether it is true for any process; all wait for each other."""
    if jax.process_count() == 1:
        return bool(flag)
    flags = np.array([flag], np.int32)
    # What goes to the devices here is a few bytes.
    with jax.transfer_guard("allow"):
        return bool(multihost_utils.process_allgather(flags).any())


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

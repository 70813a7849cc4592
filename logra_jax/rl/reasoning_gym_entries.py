"""reasoning-gym's entries, the same in every process that asks for them.

Some of its data sets go through sets of texts, whose order Python changes from process
to process (PYTHONHASHSEED), and one counts how often it was asked. A resumed run, or
another host's process, would get other questions. So entries are made in a process of
their own, where the order is fixed.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Entry = dict[str, Any]


class Order(NamedTuple):
    """What is asked of one data set."""

    name: str
    options: Mapping[str, Any]
    size: int  # entries
    seed: int


def make_entries(orders: Sequence[Order]) -> list[list[Entry]]:
    """The entries of each order: a function of the orders alone.

    Raises:
        ValueError: a data set refuses its options.
        RuntimeError: the process that makes them died.
    """
    code = f"from {__name__} import _serve; _serve()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ
        | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        input=pickle.dumps([tuple(order) for order in orders]),
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"the process that makes reasoning-gym's questions ended with status "
            f"{done.returncode}: what it said is above"
        )
    made = pickle.loads(done.stdout)
    if isinstance(made, str):
        raise ValueError(made)
    return made


def _serve() -> None:
    """The life of that process: orders in, their entries or a complaint out."""
    orders = [Order(*order) for order in pickle.load(sys.stdin.buffer)]
    # What a data set prints is not for our parent.
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        try:
            made: Any = [_make(order) for order in orders]
        except ValueError as error:
            made = str(error)
        pickle.dump(made, out)


def _make(order: Order) -> list[Entry]:
    import reasoning_gym

    name, options, size, seed = order
    try:
        data_set = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
        return [data_set[index] for index in range(size)]
    # The data sets check their options with `assert`, or find out while generating.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"`options` of {name} were refused, got {options}: {reason}"
        ) from error

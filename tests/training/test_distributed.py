"""Two processes of two CPU devices each, which talk through gloo on this machine."""

import os
import subprocess
import sys

import numpy as np
import pytest

from logra_jax.rollout.serve import free_port
from logra_jax.training.distributed import (
    agree,
    broadcast,
    from_leader,
    is_leader,
    start,
    together,
)
from logra_jax.training.schema_distributed import DistributedConfig

WORKER = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from logra_jax.training.distributed import (
    agree, broadcast, from_leader, is_leader, start, together
)
from logra_jax.training.schema_distributed import DistributedConfig

rank = int(sys.argv[2])
start(DistributedConfig(
    enabled=True, coordinator=sys.argv[1], processes=2, process=rank
))
assert (jax.device_count(), jax.local_device_count()) == (4, 2)
assert is_leader() == (rank == 0)
assert [agree(rank == 0), agree(rank == 1), agree(False)] == [True, True, False]
assert agree(2**31 - 1 - rank) == 2**31 - 1
sent = {
    "values": np.array([0.25, -1.5], np.float32) + 7 * rank,
    "counts": np.array([3, 2**31 - 1 - rank], np.int32),
    "mask": np.array([True, rank == 0]),
    "share": 0.1 + rank,
}
got = broadcast(sent)
assert got["values"].tolist() == [0.25, -1.5]
assert got["counts"].tolist() == [3, 2**31 - 1]
assert got["mask"].tolist() == [True, True]
assert got["share"] == 0.1  # of 64 bits, all of them
assert all(got[name].dtype == np.asarray(sent[name]).dtype for name in sent)


def fail(kind, message):
    raise kind(message)


def told(f, *args):
    try:
        f(*args)
    except Exception as error:
        return type(error).__name__, str(error)


called = []
said = from_leader(lambda n: called.append(1) or {"n": n, "long": "x" * 10_000}, rank)
assert said == {"n": 0, "long": "x" * 10_000}
assert called == [1] * (rank == 0)
assert told(from_leader, fail, ValueError, "bad") == ("ValueError", "bad")
raised = told(from_leader, fail, OSError, "no room")
assert raised == ("RuntimeError" if rank else "OSError", "no room")
assert together(lambda: rank) == rank
for failing in (0, 1):
    failed = told(together, lambda: rank == failing and fail(KeyError, "mine"))
    assert failed[0] == ("KeyError" if rank == failing else "ValueError")
assert agree(False) == 0  # they are in step still
mesh = jax.make_mesh((4,), ("x",))
whole = np.arange(8.0, dtype=np.float32)
x = jax.make_array_from_callback(
    (8,), NamedSharding(mesh, PartitionSpec("x")), lambda at: whole[at]
)
assert float(jax.jit(jnp.sum)(x)) == 28.0
print("met")
"""


def test_two_processes_meet_agree_and_hear_the_leader():
    flags = "--xla_force_host_platform_device_count=2"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(rank)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    for process, (out, err) in zip(processes, said, strict=True):
        assert process.returncode == 0, err
        assert out.endswith("met\n")


def test_one_process_leads_agrees_with_itself_and_waits_for_nobody():
    start(DistributedConfig())
    assert is_leader()
    assert agree(True)
    assert not agree(False)
    values = np.ones(3, np.float32)
    assert broadcast({"values": values})["values"] is values
    assert from_leader(dict, values=values)["values"] is values
    assert together(dict, values=values)["values"] is values


@pytest.mark.parametrize(
    ("coordinator", "message"),
    [
        (None, "must be given where neither SLURM, Kubernetes nor Open MPI"),
        ("no-host.invalid:2345", "must name the host of process 0, got 'no-host"),
        ("127.0.0.1:{taken}", "must be a free port of the host of process 0, got"),
    ],
)
def test_processes_that_cannot_meet_are_told_why(coordinator: str | None, message: str):
    """In a process of its own: JAX takes no address once it has computed."""
    code = (
        "import socket\n"
        "from logra_jax.training.distributed import start\n"
        "from logra_jax.training.schema_distributed import DistributedConfig\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "taken = listener.getsockname()[1]\n"
        f"given = {coordinator!r} and dict(processes=1, process=0,\n"
        f"    coordinator={coordinator!r}.format(taken=taken))\n"
        "try:\n    start(DistributedConfig(enabled=True, **given or {}))\n"
        "except ValueError as error:\n    print(error)\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI"))}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env=env, text=True, capture_output=True, check=True)
    assert message in out.stdout
    assert out.stdout.count("\n") == 1


BAD = [
    ({"process": 0}, "`distributed.enabled` must be true"),
    ({"enabled": True, "processes": 2}, "`distributed.coordinator` must be given"),
    (
        {"enabled": True, "coordinator": "a", "processes": 2, "process": 0},
        "must be `HOST:PORT`, got 'a'",
    ),
    (
        {"enabled": True, "coordinator": "a:1", "processes": 2, "process": 2},
        r"less than `distributed.processes` \(2\), got 2",
    ),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_half_a_description_is_refused(values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**values)

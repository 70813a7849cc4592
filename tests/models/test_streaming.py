"""Weights into arrays block by block: the same bits as by way of numpy, little memory.

The two ways of filling arrays (the host's own memory; any other device's) are both run
on CPU devices, whatever machine the tests run on.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logra_jax.models import streaming
from logra_jax.models.streaming import Wanted, load_arrays
from logra_jax.models.weight_files import WeightFiles, write_weights
from logra_jax.rollout.serve import free_port

LAYERS, OUT, IN = 3, 148, 20


@pytest.fixture(params=["host", "devices"], autouse=True)
def way(request, monkeypatch):
    """Both ways, in blocks that divide nothing evenly: 7 rows of bfloat16."""
    monkeypatch.setattr(streaming, "_on_host", lambda _: request.param == "host")
    monkeypatch.setattr(streaming, "BLOCK_BYTES", 7 * IN * 2 + 1)
    monkeypatch.setattr(streaming, "_EXPECTED", 2)
    return request.param


def written(directory: Path, dtype: str, shard_bytes: int = 4000) -> dict:
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(LAYERS):
        tensors[f"{i}.matrix"] = rng.normal(size=(OUT, IN)).astype(dtype)
        tensors[f"{i}.vector"] = rng.normal(size=(OUT,)).astype(dtype)
    tensors["table"] = rng.normal(size=(OUT, IN)).astype(dtype)
    write_weights(tensors.items(), directory, shard_bytes=shard_bytes)
    return tensors


def wanted(dtype: str, mesh: Mesh | None = None) -> dict[str, Wanted]:
    def at(*axes):
        return None if mesh is None else NamedSharding(mesh, PartitionSpec(*axes))

    matrices = [f"{i}.matrix" for i in range(LAYERS)]
    vectors = [f"{i}.vector" for i in range(LAYERS)]
    kind = np.dtype(dtype)
    return {
        "kernels": Wanted(
            matrices, True, True, (LAYERS, IN, OUT), kind, at(None, "y", "x")
        ),
        "biases": Wanted(vectors, True, False, (LAYERS, OUT), kind, at(None, "x")),
        "embedding": Wanted(["table"], False, False, (OUT, IN), kind, at("x", None)),
        "head": Wanted(["table"], False, True, (IN, OUT), kind, at(None, ("x", "y"))),
        "everywhere": Wanted(["table"], False, False, (OUT, IN), kind, at()),
    }


def expected(tensors: dict, dtype: str) -> dict[str, np.ndarray]:
    matrices = np.stack([tensors[f"{i}.matrix"] for i in range(LAYERS)])
    vectors = np.stack([tensors[f"{i}.vector"] for i in range(LAYERS)])
    table = tensors["table"]
    arrays = {
        "kernels": matrices.swapaxes(1, 2),
        "biases": vectors,
        "embedding": table,
        "head": table.T,
        "everywhere": table,
    }
    return {name: value.astype(dtype) for name, value in arrays.items()}


def check_equal(got: dict[str, jax.Array], want: dict[str, np.ndarray]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        bits = f"u{value.dtype.itemsize}"
        np.testing.assert_array_equal(
            np.asarray(got[name]).view(bits), value.view(bits), err_msg=name
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "float64"])
def test_arrays_hold_the_bits_that_numpy_would_put_there(tmp_path, stored, dtype):
    tensors = written(tmp_path, stored)
    with WeightFiles(tmp_path) as files:
        got = load_arrays(files, wanted(dtype))
    check_equal(got, expected(tensors, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_device_holds_its_part(tmp_path, dtype):
    tensors = written(tmp_path, "bfloat16")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    asked = wanted(dtype, mesh)
    with WeightFiles(tmp_path) as files:
        got = load_arrays(files, asked)
    check_equal(got, expected(tensors, dtype))
    for name, array in got.items():
        assert array.sharding == asked[name].sharding


def test_arrays_are_jax_s_own(tmp_path):
    """Lent memory would be copied when it is donated, which training does."""
    written(tmp_path, "float32")
    with WeightFiles(tmp_path) as files:
        kernels = load_arrays(files, wanted("float32"))["kernels"]
    before = kernels.unsafe_buffer_pointer()
    after = jax.jit(lambda x: x.at[0, 0, 0].set(1), donate_argnums=0)(kernels)
    assert after.unsafe_buffer_pointer() == before
    assert not after.committed


def test_nothing_is_read_of_a_checkpoint_that_lacks_a_tensor(tmp_path, monkeypatch):
    written(tmp_path, "float32")
    asked = wanted("float32")
    asked["other"] = Wanted(["lost"], False, False, (3, 4), np.dtype("float32"), None)
    monkeypatch.setattr(WeightFiles, "read_rows", None)
    with (
        WeightFiles(tmp_path) as files,
        pytest.raises(ValueError, match=r"`lost` is missing from the weights"),
    ):
        load_arrays(files, asked)


def test_a_file_that_shrinks_while_it_is_read_is_one_sentence(tmp_path):
    written(tmp_path, "float32", shard_bytes=10**9)
    file = tmp_path / "model.safetensors"
    with WeightFiles(tmp_path) as files:
        asked = wanted("float32")
        files.find("table")
        file.write_bytes(file.read_bytes()[:3000])
        with pytest.raises(ValueError, match="cannot be read: it ends too early"):
            load_arrays(files, asked)


def test_the_host_holds_a_few_blocks_beyond_the_arrays(tmp_path, way):
    """A stack of 200 MB from tensors of 25 MB; measured in a process of its own."""
    tensor = np.ones((2048, 3072), np.float32).astype(ml_dtypes.bfloat16)
    tensors = ((str(i), tensor) for i in range(16))
    write_weights(tensors, tmp_path, shard_bytes=10**8)
    code = f"""
import resource, numpy as np, jax, jax.numpy as jnp
from pathlib import Path
from logra_jax.models import streaming
from logra_jax.models.weight_files import WeightFiles
streaming._on_host = lambda _: {way == "host"}
{LOAD_TWICE}
"""
    dtype = "bfloat16" if way == "host" else "float32"
    beyond = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(beyond.stdout) < 4 * tensor.nbytes


LOAD_TWICE = """
import sys
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
dtype = np.dtype(jnp.dtype(sys.argv[2]))
want = {"w": streaming.Wanted([str(i) for i in range(16)], True, True,
                              (16, 3072, 2048), dtype, None)}
with WeightFiles(Path(sys.argv[1])) as files:
    one = {"w": streaming.Wanted(["0"], False, True, (3072, 2048), dtype, None)}
    jax.block_until_ready(streaming.load_arrays(files, one))
    before = peak()
    arrays = jax.block_until_ready(streaming.load_arrays(files, want))
print(peak() - before - arrays["w"].nbytes)
"""


EACH_PROCESS = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rank, port, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from logra_jax.models import streaming
from logra_jax.models.weight_files import WeightFiles
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
wanted = streaming.Wanted(["0.matrix", "1.matrix"], True, True, (2, 20, 148),
                          np.dtype("float32"), NamedSharding(mesh, P(None, "y", "x")))
streaming._on_host = lambda _: sys.argv[4] == "host"
with WeightFiles(directory) as files:
    whole = np.stack([files.read(name).T for name in wanted.names])
    array = streaming.load_arrays(files, {"w": wanted})["w"]
assert not array.is_fully_addressable and len(array.addressable_shards) == 2
for shard in array.addressable_shards:
    assert shard.data.shape == (2, 10, 74)
    np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
print("equal")
"""


def test_each_of_two_processes_reads_the_parts_of_its_devices(tmp_path, way):
    written(tmp_path, "float32")
    port = str(free_port())
    flags = "--xla_force_host_platform_device_count=2"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EACH_PROCESS, str(rank), port, str(tmp_path), way],
            env=os.environ | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert out == "equal\n", err
    finally:
        for process in processes:
            process.kill()
            process.wait()

"""NVIDIA GPUs to compile for, on machines that have none.

JAX's CUDA plugin compiles for a GPU that it is only told about: what is told here are
the data sheets' figures. It takes NVIDIA's assembler, but no driver. Two of XLA's
passes would try kernels out on the GPU itself, and are left out: products are cuBLAS's,
where a run may find Triton's to be faster.
"""

import os
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

# Of `Lowered.compile`.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

_PER_HOST = 8  # GPUs
_KIB, _GIB = 2**10, 2**30


class _Chip(NamedTuple):
    """What XLA asks of a chip."""

    capability: tuple[int, int]
    shared: int  # KiB of a multiprocessor
    threads: int  # of a multiprocessor
    lanes: int = 128  # float32 lanes of a multiprocessor
    features: str = "NONE"  # XLA's word for those that no later chip has (sm_90a)


_TURING = _Chip((7, 5), 64, 1024, 64)
_AMPERE = _Chip((8, 0), 164, 2048, 64)
_GAMING_AMPERE = _Chip((8, 6), 100, 1536)
_ADA = _Chip((8, 9), 100, 1536)
_HOPPER = _Chip((9, 0), 228, 2048, features="ACCELERATED_FEATURES")
_BLACKWELL = _Chip((10, 0), 228, 2048, features="ACCELERATED_FEATURES")
_GAMING_BLACKWELL = _Chip((12, 0), 100, 1536)


class Gpu(NamedTuple):
    """A card by its data sheet."""

    name: str
    chip: _Chip
    cores: int  # multiprocessors
    cache: int  # MiB, L2
    clock: float  # GHz
    bandwidth: int  # GB/s
    memory: float  # GiB

    def describe(self) -> str:
        """XLA's ``GpuTargetConfigProto``, as text."""
        chip = self.chip
        major, minor = chip.capability
        optin = chip.shared - (major >= 8)  # a KiB of each block's is the system's
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_block_optin: {optin * _KIB}
  shared_memory_per_core: {chip.shared * _KIB}
  threads_per_core_limit: {chip.threads}
  core_count: {self.cores}
  fpus_per_core: {chip.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth * 10**9}
  l2_cache_size: {self.cache * _KIB**2}
  clock_rate_ghz: {self.clock}
  device_memory_size: {int(self.memory * _GIB)}
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {chip.features}
  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{self.name}"
"""


# By their names in `logra_jax.study.plan.CARDS`.
GPUS = {
    "T4-16GB": Gpu("NVIDIA T4", _TURING, 40, 4, 1.59, 320, 15.0),
    "RTX4080-16GB": Gpu("NVIDIA RTX 4080", _ADA, 76, 64, 2.51, 717, 15.99),
    "L4-24GB": Gpu("NVIDIA L4", _ADA, 58, 48, 2.04, 300, 22.5),
    "RTX4090-24GB": Gpu("NVIDIA RTX 4090", _ADA, 128, 72, 2.52, 1008, 23.99),
    "RTX3090-24GB": Gpu("NVIDIA RTX 3090", _GAMING_AMPERE, 82, 6, 1.7, 936, 24.0),
    "RTX5090-32GB": Gpu(
        "NVIDIA RTX 5090", _GAMING_BLACKWELL, 170, 96, 2.41, 1792, 31.8
    ),
    "A100-40GB": Gpu("NVIDIA A100 40GB", _AMPERE, 108, 40, 1.41, 1555, 39.59),
    "L40S-48GB": Gpu("NVIDIA L40S", _ADA, 142, 96, 2.52, 864, 44.99),
    "H100-80GB": Gpu("NVIDIA H100", _HOPPER, 132, 50, 1.98, 3350, 79.65),
    "A100-80GB": Gpu("NVIDIA A100 80GB", _AMPERE, 108, 40, 1.41, 2039, 80.0),
    "H200-141GB": Gpu("NVIDIA H200", _HOPPER, 132, 50, 1.98, 4800, 140.4),
    "B200-180GB": Gpu("NVIDIA B200", _BLACKWELL, 148, 126, 1.96, 8000, 178.4),
}


def compile_only_devices(gpu: Gpu, count: int) -> list[Any]:
    """So many of a card, that programs can be compiled for but not run on.

    Args:
        gpu: of ``GPUS``.
        count: of them; beyond 8, hosts of 8.

    Raises:
        ValueError: JAX's CUDA plugin is not installed, or does not fit this jaxlib; or
            it finds no assembler.
    """
    hosts = -(-count // _PER_HOST)
    per_host = count if hosts == 1 else _PER_HOST
    # What it says of the GPU that is not here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x{hosts}x{per_host}",
            target_config=gpu.describe(),
        )
    except (NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"`--gpu` ({gpu.name}) needs JAX's CUDA plugin, of jaxlib's version: `pip "
            f"install jax-cuda12-plugin=={metadata.version('jaxlib')}`; without it JAX "
            f"says: {reason}."
        ) from error
    devices = list(topology.devices)[:count]
    _check_assembler(gpu, devices[0])
    return devices


def _check_assembler(gpu: Gpu, device: Any) -> None:
    """By the smallest of programs, before one that takes long."""
    there = SingleDeviceSharding(device)
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=there)
    try:
        jax.jit(jnp.negative).lower(number).compile(COMPILER_OPTIONS)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"`--gpu` ({gpu.name}) needs NVIDIA's assembler, ptxas: `pip install "
            f"nvidia-cuda-nvcc-cu12`; without it XLA says: {reason}."
        ) from error


def check_flash() -> None:
    """Refuse ``model.attention=flash`` where its kernel cannot be traced.

    Raises:
        ValueError: cuDNN is not installed.
    """
    some = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    kernel = partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(kernel, some, some, some)
    except RuntimeError as error:
        raise ValueError(
            "`model.attention` must be auto, full or chunked for `--gpu` without "
            "cuDNN, got 'flash'; use auto, or `pip install nvidia-cudnn-cu12`."
        ) from error

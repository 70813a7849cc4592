"""The bars of memory, by the compiler of the GPUs that a run would have."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds

EVERY_CARD = """
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from logra_jax.study.gpu_target import COMPILER_OPTIONS, GPUS, compile_only_devices

jax.config.update("jax_platforms", "cpu")
for gpu in GPUS.values():
    device = compile_only_devices(gpu, 1)[0]
    there = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=there)
    lowered = jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(x)
    compiled = lowered.compile(COMPILER_OPTIONS)
    assert "__cublas" in compiled.as_text(), gpu
    assert device.device_kind == gpu.name
for count in (4, 8, 16, 24):
    devices = compile_only_devices(gpu, count)
    assert len(devices) == count
    assert len({d.process_index for d in devices}) == -(-count // 8)
"""


def run(python: str, *arguments: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [python, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def plan(python: str, *arguments: str) -> dict:
    command = ("-m", "logra_jax", "plan", "configs/plan-7b.yaml", "--json")
    return json.loads(run(python, *command, *arguments))


def test_every_card_that_can_be_named_is_one_that_xla_compiles_for(cuda_python):
    run(cuda_python, "-c", EVERY_CARD)


# Copies that only a GPU's compiler makes would show: of a head in float32 (2 GiB of the
# 7B), of all layers' kernels transposed (.9), of a gathered head's parts (1.0).
@pytest.mark.parametrize(
    ("preset", "devices", "most"),
    [
        ("qwen2.5-7b", 4, 8.0),
        ("qwen2.5-7b", 1, 18.0),
        ("qwen2.5-1.5b", 4, 2.5),
        ("qwen3.8-27b", 4, 22.0),
    ],
)
def test_a_steps_peak_stays_below_its_bar(cuda_python, preset, devices, most):
    arguments = ("--devices", str(devices), "--gpu", "h100", f"model.preset={preset}")
    result = plan(cuda_python, *arguments)
    assert result["compiled_for"] == "NVIDIA H100"
    assert result["devices"] == devices
    peaks = {kind: part["gib"]["peak"] for kind, part in result["kinds"].items()}
    assert peaks["logra"] == result["peak_gib"] <= most
    assert peaks["logra"] < peaks["lora"] < peaks["adamw"]
    assert set(result["cards"]) == {"H100-80GB"}
    assert result["fits"]["logra"]["H100-80GB"]

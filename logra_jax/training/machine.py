"""What a run goes on: `machine.json` of its directory."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import logra_jax
from logra_jax.training.paths import MACHINE_FILE, write_aside

_PACKAGES = ("jax", "flax", "optax")
_CPUINFO = Path("/proc/cpuinfo")


def write_machine(run_dir: Path) -> None:
    """Put what this process goes on into the run directory."""
    write_aside(run_dir / MACHINE_FILE, json.dumps(describe_machine()) + "\n")


def describe_machine() -> dict[str, Any]:
    """``device``, in words, and ``versions``."""
    devices = jax.local_devices()
    name = devices[0].device_kind
    if devices[0].platform == "cpu":
        device = f"{os.cpu_count()} CPU cores ({_processor()})"
    else:
        device = f"{len(devices)} x {name}" if len(devices) > 1 else name
    versions = {"python": platform.python_version()}
    # Not as a package: a source tree on the path has no metadata.
    versions["logra-jax"] = logra_jax.__version__
    versions |= {name: metadata.version(name) for name in _PACKAGES}
    return {"device": device, "versions": versions}


def _processor() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()

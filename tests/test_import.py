import os
import re
import subprocess
import sys

import pytest

import logra_jax


def run_python(code: str) -> str:
    """Standard output of `code` in a fresh interpreter."""
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_loads_nothing_heavy_and_opens_no_socket():
    code = """
import sys
used = []
sys.addaudithook(lambda event, _: event.startswith("socket.") and used.append(event))
import logra_jax, logra_jax.cli
heavy = {"jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers", "rich"}
heavy |= {"aiohttp", "sglang"}
print(sorted(heavy & set(sys.modules)), used)
"""
    assert run_python(code).split("\n")[0] == "[] []"


def test_public_names_load_neither_torch_nor_transformers():
    code = """
import sys, logra_jax
for name in logra_jax.__all__:
    getattr(logra_jax, name)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    assert run_python(code).strip() == "[]"


def test_what_runs_in_a_server_needs_no_jax():
    code = """
import sys
for name in ("jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "aiohttp"):
    sys.modules[name] = None  # importing it is an error
import logra_jax.rollout.sglang_loader
import logra_jax.rollout.sglang_start
print(sorted({"torch", "sglang", "transformers"} & set(sys.modules)))

import numpy as np
from logra_jax.algorithm.digest import digest_array, model_digest
from logra_jax.algorithm.digest import TensorDigest as Digest
from logra_jax.rollout.replica import Replica
from logra_jax.rollout.wire import Update, encode
weights = {"w": np.ones((2, 3), np.float32)}
moved = {"w": Digest("float32", (2, 3), digest_array(weights["w"]))}
update = Update(
    base_version=0, version=1, seed=0, step=0, kind="gaussian", refresh=True,
    rounding="stochastic", base_digest=model_digest(moved),
    digest=model_digest(moved), digests={"w": moved["w"].word},
    factors={"w": np.zeros((2, 5), np.int16)},
)
print(Replica(weights, 0).apply(encode(update)))
"""
    assert run_python(code).split() == ["[]", "1"]


def test_importing_the_package_costs_little_next_to_importing_jax():
    code = """
import time
start = time.perf_counter(); import jax
middle = time.perf_counter(); import logra_jax
print((time.perf_counter() - middle) / (middle - start))
"""
    assert float(run_python(code)) < 0.5


def test_every_public_name_is_listed_and_an_unknown_one_is_an_attribute_error():
    assert set(logra_jax.__all__) <= set(dir(logra_jax))
    message = re.escape("module 'logra_jax' has no attribute 'sketches'")
    with pytest.raises(AttributeError, match=message):
        logra_jax.sketches  # noqa: B018

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

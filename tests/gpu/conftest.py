"""What is compiled for GPUs that are not here, by JAX's CUDA plugin.

The environment variable `LOGRA_CUDA_PYTHON` names an interpreter that has it: that of
an environment with `pip install -e '.[train,gpu-plan]'`.
"""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Everything in this directory needs the plugin."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu_plan)


@pytest.fixture(scope="session")
def cuda_python() -> str:
    """The interpreter that has JAX's CUDA plugin."""
    python = os.environ.get("LOGRA_CUDA_PYTHON")
    if not python:
        pytest.fail(
            "LOGRA_CUDA_PYTHON must name a Python that has JAX's CUDA plugin, of an "
            "environment with `pip install -e '.[train,gpu-plan]'`.",
            pytrace=False,
        )
    return python

"""The packaged model, converted once for all tests of this folder."""

from pathlib import Path

import pytest

from logra_jax.models.packaged import packaged_model


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packaged_model("smollm2-135m-instruct", tmp_path_factory.mktemp("cache"))

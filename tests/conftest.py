"""Shared by all tests: four CPU devices, strict rank promotion, keys, a real model."""

import os
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# Before JAX is imported: tests run on the CPU, on four devices, wherever they run.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
# Threads of XLA's CPU client. A collective holds one until all devices have arrived,
# and a program may run two at once: with few threads they wait for each other.
os.environ.setdefault("NPROC", "32")

# A shell has what it starts in the background ignore Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest

# The same examples every time, and no failure because the machine was busy.
hypothesis.settings.register_profile(
    "logra", deadline=None, derandomize=True, max_examples=25
)
hypothesis.settings.load_profile("logra")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """What a module compiled goes with it.

    A compiled program holds a few of the 65,530 memory maps that Linux allows a
    process; without one, LLVM crashes.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], jax.Array]:
    """A function that gives a new PRNG key at each call; the test's name seeds them."""
    key = jax.random.key(zlib.crc32(request.node.name.encode()))

    def get() -> jax.Array:
        nonlocal key
        key, new = jax.random.split(key)
        return new

    return get


@pytest.fixture(scope="session")
def smollm2_dir(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, converted once and kept."""
    from logra_jax.models.packaged import packaged_model

    assert request.config.cache is not None
    return packaged_model("smollm2-135m-instruct", request.config.cache.mkdir("models"))

"""Shared by all tests: four CPU devices, strict rank promotion, keys, a real model.

And a tiny random Llama with the real tokenizer, and a run on it in a second or two.
"""

import json
import os
import shutil
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
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

# The same examples every time, and no failure because the machine was busy.
hypothesis.settings.register_profile(
    "logra", deadline=None, derandomize=True, max_examples=25
)
hypothesis.settings.load_profile("logra")
jax.config.update("jax_numpy_rank_promotion", "raise")


TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

CONFIG = """
model: {{path: {model}, activations: float32}}
sketch: {{rank: 4}}
kl: {{share: 0.03125}}
task: {{options: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}}
reward: {{answer: whole_text, partial: true}}  # any digit scores a little
cache_dir: {cache}
rollout: {{max_new_tokens: 3}}
train: {{steps: 4, batch: 64, microbatch: 16, eval_every: 2, checkpoint_every: 2}}
eval: {{samples: 16, batch: 64}}
"""


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


def build_tiny(smollm2_dir: Path, where: Path, **changes) -> Path:
    """A Hugging Face directory of a tiny random model with SmolLM2's tokenizer.

    Digits are made likely, so that rewards differ between responses.

    Args:
        smollm2_dir: the real model.
        where: a directory to fill; the tiny model is put beside it.
        changes: of SmolLM2's config.json, and of ``TINY``.
    """
    # Not on top: beartype is to see the library's modules before they are imported.
    from logra_jax.models.decoder import Decoder
    from logra_jax.models.hf import save_decoder
    from logra_jax.models.hf_config import read_config
    from logra_jax.models.tokenizer import ChatTokenizer

    where.mkdir(exist_ok=True)
    for file in smollm2_dir.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, where / file.name)
    config = json.loads((where / "config.json").read_text()) | TINY | changes
    (where / "config.json").write_text(json.dumps(config))
    model = Decoder(read_config(where), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tokenizer = ChatTokenizer.load(where)
    digits = np.array([tokenizer.encode(str(i))[0] for i in range(10)])
    embedding = model.embed_tokens.embedding
    embedding[...] = embedding[...].at[digits].multiply(7.0)
    return save_decoder(model, where.with_name("tiny"), source=where)


@pytest.fixture(scope="session")
def tiny_model_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer random Llama."""
    return build_tiny(smollm2_dir, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def hybrid_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 of three layers, two of them Gated DeltaNets."""
    return build_tiny(
        smollm2_dir,
        tmp_path_factory.mktemp("hybrid") / "source",
        model_type="qwen3_5_text",
        architectures=["Qwen3_5ForCausalLM"],
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
    )


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs, shared by all runs of a session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished_run(
    tiny_model_dir: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory of a finished run of the tiny model; not to be changed."""
    from logra_jax.training.config import load_config
    from logra_jax.training.loop import train

    where = tmp_path_factory.mktemp("finished")
    path = where / "tiny.yaml"
    path.write_text(CONFIG.format(model=tiny_model_dir, cache=cache_dir))
    assert train(load_config(path, [f"run_dir={where / 'run'}"])) == 0
    return where / "run"


@pytest.fixture
def finished_copy(finished_run: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(finished_run, tmp_path / "copy"))


@pytest.fixture
def tiny_config(tiny_model_dir: Path, cache_dir: Path, tmp_path: Path) -> Path:
    """A config file of a four-step run on the tiny model."""
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.format(model=tiny_model_dir, cache=cache_dir))
    return path


@pytest.fixture
def tiny_run(tiny_config: Path, tmp_path: Path) -> Callable[..., Path]:
    """Train the tiny model with overrides; the run directory."""
    from logra_jax.training.config import load_config
    from logra_jax.training.loop import train

    def run(name: str, *overrides: str) -> Path:
        where = f"run_dir={tmp_path / name}"
        assert train(load_config(tiny_config, [where, *overrides])) == 0
        return tmp_path / name

    return run

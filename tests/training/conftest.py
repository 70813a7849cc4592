"""A tiny random Llama with the real tokenizer, and a run on it in a second or two."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from logra_jax.models.decoder import Decoder
from logra_jax.models.hf import save_decoder
from logra_jax.models.hf_config import read_config
from logra_jax.models.tokenizer import ChatTokenizer

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


def build_tiny(smollm2_dir: Path, where: Path, **changes) -> Path:
    """A Hugging Face directory of a tiny random model with SmolLM2's tokenizer.

    Digits are made likely, so that rewards differ between responses.

    Args:
        smollm2_dir: the real model.
        where: a directory to fill; the tiny model is put beside it.
        changes: of SmolLM2's config.json, and of ``TINY``.
    """
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

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


@pytest.fixture(scope="session")
def tiny_model_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a two-layer random Llama, SmolLM2's tokenizer.

    Digits are made likely, so that rewards differ between responses.
    """
    source = tmp_path_factory.mktemp("source")
    for file in smollm2_dir.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, source / file.name)
    config = json.loads((source / "config.json").read_text()) | TINY
    (source / "config.json").write_text(json.dumps(config))
    model = Decoder(read_config(source), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tokenizer = ChatTokenizer.load(source)
    digits = np.array([tokenizer.encode(str(i))[0] for i in range(10)])
    embedding = model.embed_tokens.embedding
    embedding[...] = embedding[...].at[digits].multiply(7.0)
    return save_decoder(model, source.with_name("tiny"), source=source)


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

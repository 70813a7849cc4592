import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from logra_jax.models.decoder import Decoder
from logra_jax.models.presets import PRESETS, preset

# As published, in millions of parameters.
PARAMETERS = {
    "qwen2.5-0.5b": 494.03,
    "qwen2.5-1.5b": 1543.71,
    "qwen2.5-7b": 7615.62,
    "qwen2.5-math-1.5b": 1543.71,
    "qwen2.5-math-7b": 7615.62,
    "qwen3-0.6b": 596.05,
    "qwen3-1.7b": 1720.57,
    "qwen3-4b": 4022.47,
    "qwen3-8b": 8190.74,
    "qwen3.8-27b": 26895.99,
    "llama-3.2-1b": 1235.81,
    "smollm2-135m": 134.52,
    "smollm2-360m": 361.82,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_its_model(name):
    model = nnx.eval_shape(
        lambda: Decoder(preset(name), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    size = sum(np.prod(w.shape) for w in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert size / 1e6 == pytest.approx(PARAMETERS[name], abs=0.01)


def test_case_does_not_matter():
    assert preset("Qwen3-0.6B") is PRESETS["qwen3-0.6b"]


def test_an_unknown_preset_is_one_sentence_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"got 'qwen2\.5-7'; did you mean 'qwen2\.5-7b"
    ):
        preset("qwen2.5-7")
    with pytest.raises(ValueError, match=r"must be one of .*; or set `model\.path`"):
        preset("zzz")

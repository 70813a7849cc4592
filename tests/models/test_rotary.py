"""Rotary positions, plain and stretched, against transformers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.models.rotary import RopeScaling, rope_scaling, rotary_angles, rotate

HEAD_DIM, MAX_POSITIONS = 32, 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
STRETCHED = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn from max_position_embeddings": YARN | {"factor": None},
    "yarn, its magnitude": YARN | {"attention_factor": 0.75},
    "yarn by DeepSeek": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, other turns": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn within features": YARN | {"truncate": False},
}


def test_rotary_scores_depend_on_distance_alone(getkey):
    q = jnp.tile(jax.random.normal(getkey(), (1, 1, 1, 8)), (1, 40, 1, 1))
    k = jnp.tile(jax.random.normal(getkey(), (1, 1, 1, 8)), (1, 40, 1, 1))
    angles = rotary_angles(jnp.arange(40)[None], 8, 100.0)
    scores = jnp.einsum("bthd,bshd->ts", rotate(q, angles), rotate(k, angles))
    for distance in (0, 3, 17):
        assert np.ptp(np.diagonal(scores, -distance)) < 1e-4
    assert np.ptp(scores[:, 0]) > 0.1


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("name", STRETCHED)
def test_stretched_frequencies_are_those_of_transformers(name, theta):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = STRETCHED[name]
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=rope | {"rope_theta": theta},
    )
    kind = rope["rope_type"]
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, device=None)
    scaling = rope_scaling(rope, MAX_POSITIONS)
    assert scaling is not None
    got = rotary_angles(jnp.ones((1, 1), jnp.int32), HEAD_DIM, theta, scaling)[0, 0]
    np.testing.assert_allclose(got, expected.numpy(), rtol=2e-6)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-6)
    plain = rotary_angles(jnp.ones((1, 1), jnp.int32), HEAD_DIM, theta)[0, 0]
    assert not np.allclose(got, plain, rtol=1e-3)


def test_the_fastest_stay_and_the_slowest_are_divided():
    at_one = jnp.ones((1, 1), jnp.int32)
    plain = rotary_angles(at_one, HEAD_DIM, 1e6)[0, 0]
    for rope in (LLAMA3, YARN):
        scaling = rope_scaling(rope, MAX_POSITIONS)
        got = rotary_angles(at_one, HEAD_DIM, 1e6, scaling)[0, 0]
        np.testing.assert_allclose(got[0], plain[0])
        np.testing.assert_allclose(got[-1], plain[-1] / rope["factor"], rtol=1e-6)


def test_a_magnitude_multiplies_what_is_rotated(getkey):
    x = jax.random.normal(getkey(), (2, 3, 4, HEAD_DIM))
    angles = rotary_angles(jnp.arange(3)[None], HEAD_DIM, 100.0)
    np.testing.assert_allclose(
        rotate(x, angles, 1.25), 1.25 * rotate(x, angles), rtol=1e-6, atol=1e-6
    )


def test_what_is_not_stretched_is_none():
    assert rope_scaling({}, 64) is None
    assert rope_scaling({"rope_type": "default", "rope_theta": 1e4}, 64) is None
    # the older spelling of the kind
    assert rope_scaling({"type": "linear", "factor": 2}, 64) == RopeScaling(
        "linear", 2.0, 64
    )


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "`rope_scaling` .* got 'dynamic'"),
        ({"rope_type": "longrope"}, "must be one of .*'llama3'.* got 'longrope'"),
        ({"rope_type": "linear"}, "`factor` of linear .* positive number, got None"),
        (LLAMA3 | {"factor": "8"}, "`factor` of llama3 .* got '8'"),
        (LLAMA3 | {"low_freq_factor": None}, "`low_freq_factor` .* got None"),
        (YARN | {"factor": -1}, "`factor` of yarn .* got -1"),
        (YARN | {"beta_fast": math.inf}, "`beta_fast` .* got inf"),
    ],
)
def test_bad_parameters_are_one_sentence(rope, message):
    with pytest.raises(ValueError, match=message):
        rope_scaling(rope, MAX_POSITIONS)

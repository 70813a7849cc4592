"""What the compiled step holds: the weights once, in bfloat16."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.models import head
from logra_jax.models.decoder import REMAT
from logra_jax.models.hf import load_decoder
from logra_jax.training.methods import logra_method
from logra_jax.training.objective import LossOptions
from logra_jax.training.parts import StepOptions
from logra_jax.training.state import Batch, initial_state
from logra_jax.training.step import build_step

BASIS = logra.Basis()
LOSS = LossOptions(
    temperature=1.0,
    advantage="running_mean",
    group=1,
    baseline_decay=0.8,
    clip_low=0.2,
    clip_high=0.2,
)
OPTIONS = StepOptions(LOSS, microbatch=2, kl_estimator="jvp", kl_share=0.5)
ROWS, PROMPT, NEW = 4, 3, 5
BATCH = Batch(
    prefix=jnp.arange(4, dtype=jnp.int32),
    prompts=jnp.ones((ROWS, PROMPT), jnp.int32),
    prompt_lengths=jnp.full((ROWS,), PROMPT, jnp.int32),
    completions=jnp.ones((ROWS, NEW), jnp.int32),
    mask=jnp.ones((ROWS, NEW), bool),
    logprobs=jnp.zeros((ROWS, NEW), jnp.float32),
    rewards=jnp.arange(ROWS, dtype=jnp.float32),
)


def allocated(hlo: str) -> set[tuple[str, tuple[int, ...]]]:
    """dtype and shape of every value outside fusions, where nothing is allocated."""
    found, is_fused = set(), False
    for line in hlo.splitlines():
        opening = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if opening:
            is_fused = "fused" in opening[1] or "wrapped" in opening[1]
        for dtype, sizes in re.findall(r"= (\w+)\[([\d,]+)\]", line):
            if not is_fused:
                found.add((dtype, tuple(map(int, sizes.split(",")))))
    return found


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "layer"))
        for name in REMAT
    ],
)
def test_the_step_holds_no_float32_copy_of_its_weights(
    tiny_model_dir: Path, remat: str, monkeypatch
):
    monkeypatch.setattr(head, "_HEAD_BLOCK", 2**14)
    model = load_decoder(
        tiny_model_dir, dtype="bfloat16", activations="float32", remat=remat
    )
    model = logra.sketch(model, 4, r"_proj$", BASIS)
    graph, probes, weights = nnx.split(model, logra.Probe, ...)
    plain, _, _ = nnx.split(logra.perturbed(model), logra.Probe, ...)
    optimizer = optax.chain(
        logra.scale_by_row_adam(), optax.scale_by_learning_rate(1e-4)
    )
    controller = logra.scale_by_predicted_kl(1e-3, alpha_max=100.0)
    method = logra_method(graph, plain, probes, BASIS, rounding="stochastic", bits=16)
    step = build_step(method, optimizer, controller, OPTIONS)
    state = initial_state(weights, probes, optimizer, controller)
    compiled = step.lower(state, BATCH).compile()
    values = allocated(compiled.as_text())
    kinds = {w.shape for w in jax.tree.leaves(weights) if w.dtype == jnp.bfloat16}
    large = {shape for shape in kinds if np.prod(shape) >= 2**10}
    assert len(large) >= 5  # four shapes of stacked kernels, and the embedding
    assert not {("f32", shape) for shape in large} & values
    assert {("bf16", shape) for shape in large} & values  # they are seen at all
    memory = compiled.memory_analysis()
    held = sum(w.nbytes for w in jax.tree.leaves(weights))
    assert memory.alias_size_in_bytes >= held

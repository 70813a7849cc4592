"""The update on the real model: oracles in float32."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.predicted_kl import predict_kl, realised_kl
from logra_jax.models.hf import load_decoder
from logra_jax.models.tokenizer import ChatTokenizer
from logra_jax.training.state import Batch, TrainState, initial_state
from logra_jax.training.step import (
    StepOptions,
    _accumulate,
    _response_hidden,
    build_step,
)

BASIS = logra.Basis(seed=7)
RANK = 8
OPTIONS = StepOptions(
    basis=BASIS,
    rounding="stochastic",
    temperature=1.0,
    microbatch=2,
    kl_responses=2,
    advantage="running_mean",
    group=1,
    baseline_decay=0.8,
    clip_low=0.2,
    clip_high=0.2,
)


def batch_of(tokenizer: ChatTokenizer) -> Batch:
    """Four answers to two questions, one of them cut short."""
    ask = [
        tokenizer.encode_chat([{"role": "user", "content": text}])
        for text in ("What is 3 + 4 =", "What is 9 - 2 =")
    ]
    prefix = 26
    assert ask[0][:prefix] == ask[1][:prefix]
    prompts = np.array([ask[i % 2][prefix:] for i in range(4)], np.int32)
    texts = ["The answer is 7.", "It is 7", "Three plus four is", "Seven"]
    completions = np.full((4, 8), tokenizer.pad_id, np.int32)
    mask = np.zeros((4, 8), bool)
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text)[:8]
        completions[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
    return Batch(
        prefix=jnp.array(ask[0][:prefix], jnp.int32),
        prompts=jnp.asarray(prompts),
        prompt_lengths=jnp.full((4,), prompts.shape[1], jnp.int32),
        completions=jnp.asarray(completions),
        mask=jnp.asarray(mask),
        logprobs=jnp.full((4, 8), -1.0, jnp.float32),
        rewards=jnp.array([1.0, 0.5, 0.0, 0.25], jnp.float32),
    )


@pytest.fixture(scope="module")
def real(smollm2_dir: Path):
    """The sketched real model in float32, and the batch."""
    model = load_decoder(smollm2_dir, dtype=jnp.float32, remat="dots")
    sketched = logra.sketch(model, RANK, r"_proj$", BASIS)
    return model, sketched, batch_of(ChatTokenizer.load(smollm2_dir))


@pytest.mark.model
def test_sketch_is_the_dense_gradient_times_the_basis_for_all_210_matrices(real):
    model, sketched, batch = real
    graph, probes, weights = nnx.split(sketched, logra.Probe, ...)
    advantages = jnp.array([0.5, 0.0, -0.5, 0.25])
    sketches, _ = jax.jit(
        lambda p, w, b: _accumulate(graph, p, w, b, advantages, OPTIONS)
    )(probes, weights, batch)

    dense_graph, kernels, rest = nnx.split(model, is_projection, ...)
    # The same loss differentiated with respect to ordinary kernels: the sketched loss
    # sees them through an empty set of probes.
    nothing = nnx.state(model, logra.Probe)
    gradients = jax.jit(
        jax.grad(
            lambda k: loss_of(dense_graph, nothing, nnx.merge_state(k, rest), batch)
        )
    )(kernels)
    worst = 0.0
    compared = 0
    for path, sketch in nnx.to_flat_state(sketches):
        layer = path[:-1]
        gradient = np.asarray(at(gradients, (*layer, "kernel")))
        addresses = at(weights, (*layer, "address"))
        for i in range(gradient.shape[0]):
            k = gradient.shape[1]
            basis = logra.basis_matrix(BASIS.key(addresses[i]), RANK, k)
            expected = gradient[i].T.astype(np.float64) @ np.asarray(basis).T
            error = np.linalg.norm(np.asarray(sketch[i]) - expected)
            worst = max(worst, error / np.linalg.norm(expected))
            compared += 1
    assert compared == 210
    assert worst < 1e-5


def is_projection(path: tuple, variable: Any) -> bool:
    return path[-1] == "kernel" and str(path[-2]).endswith("_proj")


def at(state: nnx.State, path: tuple) -> jax.Array:
    return dict(nnx.to_flat_state(state))[path][...]


def loss_of(graph, probes, weights, batch: Batch) -> jax.Array:
    """The loss of ``_accumulate`` in one go: token mean of -ratio * advantage."""
    advantages = jnp.array([0.5, 0.0, -0.5, 0.25])
    model = nnx.merge(graph, probes, weights)
    hidden = _response_hidden(graph, probes, weights, batch)
    logprobs = jax.nn.log_softmax(model.logits(hidden))
    chosen = jnp.take_along_axis(
        logprobs, batch.completions.reshape(-1)[:, None], axis=-1
    ).reshape(batch.completions.shape)
    ratio = jnp.exp(chosen - batch.logprobs)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    a = advantages[:, None]
    objective = jnp.minimum(ratio * a, clipped * a)
    return -jnp.sum(jnp.where(batch.mask, objective, 0.0)) / jnp.sum(batch.mask)


@pytest.mark.model
def test_predicted_kl_is_the_true_kl_of_a_small_step_within_one_percent(real):
    _, sketched, batch = real
    graph, probes, weights = nnx.split(logra.perturbed(sketched), logra.Probe, ...)
    leaves, tree = jax.tree.flatten(probes)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noise = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    updates = jax.tree.unflatten(tree, [1e-4 * x for x in noise])
    mask = batch.mask.reshape(-1)

    @jax.jit
    def measure(weights, scale):  # not closed over: jit would fold them in
        head = nnx.merge(graph, probes, weights).logits
        q, before = predict_kl(
            lambda p: _response_hidden(graph, p, weights, batch),
            head,
            probes,
            updates,
            mask,
        )
        moved = jax.tree.map(lambda u: scale * u, updates)
        after = _response_hidden(graph, moved, weights, batch)
        return q, realised_kl(before, after, head, mask)

    q, _ = measure(weights, 0.0)
    alpha = np.sqrt(2e-4 / q)  # small enough to be quadratic, large enough for float32
    _, true = measure(weights, alpha)
    assert float(true / (alpha**2 * q)) == pytest.approx(1.0, abs=0.01)


def tiny_step(tiny_model_dir: Path, **options: Any):
    model = load_decoder(tiny_model_dir, dtype=jnp.float32)
    sketched = logra.sketch(model, 4, r"_proj$", BASIS)
    graph, probes, weights = nnx.split(sketched, logra.Probe, ...)
    plain, _, _ = nnx.split(logra.perturbed(sketched), logra.Probe, ...)
    optimizer = optax.chain(
        logra.scale_by_row_adam(), optax.scale_by_learning_rate(1e-4)
    )
    controller = logra.scale_by_predicted_kl(1e-3, alpha_max=100.0)
    step = build_step(
        graph, plain, probes, optimizer, controller, OPTIONS._replace(**options)
    )
    state = initial_state(weights, probes, optimizer, controller)
    return step, state, batch_of(ChatTokenizer.load(tiny_model_dir))


def run(step, state: TrainState, batch: Batch):
    return step(jax.tree.map(jnp.copy, state), batch)


def test_microbatching_does_not_change_the_update(tiny_model_dir: Path):
    one, state, batch = tiny_step(tiny_model_dir, microbatch=4)
    four, _, _ = tiny_step(tiny_model_dir, microbatch=1)
    (a, metrics_a), (b, metrics_b) = run(one, state, batch), run(four, state, batch)
    for name, value in metrics_a.items():
        assert float(metrics_b[name]) == pytest.approx(float(value), rel=1e-4), name
    old = jax.tree.leaves(state.weights)
    leaves = jax.tree.leaves(a.weights), jax.tree.leaves(b.weights), old
    for new_a, new_b, before in zip(*leaves, strict=True):
        if jnp.issubdtype(before.dtype, jnp.floating):
            scale = float(jnp.max(jnp.abs(new_a - before)))
            assert float(jnp.max(jnp.abs(new_a - new_b))) <= 1e-3 * scale


def test_the_step_compiles_once_and_donates_its_weights(tiny_model_dir: Path):
    step, state, batch = tiny_step(tiny_model_dir)
    compiled = step.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    weights = sum(x.nbytes for x in jax.tree.leaves(state.weights))
    assert memory.alias_size_in_bytes >= 0.99 * weights
    for _ in range(3):
        state, _ = step(state, batch)
    assert step._cache_size() == 1
    assert int(state.step) == 3


def test_padding_has_no_say_in_the_update(tiny_model_dir: Path):
    step, state, batch = tiny_step(tiny_model_dir)
    other = batch._replace(
        completions=jnp.where(batch.mask, batch.completions, 17),
        logprobs=jnp.where(batch.mask, batch.logprobs, -jnp.inf),
    )
    (_, ours), (_, theirs) = run(step, state, batch), run(step, state, other)
    assert {k: float(v) for k, v in ours.items()} == {
        k: float(v) for k, v in theirs.items()
    }

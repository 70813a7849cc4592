"""The update on the real model: oracles in float32."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.models.hf import load_decoder
from logra_jax.models.tokenizer import ChatTokenizer
from logra_jax.training.methods import Method, logra_method
from logra_jax.training.objective import LossOptions, response_hidden
from logra_jax.training.parts import StepOptions
from logra_jax.training.state import Batch, TrainState, initial_state
from logra_jax.training.step import _share, accumulate, build_step

BASIS = logra.Basis(seed=7)
RANK = 8
LOSS = LossOptions(
    temperature=1.0,
    advantage="running_mean",
    group=1,
    baseline_decay=0.8,
    clip_low=0.2,
    clip_high=0.2,
)
OPTIONS = StepOptions(LOSS, microbatch=2, kl_estimator="jvp", kl_share=0.5)


def method_of(sketched: nnx.Module) -> Method:
    """LoGRA of a sketched model, with this file's basis."""
    graph, probes, _ = nnx.split(sketched, logra.Probe, ...)
    plain, _, _ = nnx.split(logra.perturbed(sketched), logra.Probe, ...)
    return logra_method(graph, plain, probes, BASIS, rounding="stochastic", bits=16)


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
    _, _, weights = nnx.split(sketched, logra.Probe, ...)
    advantages = jnp.array([0.5, 0.0, -0.5, 0.25])
    sketches, _ = jax.jit(
        lambda w, b: accumulate(method_of(sketched), w, b, advantages, OPTIONS)
    )(weights, batch)

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
    hidden = response_hidden(model, batch)
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
        q, before = logra.predict_kl(
            lambda p: response_hidden(nnx.merge(graph, p, weights), batch),
            head,
            probes,
            updates,
            mask,
        )
        moved = jax.tree.map(lambda u: scale * u, updates)
        after = response_hidden(nnx.merge(graph, moved, weights), batch)
        return q, logra.realised_kl(before, after, head, mask)

    q, _ = measure(weights, 0.0)
    alpha = np.sqrt(2e-4 / q)  # small enough to be quadratic, large enough for float32
    _, true = measure(weights, alpha)
    assert float(true / (alpha**2 * q)) == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
@pytest.mark.model
def test_difference_and_jvp_agree_within_two_percent_at_any_scale(real):
    _, sketched, batch = real
    graph, probes, weights = nnx.split(logra.perturbed(sketched), logra.Probe, ...)

    def measure(estimate):
        @jax.jit
        def of(weights, scale, temperature):  # not closed over: jit would fold them in
            return estimate(
                lambda p: response_hidden(nnx.merge(graph, p, weights), batch),
                nnx.merge(graph, probes, weights).logits,
                probes,
                jax.tree.map(lambda u: scale * u, fixed_proposal(probes)),
                batch.mask.reshape(-1),
                temperature=temperature,
            )[0]

        return lambda *scalars: float(of(weights, *map(jnp.float32, scalars)))

    jvp, difference = map(measure, (logra.predict_kl, logra.predict_kl_by_difference))
    for temperature in (1.0, 0.7):
        expected = jvp(0.1, temperature)
        for scale in (1e-3, 1.0, 1e3):
            ratio = difference(0.1 * scale, temperature) / (expected * scale**2)
            assert ratio == pytest.approx(1.0, abs=0.02), (temperature, scale)


@functools.cache
def sketched_tiny(tiny_model_dir: Path) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The tiny model, sketched and split."""
    model = load_decoder(tiny_model_dir, dtype=jnp.float32)
    sketched = logra.sketch(model, 4, r"_proj$", BASIS)
    return nnx.split(sketched, logra.Probe, ...)


@functools.cache
def tiny_step(
    tiny_model_dir: Path, optimizer: Any = None, budget: Any = 1e-3, **options: Any
):
    """A step on the tiny model, compiled once for all tests that ask for the same."""
    graph, probes, weights = sketched_tiny(tiny_model_dir)
    optimizer = optimizer or optax.chain(
        logra.scale_by_row_adam(), optax.scale_by_learning_rate(1e-4)
    )
    controller = logra.scale_by_predicted_kl(budget, alpha_max=1e6)
    method = method_of(nnx.merge(graph, probes, weights))
    loss = {k: options.pop(k) for k in LossOptions._fields if k in options}
    chosen = OPTIONS._replace(loss=LOSS._replace(**loss), **options)
    step = build_step(method, optimizer, controller, chosen)
    state = initial_state(weights, probes, optimizer, controller)
    return step, state, batch_of(ChatTokenizer.load(tiny_model_dir))


def run(step, state: TrainState, batch: Batch):
    after, metrics, _ = step(jax.tree.map(jnp.copy, state), batch)
    return after, metrics


@pytest.mark.slow
def test_microbatching_does_not_change_the_update(tiny_model_dir: Path):
    one, state, batch = tiny_step(tiny_model_dir, microbatch=4)
    four, _, _ = tiny_step(tiny_model_dir, microbatch=1)
    (a, metrics_a), (b, metrics_b) = run(one, state, batch), run(four, state, batch)
    for name, value in metrics_a.items():
        # what lands hangs on the last bit of the factor
        rel = 1e-2 if name.startswith("landed/") else 1e-4
        assert float(metrics_b[name]) == pytest.approx(float(value), rel=rel), name
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
    state = jax.tree.map(jnp.copy, state)
    compiled_before = step._cache_size()
    for _ in range(3):
        state, _, _ = step(state, batch)
    assert step._cache_size() <= max(1, compiled_before)
    assert int(state.step) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"kl_estimator": "jvp"},
        pytest.param({"kl_estimator": "difference"}, marks=pytest.mark.slow),
        pytest.param({"kl_estimator": "engine"}, marks=pytest.mark.slow),
        pytest.param(
            {"kl_estimator": "engine", "correction": "sequence"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_padding_has_no_say_in_the_update(tiny_model_dir: Path, options: dict):
    step, state, batch = tiny_step(tiny_model_dir, PROPOSE, **options)
    batch = batch._replace(logprobs=trainer_of(tiny_model_dir)[1])
    other = batch._replace(
        completions=jnp.where(batch.mask, batch.completions, 17),
        logprobs=jnp.where(batch.mask, batch.logprobs, -jnp.inf),
    )
    (_, ours), (_, theirs) = run(step, state, batch), run(step, state, other)
    assert {k: float(v) for k, v in ours.items()} == {
        k: float(v) for k, v in theirs.items()
    }


def fixed_proposal(probes: nnx.State) -> nnx.State:
    """Noise in place of an optimizer's proposal."""
    leaves, tree = jax.tree.flatten(probes)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noise = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, [1e-3 * x for x in noise])


PROPOSE = optax.stateless(lambda updates, params: fixed_proposal(updates))


@functools.cache
def trainer_of(tiny_model_dir: Path):
    """q of the fixed proposal on every other response.

    And the log-probs, with their first and second derivative along the proposal.
    """
    batch = batch_of(ChatTokenizer.load(tiny_model_dir))
    model = load_decoder(tiny_model_dir, dtype=jnp.float32)
    plain = logra.perturbed(logra.sketch(model, 4, r"_proj$", BASIS))
    graph, probes, weights = nnx.split(plain, logra.Probe, ...)
    head = nnx.merge(graph, probes, weights).logits

    def hidden(probes):
        return response_hidden(nnx.merge(graph, probes, weights), batch)

    def logprobs(probes):
        z = jax.nn.log_softmax(head(hidden(probes)))
        ids = batch.completions.reshape(-1)[:, None]
        return jnp.take_along_axis(z, ids, -1).reshape(batch.mask.shape)

    @jax.jit
    def measure(proposal):
        half = batch.mask.at[1::2].set(False).reshape(-1)
        q, _ = logra.predict_kl(hidden, head, probes, proposal, half)

        def rates(p):
            return jax.jvp(logprobs, (p,), (proposal,))[1]

        return q, logprobs(probes), *jax.jvp(rates, (probes,), (proposal,))

    return measure(fixed_proposal(probes))


@pytest.mark.parametrize(
    "estimator",
    [
        "jvp",
        pytest.param("difference", marks=pytest.mark.slow),
        pytest.param("engine", marks=pytest.mark.slow),
    ],
)
def test_each_estimator_measures_the_proposal_on_its_share(
    tiny_model_dir: Path, estimator: str
):
    step, state, batch = tiny_step(tiny_model_dir, PROPOSE, kl_estimator=estimator)
    q, logprobs, rates, _ = trainer_of(tiny_model_dir)
    if estimator == "engine":  # half the squared score of each sampled token
        q = 0.5 * jnp.mean(jnp.square(rates[::2])[batch.mask[::2]])
    # an engine without mismatch, but for padding
    batch = batch._replace(logprobs=jnp.where(batch.mask, logprobs, -jnp.inf))
    after, metrics = run(step, state, batch)
    assert float(metrics["kl/q"]) == pytest.approx(float(q), rel=1e-3)
    assert float(metrics["kl/predicted"]) == pytest.approx(1e-3, rel=1e-4)
    assert float(metrics["mismatch/kl"]) < 1e-10
    # The next search starts from this q and ends at the same.
    again = after._replace(weights=state.weights, step=state.step)
    _, metrics = run(step, again, batch)
    assert float(metrics["kl/q"]) == pytest.approx(float(q), rel=1e-3)

    # No token of the share left: no estimate, no update.
    blank = batch._replace(mask=batch.mask.at[::2].set(False))
    after, metrics = run(step, state, blank)
    assert jnp.isnan(metrics["kl/q"])
    assert (metrics["alpha"], metrics["kl/predicted"]) == (0, 0)
    leaves = zip(*map(jax.tree.leaves, (state.weights, after.weights)), strict=True)
    floats = [x for x in leaves if jnp.issubdtype(x[0].dtype, jnp.floating)]
    assert floats
    assert all(jnp.array_equal(old, new) for old, new in floats)
    assert step._cache_size() == 1


def falling(count):
    return 10.0 ** (-2.0 - count)


@pytest.mark.slow
def test_realised_over_predicted_kl_tends_to_one_with_the_budget(tiny_model_dir: Path):
    step, state, batch = tiny_step(tiny_model_dir, PROPOSE, falling)
    errors = []
    for count in range(3):
        controller = state.controller._replace(count=jnp.int32(count))
        _, metrics = run(step, state._replace(controller=controller), batch)
        budget = float(metrics["kl/budget"])
        assert float(metrics["kl/predicted"]) == pytest.approx(budget, rel=1e-4)
        errors.append(abs(float(metrics["kl/realised"]) / budget - 1))
    assert errors[2] < 0.02
    assert errors[2] < errors[1] < errors[0]


def test_mismatch_is_the_sampled_kl_of_the_engine_to_the_trainer(tiny_model_dir: Path):
    step, state, batch = tiny_step(tiny_model_dir)
    logprobs = trainer_of(tiny_model_dir)[1]
    noise = 0.3 * jax.random.normal(jax.random.key(0), batch.mask.shape)
    batch = batch._replace(logprobs=logprobs + noise)
    _, metrics = run(step, state, batch)
    expected = logra.sampled_kl(batch.logprobs, logprobs, batch.mask)
    assert float(metrics["mismatch/kl"]) == pytest.approx(float(expected), rel=1e-3)
    mean = jnp.mean(jnp.abs(noise)[batch.mask])
    assert float(metrics["mismatch/mean"]) == pytest.approx(float(mean), rel=1e-3)
    largest = jnp.max(jnp.abs(noise)[batch.mask])  # of all microbatches
    assert float(metrics["mismatch/max"]) == pytest.approx(float(largest), rel=1e-3)
    assert not [name for name in metrics if name.startswith("correction/")]


@pytest.mark.slow
def test_the_engine_estimate_is_fed_the_log_probs_of_an_engine_that_differs(
    tiny_model_dir: Path,
):
    step, state, batch = tiny_step(tiny_model_dir, PROPOSE, kl_estimator="engine")
    _, logprobs, rates, curvatures = trainer_of(tiny_model_dir)
    log_r = 0.3 * jax.random.normal(jax.random.key(0), batch.mask.shape)
    engine = jnp.where(batch.mask, logprobs - log_r, -jnp.inf)
    _, metrics = run(step, state, batch._replace(logprobs=engine))
    # The second difference of r - 1 - log r, with what a mismatch adds.
    r = jnp.exp(log_r)
    terms = 0.5 * r * jnp.square(rates) + 0.5 * (r - 1) * curvatures
    expected = jnp.mean(terms[::2][batch.mask[::2]])
    blind = 0.5 * jnp.mean(jnp.square(rates[::2])[batch.mask[::2]])
    assert abs(float(blind / expected) - 1) > 0.02
    assert float(metrics["kl/q"]) == pytest.approx(float(expected), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_weighs_the_whole_batch_alike_in_any_microbatches(
    tiny_model_dir: Path, level: str
):
    batch = tiny_step(tiny_model_dir)[2]
    logprobs = trainer_of(tiny_model_dir)[1]
    if level == "token":
        log_r = 0.7 * jax.random.normal(jax.random.key(0), batch.mask.shape)
    else:
        totals = jnp.array([0.6, 0.1, -0.2, -2.0])[:, None]
        lengths = jnp.sum(batch.mask, axis=1, keepdims=True)
        log_r = jnp.broadcast_to(totals / lengths, batch.mask.shape)
    batch = batch._replace(logprobs=logprobs - log_r)
    advantages = jnp.array([0.5, 1.0, 0.75, 0.25])
    graph, probes, weights = sketched_tiny(tiny_model_dir)
    method = method_of(nnx.merge(graph, probes, weights))
    loss = LOSS._replace(
        correction=level, correction_cap=1.5, correction_mask=(0.5, 4.0)
    )
    one, by_row = (
        accumulate(
            method,
            weights,
            batch,
            advantages,
            OPTIONS._replace(loss=loss, microbatch=n),
        )
        for n in (4, 1)
    )
    ratio = np.where(batch.mask, log_r, 0.0)
    if level == "sequence":
        ratio = np.broadcast_to(ratio.sum(-1, keepdims=True), ratio.shape)
    ratio = np.exp(ratio)[np.asarray(batch.mask)]
    kept = (ratio >= 0.5) & (ratio <= 4.0)
    capped = kept & (ratio > 1.5)
    assert 0 < capped.mean() < kept.mean() < 1
    expected = {
        "correction/mean_weight": np.mean(np.minimum(ratio, 1.5) * kept),
        "correction/capped": capped.mean(),
        "correction/masked": 1 - kept.mean(),
        "clip/share": 0.0,
    }
    for metrics in (one[1], by_row[1]):
        for name, value in expected.items():
            assert float(metrics[name]) == pytest.approx(value, rel=1e-4), name
    for name, value in one[1].items():
        assert float(by_row[1][name]) == pytest.approx(float(value), rel=1e-4), name
    for a, b in zip(*map(jax.tree.leaves, (one[0], by_row[0])), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-3, atol=1e-5 * float(jnp.max(jnp.abs(a)))
        )


@pytest.mark.slow
def test_correction_of_an_engine_without_mismatch_changes_no_sketch(
    tiny_model_dir: Path,
):
    batch = tiny_step(tiny_model_dir)[2]
    batch = batch._replace(logprobs=trainer_of(tiny_model_dir)[1])
    advantages = jnp.array([0.5, -1.0, -0.5, 0.25])
    graph, probes, weights = sketched_tiny(tiny_model_dir)
    method = method_of(nnx.merge(graph, probes, weights))
    plain, token = (
        accumulate(
            method,
            weights,
            batch,
            advantages,
            OPTIONS._replace(loss=LOSS._replace(correction=level)),
        )[0]
        for level in ("none", "token")
    )
    for a, b in zip(*map(jax.tree.leaves, (plain, token)), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(a)))
        )


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.125, [0, 8, 16, 24, 32, 40, 48, 56]),
        (0.05, [0, 21, 42]),
        (1e-9, [0]),
        (1.0, list(range(64))),
        (0.99, [i * 64 // 63 for i in range(63)]),
    ],
)
def test_the_share_is_spread_evenly_and_never_empty(share, expected):
    index = jnp.arange(64)
    batch = Batch(jnp.zeros(3, jnp.int32), *([index] * 6))
    batch = batch._replace(mask=jnp.ones((64, 2), bool))
    few = _share(batch, share, 1)
    np.testing.assert_array_equal(few.rewards, expected)
    of_eight = _share(batch, share, 8)  # rows that fill up have no token
    assert len(of_eight.rewards) == -(-len(expected) // 8) * 8
    np.testing.assert_array_equal(of_eight.rewards[: len(expected)], expected)
    counted = np.flatnonzero(of_eight.mask.all(1))
    np.testing.assert_array_equal(counted, np.arange(len(expected)))
    assert len(set(expected)) == len(expected)
    assert len(few.prefix) == 3

"""Packing loses and adds nothing: on the host, and in loss and sketches."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import logra_jax as logra
from logra_jax.models.decoder import Decoder
from logra_jax.models.delta_net import DeltaShape
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.sharding import make_mesh, place
from logra_jax.training.journal import read_metrics
from logra_jax.training.layout import build_layout
from logra_jax.training.methods import Method, logra_method, weights_of
from logra_jax.training.objective import (
    LossOptions,
    hidden_in_parts,
    response_hidden,
)
from logra_jax.training.packing import Fields, first_fit, most_rows, pack
from logra_jax.training.parts import StepOptions
from logra_jax.training.state import Batch, Credit, initial_state
from logra_jax.training.step import accumulate, build_step

VOCAB = 44
CONFIG = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=64,
    rope_theta=100.0,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
)
HYBRID = dataclasses.replace(
    CONFIG,
    num_layers=4,
    qk_norm=True,
    gated_attention=True,
    delta=DeltaShape(1, 2, 4, 6, conv_width=4),
    delta_per_block=1,
)
BASIS = logra.Basis(seed=3)
LOSS = LossOptions(
    temperature=0.9,
    advantage="running_mean",
    group=1,
    baseline_decay=0.8,
    clip_low=0.2,
    clip_high=0.2,
)
PREFIX = jnp.array([5, 9, 17], jnp.int32)


def fields_of(prompts: list[int], answers: list[int], seed: int = 0) -> Fields:
    """Random responses of these lengths."""
    rng = np.random.default_rng(seed)
    batch, suffix, new = len(prompts), max(prompts) + 1, max(max(answers), 1) + 2
    mask = np.arange(new)[None] < np.array(answers)[:, None]
    return Fields(
        rng.integers(1, VOCAB, (batch, suffix)).astype(np.int32),
        np.array(prompts, np.int32),
        rng.integers(1, VOCAB, (batch, new)).astype(np.int32),
        mask,
        np.where(mask, -4 + rng.normal(size=mask.shape), np.nan).astype(np.float32),
    )


def batch_of(fields: Fields, row_tokens: int | None, devices: int = 1) -> Batch:
    packed = row_tokens and jax.tree.map(jnp.asarray, pack(fields, row_tokens, devices))
    rewards = jnp.linspace(-1, 1, len(fields.mask))
    arrays = map(jnp.asarray, fields)
    return Batch(PREFIX, *arrays, rewards=rewards, packed=packed or None)


# --- on the host

LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=1)


@given(LENGTHS, st.integers(12, 40), st.integers(1, 3))
def test_every_token_is_in_one_row_after_what_it_followed(lengths, size, devices):
    prompts, answers = map(list, zip(*lengths, strict=True))
    fields = fields_of(prompts, answers)
    packed = pack(fields, size, devices)
    rows = packed.rows
    found = {}
    for d, r, slot in zip(*np.nonzero(rows.mask), strict=True):
        i, column = rows.response[d, r, slot], rows.column[d, r, slot]
        segment = rows.segments[d, r]
        before = np.flatnonzero(segment[: column + 1] == segment[column])
        position = rows.positions[d, r, before]
        np.testing.assert_array_equal(position, np.arange(len(before)))
        j = len(before) - prompts[i]  # which of the completion's tokens it is
        whole = [*fields.prompts[i, -prompts[i] :], *fields.completions[i, :j]]
        np.testing.assert_array_equal(rows.tokens[d, r, before], whole)
        assert rows.target[d, r, slot] == fields.completions[i, j]
        assert rows.place[d, r, slot] == j
        assert rows.logprob[d, r, slot] == fields.logprobs[i, j]
        assert r < packed.count
        assert (i, j) not in found
        found[i, j] = True
    assert set(found) == {(i, j) for i, n in enumerate(answers) for j in range(n)}
    filled = rows.mask.sum(-1)
    np.testing.assert_array_equal(
        rows.targets, np.broadcast_to(filled.max(0), filled.shape)
    )
    assert np.all(np.isfinite(rows.logprob))


@given(LENGTHS, st.integers(12, 40), st.integers(1, 3))
def test_padding_is_seen_by_itself_alone(lengths, size, devices):
    prompts, answers = map(list, zip(*lengths, strict=True))
    fields = fields_of(prompts, answers)
    rows = pack(fields, size, devices).rows
    for segment in rows.segments.reshape(-1, size):
        padding = segment[segment < 0]
        assert len(set(padding)) == len(padding)
        assert np.all(padding < -1)  # which everyone would see
        assert np.all(segment[: np.sum(segment >= 0)] >= 0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(50, 200))
def test_rows_are_near_the_fewest_and_within_the_bound(lengths, size):
    placed = first_fit(np.array(lengths), size)
    for row in placed:
        assert sum(lengths[i] for i in row) <= size
    packed = sorted(i for row in placed for i in row)
    assert packed == [i for i, n in enumerate(lengths) if n]
    fewest = -(-sum(lengths) // size)
    # all rows but one are more than half full
    assert len(placed) <= max(2 * fewest, 1)
    for devices in (1, 3):
        most = most_rows(len(lengths), 50, size, devices)
        assert -(-len(placed) // devices) <= most


def test_many_ragged_responses_leave_little_padding():
    lengths = np.random.default_rng(0).integers(20, 400, 256)
    placed = first_fit(lengths, 4096)
    assert len(placed) == -(-lengths.sum() // 4096)


def test_shapes_hang_on_the_widths_of_the_batch_alone():
    full, empty = fields_of([4] * 6, [5] * 6), fields_of([4] * 6, [5] + [0] * 5)
    shapes = [jax.tree.map(np.shape, pack(f, 16, devices=2)) for f in (full, empty)]
    assert shapes[0] == shapes[1]
    assert shapes[0].rows.tokens == (2, 3, 16)  # 11 tokens at most: one fits
    assert int(pack(empty, 16, devices=2).count) == 1


def test_a_response_longer_than_a_row_is_refused():
    expected = (
        r"The longest response must fit into `train.microbatch_tokens` \(10\), got 11 "
        r"tokens; raise it, or lower `rollout.max_new_tokens`."
    )
    with pytest.raises(ValueError, match=expected):
        pack(fields_of([3, 5], [2, 7]), 10)


# --- in the update

# Compile time is what these tests cost, so XLA is told not to try hard.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def sketched(config: DecoderConfig = CONFIG) -> Decoder:
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    return logra.sketch(model, 4, r"_proj(_qkv|_z)?$", BASIS)


def method_of(model: Decoder) -> Method:
    graph, probes, _ = nnx.split(model, logra.Probe, ...)
    plain, _, _ = nnx.split(logra.perturbed(model), logra.Probe, ...)
    return logra_method(graph, plain, probes, BASIS, rounding="stochastic", bits=16)


@functools.cache
def gradients(size: int, loss: LossOptions = LOSS, config: DecoderConfig = CONFIG):
    options = StepOptions(loss, microbatch=size, kl_estimator="jvp", kl_share=0.5)
    method = method_of(sketched(config))
    return jit(lambda w, b, a: accumulate(method, w, b, a, options))


def check_same(
    fields: Fields,
    row_tokens: int,
    loss=LOSS,
    devices: int = 1,
    config=CONFIG,
    tolerance: float = 1e-5,
    **judged,
) -> dict:
    """Sketches and metrics of packed rows and of padded ones; the metrics."""
    weights = weights_of(sketched(config))
    advantages = jnp.cos(jnp.arange(float(len(fields.mask))))
    run = gradients(len(fields.mask), loss, config)
    padded = batch_of(fields, None)._replace(**judged)
    rows = batch_of(fields, row_tokens, devices)._replace(**judged)
    expected, metrics = run(weights, padded, advantages)
    got, packed = run(weights, rows, advantages)
    assert set(packed) == set(metrics)
    for name, value in metrics.items():
        expect = pytest.approx(float(value), rel=tolerance, abs=1e-6)
        assert float(packed[name]) == expect, name
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        atol = tolerance * float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=atol)
    assert any(np.any(b) for b in jax.tree.leaves(expected))
    return {name: float(value) for name, value in metrics.items()}


RAGGED = ([3, 1, 6, 2, 5, 3, 1, 4], [7, 2, 0, 9, 1, 5, 3, 8])


@pytest.mark.parametrize(("row_tokens", "devices"), [(16, 1), (100, 1), (16, 3)])
def test_packed_rows_have_the_loss_and_the_sketches_of_padded_ones(row_tokens, devices):
    check_same(fields_of(*RAGGED), row_tokens, devices=devices)


@pytest.mark.parametrize(("most", "held"), [(1, 1), (3, 2), (4, 4), (100, 8)])
def test_hidden_states_in_parts_are_those_of_all_rows(most, held):
    model, batch = sketched(), batch_of(fields_of(*RAGGED), None)

    def in_parts(batch: Batch) -> jax.Array:
        return hidden_in_parts(model, batch, most)

    expected = jit(lambda batch: response_hidden(model, batch))(batch)
    np.testing.assert_allclose(jit(in_parts)(batch), expected, rtol=1e-5, atol=1e-5)
    # (rows, tokens) of the MLP's features
    text = str(jax.make_jaxpr(in_parts)(batch))
    found = set(re.findall(r"f32\[(\d+),(\d+),24\]", text))
    time = batch.prompts.shape[1] + batch.completions.shape[1] - 1
    assert (str(held), str(time)) in found
    assert max(int(rows) for rows, length in found if length == str(time)) == held


@pytest.mark.slow
@pytest.mark.parametrize("row_tokens", [16, 100])
def test_packed_rows_of_a_hybrid_have_those_of_padded_ones_too(row_tokens):
    """Its recurrence and its convolution start anew with each response.

    The sketches of so small a one are ill-conditioned: wider padding alone, which moves
    where chunks begin, changes them by 8e-5 of their largest entry.
    """
    check_same(fields_of(*RAGGED), row_tokens, config=HYBRID, tolerance=1e-3)


def test_rows_dealt_to_the_devices_of_a_mesh_have_the_same_sketches():
    fields = fields_of(*RAGGED)
    advantages = jnp.cos(jnp.arange(8.0))
    weights = weights_of(sketched())
    expected, metrics = gradients(8)(weights, batch_of(fields, None), advantages)
    method = method_of(place(sketched()))
    layout = build_layout(make_mesh(1, 2, 2), method, weights)
    options = StepOptions(LOSS, microbatch=4, kl_estimator="jvp", kl_share=0.5)
    weights = jax.device_put(weights, layout.shardings(layout.weights))
    batch = layout.put_batch(batch_of(fields, 16, layout.row_parts))
    run = jit(lambda w, b, a: accumulate(method, w, b, a, options, layout))
    got, packed = run(weights, batch, advantages)
    for name, value in metrics.items():
        assert float(packed[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        atol = 1e-5 * float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrections_are_those_of_padded_rows(level):
    loss = LOSS._replace(
        correction=level, correction_cap=1.1, correction_mask=(0.05, 20.0)
    )
    metrics = check_same(fields_of(*RAGGED), 24, loss)
    assert metrics["correction/capped"] > 0
    assert metrics["correction/masked"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"loss": "gspo", "aggregation": "sequence", "clip_low": 0.1, "clip_high": 0.1},
        {
            "loss": "cispo",
            "aggregation": "constant",
            "length": 7,
            "correction": "token",
        },
        {"aggregation": "sequence", "correction": "sequence", "reference_weight": 0.1},
        {"loss": "reinforce", "reference_weight": 0.1, "reference_estimator": "k2"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_loss_is_that_of_padded_rows(options):
    """With log-probs of other policies, and a response that has no say."""
    fields = fields_of(*RAGGED)
    rng = np.random.default_rng(1)
    old, reference = (
        jnp.where(fields.mask, -3 + rng.normal(size=fields.mask.shape), jnp.nan)
        for _ in range(2)
    )
    credit = Credit(
        jnp.zeros(8), old, reference if "reference" in str(options) else None
    )
    counts = jnp.array([True, True, True, False, True, True, True, True])
    judged = {"credit": credit, "counts": counts}
    metrics = check_same(fields, 24, LOSS._replace(**options), **judged)
    if options.get("loss") in ("gspo", "cispo"):
        assert 0 < metrics["clip/share"] < 1
    assert ("reference/kl" in metrics) == ("reference" in str(options))


def test_one_program_serves_batches_of_any_lengths():
    weights = weights_of(sketched())
    run = gradients.__wrapped__(8)
    for answers in (RAGGED[1], [9] * 8, [1] * 7 + [9], [9] + [0] * 7):
        run(weights, batch_of(fields_of(RAGGED[0], answers), 16), jnp.ones(8))
    assert run._cache_size() == 1


def test_no_token_at_all_is_no_gradient():
    weights = weights_of(sketched())
    fields = fields_of([2, 3], [0, 0])
    sums, metrics = gradients(2)(weights, batch_of(fields, 16), jnp.ones(2))
    assert all(not np.any(s) for s in jax.tree.leaves(sums))
    assert all(float(value) == 0 for value in metrics.values())


def test_only_rows_that_hold_tokens_are_computed():
    """The loop ends at the count; a row beyond it would add NaN."""
    weights = weights_of(sketched())
    batch = batch_of(fields_of(*RAGGED), 16)
    assert batch.packed is not None
    count = int(batch.packed.count)
    assert count < batch.packed.rows.tokens.shape[1]
    spoilt = batch.packed.rows.logprob.at[:, count:].set(jnp.nan)
    mask = batch.packed.rows.mask.at[:, count:].set(True)
    rows = batch.packed.rows._replace(logprob=spoilt, mask=mask)
    batch = batch._replace(packed=batch.packed._replace(rows=rows))
    sums, _ = gradients(8)(weights, batch, jnp.ones(8))
    assert all(np.all(np.isfinite(s)) for s in jax.tree.leaves(sums))


@pytest.mark.slow
def test_the_whole_step_is_that_of_padded_rows():
    method, weights = method_of(sketched()), weights_of(sketched())
    optimizer = optax.chain(
        logra.scale_by_row_adam(), optax.scale_by_learning_rate(1e-3)
    )
    controller = logra.scale_by_predicted_kl(1e-4, alpha_max=1e6)
    chosen = StepOptions(LOSS, microbatch=4, kl_estimator="jvp", kl_share=0.5)
    step = build_step(method, optimizer, controller, chosen)
    probes, _ = method.split(weights)
    fields = fields_of(*RAGGED)
    found = []
    for row_tokens in (None, 24):
        state = initial_state(
            jax.tree.map(jnp.copy, weights), probes, optimizer, controller
        )
        batch = batch_of(fields, row_tokens)
        options = {"xla_backend_optimization_level": 0}
        run = step.lower(state, batch).compile(compiler_options=options)
        _, metrics, _ = run(state, batch)
        found.append(metrics)
    padded, packed = found
    for name, value in padded.items():
        rel = 1e-2 if name.startswith("landed/") else 1e-4
        assert float(packed[name]) == pytest.approx(float(value), rel=rel), name


@pytest.mark.slow
def test_a_run_packs_its_responses(tiny_run):
    run_dir = tiny_run("packed", "train.steps=2", "train.microbatch_tokens=64")
    rows = [row for row in read_metrics(run_dir) if row["step"] > 0]
    assert len(rows) == 2
    for row in rows:
        assert row["kl/predicted"] > 0
        assert row["update/sketch_norm"] > 0
        assert row["mismatch/max"] < 1e-3  # the engine's tokens, in their places


def test_a_run_whose_responses_fit_into_no_row_is_refused(tiny_run):
    expected = (
        r"The longest prompt and `rollout.max_new_tokens` must fit into "
        r"`train.microbatch_tokens` \(3\), got \d+ tokens; raise it"
    )
    with pytest.raises(ValueError, match=expected):
        tiny_run("packed", "train.microbatch_tokens=3")

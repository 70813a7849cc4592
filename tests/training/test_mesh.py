"""The step on a mesh of four devices: the weights of one device, and what travels."""

import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.dense import dense
from logra_jax.algorithm.lora import lora
from logra_jax.models import head
from logra_jax.models.decoder import Decoder
from logra_jax.models.delta_net import DeltaShape
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.sharding import check_fits, make_mesh, place, specs_of
from logra_jax.rollout.local import LocalEngine
from logra_jax.rollout.types import Sampling
from logra_jax.training.journal import read_metrics
from logra_jax.training.layout import build_layout, first_state
from logra_jax.training.methods import (
    Method,
    adamw_method,
    logra_method,
    lora_method,
    weights_of,
)
from logra_jax.training.objective import LossOptions
from logra_jax.training.parts import StepOptions
from logra_jax.training.state import Batch
from logra_jax.training.step import accumulate, build_step

# Sizes that tell weights, sketches and activations apart in a compiled program.
LAYERS, HIDDEN, FFN, VOCAB, RANK = 2, 32, 64, 96, 4
ROWS, PREFIX, PROMPT, NEW = 12, 10, 7, 5
TIME = PROMPT + NEW - 1
CONFIG = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    qkv_bias=True,
)
HYBRID = dataclasses.replace(
    CONFIG,
    qkv_bias=False,
    qk_norm=True,
    gated_attention=True,
    zero_centred_norms=True,
    delta=DeltaShape(2, 4, 8, 8, conv_width=4),
    delta_per_block=1,
)
BASIS = logra.Basis(seed=3)
LOSS = LossOptions(
    temperature=1.0,
    advantage="running_mean",
    group=1,
    baseline_decay=0.8,
    clip_low=0.2,
    clip_high=0.2,
)
_MATCH = r"_proj(_qkv|_z)?$"
OPTIONS = StepOptions(LOSS, microbatch=3, kl_estimator="jvp", kl_share=0.25)
FSDP, BOTH, DATA = (1, 4, 1), (1, 2, 2), (2, 2, 1)


def a_batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch(
        prefix=np.arange(PREFIX, dtype=np.int32),
        prompts=rng.integers(0, VOCAB, (ROWS, PROMPT)).astype(np.int32),
        prompt_lengths=rng.integers(2, PROMPT + 1, ROWS).astype(np.int32),
        completions=rng.integers(0, VOCAB, (ROWS, NEW)).astype(np.int32),
        mask=rng.random((ROWS, NEW)) < 0.8,
        logprobs=np.full((ROWS, NEW), -4.0, np.float32),
        rewards=rng.random(ROWS).astype(np.float32),
    )


def decoder(dtype: str, config: DecoderConfig = CONFIG) -> Decoder:
    return Decoder(
        config, dtype=dtype, activations="float32", remat="layer", rngs=nnx.Rngs(0)
    )


def logra_of(model: Decoder) -> Method:
    graph, probes, _ = nnx.split(model, logra.Probe, ...)
    plain, _, _ = nnx.split(logra.perturbed(model), logra.Probe, ...)
    return logra_method(graph, plain, probes, BASIS, rounding="stochastic", bits=16)


KINDS = {
    "logra": (lambda m: logra.sketch(m, RANK, _MATCH, BASIS), logra_of),
    "adamw": (
        lambda m: dense(m, _MATCH),
        functools.partial(adamw_method, rounding="stochastic"),
    ),
    "lora": (lambda m: lora(m, RANK, _MATCH), lora_method),
}


class Ran(NamedTuple):
    """Three steps of one kind on one mesh."""

    weights: list[np.ndarray]
    metrics: list[dict[str, float]]
    hlo: str
    shards: dict[str, float]  # largest part of a device, of all, for each tree


@functools.cache
def ran(
    kind: str,
    shape: tuple[int, int, int] | None,
    dtype: str = "bfloat16",
    config: DecoderConfig = CONFIG,
) -> Ran:
    train, method_of = KINDS[kind]
    model = train(decoder(dtype, config))
    weights, layout, mesh = weights_of(model), None, shape and make_mesh(*shape)
    method = method_of(place(model) if mesh else model)
    if kind == "logra":
        rule = logra.scale_by_row_adam()
    else:
        rule = optax.scale_by_adam(eps=1e-4)  # far from dividing noise by noise
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), rule, optax.scale_by_learning_rate(1e-3)
    )
    controller = logra.scale_by_predicted_kl(1e-3, alpha_max=100.0)
    batch = a_batch()
    if mesh:
        layout = build_layout(mesh, method, weights)
        weights = jax.device_put(weights, layout.shardings(layout.weights))
        batch = layout.put_batch(batch)
    state = first_state(weights, method.trained, optimizer, controller, layout)
    step = build_step(method, optimizer, controller, OPTIONS, layout)
    # Compile time is what these tests cost, so LLVM is told not to try hard.
    quick = {"xla_backend_optimization_level": 0}
    compiled = step.lower(state, batch).compile(compiler_options=quick)
    metrics = []
    for _ in range(3):
        state, found, _ = compiled(state, batch)
        metrics.append({name: float(value) for name, value in found.items()})
    shards = {"weights": state.weights, "optimizer": state.optimizer}
    return Ran(
        [np.asarray(x, np.float64) for x in jax.tree.leaves(state.weights)],
        metrics,
        compiled.as_text(),
        {name: share_of_a_device(tree) for name, tree in shards.items()},
    )


def share_of_a_device(tree) -> float:
    leaves = [x for x in jax.tree.leaves(tree) if x.ndim >= 2]
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    return held / sum(x.nbytes for x in leaves)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("logra", FSDP),
        ("logra", BOTH),
        ("logra", DATA),
        pytest.param("adamw", BOTH, marks=pytest.mark.slow),
        pytest.param("lora", BOTH, marks=pytest.mark.slow),
    ],
)
def test_three_steps_land_the_weights_of_one_device(kind, shape):
    """Sums over devices have another order: some factors' integers differ by one.

    That moves an update by 2^-15 of its row's largest entry, and a weight by a unit in
    the last place where that decides which way it is rounded.
    """
    check_same_weights(kind, ran(kind, None), ran(kind, shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("logra", BOTH), ("adamw", BOTH)],
)
def test_three_steps_of_a_hybrid_do_too(kind, shape):
    one, many = (ran(kind, s, config=HYBRID) for s in (None, shape))
    check_same_weights(kind, one, many)


def check_same_weights(kind: str, one: Ran, many: Ran) -> None:
    differ = count = 0
    for a, b in zip(one.weights, many.weights, strict=True):
        assert np.max(np.abs(a - b)) <= 2**-7 * np.max(np.abs(a))
        differ += np.sum(a != b)
        count += a.size
    # lora's factors are float32: compared by size alone
    assert differ <= (count if kind == "lora" else 2e-3 * count)
    for before, after in zip(one.metrics, many.metrics, strict=True):
        assert before.keys() == after.keys()
        for name in ("loss", "kl/q", "kl/realised", "mismatch/kl", "alpha"):
            assert after[name] == pytest.approx(before[name], rel=2e-3), name


@pytest.mark.slow
def test_in_float32_the_difference_is_that_of_a_sum_in_another_order():
    one, many = ran("logra", None, "float32"), ran("logra", BOTH, "float32")
    for a, b in zip(one.weights, many.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.max(np.abs(a)))


@pytest.mark.parametrize("kind", ["logra", "adamw"])
def test_a_device_holds_its_part_of_weights_and_optimizer_state(kind):
    shares = ran(kind, BOTH).shards
    assert shares["weights"] < 0.3  # norms and biases lie everywhere
    # of kernels cut by inputs, sketches are cut over fsdp alone
    assert shares["optimizer"] < (0.35 if kind == "logra" else 0.26)


NAMED = "mesh['data'=1,'fsdp'=2,'tensor'=2]"  # BOTH, as JAX 0.12 writes it


class Collective(NamedTuple):
    """One exchange in a compiled program."""

    op: str
    shapes: list[tuple[int, ...]]
    groups: str
    axes: str  # of a gather


def collectives(hlo: str) -> list[Collective]:
    found = []
    for line in hlo.splitlines():
        match = re.search(
            r"= (.*?) (all-gather|all-reduce|reduce-scatter|collective-permute|"
            r"all-to-all)(?:-start)?\(",
            line,
        )
        if match:
            shapes = [
                tuple(map(int, filter(None, sizes.split(","))))
                for sizes in re.findall(r"\w+\[([\d,]*)\]", match[1])
            ]
            # {{0,1},{2,3}}, or by axes of a mesh: mesh['fsdp'=2,'tensor'=2] {'tensor'}
            groups = re.search(r"replica_groups=(mesh\S+ \S+|\S+)", line)
            axes = re.search(r"[, ]dimensions=(\{\S*\})", line)
            parts = (part[1] if part else "" for part in (groups, axes))
            found.append(Collective(match[2], shapes, *parts))
    return found


def is_activation(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and bool({PREFIX, TIME} & set(shape)) and shape[-1] >= 8


def kernel_shapes(tensor: int) -> set[tuple[int, ...]]:
    """All of a kernel, as a device along ``tensor`` computes with it."""
    outputs = {(HIDDEN, n // tensor) for n in (HIDDEN, HIDDEN // 2, FFN)}
    inputs = {(n // tensor, HIDDEN) for n in (HIDDEN, FFN)}
    return outputs | inputs | {(VOCAB, HIDDEN), (HIDDEN, VOCAB)}


def as_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same; of a kernel whose parts arrive one after the other, the kernel."""
    if len(shape) == 3:
        parts, k, d = shape
        for joined in ((parts * k, d), (k, parts * d)):
            if joined in kernel_shapes(1):
                return joined
    return shape


@pytest.mark.parametrize("shape", [FSDP, DATA])
def test_devices_exchange_weights_sketches_and_scalars_only(shape):
    found = collectives(ran("logra", shape).hlo)
    kinds = {c.op for c in found}
    assert {"all-gather", "all-reduce", "reduce-scatter"} <= kinds
    gathered = set()
    for c in found:
        for s in map(as_one, c.shapes):
            assert not is_activation(s), c
            is_sketch = len(s) >= 2 and s[-1] == RANK
            is_small = len(s) < 2 or max(s) <= max(PROMPT, ROWS)  # token ids, sums
            if c.op == "all-gather" and not is_sketch:
                gathered.add(s)
                assert s in kernel_shapes(1) or is_small, c
                # Along another, a GPU would hold all layers' kernels transposed too.
                assert c.axes == "{0}", c
            else:
                assert is_sketch or is_small, c
    assert kernel_shapes(1) <= gathered  # they are seen at all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "is_tied", "microbatch"),
    [("jvp", True, 3), ("jvp", False, 1), ("difference", False, 1)],
)
def test_a_device_holds_one_whole_matrix_of_the_vocabulary_at_a_time(
    estimator, is_tied, microbatch, monkeypatch
):
    """Embedding and head are gathered in turns, for as long as they are used.

    For a prefix and rows, for the gradients of one microbatch after the other, and for
    the KL of the proposal and of what landed.
    """
    monkeypatch.setattr(head, "_HEAD_BLOCK", 2**15)
    vocab, hidden = 8192, 256
    config = dataclasses.replace(
        CONFIG, vocab_size=vocab, hidden_size=hidden, tie_embeddings=is_tied
    )
    model = logra.sketch(decoder("bfloat16", config), RANK, _MATCH, BASIS)
    method, mesh = logra_of(place(model)), make_mesh(*FSDP)
    layout = build_layout(mesh, method, weights_of(model))
    weights = jax.device_put(weights_of(model), layout.shardings(layout.weights))
    rules = logra.scale_by_row_adam(), logra.scale_by_predicted_kl(1e-3)
    state = first_state(weights, method.trained, *rules, layout)
    options = OPTIONS._replace(microbatch=microbatch, kl_estimator=estimator)
    step = build_step(method, *rules, options, layout)
    compiled = step.lower(state, layout.put_batch(a_batch())).compile()
    # one of them, what becomes of this device's parts of both, logits of a microbatch
    allowed = 1.75 * 2 * vocab * hidden
    assert compiled.memory_analysis().temp_size_in_bytes < allowed


def test_no_device_holds_the_sketches_of_all_rows_of_all_layers():
    model = logra.sketch(decoder("bfloat16", CONFIG), RANK, _MATCH, BASIS)
    method, mesh = logra_of(place(model)), make_mesh(*FSDP)
    layout = build_layout(mesh, method, weights_of(model))
    weights = jax.device_put(weights_of(model), layout.shardings(layout.weights))

    @jax.jit
    def sketches(weights, batch):
        advantages = jnp.ones(len(batch.rewards))
        return accumulate(method, weights, batch, advantages, OPTIONS, layout)[0]

    hlo = sketches.lower(weights, layout.put_batch(a_batch())).compile().as_text()
    for rows in (HIDDEN, FFN):
        assert f"f32[{LAYERS},{rows // FSDP[1]},{RANK}]" in hlo
        assert f"f32[{LAYERS},{rows},{RANK}]" not in hlo


def test_along_tensor_the_sums_of_hidden_states_travel_and_nothing_wider():
    """Megatron's sums, within groups along ``tensor``; nothing of a kernel's size."""
    seen = 0
    for c in collectives(ran("logra", BOTH).hlo):
        for s in c.shapes:
            if is_activation(s):
                seen += 1
                assert c.op == "all-reduce", c
                assert s[-1] == HIDDEN, c
                by_tensor = ("{{0,1},{2,3}}", "[2,2]<=[4]", f"{NAMED} {{'tensor'}},")
                assert c.groups.startswith(by_tensor), c
            elif c.op != "all-gather":
                assert s not in kernel_shapes(1) | kernel_shapes(2), c
    assert seen


def test_dense_gradients_do_travel():
    """The audit sees what it forbids to sketches."""
    found = collectives(ran("adamw", BOTH).hlo)
    reduced = {s for c in found if c.op == "reduce-scatter" for s in c.shapes}
    assert any(len(s) == 2 and min(s) >= 8 for s in reduced)


@pytest.mark.parametrize("shape", [FSDP, BOTH])
def test_a_mesh_samples_the_tokens_of_one_device(shape):
    model = logra.sketch(decoder("float32"), RANK, _MATCH, BASIS)
    prompts = [[1, 2, 3, *range(4, 4 + n)] for n in (1, 5, 2, 4, 3, 2)]
    sampling = Sampling(max_new_tokens=6)
    options = {"max_positions": 64, "eos_ids": (5,), "prefix": (1, 2, 3)}
    key = jax.random.key(1)
    graph, whole = nnx.split(model)
    one = LocalEngine(graph, **options).generate(whole, prompts, sampling, key)
    mesh = make_mesh(*shape)
    where = jax.tree.map(functools.partial(jax.NamedSharding, mesh), specs_of(whole))
    engine = LocalEngine(nnx.graphdef(place(model)), **options, mesh=mesh)
    many = engine.generate(jax.device_put(whole, where), prompts, sampling, key)
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_array_equal(many.lengths, one.lengths)
    np.testing.assert_allclose(many.logprobs, one.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 1), r"`mesh.fsdp` must divide the model's hidden_size \(32\), got 3"),
        ((1, 1, 4), r"`mesh.tensor` must divide the model's num_key_value_heads \(2\)"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        check_fits(CONFIG, make_mesh(*shape))


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"`mesh` must not need more .* \(4\)"):
        make_mesh(1, 8, 1)


def test_cpu_devices_that_would_hear_each_other_wrongly_are_refused(
    tiny_run, monkeypatch
):
    from logra_jax.training import policy

    monkeypatch.setattr(policy, "CPU_EXCHANGES_MIX", True)
    with pytest.raises(
        ValueError, match=r"`mesh` must be of one device .*, got 4; use"
    ):
        tiny_run("run", "mesh.fsdp=4")


def test_the_model_is_read_straight_into_its_parts(tiny_model_dir):
    from logra_jax.models.hf import load_decoder

    whole = nnx.state(load_decoder(tiny_model_dir, dtype=jnp.bfloat16))
    mesh = make_mesh(1, 2, 2)
    parts = nnx.state(load_decoder(tiny_model_dir, dtype=jnp.bfloat16, mesh=mesh))
    specs = dict(nnx.to_flat_state(specs_of(parts)))
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(whole), nnx.to_flat_state(parts), strict=True
    ):
        assert b[...].sharding.spec == specs[path].get_value()
        np.testing.assert_array_equal(np.asarray(a[...]), np.asarray(b[...]))


@pytest.mark.slow
def test_a_run_on_one_mesh_is_resumed_on_another(tiny_run):
    """Rollout, update, monitor, evaluation, checkpoint and export, all on a mesh."""
    from safetensors.numpy import load_file

    options = ("model.dtype=float32", "monitor.every=2", "monitor.responses=4")
    one = tiny_run("one", *options)
    half = tiny_run("half", *options, "mesh.fsdp=4", "train.steps=2")
    rest = ("mesh.data=2", "mesh.tensor=2", "train.steps=4", f"resume={half}")
    tiny_run("half", *options, *rest)
    rows, expected = (read_metrics(run) for run in (half, one))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    # Later steps part: the cosine budget knows its run's length, and tokens differ.
    assert rows[0]["heldout/sampled"] == expected[0]["heldout/sampled"]
    assert rows[1]["reward"] == pytest.approx(expected[1]["reward"], rel=1e-3)
    assert rows[1]["kl/q"] == pytest.approx(expected[1]["kl/q"], rel=1e-2)
    # On either mesh the trainer computes what its sampler did.
    assert all(row["mismatch/max"] < 1e-4 for row in rows[1:])
    assert rows[2].keys() >= {"monitor/snr_min", "heldout/greedy"}
    found, wanted = (
        load_file(run / "model" / "model.safetensors") for run in (half, one)
    )
    assert {n: t.shape for n, t in found.items()} == {
        n: t.shape for n, t in wanted.items()
    }

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import logra_jax as logra
from logra_jax.algorithm.alignment import Moments, cos_c, effective_dimension, snr
from logra_jax.models.decoder import Decoder
from logra_jax.models.layers import DecoderConfig
from logra_jax.rl.advantages import RunningMean
from logra_jax.training.alarms import read_alarms
from logra_jax.training.config import load_config
from logra_jax.training.journal import deterministic, read_metrics
from logra_jax.training.monitor import (
    build_cotangents,
    build_measuring,
    build_monitor,
    ranks_of,
    summarise,
    unshare_prefix,
)
from logra_jax.training.objective import LossOptions
from logra_jax.training.state import Batch, TrainState

VOCAB, ROWS, NEW = 31, 4, 3
OPTIONS = LossOptions(
    temperature=0.9,
    advantage="running_mean",
    group=1,
    baseline_decay=0.8,
    clip_low=0.2,
    clip_high=0.2,
)
FIELDS = list(enumerate(Moments._fields))
Run = Callable[..., Path]


class Policy(NamedTuple):
    """A random float32 decoder, sketched and split."""

    graph: nnx.GraphDef
    probes: nnx.State
    weights: nnx.State


def policy(layers: int = 2, hidden: int = 16, rank=2) -> Policy:
    config = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=hidden // 2,
        max_positions=32,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
    )
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    model = logra.sketch(model, rank, "_proj$", logra.Basis(seed=3))
    return Policy(*nnx.split(model, logra.Probe, ...))


def batch_of(rewards=(1.0, 0.0, 0.25, 0.0), prefix: int = 4) -> Batch:
    """Prompts of 1 to 4 tokens behind a common prefix, answers of 3 to 1 tokens."""
    rng = np.random.default_rng(0)
    lengths = np.array([4, 1, 3, 2])
    prompts = rng.integers(0, VOCAB, (ROWS, 5))
    for row, length in zip(prompts, lengths, strict=True):
        row[: 5 - length] = VOCAB - 1  # padding
    answers = np.array([3, 2, 1, 3])
    return Batch(
        prefix=jnp.asarray(rng.integers(0, VOCAB, prefix), jnp.int32),
        prompts=jnp.asarray(prompts, jnp.int32),
        prompt_lengths=jnp.asarray(lengths, jnp.int32),
        completions=jnp.asarray(rng.integers(0, VOCAB, (ROWS, NEW)), jnp.int32),
        mask=jnp.asarray(np.arange(NEW)[None] < answers[:, None]),
        logprobs=jnp.full((ROWS, NEW), -3.4, jnp.float32),
        rewards=jnp.asarray(rewards, jnp.float32),
    )


def state_of(weights: nnx.State) -> TrainState:
    return TrainState(jnp.int32(0), weights, (), None, RunningMean.zero(), jnp.int32(0))  # pyright: ignore


def the_sketch(x, g, A):
    return {"sketch": g.T @ (x @ A.T)}


@pytest.mark.slow
def test_the_measured_gradient_is_the_one_that_the_update_sketches():
    """Of all responses, its sketch is that of the training step, padding and all."""
    from logra_jax.training.methods import logra_method
    from logra_jax.training.parts import StepOptions
    from logra_jax.training.step import accumulate

    p, batch = policy(), batch_of()
    method = logra_method(
        p.graph, p.graph, p.probes, logra.Basis(seed=3), rounding="nearest", bits=16
    )
    options = StepOptions(OPTIONS, microbatch=ROWS, kl_estimator="jvp", kl_share=1.0)
    advantages = batch.rewards - jnp.mean(batch.rewards)
    sketches, _ = accumulate(method, p.weights, batch, advantages, options)
    measure = build_measuring(p.graph, p.probes, OPTIONS, the_sketch, responses=ROWS)
    found = measure(p.weights, RunningMean.zero(), batch)
    for path, expected in nnx.to_flat_state(sketches):
        got = found[".".join(map(str, path[:-1]))]["sketch"]
        error = np.linalg.norm(got - expected[...])
        assert error <= 1e-4 * np.linalg.norm(expected[...])


@pytest.mark.parametrize("prefix", [0, 1, 4])
def test_a_prefix_put_back_leaves_the_padding_on_the_left(prefix):
    batch = batch_of(prefix=prefix)
    whole = unshare_prefix(batch)
    assert whole.prefix.shape == (0,)
    np.testing.assert_array_equal(whole.prompt_lengths, batch.prompt_lengths + prefix)
    for row, length, own in zip(
        np.asarray(whole.prompts), batch.prompt_lengths, batch.prompts, strict=True
    ):
        expected = [*batch.prefix.tolist(), *own[5 - length :].tolist()]
        assert row[len(row) - len(expected) :].tolist() == expected


def test_responses_are_spread_evenly_over_the_batch():
    """Two of four rows: the first and the third; the others could be anything."""
    p, batch = policy(), batch_of()
    measure = build_measuring(p.graph, p.probes, OPTIONS, the_sketch, responses=2)
    base = measure(p.weights, RunningMean.zero(), batch)
    for row, matters in ((0, True), (1, False), (2, True), (3, False)):
        changed = batch._replace(
            completions=batch.completions.at[row, 0].set(
                (batch.completions[row, 0] + 1) % VOCAB
            )
        )
        found = measure(p.weights, RunningMean.zero(), changed)
        is_same = all((found[k]["sketch"] == base[k]["sketch"]).all() for k in base)
        assert is_same is not matters


def test_metrics_are_means_over_layers_and_the_smallest_snr_over_all():
    p, batch = policy(), batch_of()
    monitor = build_monitor(
        p.graph, p.probes, OPTIONS, responses=ROWS, kind="rademacher"
    )
    metrics = monitor(state_of(p.weights), batch)
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    names = {"snr", "norm_ratio", "d_eff", "cos_c", "cos_c_sketch"}
    assert metrics.keys() == {
        f"monitor/{kind}/{name}" for kind in kinds | {"down_proj"} for name in names
    } | {"monitor/snr_min"}
    assert all(np.isfinite(list(metrics.values())))
    for kind in kinds:
        assert metrics[f"monitor/{kind}/d_eff"] >= 1
        assert 0 < metrics[f"monitor/{kind}/cos_c"] < 1
        assert metrics["monitor/snr_min"] <= metrics[f"monitor/{kind}/snr"]

    factors = {name: 10 if "lifted" in name else i + 1 for i, name in FIELDS}
    found = {
        f"layers.mlp.{kind}": {n: np.array(sizes) * f for n, f in factors.items()}
        for kind, sizes in (("up_proj", [1.0, 2.0, 5.0]), ("down_proj", [3.0]))
    }
    ranks = {"layers.mlp.up_proj": 4, "layers.mlp.down_proj": 2}
    metrics = summarise(found, ranks, "gaussian")
    up, down = (Moments.of(values) for values in found.values())
    assert metrics["monitor/up_proj/d_eff"] == pytest.approx(
        float(np.mean(effective_dimension(up))), rel=1e-5
    )
    for m, kind, rank in ((up, "up_proj", 4), (down, "down_proj", 2)):
        assert metrics[f"monitor/{kind}/cos_c"] == pytest.approx(
            float(np.mean(cos_c(m, rank, "gaussian"))), rel=1e-5
        )
    smallest = min(float(snr(m).min()) for m in (up, down))
    assert np.isfinite(smallest)
    assert metrics["monitor/snr_min"] == pytest.approx(smallest, rel=1e-5)


def test_the_state_is_only_read():
    p, batch = policy(), batch_of()
    monitor = build_monitor(p.graph, p.probes, OPTIONS, responses=2, kind="rademacher")
    before = jax.tree.map(np.asarray, p.weights)
    first = monitor(state_of(p.weights), batch)
    assert monitor(state_of(p.weights), batch) == first
    jax.tree.map(np.testing.assert_array_equal, before, p.weights)


def test_advantages_of_zero_measure_nothing():
    p, batch = policy(), batch_of(rewards=(0.5,) * ROWS)
    monitor = build_monitor(p.graph, p.probes, OPTIONS, responses=2, kind="rademacher")
    assert all(np.isnan(list(monitor(state_of(p.weights), batch).values())))


def test_memory_is_that_of_one_layers_gradient():
    from logra_jax.algorithm.alignment import measure_moments

    layers, hidden = 24, 64
    p, batch = policy(layers, hidden), batch_of()
    cotangents = build_cotangents(
        p.graph, p.probes, OPTIONS, measure_moments, responses=2
    )
    compiled = cotangents.lower(p.weights, RunningMean.zero(), batch).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    all_gradients = sum(
        4 * value.size
        for path, value in nnx.to_flat_state(p.weights)
        if "layers" in path and path[-1] == "kernel"
    )
    assert temporary < all_gradients / 4


# --- in a run


@pytest.mark.slow
def test_a_run_measures_every_n_updates_and_is_not_disturbed(tiny_run: Run):
    options = ["model.dtype=float32", "monitor.max_truncated=1"]
    plain = tiny_run("plain", *options)
    assert all(row["alarms"] == 0 for row in read_metrics(plain))
    assert read_alarms(plain) == []
    seen = tiny_run("seen", *options, "monitor.every=2", "monitor.responses=4")
    rows = read_metrics(seen)
    measured = [r["step"] for r in rows if "monitor/snr_min" in r]
    assert measured == [2, 4]
    assert all(np.isfinite(rows[2][k]) for k in rows[2] if k.startswith("monitor/"))
    without = [
        {k: v for k, v in deterministic(row).items() if not k.startswith("monitor/")}
        for row in rows
    ]
    assert without == [deterministic(row) for row in read_metrics(plain)]
    model = "model/model.safetensors"
    assert (plain / model).read_bytes() == (seen / model).read_bytes()
    assert rows[2]["seconds/monitor"] > 0


@pytest.mark.slow
def test_alarms_are_counted_recorded_and_shown_once(tiny_run: Run, capsys):
    """A threshold that no run keeps, in a run whose kinds of layers differ in rank."""
    ranks = ["sketch.rank.mlp=5", "sketch.rank.attn=3"]
    limits = ["monitor.every=1", "monitor.min_cos_c=1", "monitor.max_truncated=1"]
    run_dir = tiny_run("run", "train.steps=2", *ranks, *limits)
    assert load_config(run_dir / "config.yaml").sketch.rank == {"mlp": 5, "attn": 3}
    found = read_alarms(run_dir)
    assert [row["alarms"] for row in read_metrics(run_dir)] == [0, 1, 1]
    assert [(row["step"], row["name"]) for row in found] == [(1, "cos_c"), (2, "cos_c")]
    for kind in ("q_proj", "v_proj", "up_proj", "down_proj"):
        assert kind in found[0]["message"]
    assert capsys.readouterr().out.count("A step through the sketch of") == 1


def test_ranks_by_regular_expression_are_those_of_the_probes():
    ranks = ranks_of(policy(rank={"mlp": 5, "q_proj": 4, "attn": 3}).probes)
    assert ranks == {
        "layers.mlp.gate_proj": 5,
        "layers.mlp.up_proj": 5,
        "layers.mlp.down_proj": 5,
        "layers.self_attn.q_proj": 4,
        "layers.self_attn.k_proj": 3,
        "layers.self_attn.v_proj": 3,
        "layers.self_attn.o_proj": 3,
    }


@pytest.fixture
def load(tmp_path: Path):
    """Load a small config file, with more lines and overrides."""

    def load(lines: str = "", *overrides: str):
        path = tmp_path / "some.yaml"
        path.write_text(f"model: {{path: some}}\ntrain: {{steps: 1}}\n{lines}")
        return load_config(path, overrides)

    return load


def test_ranks_by_regular_expression_come_from_a_file_and_overrides(load):
    file = "sketch:\n  rank:\n    mlp: 32\n    'q|k': 8\n    attn: 16\n"
    rank = load(file).sketch.rank
    assert list(rank.items()) == [("mlp", 32), ("q|k", 8), ("attn", 16)]
    assert load(file, "sketch.rank.mlp=4").sketch.rank == rank | {"mlp": 4}
    assert load(file, "sketch.rank=7").sketch.rank == 7
    assert load("", "sketch.rank={mlp: 2, attn: 3}").sketch.rank == {
        "mlp": 2,
        "attn": 3,
    }
    assert load("sketch: {rank: 5}").sketch.rank == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sketch.rank=0", r"`sketch\.rank` must be at least 1, got 0"),
        ("sketch.rank=1.5", r"`sketch\.rank` must be an integer, or int.* got 1\.5"),
        ("sketch.rank=true", r"`sketch\.rank` must be an integer, or .* got True"),
        ("sketch.rank=null", r"`sketch\.rank` must be an integer, or .* got null"),
        ("sketch.rank.mlp=0", r"`sketch\.rank\.mlp` must be at least 1, got 0"),
        ("sketch.rank.mlp=x", r"`sketch\.rank\.mlp` must be an integer, got 'x'"),
        ("sketch.rank={}", r"`sketch\.rank` must hold a regular expression"),
        ("sketch.rank.(=4", r"`sketch\.rank` must be a regular expression, got '\('"),
        ("monitor.every=-1", r"`monitor\.every` must be at least 0"),
        ("monitor.evry=1", r"did you mean `monitor\.every`"),
    ],
)
def test_bad_ranks_and_monitors_are_one_sentence(load, override, message):
    with pytest.raises(ValueError, match=message):
        load("", override)


def test_a_monitor_of_more_responses_than_the_batch_is_refused(load):
    options = ["train.batch=16", "monitor.responses=17"]
    assert load("", *options).monitor.responses == 17  # it is off
    with pytest.raises(ValueError, match=r"be at most `train\.batch` \(16\), got 17"):
        load("", *options, "monitor.every=1")


def test_a_rank_for_no_projection_is_refused(tiny_run: Run):
    with pytest.raises(ValueError, match="`rank` must cover every layer"):
        tiny_run("run", "sketch.rank.mlp=5")

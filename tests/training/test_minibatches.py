"""Several updates of one batch, references, filtered groups: runs of a tiny model."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import logra_jax as logra
from logra_jax.models.decoder import Decoder
from logra_jax.models.layers import DecoderConfig
from logra_jax.rl.reward_pool import PendingRewards, RewardPool
from logra_jax.rollout.types import Completions, pack_prompts
from logra_jax.training.batches import Batches, Responses
from logra_jax.training.collect import Collector
from logra_jax.training.config import load_config
from logra_jax.training.display import Display
from logra_jax.training.journal import deterministic, read_metrics
from logra_jax.training.loop import _Run
from logra_jax.training.methods import Method, logra_method
from logra_jax.training.objective import LossOptions, response_hidden
from logra_jax.training.parts import StepOptions
from logra_jax.training.prepare import build_prepare, minibatch_rows, trained_weights
from logra_jax.training.recorder import Recorder
from logra_jax.training.state import Batch, initial_state

Run = Callable[..., Path]
SHAPE = DecoderConfig(
    vocab_size=24,
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
BASIS = logra.Basis(seed=3)
LOSS = LossOptions(
    temperature=0.7,
    advantage="rloo",
    group=2,
    baseline_decay=0.8,
    clip_low=0.2,
    clip_high=0.2,
)


def journal(run_dir: Path) -> list[dict]:
    return [deterministic(row) for row in read_metrics(run_dir)]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


# --- rows

COUNTS = st.integers(1, 4), st.integers(1, 6), st.integers(1, 5)


@given(*COUNTS, st.integers(0, 2**32 - 1))
def test_every_row_is_in_one_minibatch_of_each_epoch(epochs, parts, size, seed):
    counts = {"epochs": epochs, "minibatches": parts}
    found = minibatch_rows(seed, 5, parts * size, **counts)
    assert [len(rows) for rows in found] == [size] * (epochs * parts)
    for epoch in range(epochs):
        rows = np.concatenate(found[epoch * parts : (epoch + 1) * parts])
        np.testing.assert_array_equal(np.sort(rows), np.arange(parts * size))
    again = minibatch_rows(seed, 5, parts * size, **counts)
    for rows, same in zip(found, again, strict=True):
        np.testing.assert_array_equal(rows, same)


def test_epochs_and_batches_have_orders_of_their_own():
    found = minibatch_rows(0, 0, 64, epochs=3, minibatches=2)
    found += minibatch_rows(0, 6, 64, epochs=1, minibatches=2)
    found += minibatch_rows(1, 0, 64, epochs=1, minibatches=2)
    firsts = {tuple(rows) for rows in found[::2]}
    assert len(firsts) == 5


# --- judging a batch


@pytest.fixture(scope="module")
def prepared():
    """A model, a batch, and what comes before its updates; another as reference."""
    model = logra.sketch(
        Decoder(SHAPE, dtype=jnp.float32, rngs=nnx.Rngs(0)), 4, r"_proj$", BASIS
    )
    graph, probes, weights = nnx.split(model, logra.Probe, ...)
    plain, _, _ = nnx.split(logra.perturbed(model), logra.Probe, ...)
    method = logra_method(graph, plain, probes, BASIS, rounding="stochastic", bits=16)
    rng = np.random.default_rng(0)
    batch = Batch(
        prefix=jnp.array([3, 4], jnp.int32),
        prompts=jnp.asarray(rng.integers(1, 24, (4, 3)), jnp.int32),
        prompt_lengths=jnp.array([3, 3, 2, 2], jnp.int32),
        completions=jnp.asarray(rng.integers(1, 24, (4, 5)), jnp.int32),
        mask=jnp.arange(5)[None] < jnp.array([5, 3, 4, 1])[:, None],
        logprobs=jnp.full((4, 5), -3.0),
        rewards=jnp.array([1.0, 0.0, 0.5, 0.5]),
    )
    options = StepOptions(LOSS, microbatch=2, kl_estimator="jvp", kl_share=0.5)
    prepare = build_prepare(method, options, None, needs_old=True, rows=2)
    changed = jax.tree.map(lambda a: a * 1.1, trained_weights(method, weights))
    state = initial_state(weights, probes, *[_no_optimizer()] * 2)
    credit, baseline = prepare(weights, state.baseline, batch, changed)
    return method, weights, changed, batch, credit, baseline


def _no_optimizer():
    import optax

    return optax.identity()


def direct_logprobs(method: Method, weights: nnx.State, batch: Batch) -> np.ndarray:
    """Of the completion tokens, from all the logits at once."""
    model = nnx.merge(method.graph, *method.split(weights))
    z = model.logits(response_hidden(model, batch)) / LOSS.temperature
    chosen = batch.completions.reshape(-1)[:, None]
    found = jnp.take_along_axis(jax.nn.log_softmax(z), chosen, -1)
    return np.asarray(found.reshape(batch.mask.shape))


def test_a_batch_is_judged_by_the_weights_before_it_and_by_the_reference(prepared):
    method, weights, changed, batch, credit, baseline = prepared
    mask = np.asarray(batch.mask)
    old = direct_logprobs(method, weights, batch)
    other = direct_logprobs(method, nnx.merge_state(weights, changed), batch)
    np.testing.assert_allclose(credit.old[mask], old[mask], rtol=1e-5, atol=1e-5)
    found = np.asarray(credit.reference)[mask]
    np.testing.assert_allclose(found, other[mask], rtol=1e-5, atol=1e-5)
    assert np.max(np.abs(old - other)[mask]) > 1e-3
    np.testing.assert_allclose(credit.advantages, [1, -1, 0, 0], atol=1e-6)
    assert baseline.weight == 0  # of the running mean alone


def test_the_reference_is_what_updates_change_alone(prepared):
    _, weights, changed, *_ = prepared
    names = {str(path[-1]) for path, _ in nnx.to_flat_state(changed)}
    assert names == {"kernel"}
    kernels = [p for p, _ in nnx.to_flat_state(weights) if p[-1] == "kernel"]
    assert len(nnx.to_flat_state(changed)) == len(kernels)


# --- runs

TWICE = ["rl.epochs=2", "rl.minibatches=2", "kl.budget=constant", "kl.share=0.0625"]
EVERY = ["train.eval_every=4", "train.checkpoint_every=4"]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*TWICE, *EVERY, "rl.correction=token", "reference.policy=base"]


@pytest.mark.slow
def test_a_batch_makes_several_updates_and_a_run_goes_on_where_it_was(
    tiny_run: Run, options: list[str]
):
    whole = tiny_run("whole", "train.steps=8", *options)
    rows = read_metrics(whole)
    assert [row["step"] for row in rows] == list(range(9))
    for batch in (rows[1:5], rows[5:9]):
        assert len({row["reward"] for row in batch}) == 1
        assert len({row["loss"] for row in batch}) == 4
    # The first update is of the policy that sampled, before which no weight had moved.
    assert rows[1]["clip/share"] == 0
    assert rows[1]["reference/kl"] == pytest.approx(0, abs=1e-9)
    assert all(row["reference/kl"] > 1e-9 for row in rows[2:])
    # Within a batch the correction is of its first weights: it stays.
    assert all(row["correction/mean_weight"] > 0 for row in rows[1:])
    part = tiny_run("part", "train.steps=4", *options)
    tiny_run("unused", f"resume={part}", "train.steps=8", *options)
    assert journal(part)[1:4] == journal(whole)[1:4]
    assert journal(part)[5:] == journal(whole)[5:]
    assert weights(part) == weights(whole)


@pytest.mark.parametrize(
    ("epochs", "what"), [(1, "this update"), (2, "the updates of this batch")]
)
def test_a_signal_is_told_what_the_run_ends_after(epochs, what, tiny_config: Path):
    run, said = object.__new__(_Run), []
    run.config = load_config(tiny_config, [f"rl.epochs={epochs}"])
    run.display = Display(total_steps=1)
    run.display.note = said.append
    run._acknowledge("SIGINT")
    assert said == [f"SIGINT: stopping after {what}"]


@pytest.mark.slow
def test_groups_that_teach_nothing_are_replaced_and_the_place_in_the_data_is_kept(
    tiny_run: Run,
):
    groups = ["rl.advantage=grpo", "rl.responses_per_prompt=2", "kl.budget=constant"]
    options = [*groups, "shaping.filter_groups=true", "shaping.filter_rounds=3"]
    options += ["train.checkpoint_every=1", "train.eval_every=4"]
    whole = tiny_run("whole", "train.steps=3", *options)
    rows = read_metrics(whole)[1:]
    assert all(1 <= row["filter/rounds"] <= 3 for row in rows)
    assert any(row["filter/rounds"] > 1 for row in rows)
    for row in rows:
        kept = row["filter/mixed"] * row["filter/rounds"] * 32  # groups
        expected = max(0.0, 1 - kept / 32)
        assert row["filter/filled_up"] == pytest.approx(expected, abs=1e-9)
        assert row["filter/rounds"] == 3 or kept >= 32
    part = tiny_run("part", "train.steps=1", *options)
    tiny_run("unused", f"resume={part}", "train.steps=3", *options)
    assert weights(part) == weights(whole)


class Scripted(Batches):
    """Two groups of two: first one that is cut, then whole ones; scored already."""

    prompts = 2
    finished = ((False, False, True, True), (True, False, True, True))
    scores = ((0.0, 1.0, 0.0, 1.0), (0.0, 1.0, 1.0, 1.0))

    def __init__(self):
        pass

    def start_ahead(self, *_):
        pass

    def take(self, index, position, weights, attempt=0):
        prompts = pack_prompts([[2 * attempt + i // 2] for i in range(4)])
        tokens, lengths = np.zeros((4, 3), np.int32), np.full(4, 3, np.int32)
        ends = np.array(self.finished[attempt])
        logprobs = np.zeros((4, 3), np.float32)
        done = Future()
        done.set_result(([*self.scores[attempt]], 0.0))
        return Responses(
            [],
            Completions(prompts, tokens, logprobs, lengths, ends),
            [],
            PendingRewards((done,), 0.0),
        )


class Untimed(Recorder):
    """Keeps no record."""

    is_ahead = False

    def __init__(self):
        pass

    def timed(self, *_):
        return nullcontext()


def test_groups_whose_responses_are_all_masked_are_replaced_too(tiny_config: Path):
    """They may differ in reward, and teach nothing: none of them is in the loss."""
    options = ["train.batch=4", "train.microbatch=4", "rl.responses_per_prompt=2"]
    options += ["shaping.filter_groups=true", "shaping.truncated=mask"]
    config = load_config(tiny_config, options)
    pool = object.__new__(RewardPool)  # all is scored already
    collector = Collector(config, Scripted(), pool, Untimed(), 0)
    found = collector.collect(0, nnx.State({}))
    assert found.completions.prompts.tokens.ravel().tolist() == [1, 1, 2, 2]
    assert found.counts is not None
    assert found.counts.tolist() == [True, True, True, False]
    assert found.values["filter/rounds"] == 2
    assert found.values["filter/mixed"] == 0.5


@pytest.mark.slow
def test_masked_responses_have_no_say_and_lengths_still_count_them(tiny_run: Run):
    """The tiny model hardly ever ends an answer within three tokens."""
    run_dir = tiny_run("run", "shaping.truncated=mask", "train.steps=1")
    _, row = read_metrics(run_dir)
    assert row["length/truncated"] > 0.9
    assert row["length/mean"] > 2.5
    assert np.isfinite(row["loss"])
    kept = tiny_run("kept", "train.steps=1")
    assert abs(row["loss"]) != abs(read_metrics(kept)[1]["loss"])


@pytest.mark.slow
def test_rewards_are_shaped_and_the_score_is_shown_as_it_was(tiny_run: Run):
    options = ["shaping.truncated=penalise", "shaping.truncated_reward=-1"]
    _, row = read_metrics(tiny_run("run", "train.steps=1", *options))
    assert row["reward"] >= 0
    share = row["length/truncated"]
    assert -1 <= row["reward/shaped"] <= -share + (1 - share)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.advantage=rloo", "`rl.responses_per_prompt` must be at least 2 when"),
        (
            "rl.minibatches=3",
            r"`rl.minibatches` must divide `train.batch` \(64\), got 3; ",
        ),
        ("rl.epochs=3", "`train.steps` must be a multiple of `rl.epochs` times .*6 is"),
        ("rl.epochs=0", "`rl.epochs` must be at least 1"),
        ("rl.std_floor=0", "`rl.std_floor` must be positive"),
        ("rl.loss=ppoo", "`rl.loss` must be one of ppo, reinforce, cispo, gspo"),
        ("shaping.filter_groups=true", "`shaping.filter_groups` must be false when"),
        ("shaping.filter_rounds=1", "`shaping.filter_rounds` must be at least 2"),
        ("shaping.overlong_buffer=4", "must be at most `rollout.max_new_tokens` .3."),
        ("shaping.overlong_buffer=0", "`shaping.overlong_buffer` must be at least 1"),
        ("shaping.truncated_reward=.nan", "`shaping.truncated_reward` must be finite"),
        ("reference.weight=0", "`reference.weight` must be positive and finite, got 0"),
    ],
)
def test_bad_values_are_refused(override: str, message: str, tiny_config: Path):
    with pytest.raises(ValueError, match=message):
        load_config(tiny_config, [override])


def test_bounds_of_rewards_are_in_order(tiny_config: Path):
    bounds = ["shaping.reward_min=1", "shaping.reward_max=0"]
    message = r"`shaping.reward_min` must be below `shaping.reward_max` \(0"
    with pytest.raises(ValueError, match=message):
        load_config(tiny_config, bounds)

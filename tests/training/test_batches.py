"""Batches that are sampled ahead, by an engine that notes when each was asked for."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from logra_jax.rl.reward_pool import RewardPool
from logra_jax.rl.rewards import ExactReward
from logra_jax.rl.tasks import Question, Task
from logra_jax.rollout.local import LocalEngine
from logra_jax.rollout.servers import ServerError
from logra_jax.rollout.sglang import SGLangEngine
from logra_jax.rollout.types import Completions, pack_prompts
from logra_jax.training.assemble import sampling_of, stream_key, training_questions
from logra_jax.training.batches import Batches, staleness
from logra_jax.training.config import Config, ModelConfig, RolloutConfig, TrainConfig
from logra_jax.training.policy import Policy
from logra_jax.training.remote import Remote

BATCH = 4
WEIGHTS = nnx.State({})
# More questions than are asked: no two batches have one in common.
TASK = Task(
    "numbers",
    train=tuple(Question(str(i), "", {}) for i in range(100)),
    held_out=(Question("-1", "", {}),),
)


def make_config(ahead: int, steps: int) -> Config:
    return Config(
        model=ModelConfig(path="none"),
        rollout=RolloutConfig(
            engine="sglang", urls=["http://127.0.0.1:1"], staleness=ahead
        ),
        train=TrainConfig(steps=steps, batch=BATCH, microbatch=BATCH),
    )


@functools.cache
def order(seed: int) -> dict[str, int]:
    """The batch that each question is the first of."""
    config = dataclasses.replace(make_config(0, 20), seed=seed)
    return {training_questions(config, TASK, i * BATCH)[0].text: i for i in range(20)}


def make_completions(prompts, versions: list[list[int]]) -> Completions:
    """Tokens of these versions; -1 is padding."""
    shape = (len(versions), len(versions[0]))
    return Completions(
        pack_prompts(prompts),
        tokens=np.broadcast_to(np.array(prompts, np.int32), shape).copy(),
        logprobs=np.zeros(shape, np.float32),
        lengths=np.array([sum(v >= 0 for v in row) for row in versions], np.int32),
        finished=np.ones(len(versions), bool),
        versions=np.array(versions, np.int32),
    )


class Engine(SGLangEngine):
    """Answers at once, with tokens of the weights' version at that time."""

    def __init__(self, config: Config):
        self.config = config
        self.log: list[tuple[str, int]] = []
        self.version = 0
        self.is_down = self.is_slow = False
        self.futures: list[concurrent.futures.Future] = []

    def start(self, prompts, sampling, key):
        index = order(self.config.seed)[str(prompts[0][0])]
        asked = [q.text for q in training_questions(self.config, TASK, index * BATCH)]
        assert [str(prompt[0]) for prompt in prompts] == asked
        assert sampling == sampling_of(self.config)
        assert key == stream_key(self.config.seed, "rollout", index)
        self.log.append(("start", index))
        future = concurrent.futures.Future()
        self.futures.append(future)
        if self.is_down:
            future.set_exception(ServerError("http://a", "unreachable", "Gone."))
        elif not self.is_slow:
            versions = [[self.version] * 2] * len(prompts)
            future.set_result(make_completions(prompts, versions))
        return future


class Numbers(Policy):
    """A question is its only token, and so is the response."""

    def __init__(self, engine):
        object.__setattr__(self, "engine", engine)

    def encode(self, questions):
        return [[int(question.text)] for question in questions]

    def decode(self, completions):
        return [str(row[0]) for row in completions.tokens]

    def respond(self, weights, questions, sampling, key):
        self.engine.keys.append(key)
        completions = make_completions(self.encode(questions), [[0]] * len(questions))
        return completions._replace(versions=None), self.decode(completions)


class Comeback(Remote):
    """Servers that come back at once, as often as they are lost."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def persist(self, version, weights, work: Callable):
        while True:
            try:
                return work()
            except ServerError:
                self.engine.log.append(("back", version))
                self.engine.is_down = False


def make_batches(ahead: int, steps: int) -> tuple[Batches, Engine]:
    config = make_config(ahead, steps)
    engine = Engine(config)
    return Batches(config, TASK, Numbers(engine), Comeback(engine)), engine


def train(batches: Batches, engine: Engine, steps: range, lost=frozenset()):
    """The loop's use of batches; the staleness of each."""
    metrics = []
    for index in steps:
        engine.version, engine.is_down = index, index in lost
        responses = batches.take(index, index * BATCH, WEIGHTS)
        engine.log.append(("took", index))
        assert responses.texts == [question.text for question in responses.questions]
        asked = training_questions(engine.config, TASK, index * BATCH)
        assert responses.questions == asked
        batches.start_ahead(index, (index + 1) * BATCH)
        metrics.append(staleness(responses.completions, index))
    return metrics


def took_before(log: list[tuple[str, int]], place: int) -> int:
    """The newest batch that had been taken by then."""
    return max((i for what, i in log[:place] if what == "took"), default=-1)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("first", [0, 3])
def test_batches_are_asked_for_once_in_order_and_no_earlier_than_allowed(ahead, first):
    steps = 8
    batches, engine = make_batches(ahead, steps)
    metrics = train(batches, engine, range(first, steps))
    started = [index for what, index in engine.log if what == "start"]
    assert started == list(range(first, steps))
    for place, (what, index) in enumerate(engine.log):
        if what == "start" and index > first:
            # As early as is allowed, or with those that may be first of all.
            earliest = max(first, index - max(ahead, 1))
            assert took_before(engine.log, place) == earliest
    most = [m["staleness/max"] for m in metrics]
    expected = [min(ahead, i - first) for i in range(first, steps)]
    assert most == [m["staleness/mean"] for m in metrics] == expected


def test_without_staleness_a_batch_is_asked_for_when_it_is_taken():
    batches, engine = make_batches(0, 4)
    train(batches, engine, range(4))
    pairs = [(what, i) for i in range(4) for what in ("start", "took")]
    assert engine.log == pairs


@settings(max_examples=15)
@given(st.integers(0, 4), st.integers(0, 6), st.sets(st.integers(0, 6)))
def test_servers_that_are_lost_make_no_batch_staler(ahead, first, lost):
    steps = 7
    batches, engine = make_batches(ahead, steps)
    metrics = train(batches, engine, range(first, steps), lost)
    assert max(m["staleness/max"] for m in metrics) <= ahead
    taken = [index for what, index in engine.log if what == "took"]
    assert taken == list(range(first, steps))
    for place, (what, index) in enumerate(engine.log):
        if what == "start" and index > first:
            newest = took_before(engine.log, place)
            assert newest >= index - max(ahead, 1)
            assert newest < index


def test_a_batch_that_was_lost_is_asked_for_again_with_all_that_follow():
    batches, engine = make_batches(2, 5)
    engine.is_slow = True
    batches.start(0, 0)
    batches.start_ahead(0, BATCH)
    engine.futures[0].set_exception(ServerError("http://a", "unreachable", "Gone."))
    engine.is_slow = False
    train(batches, engine, range(1))
    assert engine.log == [
        *(("start", i) for i in range(3)),
        ("start", 0),
        ("took", 0),
        ("start", 1),
        ("start", 2),
    ]
    assert [future.cancelled() for future in engine.futures[:3]] == [False, True, True]


def test_a_batch_that_failed_before_servers_were_healed_does_not_end_the_run():
    """An update heals what failed a batch ahead: nobody has to wait for servers."""
    batches, engine = make_batches(1, 3)
    engine.is_slow = True
    batches.start_ahead(0, BATCH)
    engine.futures[0].set_exception(ServerError("http://a", "unreachable", "Gone."))
    engine.is_slow = False
    batches.take(1, BATCH, WEIGHTS)
    assert engine.log == [("start", 1), ("start", 1)]  # and nothing was waited for
    engine.is_slow = True
    batches.start_ahead(1, 2 * BATCH)
    engine.futures[-1].set_exception(ServerError("http://a", "refused", "No."))
    engine.is_slow = False
    batches.take(2, 2 * BATCH, WEIGHTS)
    assert engine.log[2:] == [("start", 2), ("back", 2), ("start", 2)]


def test_cancelling_gives_up_what_is_under_way():
    batches, engine = make_batches(3, 9)
    engine.is_slow = True
    batches.start_ahead(0, BATCH)
    batches.start_ahead(0, BATCH)
    assert engine.log == [("start", 1), ("start", 2), ("start", 3)]
    batches.cancel()
    assert all(future.cancelled() for future in engine.futures)
    batches.start(1, BATCH)
    assert engine.log[3:] == [("start", 1)]


def test_answers_are_scored_as_they_come_and_anew_for_a_batch_that_was_lost():
    class Talking(Engine):
        def start(self, prompts, sampling, key, on_answer):
            future = super().start(prompts, sampling, key)
            # The last first, and none of the last batch before it is lost.
            for i in reversed(range(2 if self.is_slow else len(prompts))):
                on_answer(i, [prompts[i][0]])
            return future

    config = make_config(1, 3)
    engine, policy = Talking(config), Numbers(None)
    tokenizer = SimpleNamespace(decode=lambda tokens: "x" * (tokens[0] + 1))
    for name, value in {"engine": engine, "tokenizer": tokenizer}.items():
        object.__setattr__(policy, name, value)
    task = dataclasses.replace(
        TASK,
        train=tuple(
            Question(q.text, "x" * (int(q.text) + 1) if int(q.text) % 3 else "no", {})
            for q in TASK.train
        ),
    )
    with RewardPool(ExactReward("whole_text")) as pool:
        batches = Batches(config, task, policy, Comeback(engine), pool)
        engine.is_slow = True
        batches.start(0, 0)
        engine.futures[0].set_exception(ServerError("http://a", "unreachable", "Gone."))
        engine.is_slow = False
        for index in range(2):
            responses = batches.take(index, index * BATCH, WEIGHTS)
            assert responses.scores is not None
            right = [float(int(q.text) % 3 > 0) for q in responses.questions]
            np.testing.assert_array_equal(responses.scores.result().values, right)
            batches.start_ahead(index, (index + 1) * BATCH)


def test_an_engine_of_this_process_samples_when_a_batch_is_taken():
    class Local(LocalEngine):
        def __init__(self):
            self.keys: list[jax.Array] = []

    engine, config = Local(), make_config(0, 3)
    batches = Batches(config, TASK, Numbers(engine), None)
    batches.start_ahead(0, BATCH)
    assert engine.keys == []
    responses = batches.take(1, BATCH, WEIGHTS)
    assert engine.keys == [stream_key(config.seed, "rollout", 1)]
    assert responses.questions == training_questions(config, TASK, BATCH)
    assert responses.texts == [question.text for question in responses.questions]
    assert staleness(responses.completions, 1) == {}


# --- staleness


def test_staleness_counts_each_sampled_token():
    versions = [[3, 3, 4, 5], [5, -1, -1, -1], [1, 5, -1, -1]]
    metrics = staleness(make_completions([[1], [2], [3]], versions), 5)
    # Behind: 2 2 1 0, 0, 4 0.
    assert metrics == {"staleness/mean": pytest.approx(9 / 7), "staleness/max": 4.0}


def test_tokens_of_weights_that_are_yet_to_come_are_an_error():
    completions = make_completions([[1], [2]], [[4, 5], [5, 7]])
    with pytest.raises(ValueError, match=r"version 5 or earlier, got 7: another"):
        staleness(completions, 5)
    assert staleness(completions, 7)["staleness/max"] == 3.0

"""An evaluation's numbers, worked out by hand from scripted responses."""

import math
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from flax import nnx

from logra_jax.rl.reward_pool import PendingRewards, RewardPool
from logra_jax.rl.reward_worker import Failure
from logra_jax.rl.tasks import EvalSet, Question
from logra_jax.rollout.local import LocalEngine
from logra_jax.rollout.types import Completions, pack_prompts
from logra_jax.training.config import Config, ModelConfig, TrainConfig
from logra_jax.training.evaluate import answer_label, check_evaluation, evaluate
from logra_jax.training.policy import Policy
from logra_jax.training.samples import (
    Sample,
    read_samples,
    samples_path,
    spread,
    to_show,
    write_samples,
)
from logra_jax.training.schema_watch import EvalConfig

# Question, family, the answer that is right, and the samples in turn.
SCRIPT = {
    "one": ("a", "5", ["It is 5.", "5.0", "6", "5"]),
    "two": ("a", "7", ["1", "2", "none", "7"]),
    "three": ("b", "9", ["9", "8", "9", "8"]),
    "a long one of another kind": ("c", "3", ["3", "3", "3", "3"]),
}
HELDOUT = EvalSet(
    "heldout",
    tuple(Question(q, SCRIPT[q][1], {}, SCRIPT[q][0]) for q in ("one", "two", "three")),
)
OTHER = EvalSet("other", (Question("a long one of another kind", "3", {}, "c"),))


class Scripted(Policy):
    """Answers by the script, in turn; greedily with the right number."""

    def __init__(self, engine, **others):
        fields = {"method": None, "tokenizer": None, "system_prompt": None}
        fields |= {"graph": None, "layout": None, "engine": engine} | others
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def calls(self):
        return self.engine.notes[0]

    @property
    def turns(self):
        return self.engine.notes[1]

    def encode(self, questions):
        begin = [7, 7, 7] if questions[0].family != "c" else [8]
        return [[*begin, *(len(word) for word in q.text.split())] for q in questions]

    def respond(self, weights, questions, sampling, key):
        self.calls.append((self, len(questions), sampling, jax.random.key_data(key)))
        texts = []
        for question in questions:
            _, right, answers = SCRIPT[question.text]
            if sampling.temperature == 0:
                texts.append(right)
            else:
                turn = self.turns.get(question.text, 0)
                self.turns[question.text] = turn + 1
                texts.append(answers[turn % 4])
        count = len(texts)
        completions = Completions(
            pack_prompts(self.encode(questions)),
            np.zeros((count, 9), np.int32),
            np.zeros((count, 9), np.float32),
            np.array([len(text) for text in texts], np.int32),
            np.array([text != "none" for text in texts]),
        )
        return completions, texts


class Scorer(RewardPool):
    """Right where the last number is; "none" raises."""

    def __init__(self):
        pass

    def submit(self, questions, texts):
        future = Future()
        verdicts = [
            Failure("raised", "none")
            if text == "none"
            else float(answer_label(text, "last_number") == question.answer)
            for question, text in zip(questions, texts, strict=True)
        ]
        future.set_result((verdicts, 0.0))
        return PendingRewards((future,), 0.0)


@pytest.fixture
def policy() -> Scripted:
    engine = object.__new__(LocalEngine)
    engine.max_positions, engine.prefix, engine.bucket = 40, (7, 7, 7), 1
    engine.notes = ([], {})  # copies of the engine share them
    return Scripted(engine)


def settings(**options) -> Config:
    usual = {"samples_per_question": 4, "batch": 5, "pass_at": [1, 2]}
    return Config(
        model=ModelConfig(path="some-model"),
        train=TrainConfig(steps=1),
        eval=EvalConfig(**usual | options),
    )


def run(policy, *sets, **options):
    return evaluate(policy, nnx.State({}), Scorer(), sets, settings(**options))


def test_every_number_by_hand(policy: Scripted):
    values, samples = run(policy, HELDOUT)
    # means of the questions: 3/4, 1/4, 2/4
    assert values["heldout/sampled"] == pytest.approx(0.5)
    assert values["heldout/sampled_n"] == 12
    assert values["heldout/sampled_se"] == pytest.approx(0.25 / math.sqrt(3))
    # 1 - C(wrong, 2) / 6 with 1, 3 and 2 wrong
    assert values["heldout/pass@2"] == pytest.approx((1 + 1 / 2 + 5 / 6) / 3)
    # one: 5, 5, 6, 5: half the pairs are 5 5, half level. two: 1, 2, none, 7: of the
    # pairs with 7, two are level and one votes alone. three: 1/6 right, 4/6 level.
    votes = (0.5 + 0.5 / 2, (2 / 2 + 1) / 6, 1 / 6 + 4 / 6 / 2)
    assert values["heldout/maj@2"] == pytest.approx(sum(votes) / 3)
    assert not any("@1" in name for name in values)  # that is `sampled`
    assert values["heldout/greedy"] == 1
    assert (values["heldout/greedy_se"], values["heldout/greedy_n"]) == (0, 3)
    assert values["heldout/family/a"] == pytest.approx(0.5)
    assert values["heldout/family/b_n"] == 4
    assert values["heldout/macro"] == pytest.approx(0.5)
    assert math.isnan(values["heldout/macro_se"])  # of one family's single question
    assert values["heldout/failed"] == 1
    assert values["heldout/truncated"] == pytest.approx(1 / 12)
    lengths = [len(text) for _, _, texts in list(SCRIPT.values())[:3] for text in texts]
    assert values["heldout/length"] == pytest.approx(np.mean(lengths))
    assert [s.mode for s in samples] == ["greedy"] * 3 + ["sampled"] * 12
    assert samples[3] == Sample(
        *("heldout", "sampled", "a", "one", "5", "It is 5.", "5"),
        *(1.0, 8, True, 0),
    )


def test_the_mean_over_families_counts_each_alike(policy: Scripted):
    both = EvalSet("both", HELDOUT.questions[:2] + OTHER.questions)
    values, _ = run(policy, both, pass_at=[])
    assert values["both/macro"] == pytest.approx((1 / 2 + 1) / 2)
    assert values["both/sampled"] == pytest.approx((3 + 1 + 4) / 12)
    assert not any("@" in name for name in values)


def test_shapes_are_fixed_and_what_fills_them_is_not_counted(policy: Scripted):
    values, samples = run(
        policy, HELDOUT, samples_per_question=None, samples=7, pass_at=[]
    )
    assert values["heldout/sampled_n"] == 7
    assert len(samples) == 3 + 7
    assert {count for _, count, *_ in policy.calls} == {5}
    assert [s.n for s in samples[3:]] == [0, 0, 0, 1, 1, 1, 2]


def test_sampling_is_the_users(policy: Scripted):
    run(policy, HELDOUT, temperature=0.6, top_p=0.9, max_new_tokens=11, greedy=False)
    used = {call[2] for call in policy.calls}
    assert [(s.temperature, s.top_p, s.max_new_tokens) for s in used] == [
        (0.6, 0.9, 11)
    ]


def test_a_set_s_random_numbers_are_its_own(policy: Scripted):
    def keys(*sets, **options):
        policy.calls.clear()
        run(policy, *sets, **options)
        return [
            tuple(key.tolist()) for _, _, s, key in policy.calls if s.temperature > 0
        ]

    alone, with_others = keys(HELDOUT), keys(OTHER, HELDOUT)
    assert len(set(with_others)) == len(with_others)
    assert with_others[1:] == alone == keys(HELDOUT, greedy=False)


def test_prompts_of_another_kind_get_an_engine_that_fits_them(policy: Scripted):
    run(policy, HELDOUT, OTHER)
    engines = [call[0].engine for call in policy.calls]
    assert engines[0] is policy.engine
    assert policy.engine.prefix == (7, 7, 7)  # as it was
    # one prompt: all but its last token is common, and the bucket is a multiple of 8
    assert (engines[-1].prefix, engines[-1].bucket) == ((8, 1, 4, 3, 2, 7), 8)


def test_what_a_run_could_not_evaluate_is_refused_before_it(policy: Scripted):
    check_evaluation(policy, [HELDOUT, OTHER], settings(best="other/maj@2"))
    check_evaluation(policy, [HELDOUT], settings(best="heldout/family/b"))
    check_evaluation(policy, [], settings(best="heldout/sampled"))
    few = {"samples_per_question": None, "samples": 2, "pass_at": []}
    with pytest.raises(ValueError, match=r"are heldout/greedy, heldout/sampled\.$"):
        check_evaluation(policy, [HELDOUT], settings(best="heldout/family/b", **few))
    with pytest.raises(ValueError, match=r"`eval\.best` must be .*; there are heldout"):
        check_evaluation(policy, [HELDOUT], settings(best="other/sampled"))
    with pytest.raises(ValueError, match=r"`eval\.max_new_tokens` .* 'other' \(7 tok"):
        check_evaluation(policy, [OTHER], settings(max_new_tokens=34))


def test_progress_is_told_to_the_end(policy: Scripted):
    told: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        told.append((done, total))

    config = settings()
    evaluate(policy, nnx.State({}), Scorer(), [HELDOUT], config, progress=note)
    assert told == [(0, 15), (3, 15), (8, 15), (13, 15), (15, 15)]


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("so 3", "3"),
        ("3.0", "3"),
        ("03", "3"),
        ("= -0.0", "0"),
        ("x = -1,050.50.", "-1050.5"),
        (".5", "0.5"),
        ("three", None),
    ],
)
def test_answers_are_one_however_they_are_written(text: str, label: str | None):
    assert answer_label(text, "last_number") == label
    assert answer_label(f" {text} ", "whole_text") == text.casefold()
    if label is not None:
        boxed = f"\\boxed{{{label}.00}}" if "." not in label else f"\\boxed{{{label}}}"
        assert answer_label(boxed, "final_answer") == label


# --- samples


def make_samples(*modes: str) -> list[Sample]:
    return [
        Sample("s", mode, "f", f"q{i}", "1", "ü\n", None, 0.0, 2, True, i // 4)
        for i, mode in enumerate(modes)
    ]


@pytest.mark.parametrize(("keep", "kept"), [(-1, 8), (0, 0), (3, 3), (100, 8)])
def test_samples_come_back_as_they_were(tmp_path, keep: int, kept: int):
    samples = make_samples(*["greedy"] * 4, *["sampled"] * 4)
    path = samples_path(tmp_path, 12)
    write_samples(path, samples, keep)
    assert path.exists() == (kept > 0)
    if kept:
        found = read_samples(path)
        assert len(found) == kept
        assert [s for s in samples if s in found] == found
        assert {s.mode for s in found} == {"greedy", "sampled"}
        assert [p.name for p in path.parent.iterdir()] == ["000012.jsonl"]


def test_those_to_look_at_are_the_first_greedy_ones():
    samples = make_samples(*["greedy"] * 4, *["sampled"] * 4)
    assert to_show(samples, 2) == samples[:2]
    assert to_show(samples[4:], 2) == []  # none of them the first of its question
    assert to_show([], 2) == []
    assert spread(samples, 2) == [samples[0], samples[4]]

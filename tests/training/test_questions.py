"""The questions of a run, from its config: every source, and evaluation sets."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from logra_jax.rl.rewards import ReasoningGymReward
from logra_jax.rl.tasks import plain, question_class
from logra_jax.training.assemble import (
    load_eval_sets,
    load_task,
    training_questions,
)
from logra_jax.training.checkpoint import discard_start, write_config
from logra_jax.training.config import Config, load_config
from logra_jax.training.data_record import (
    check_data_record,
    data_record,
    describe_data,
    task_fingerprint,
    write_data_record,
)
from logra_jax.training.paths import DATA_FILE
from logra_jax.training.policy import load_policy
from logra_jax.training.questions import load_questions

CONFIGS = Path(__file__).parents[2] / "configs"
ROWS = [
    {"question": f"{i} + {j}?", "answer": i + j} for i in range(4) for j in range(4)
]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Config]:
    """Load a minimal config file with overrides."""
    path = tmp_path / "tiny.yaml"
    path.write_text("model: {path: some-model}\ntrain: {steps: 3, batch: 4}\n")
    train = ["train.microbatch=4"]
    return lambda *overrides: load_config(path, [*train, *overrides])


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write rows as JSON lines; the path."""

    def write(rows: list[dict], name: str = "questions.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def files(path: str, section: str = "task") -> list[str]:
    return [f"{section}.source=files", f"{section}.name={path}"]


def classes(questions) -> set[str]:
    return {question_class(question) for question in questions}


@pytest.mark.parametrize(
    "overrides",
    [
        ["task.size=60", "task.options={min_terms: 2, max_terms: 2, max_digits: 1}"],
        ["task.size=60", "task.mix={gcd: {weight: 2}, lcm: {level: 1}}"],
        ["task.source=aime", "task.name=all"],
        None,  # a file
    ],
)
def test_every_source_splits_by_class_and_loads_the_same_again(load, write, overrides):
    overrides = files(write(ROWS)) if overrides is None else overrides
    task = load_task(load(*overrides))
    assert task.train
    assert task.held_out
    assert classes(task.train).isdisjoint(classes(task.held_out))
    assert load_task(load(*overrides)) == task
    other = load_task(load(*overrides, "task.seed=1"))
    assert other.held_out != task.held_out


def test_questions_without_answers_are_for_rewards_of_ones_own(load, write):
    rows = [{"question": f"A word that begins with {c}?"} for c in "abcdefgh"]
    without = [*files(write(rows)), "task.columns.answer=null"]
    own = ["reward.kind=python", "reward.function=my_rewards:score"]
    task = load_questions(load(*without, *own))
    assert len(task.train) + len(task.held_out) == 8
    others = files(write(rows, "b.jsonl"), "eval.sets.b")
    others += ["eval.sets.b.columns.answer=null", "eval.sets.b.reward=exact"]
    for overrides, section in (
        ([*without, "reward.kind=exact"], "task"),
        ([*without, *own, *others], "eval.sets.b"),
    ):
        with pytest.raises(ValueError, match=rf"^`{section}.columns.answer` must name"):
            load(*overrides)


def test_a_commuted_question_of_a_file_stays_on_its_side(load, write):
    task = load_task(load(*files(write(ROWS))))
    assert len(classes(task.train + task.held_out)) == 10  # of 16, 6 of them pairs
    assert len(task.train) + len(task.held_out) == 16


def test_the_limit_takes_the_first_distinct_questions(load, write):
    rows = [ROWS[0], ROWS[0], *ROWS[1:]]
    task = load_task(load(*files(write(rows)), "task.limit=5"))
    asked = {question.text for question in task.train + task.held_out}
    assert asked == {row["question"] for row in ROWS[:5]}
    assert task.dropped == {"duplicate": 1}


def test_contradictory_answers_are_dropped_and_counted(load, write):
    rows = [*ROWS, ROWS[0] | {"answer": 9}]
    task = load_task(load(*files(write(rows))))
    asked = {question.text for question in task.train + task.held_out}
    assert asked == {row["question"] for row in ROWS[1:]}
    assert task.dropped == {"contradictory": 2}


def test_a_prompt_goes_around_each_question_and_eval_sets_may_have_their_own(
    load, write
):
    path = write(ROWS)
    extra = write([{"question": "7 + 7?", "answer": 14}], "extra.jsonl")
    task = load_task(
        load(
            *files(path),
            r"task.prompt='{question} In \boxed{}.'",
            *files(extra, "eval.sets.same"),
            *files(extra, "eval.sets.own"),
            "eval.sets.own.prompt='Now: {question}'",
        )
    )
    assert all(q.text == rf"{plain(q)} In \boxed{{}}." for q in task.train)
    same, own = task.eval_sets
    assert same.questions[0].text == r"7 + 7? In \boxed{}."
    assert own.questions[0].text == "Now: 7 + 7?"


def test_questions_of_eval_sets_are_not_trained_on_whatever_their_prompt(load, write):
    config = load(
        *files(write(ROWS)),
        "task.held_out=0",
        *files(write([ROWS[1], ROWS[5]], "a.jsonl"), "eval.sets.a"),
        "eval.sets.a.prompt='Say: {question}'",
    )
    task = load_task(config)
    measured = classes(task.eval_sets[0].questions)
    assert measured.isdisjoint(classes(task.train))
    # 0 + 1, its twin 1 + 0, and 1 + 1.
    assert task.dropped == {"in evaluation sets": 3}
    assert len(task.train) == 13
    assert task.held_out == ()
    assert describe_data(task) == [
        f"{config.task.name}: 13 questions to train on; dropped: 3 in evaluation sets",
        "a: 2 questions to measure on",
    ]


def test_eval_sets_that_hold_everything_are_refused(load, write):
    path = write(ROWS)
    config = load(*files(path), "task.held_out=0", *files(path, "eval.sets.all"))
    with pytest.raises(ValueError, match=r"`eval.sets` must leave questions to train"):
        load_task(config)


def test_eval_sets_come_after_the_held_out_and_name_their_own_scorer(load, write):
    config = load(
        *files(write(ROWS)),
        "eval.sets.aime.source=aime",
        "eval.sets.aime.name=2024",
        "eval.sets.aime.reward=math",
        "eval.sets.sums.size=5",
    )
    sets = load_eval_sets(config, load_task(config))
    assert [(one.name, len(one.questions)) for one in sets[1:]] == [
        ("aime", 30),
        ("sums", 5),
    ]
    assert sets[0].name == "heldout"
    assert {q.scorer for q in sets[1].questions} == {"aime"}
    assert {q.scorer for q in (*sets[0].questions, *sets[2].questions)} == {""}
    config = load("task.held_out=0", "eval.sets.a.source=aime", "eval.sets.a.name=2025")
    assert [one.name for one in load_eval_sets(config, load_task(config))] == ["a"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["eval.sets.a.source=aime", "eval.sets.a.name=1999"],
            r"^`eval\.sets\.a\.name` must be one of",
        ),
        (
            ["eval.sets.a.name=nothing"],
            r"^`eval\.sets\.a\.name` must be a reasoning-gym",
        ),
        (["task.name=nothing"], r"^`task\.name` must be a reasoning-gym data set"),
        (["task.level=99"], r"^`task\.level` must lie in"),
        (
            ["task.mix={gcd: {weight: 1e-6}, lcm: {}}"],
            r"^`task\.size` must give every family",
        ),
    ],
)
def test_questions_that_cannot_be_had_are_refused_in_one_sentence(
    load, overrides, message
):
    with pytest.raises(ValueError, match=message) as caught:
        load_task(load(*overrides))
    assert "\n" not in str(caught.value)


def test_a_file_of_contradictions_alone_is_refused(load, write):
    path = write([ROWS[0], ROWS[0] | {"answer": 7}])
    with pytest.raises(ValueError, match="whose 2 contradict one another"):
        load_task(load(*files(path)))


def test_the_fingerprint_follows_texts_answers_and_order_and_nothing_else(load, write):
    def record(rows, *overrides):
        config = load(*files(write(rows)), "task.held_out=0.0", *sets, *overrides)
        task = load_task(config)
        assert data_record(config, task)["fingerprint"] == task_fingerprint(task)
        return task_fingerprint(task)

    sets = ["eval.sets.a.source=aime", "eval.sets.a.name=2024"]
    first = record(ROWS)
    assert record(ROWS) == first
    assert record([row | {"unused": 1} for row in ROWS]) == first
    changed = {
        record([*ROWS[:3], ROWS[3] | {"answer": 9}, *ROWS[4:]]),
        record([*ROWS[:3], ROWS[3] | {"question": "0 + 3 ?"}, *ROWS[4:]]),
        record([ROWS[1], ROWS[0], *ROWS[2:]]),
        record(ROWS[:-1]),
        record(ROWS, "task.prompt='{question}!'"),
    }
    assert len(changed) == 5
    assert first not in changed


@pytest.mark.parametrize(
    ("rows", "change"),
    [
        (ROWS[:-1], "got 15 questions to train on where it had 16;"),
        (
            [ROWS[1], ROWS[0], *ROWS[2:]],
            "got 16 questions .* as before, in another order",
        ),
        (
            [ROWS[0] | {"answer": 5}, *ROWS[1:]],
            "got 16 questions .* as before, with other answers",
        ),
        (
            [ROWS[0] | {"question": "9 + 9?"}, *ROWS[1:]],
            "got 16 questions .*, as many as before but others",
        ),
    ],
)
def test_a_changed_data_set_is_refused_on_resume(load, write, tmp_path, rows, change):
    def record(rows):
        config = load(
            *files(write(rows)),
            "task.held_out=0",
            "eval.sets.a.source=aime",
            "eval.sets.a.name=2024",
        )
        return data_record(config, load_task(config))

    check_data_record(tmp_path, record(ROWS))  # a run without a record
    write_data_record(tmp_path, record(ROWS))
    check_data_record(tmp_path, record(ROWS))
    with pytest.raises(ValueError, match=change) as caught:
        check_data_record(tmp_path, record(rows))
    assert "\n" not in str(caught.value)
    stored = json.loads((tmp_path / DATA_FILE).read_text())
    assert stored["train"] == 16
    assert stored["eval_sets"]["a"]["questions"] == 30


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_record_that_cannot_be_read_is_refused(load, write, tmp_path, content):
    config = load(*files(write(ROWS)))
    (tmp_path / DATA_FILE).write_text(content)
    with pytest.raises(
        ValueError, match=r"a run whose data.json can be read, got"
    ) as e:
        check_data_record(tmp_path, data_record(config, load_task(config)))
    assert "\n" not in str(e.value)


def test_a_run_asks_one_stream_over_its_epochs_whatever_it_resumes_at(load, write):
    config = load(
        *files(write(ROWS[:6])), "rl.responses_per_prompt=2", "task.held_out=0.2"
    )
    task = load_task(config)
    count = config.train.batch // 2
    asked = [q for i in range(9) for q in training_questions(config, task, i * count)]
    assert asked[::2] == asked[1::2]
    one, epoch = asked[::2], len(task.train)
    assert (
        Counter(one[:epoch]) == Counter(one[epoch : 2 * epoch]) == Counter(task.train)
    )
    assert training_questions(config, task, 5 * count) == asked[20:24]


def test_the_hard_mix_has_all_its_families_on_both_sides_and_right_answers():
    config = load_config(
        CONFIGS / "reasoning_gym_hard.yaml",
        ["task.size=320", "task.held_out=0.1", "task.too_long=refuse"],
    )
    task = load_task(config)
    assert len(config.task.mix) == 8
    for side in (task.train, task.held_out):
        assert {question.family for question in side} == set(config.task.mix)
    assert classes(task.train).isdisjoint(classes(task.held_out))
    for question in task.train + task.held_out:
        reward = ReasoningGymReward("whole_text")
        assert reward(question, question.answer) == 1.0
        assert r"\boxed{}" in question.text


@pytest.mark.parametrize("name", ["dapo_math", "qwen2.5-math-1.5b", "qwen2.5-math-7b"])
def test_configs_of_the_hub_take_files_in_its_place(name, write):
    train = [{"prompt": r["question"], "solution": str(r["answer"])} for r in ROWS]
    test = [{"problem": "5 + 6?", "answer": "11", "subject": "Algebra"}]
    overrides = ["task.too_long=refuse", "task.subset=null", *files(write(train))]
    overrides += files(write(test, "test.jsonl"), "eval.sets.math500")
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    sets = load_eval_sets(config, load_task(config))
    assert sets[0].name == "math500"
    assert sets[0].questions[0].family == "Algebra"
    assert r"\boxed{}" in sets[0].questions[0].text
    assert [one.name for one in sets[1:]] == ["aime"] * (name == "dapo_math")


def test_the_27b_is_trained_on_the_hard_mix():
    hard, large = (
        load_config(CONFIGS / f"{name}.yaml")
        for name in ("reasoning_gym_hard", "qwen3.8-27b")
    )
    assert large.task == hard.task


def test_a_start_that_is_taken_back_leaves_no_record(load, write, tmp_path):
    config, run_dir = load(*files(write(ROWS))), tmp_path / "run"
    write_config(run_dir, "")
    write_data_record(run_dir, data_record(config, load_task(config)))
    discard_start(run_dir)
    assert not run_dir.exists()


def test_too_long_prompts_are_dropped_with_a_count_or_refused(
    load, write, tiny_model_dir, tmp_path
):
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    long = [{"question": "9 + 9? " * 200, "answer": 18}]
    shapes = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(shapes | {"max_position_embeddings": 256})
    )
    overrides = [
        *files(write(ROWS + long)),
        "task.held_out=0.5",
        f"model.path={model}",
        "sketch.rank=4",
        *files(
            write([*long, {"question": 9 * "8 + " + "9?", "answer": 81}], "b.jsonl"),
            "eval.sets.b",
        ),
    ]
    config = load(*overrides, "task.too_long=drop", "rollout.max_new_tokens=150")
    task = load_task(config)
    assert sum(task.dropped.values()) == 1
    assert task.eval_sets[0].dropped == {"too long": 1}
    assert len(task.eval_sets[0].questions) == 1
    assert max(len(q.text) for q in task.train + task.held_out) < 10
    # Also of a task from which nothing was dropped: what is not asked must not matter.
    for loaded in (task, load_questions(config)):
        policy, _ = load_policy(config, loaded, model)
        encoded = policy.encode(task.train + task.eval_sets[0].questions)
        room = len(policy.engine.prefix) + policy.engine.bucket
        assert max(map(len, encoded)) <= room < 256 - 150
    with pytest.raises(ValueError, match=r"`task.too_long=drop` leaves out what does"):
        load_policy(load(*overrides), load_task(load(*overrides)), model)
    with pytest.raises(ValueError, match=r"leaves 1 tokens, too few for all \d+ quest"):
        load_task(load(*overrides, "task.too_long=drop", "rollout.max_new_tokens=255"))

"""What grows worse is seen, what does not raises nothing; by hand-made histories."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from logra_jax.training.config import Config, ModelConfig, MonitorConfig, TrainConfig
from logra_jax.training.degradation import DegradationWatch, Watch
from logra_jax.training.schema_watch import ALARMS, EvalConfig

LIMITS = MonitorConfig(window=4)
SOUND = {
    "reward": 0.5,
    "alpha": 1.0,
    "length/mean": 100.0,
    "length/truncated": 0.1,
    "rollout/repetition": 0.1,
    "entropy": 0.5,
    "kl/realised": 1.1e-3,
    "kl/predicted": 1e-3,
    "kl/budget": 1e-3,
}


def raised(rows: list[dict], limits: MonitorConfig = LIMITS) -> list[list[str]]:
    """Names of the alarms of each row."""
    watch = DegradationWatch(limits)
    return [[alarm.name for alarm in watch.see(row)] for row in rows]


def history(key: str, values: list[float]) -> list[dict]:
    return [SOUND | {key: value} for value in values]


def test_a_run_as_it_began_raises_none_and_one_odd_update_neither():
    assert not any(raised([SOUND] * 40))
    for key, odd in (
        ("length/mean", 400.0),
        ("rollout/repetition", 1.0),
        ("entropy", 0.0),
        ("kl/realised", 4e-3),
    ):
        usual = SOUND[key]
        assert not any(raised(history(key, [usual] * 8 + [odd] + [usual] * 8))), key


# The metric, its baseline, and the mean of four rows at which the alarm begins.
WORSE = {
    "length_growth": ("length/mean", 100.0, 200.0),
    "repetition": ("rollout/repetition", 0.1, 0.5),
    "entropy_collapse": ("entropy", 0.5, 0.05),
    "kl_overspend": ("kl/realised", 1e-3, 2e-3),
}


@pytest.mark.parametrize("name", WORSE)
def test_a_mean_over_the_window_beyond_its_limit_is_an_alarm(name: str):
    key, usual, limit = WORSE[name]
    way = math.copysign(0.01, limit - usual) * limit
    for mean, expected in ((limit - way, []), (limit + way, [name])):
        # of four rows that differ
        rows = history(key, [usual] * 4 + [mean * x for x in (1.5, 0.5, 1.2, 0.8)])
        assert raised(rows)[-1] == expected
    watch = DegradationWatch(LIMITS)
    [alarm] = [watch.see(row) for row in rows][-1]
    assert alarm.message.endswith(".")
    assert ". " not in alarm.message


def test_kl_that_is_only_rounding_is_no_overspending():
    few = {"kl/budget": 2e-5, "kl/realised": 4e-4}
    assert not any(raised([SOUND | few] * 12))


@pytest.mark.parametrize("key", ["length/mean", "entropy", "kl/realised"])
def test_what_is_missing_or_no_number_is_passed_over(key: str):
    gone = {k: v for k, v in SOUND.items() if k != key}
    assert not any(raised([gone] * 12))
    assert not any(raised([SOUND | {key: math.nan}] * 12))


def test_an_accuracy_falls_by_more_than_the_limit_and_more_than_chance():
    def evaluations(*pairs):
        return [{"heldout/sampled": v, "heldout/sampled_se": se} for v, se in pairs]

    best = (0.5, 0.01)
    assert raised(evaluations((0.4, 0.01), best, (0.44, 0.01))) == [
        [],
        [],
        ["eval_drop"],
    ]
    assert not any(raised(evaluations(best, (0.46, 0.01))))  # below the limit
    assert not any(raised(evaluations(best, (0.44, 0.03))))  # 1.9 errors
    assert not any(raised(evaluations(best, (0.1, math.nan))))
    # rows between evaluations say nothing of it
    rows = [*evaluations(best), SOUND, *evaluations((0.4, 0.01)), SOUND]
    assert raised(rows) == [[], [], ["eval_drop"], []]


# --- patience


def config(*stop_on: str, **limits) -> Config:
    return Config(
        model=ModelConfig(path="some-model"),
        train=TrainConfig(steps=3),
        monitor=MonitorConfig(stop_on=list(stop_on), **limits),
    )


CUT = SOUND | {"length/truncated": 1.0}


def stops(settings: Config, rows: list[dict]) -> list[str | None]:
    watch, names = Watch(settings), []
    for row in rows:
        watch.see(row)
        names.append(watch.stop.name if watch.stop else None)
    return names


def test_an_alarm_ends_the_run_when_it_has_lasted():
    rows = [CUT, CUT, SOUND, CUT, CUT, CUT]
    assert stops(config(), rows) == [None] * 6
    assert stops(config("truncated"), rows) == [None] * 5 + ["truncated"]
    assert stops(config("truncated", patience=1), rows)[0] == "truncated"
    assert stops(config("repetition"), rows) == [None] * 6


def test_rows_that_cannot_judge_neither_count_nor_break_the_series():
    low = {"monitor/snr_min": 0.1}
    rows = [SOUND | low, SOUND, SOUND | low, SOUND, SOUND | low]
    assert stops(config("snr"), rows) == [None] * 4 + ["snr"]
    down = {"heldout/sampled": 0.1, "heldout/sampled_se": 0.0}
    rows = [down | {"heldout/sampled": 0.5}, SOUND | down, SOUND, SOUND | down]
    assert stops(config("eval_drop", patience=2), rows)[-1] == "eval_drop"


def test_a_journal_rebuilds_the_state(tmp_path: Path):
    random = np.random.default_rng(0)
    rows = [
        SOUND
        | {
            "length/mean": float(100 + 20 * i * random.random()),
            "entropy": float(0.5 * random.random() ** i),
            "length/truncated": float(random.random() > 0.2),
        }
        for i in range(30)
    ]
    settings = config("truncated", "length_growth", window=5)
    whole = Watch(settings)
    seen = [(whole.see(row), whole.stop) for row in rows]
    assert any(stop for _, stop in seen)
    resumed = Watch(settings)
    for row in rows[:17]:
        resumed.see(json.loads(json.dumps(row)))
    assert [(resumed.see(row), resumed.stop) for row in rows[17:]] == seen[17:]


def test_alarms_to_stop_on_are_known_names():
    with pytest.raises(
        ValueError, match=r"`monitor\.stop_on` .* got 'entropie'; did .*[^.]$"
    ):
        MonitorConfig(stop_on=["entropie"])
    assert len(set(ALARMS)) == len(ALARMS)
    assert {*WORSE, "eval_drop"} < set(ALARMS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MonitorConfig(patience=0), r"`monitor\.patience` must be at least 1"),
        (lambda: MonitorConfig(max_length_growth=0.5), "must be at least 1, got 0.5"),
        (lambda: MonitorConfig(min_entropy=-1.0), r"`monitor\.min_entropy` must lie"),
        (lambda: EvalConfig(pass_at=[0]), r"`eval\.pass_at` must be at least 1"),
        (
            lambda: EvalConfig(pass_at=[1, 8]),
            r"`eval\.samples_per_question` must be at least 8, .* got null",
        ),
        (lambda: EvalConfig(best="accuracy"), r"`eval\.best` must be `<set>/<metric>`"),
        (
            lambda: EvalConfig(keep_best=False, export="best"),
            r"`eval\.export` must not be best",
        ),
        (lambda: EvalConfig(temperature=0.0), r"`eval\.temperature` must be positive"),
    ],
)
def test_bad_settings_are_one_sentence(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()

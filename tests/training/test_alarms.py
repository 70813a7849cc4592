import dataclasses
import json
import math
from pathlib import Path

import pytest

from logra_jax.training.alarms import (
    ALARM_FILE,
    Alarm,
    AlarmLog,
    find_alarms,
    read_alarms,
)
from logra_jax.training.schema_watch import ALARMS, MonitorConfig

LIMITS = MonitorConfig()
# An update of the quickstart, as its journal has it: 2.6 % of the weights change, and
# rounding noise is ten times the update.
HEALTHY = {
    "reward": 0.375,
    "reward/raised": 0,
    "reward/timed_out": 1,
    "length/truncated": 0.66,
    "alpha": 0.064,
    "kl/q": 0.246,
    "kl/budget": 1e-3,
    "kl/predicted": 1.0e-3,
    "kl/realised": 9.8e-4,
    "landed/q_proj/changed": 0.028,
    "landed/q_proj/cosine": 0.1025,
    "landed/q_proj/norm_ratio": 9.745,
    "landed/down_proj/changed": 0.026,
    "landed/down_proj/cosine": 0.1014,
    "landed/down_proj/norm_ratio": 9.867,
    "update/rows_dropped": 0.0,
    "monitor/q_proj/snr": 1.02,
    "monitor/q_proj/cos_c": 0.92,
    "monitor/q_proj/cos_c_sketch": 0.0,  # noise: raises nothing
    "monitor/down_proj/cos_c": 0.61,
    "monitor/snr_min": 0.99,
}


def names(changes: dict, limits: MonitorConfig = LIMITS) -> list[str]:
    return [a.name for a in find_alarms(HEALTHY | changes, limits, responses=64)]


def test_a_healthy_update_raises_none():
    assert names({}) == []
    assert find_alarms({}, LIMITS, responses=64) == []
    assert find_alarms({"heldout/greedy": 0.4}, LIMITS, responses=64) == []


FAULTS = {
    "update_dropped": {"alpha": 0.0, "kl/q": math.nan, "kl/predicted": math.nan},
    "rows_dropped": {"update/rows_dropped": 3.0},
    "taught_nothing": {"reward": 0.0, "update/sketch_norm": 0.0},
    "kl_ratio": {"kl/realised": 3.5e-3},
    "kl_realised": {"kl/realised": math.nan},
    "landed_nothing": {"landed/q_proj/changed": 0.0},
    # what rounding to nearest does to a small update: less of it, in its direction
    "landed": {
        "landed/down_proj/cosine": 0.5,
        "landed/down_proj/norm_ratio": 0.2,
    },
    "cos_c": {"monitor/down_proj/cos_c": 0.2},
    "snr": {"monitor/snr_min": 0.3},
    "truncated": {"length/truncated": 0.97},
    "reward_raised": {"reward/raised": 7},
    "reward_timed_out": {"reward/timed_out": 7},
}


def test_every_alarm_has_a_name_to_stop_on():
    grow = {"length_growth", "repetition", "entropy_collapse", "kl_overspend"}
    assert set(ALARMS) == {*FAULTS, *grow, "eval_drop"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_raises_its_own_alarm_alone_in_one_sentence(name):
    [alarm] = find_alarms(HEALTHY | FAULTS[name], LIMITS, responses=64)
    assert alarm.name == name
    assert alarm.message.endswith(".")
    assert ". " not in alarm.message
    assert "\n" not in alarm.message
    kinds = {"landed_nothing": "q_proj", "landed": "down_proj", "cos_c": "down_proj"}
    assert kinds.get(name, "") in alarm.message


def test_kinds_of_layers_share_an_alarm_that_names_them():
    changes = {
        "landed/q_proj/norm_ratio": 0.5,
        "landed/down_proj/norm_ratio": 0.8,
        "monitor/q_proj/cos_c": 0.2,
    }
    landed, cos_c = find_alarms(HEALTHY | changes, LIMITS, responses=64)
    assert "of q_proj and down_proj 0.051 to 0.081 landed" in landed.message
    assert "of q_proj may gain as little as 0.2 of a dense" in cos_c.message


def test_an_infinite_q_and_a_step_of_nothing_are_dropped_updates():
    assert names({"kl/q": math.inf, "alpha": 0.0}) == ["update_dropped"]
    assert names({"alpha": 0.0}) == ["update_dropped"]


def test_a_budget_of_zero_asks_for_no_update():
    changes = {"alpha": 0.0, "kl/budget": 0.0, "kl/predicted": 0.0, "kl/realised": 0.0}
    changes |= {f"landed/{k}/changed": 0.0 for k in ("q_proj", "down_proj")}
    assert names(changes) == []


def test_too_little_realised_kl_is_an_alarm_too_but_not_below_the_floor():
    assert names({"kl/realised": 1e-4}) == ["kl_ratio"]
    small = {"kl/predicted": 2e-5, "kl/realised": 4e-4, "kl/budget": 2e-5}
    assert names(small) == []


def test_an_update_that_did_not_move_is_not_also_small():
    nothing = {
        "landed/q_proj/changed": 0.0,
        "landed/q_proj/norm_ratio": 0.0,
        "landed/q_proj/cosine": math.nan,
    }
    assert names(nothing) == ["landed_nothing"]
    # Rewards that are all alike give no gradient: nothing is wrong with its landing.
    assert names(nothing | {"update/sketch_norm": 0.0}) == ["taught_nothing"]
    assert names(nothing | {"update/sketch_norm": 0.1}) == ["landed_nothing"]


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("kl_ratio_high", 0.9, "kl_ratio"),
        ("landed_high", 0.99, "landed"),
        ("min_cos_c", 0.7, "cos_c"),
        ("min_snr", 1.0, "snr"),
        ("max_truncated", 0.5, "truncated"),
        ("max_failed", 0.01, "reward_timed_out"),
    ],
)
def test_every_threshold_is_the_users(field, value, name):
    assert name in names({}, dataclasses.replace(LIMITS, **{field: value}))


# --- the log

ONE, TWO = Alarm("one", "First."), Alarm("two", "Second.")


def test_every_alarm_is_a_line_and_only_new_ones_are_announced(tmp_path: Path):
    log = AlarmLog(tmp_path, resume_step=None)
    assert log.write(0, []) == []
    assert not (tmp_path / ALARM_FILE).exists()
    assert log.write(1, [ONE]) == [ONE]
    assert log.write(2, [ONE, TWO]) == [TWO]
    assert log.write(3, []) == []
    assert log.write(4, [ONE]) == [ONE]
    lines = (tmp_path / ALARM_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == read_alarms(tmp_path)
    assert [(row["step"], row["name"]) for row in read_alarms(tmp_path)] == [
        (1, "one"),
        (2, "one"),
        (2, "two"),
        (4, "one"),
    ]
    assert read_alarms(tmp_path)[0]["message"] == "First."


def test_a_resumed_run_drops_what_it_will_raise_again(tmp_path: Path):
    log = AlarmLog(tmp_path, resume_step=None)
    for step in (1, 2, 3):
        log.write(step, [ONE])
    with (tmp_path / ALARM_FILE).open("a") as file:
        file.write('{"step": 4, "na')  # killed while it wrote
    log = AlarmLog(tmp_path, resume_step=2)
    log.write(3, [TWO])
    assert [(row["step"], row["name"]) for row in read_alarms(tmp_path)] == [
        (1, "one"),
        (2, "one"),
        (3, "two"),
    ]
    AlarmLog(tmp_path / "new", resume_step=7)  # a run that never raised one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": -1}, r"`monitor\.every` must be at least 0, got -1"),
        ({"responses": 0}, r"`monitor\.responses` must be at least 1, got 0"),
        ({"min_cos_c": 1.5}, r"`monitor\.min_cos_c` must lie in \[0, 1\], got 1\.5"),
        ({"landed_low": 2.0}, r"`monitor\.landed_low` must be at least 0 and below"),
        ({"kl_ratio_high": 0.1}, r"below `monitor\.kl_ratio_high` \(0\.1\), got 0\.3"),
    ],
)
def test_bad_thresholds_are_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        MonitorConfig(**changes)

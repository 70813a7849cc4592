"""What needs no server; the bench itself runs in tests/sglang/test_bench_overlap.py."""

import re
from pathlib import Path

import pytest

from logra_jax import cli
from logra_jax.study.bench_overlap import (
    _print_table,
    _run_config,
    _steps,
    _summary,
    bench_overlap,
)
from logra_jax.training.config import load_config, to_yaml


def lines(*seconds: float, wait: float) -> list[dict]:
    """A journal: evaluation first, then steps of so many seconds, all else alike."""
    rows: list[dict] = [{"step": 0, "seconds/total": 10.0, "seconds/eval": 9.0}]
    for step, took in enumerate(seconds, start=1):
        parts = {"rollout": wait, "step": 0.25, "save": 0.125, "sync": 0.0625}
        rows.append(
            {"step": step, "seconds/total": rows[-1]["seconds/total"] + took}
            | {f"seconds/{name}": value for name, value in parts.items()}
            | {"length/mean": 7.0, "staleness/mean": wait, "staleness/max": 1}
        )
    rows[-1]["seconds/eval"] = 9.0
    return rows


def summary() -> dict:
    synchronous = _steps(lines(60, 50, 3, 8, 4, 99, wait=2.0))
    return _summary(synchronous, _steps(lines(60, 50, 2, 2, 1, 99, wait=0.5)))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text("model: {path: none}\ntrain: {steps: 1}\n")
    return str(path)


def test_steps_that_compile_and_the_last_do_not_count():
    measured = _steps(lines(60, 50, 3, 8, 4, 99, wait=2.0))
    assert measured["total_seconds"] == [3, 8, 4]
    assert {len(values) for values in measured.values()} == {3}


def test_the_parts_of_a_step_add_up_to_it():
    measured = _steps(lines(60, 50, 3, 99, wait=2.0))
    parts = {name: measured[f"{name}_seconds"] for name in ("rollout", "step", "sync")}
    assert parts == {"rollout": [2.0], "step": [0.25], "sync": [0.1875]}
    assert measured["rest_seconds"] == [3 - 2.4375]


def test_ratios_are_of_synchronous_to_ahead():
    found = summary()
    assert found["ratios"] == {"median": 4 / 2, "sum": 15 / 5}
    assert found["seconds"] == {"synchronous": 15, "ahead": 5}
    assert found["medians"]["ahead"]["rollout_seconds"] == 0.5
    assert found["staleness"]["ahead"] == {"mean": 0.5, "max": 1}
    assert found["counted"] == 3


def test_people_get_a_table(capsys):
    result = {
        "device": "cpu, x86_64",
        "cores": 2,
        "versions": {"jax": "0.10", "sglang": "0.5"},
        "servers": 2,
        "server_device": "cuda",
        "tensor_parallel": 4,
        "model": "[tiny]",
        "dtype": "bfloat16",
        "batch": 64,
        "max_new_tokens": 24,
        "pause": "in_place",
        "steps": 6,
        **summary(),
    }
    _print_table(result)
    text = capsys.readouterr().out
    assert "[tiny] in bfloat16, batches of 64 responses" in text
    assert "from 2 servers on cuda" in text
    assert "in_place" in text

    def row(name: str) -> list[str]:
        (line,) = [line for line in text.splitlines() if name in line]
        return [cell.strip() for cell in re.split("[│|]", line)[2:-1]]

    assert row("a step, median") == ["4.000 s", "2.000 s", "2.00x"]
    assert row("wait for responses") == ["2.000 s", "0.500 s", ""]
    assert row("write and send") == ["0.188 s", "0.188 s", ""]
    assert row("3 steps") == ["15.000 s", "5.000 s", "3.00x"]
    assert row("staleness, mean") == ["2.00", "0.50", ""]
    assert row("staleness, most") == ["1", "1", ""]


@pytest.mark.parametrize(("mode", "staleness"), [("synchronous", 0), ("ahead", 1)])
def test_a_run_differs_from_the_config_in_nothing_that_takes_part_in_a_step(
    config, tmp_path, mode, staleness
):
    given = load_config(config, ["rollout.pause=in_place", "seed=3"])
    urls = ["http://127.0.0.1:30000"]
    run = _run_config(given, urls, mode, 5, tmp_path / "run")
    changes = {
        "engine": "sglang",
        "urls": f"[{urls[0]}]",
        "staleness": staleness,
        "load_weights": "true",
    }
    overrides = [f"rollout.{name}={value}" for name, value in changes.items()]
    overrides += [f"train.{n}=5" for n in ("steps", "eval_every", "checkpoint_every")]
    overrides += ["train.keep_checkpoints=1", "eval.samples=1", "monitor.every=0"]
    overrides += [f"run_dir={tmp_path / 'run'}", "rollout.pause=in_place", "seed=3"]
    assert to_yaml(run) == to_yaml(load_config(config, overrides))


def test_wrong_input_is_one_sentence(config):
    given = load_config(config)
    with pytest.raises(ValueError, match="`--steps` must be at least 4, got 3"):
        bench_overlap(given, True, steps=3)
    with pytest.raises(ValueError, match=r"`model\.path` must be a Hugging Face"):
        bench_overlap(given, True)


def test_a_run_that_was_told_to_stop_ends_the_bench(config, monkeypatch):
    given = load_config(config, ["rollout.engine=sglang", "rollout.urls=[http://a]"])
    monkeypatch.setattr("logra_jax.study.bench_overlap.train", lambda config: 130)
    with pytest.raises(KeyboardInterrupt):
        bench_overlap(given, True)


def test_the_command_takes_its_flags_on_either_side_of_the_overrides(
    config, monkeypatch
):
    calls = []

    def stand_in(config, as_json, *, steps):
        calls.append((config.seed, as_json, steps))
        return 7

    monkeypatch.setattr("logra_jax.study.bench_overlap.bench_overlap", stand_in)
    assert cli.main(["bench", "overlap", config, "seed=1"]) == 7
    cli.main(["bench", "overlap", "--json", config, "seed=1", "--steps", "9"])
    assert calls == [(1, False, 6), (1, True, 9)]


def test_help_says_that_servers_are_changed_and_has_an_example(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["bench", "overlap", "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert "are changed, and left so" in text
    assert "  logra bench overlap configs/" in text

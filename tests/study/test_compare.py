"""Studies that are run: kept, gone on with, and told truthfully when they fail."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from logra_jax import cli
from logra_jax.study.compare import compare_command
from logra_jax.training.journal import read_metrics

pytestmark = pytest.mark.slow

STUDY = """\
config: tiny.yaml
set: {{train.steps: 4, train.eval_every: 4, train.checkpoint_every: 1}}
seeds: {seeds}
axes:
  method:
    logra: {{}}
    lora: {{optimizer.kind: lora}}
    too wide: {{sketch.rank: 40}}
baseline: {{method: {baseline}}}
"""
# What a seed determines.
EXACT = ("evaluations", "reward", "length", "truncated", "kl", "alarms", "steps")


@pytest.fixture
def write(tiny_config: Path) -> Callable[..., Path]:
    def to_file(seeds: str = "[0]", baseline: str = "too wide") -> Path:
        path = tiny_config.with_name("study.yaml")
        path.write_text(STUDY.format(seeds=seeds, baseline=baseline))
        return path

    return to_file


def results(study_dir: Path) -> dict[str, dict]:
    lines = (study_dir / "results.jsonl").read_text().splitlines()
    return {record["cell"]: record for record in map(json.loads, lines)}


def exact(record: dict) -> dict:
    return {key: record.get(key) for key in (*EXACT, "status", "settings")}


def start(path: Path, study_dir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "logra_jax", "compare", str(path)]
    return subprocess.Popen([*command, "--out", str(study_dir)])


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    while process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.exists() and any(r["step"] >= step for r in read_metrics(run_dir)):
            return
        time.sleep(0.02)
    raise AssertionError("the study ended before it was to be killed")


def pid_of_cell(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[0])


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_study_is_run_reported_kept_and_killed_at_any_point_ends_the_same(
    write, tmp_path: Path, capsys: pytest.CaptureFixture
):
    path, whole, killed = write(), tmp_path / "whole", tmp_path / "killed"

    # A cell fails: it is recorded with its phase, and the study goes on.
    assert compare_command(str(path), [], out=str(whole)) == 1
    found = results(whole)
    assert [r["status"] for r in found.values()] == ["finished", "finished", "failed"]
    failed = found["method=too_wide,seed=0"]
    assert failed["phase"] == "loading the model"
    assert "`rank` must be in [1, min(k, d)]" in failed["message"]
    logra = found["method=logra,seed=0"]
    assert logra["steps"] == 4
    assert logra["memory_gib"]["mean"] > logra["memory_gib"]["weights"] > 0
    assert logra["memory_gib"]["worst"] >= logra["memory_gib"]["mean"]
    assert logra["memory_gib"]["step"] > 0
    run_dir = whole / logra["run_dir"]
    assert not (run_dir / "checkpoints").exists()  # gigabytes, of a large model
    report = (whole / "report.md").read_text()
    assert "not measurable (the baseline failed in loading the model)" in report
    assert "%" not in report.split("## Memory")[1].split("## Time")[0].split("|--")[0]

    # What is done is kept.
    before = (run_dir / "metrics.jsonl").stat().st_mtime_ns
    capsys.readouterr()
    assert compare_command(str(path), [], out=str(whole)) == 1
    assert (run_dir / "metrics.jsonl").stat().st_mtime_ns == before
    assert capsys.readouterr().out.count("(kept)") == 3
    assert (whole / "report.md").read_text() == report

    # Killed in the first cell, ended in the second.
    process = start(path, killed)
    try:
        wait_for_step(killed / "cells/method=logra,seed=0/run", 2, process)
        cell = pid_of_cell(process.pid)
        process.kill()
        process.wait()
        until = time.monotonic() + 20
        while is_alive(cell) and time.monotonic() < until:
            time.sleep(0.02)
        assert not is_alive(cell)
        process = start(path, killed)
        wait_for_step(killed / "cells/method=lora,seed=0/run", 1, process)
        process.terminate()
        assert process.wait(120) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert set(results(killed)) == {"method=logra,seed=0"}
    assert compare_command(str(path), [], out=str(killed)) == 1
    again = results(killed)
    assert {name: exact(r) for name, r in again.items()} == {
        name: exact(r) for name, r in found.items()
    }

    # Failed cells are done again when asked for; others are not.
    assert compare_command(str(path), [], out=str(whole), retry_failed=True) == 1
    assert (run_dir / "metrics.jsonl").stat().st_mtime_ns == before

    # The same directory for another config is refused, a new seed is added.
    with pytest.raises(ValueError, match=r"`kl.start` must be what it was when"):
        compare_command(str(path), ["kl.start=0.5"], out=str(whole))


def test_a_directory_in_use_is_refused(write, tmp_path: Path, capsys):
    study_dir = tmp_path / "used"
    study_dir.mkdir()
    with (study_dir / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = cli.main(["compare", str(write()), "--out", str(study_dir)])
    assert code == 2
    assert "`--out` must not be in use" in capsys.readouterr().err


def test_a_cell_killed_by_the_system_is_recorded_with_its_phase(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def kill(cell_dir: Path) -> int:
        os.kill(pid_of_cell(os.getpid()), signal.SIGKILL)
        return 0

    # The kernel's out-of-memory killer sends the same signal.
    monkeypatch.setattr("logra_jax.study.compare._steps_done", kill)
    out = tmp_path / "oom"
    study = [str(write()), ["axes.method={logra: {}}", "baseline={}"]]
    assert compare_command(*study, out=str(out)) == 1
    (record,) = results(out).values()
    assert record["status"] == "failed"
    assert record["phase"] == "starting"
    assert record["message"].startswith("killed by the system, most likely for want of")
    assert "## Failed" in (out / "report.md").read_text()

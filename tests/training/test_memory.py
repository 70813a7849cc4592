"""Peaks of memory that are seen, and parts that are counted."""

import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logra_jax
from logra_jax.training import memory
from logra_jax.training.journal import read_metrics, warm
from logra_jax.training.machine import describe_machine
from logra_jax.training.memory import (
    GIB,
    MemoryWatch,
    Usage,
    device_bytes,
    memory_parts,
    process_usage,
)

MIB = 2**20


def hold(size: int, seconds: float) -> tuple[float, float]:
    """Hold so many bytes for a while; when that was."""
    began = time.monotonic()
    held = np.ones(size, np.uint8)
    time.sleep(seconds)
    del held
    return began, time.monotonic()


def test_a_stretch_of_time_has_the_peak_of_what_was_held_in_it():
    with MemoryWatch() as watch:
        before = (time.monotonic(), time.sleep(0.1) or time.monotonic())
        during = hold(300 * MIB, 0.3)
        after = (time.monotonic(), time.sleep(0.1) or time.monotonic())
        low, high, then = (watch.peak(*when) for when in (before, during, after))
        # Reading what is in use now also is a sample, which is of no other stretch.
        assert watch.peak(*before) == low
        watch.forget(after[0])
    assert 250 * MIB < high - low < 400 * MIB
    assert then - low < 100 * MIB


def test_a_short_peak_is_seen_where_it_is_the_highest_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
):
    readings = iter([Usage(5, 10), Usage(5, 10), Usage(6, 40), Usage(7, 40)])
    monkeypatch.setattr(memory, "usage", lambda: next(readings))
    watch = MemoryWatch()  # its thread is not begun: a sample is one that is asked for
    began = time.monotonic()
    assert watch.peak(began, time.monotonic() + 1) == 5
    assert watch.peak(began, time.monotonic() + 1) == 40
    watch.forget(time.monotonic())
    assert watch.peak(time.monotonic(), time.monotonic() + 1) == 7


def test_the_process_has_held_at_least_what_it_holds():
    now, peak = process_usage()
    assert 0 < now <= peak * 1.01  # the kernel counts the peak in batches


def test_parts_are_those_of_one_device_times_the_devices_of_the_process():
    tree = {"a": jnp.zeros((256, 4), jnp.float32), "b": jnp.zeros(8, jnp.bfloat16)}
    assert device_bytes(tree) == 256 * 4 * 4 + 8 * 2
    shapes = jax.eval_shape(lambda: tree)
    parts = memory_parts(3 * GIB, devices=2, weights=tree, sketches=shapes, none=None)
    size = device_bytes(tree) * 2 / GIB
    assert parts == {
        "memory/weights_gib": size,
        "memory/sketches_gib": size,
        "memory/none_gib": 0.0,
        "memory/program_gib": 3.0,
    }


@pytest.mark.slow
def test_a_run_records_peaks_of_updates_and_steps_and_once_what_it_holds(
    finished_run: Path,
):
    first, *updates = read_metrics(finished_run)
    assert first["memory/weights_gib"] > first["memory/sketches_gib"] > 0
    assert first["memory/optimizer_gib"] > 0
    assert first["memory/reference_gib"] == 0
    assert "memory/update_peak_gib" not in first
    assert first["memory/step_peak_gib"] > first["memory/weights_gib"]
    for row in updates:
        assert "memory/weights_gib" not in row
        # Both are of resident memory of this process, which holds far more than it.
        assert row["memory/update_peak_gib"] > first["memory/weights_gib"]
        assert row["memory/update_peak_gib"] <= row["memory/peak_rss_gib"] * 1.01


def test_warm_rows_are_those_that_compiled_nothing():
    rows = [{"seconds/compile": 2.0}, {"seconds/compile": 0.0}, {}]
    assert warm(rows) == rows[1:]
    assert warm(rows[:1]) == rows[:1]


def test_a_source_tree_that_is_not_installed_says_what_it_runs_on(
    monkeypatch: pytest.MonkeyPatch,
):
    def version(name: str) -> str:
        if name == "logra-jax":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    versions = describe_machine()["versions"]
    assert versions["logra-jax"] == logra_jax.__version__
    assert versions["jax"] == "1.0"

import errno
import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.training.journal import Journal, deterministic, last_step, read_metrics


def write(run_dir, steps, *, resume_step=None):
    with Journal(run_dir, resume_step=resume_step) as journal:
        for step in steps:
            journal.write(step, {"reward": step / 3, "seconds/step": 1.5})


def steps_of(run_dir):
    return [row["step"] for row in read_metrics(run_dir)]


def test_what_is_written_is_read_back_exactly(tmp_path):
    values = {"reward": 1 / 3, "n": 7, "kl": np.float32(0.1), "alpha": jnp.ones(())}
    with Journal(tmp_path / "run", resume_step=None) as journal:
        journal.write(4, values)
        # On disk before the journal closes.
        [row] = read_metrics(tmp_path / "run")
    assert row == {
        "step": 4,
        "reward": 1 / 3,
        "n": 7,
        "kl": float(np.float32(0.1)),
        "alpha": 1.0,
    }
    assert isinstance(row["n"], int)


def test_the_last_step_is_read_from_the_end_of_a_file_that_may_be_torn(tmp_path):
    assert last_step(tmp_path) is None
    write(tmp_path, range(3000))  # longer than what is read of it
    assert last_step(tmp_path) == 2999
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3000, "rew')
    assert last_step(tmp_path) == 2999


def test_the_same_values_give_the_same_bytes(tmp_path):
    for name in "ab":
        write(tmp_path / name, range(3))
    lines = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in "ab"]
    assert lines[0] == lines[1]


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    with Journal(tmp_path, resume_step=None) as journal:
        journal.write(1, {"a": math.nan, "b": math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "a": None, "b": None}
    assert math.isnan(read_metrics(tmp_path)[0]["a"])


def test_scalars_reach_tensorboard(tmp_path):
    write(tmp_path, [1])
    [events] = (tmp_path / "tensorboard").iterdir()
    assert b"reward" in events.read_bytes()


def test_a_disk_that_is_full_is_an_error_and_the_run_does_not_wait(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    with Journal(tmp_path, resume_step=None) as journal:

        def flush(writer):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr("tensorboardX.record_writer.RecordWriter.flush", flush)
            with pytest.raises(OSError, match="No space left"):
                journal.write(1, {"reward": 0.5})
        journal.write(2, {"reward": 0.5})  # there is room again
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_resuming_drops_later_steps_and_continues(tmp_path):
    write(tmp_path, range(6))
    write(tmp_path, [4, 5, 6], resume_step=3)
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert {path.name for path in tmp_path.iterdir()} == {
        "metrics.jsonl",
        "tensorboard",
    }


def test_a_torn_last_line_is_left_out_and_dropped_at_resume(tmp_path):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "rew')
    assert steps_of(tmp_path) == [0, 1, 2]
    write(tmp_path, [3], resume_step=2)
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\noops\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"^Line 2 of .* must be JSON, got 'oops'"):
        read_metrics(tmp_path)


def test_a_new_journal_never_overwrites_an_old_one(tmp_path):
    write(tmp_path, [0])
    with pytest.raises(ValueError, match=r"^`run_dir` must not hold metrics yet"):
        Journal(tmp_path, resume_step=None)
    assert steps_of(tmp_path) == [0]


def test_resuming_or_reading_where_nothing_is_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^`run_dir` must hold metrics\.jsonl"):
        Journal(tmp_path, resume_step=3)
    with pytest.raises(ValueError, match=r"^`run_dir` must hold metrics\.jsonl"):
        read_metrics(tmp_path)


def test_deterministic_drops_what_a_clock_decides():
    values = {"step": 1, "reward": 0.5, "seconds/step": 2.0, "memory/peak_rss_gib": 3.0}
    assert deterministic(values) == {"step": 1, "reward": 0.5}


def test_closing_twice_is_fine(tmp_path):
    journal = Journal(tmp_path, resume_step=None)
    journal.close()
    journal.close()

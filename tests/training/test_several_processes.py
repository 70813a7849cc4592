"""`logra train` in two processes of two CPU devices: the run of one process of four."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from logra_jax.rollout.follow import replay_command
from logra_jax.rollout.serve import free_port
from logra_jax.rollout.wire import decode
from logra_jax.training.journal import deterministic, read_metrics

# A constant budget: one program whatever the number of steps.
FSDP = ("mesh.fsdp=4", "kl.budget=constant", "train.eval_every=1000")
BOTH = ("mesh.data=2", "mesh.fsdp=2", "train.eval_every=1000", "train.steps=3")
Run = Callable[..., Path]

# Python that becomes another once it is bound to end with its parent, however it ends.
WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Pair:
    """The processes of one run, the leader first."""

    def __init__(self, config: Path, *common: str, own: tuple[str, ...] = ("", "")):
        flags = "--xla_force_host_platform_device_count=2"
        env = os.environ | {"XLA_FLAGS": flags, "NPROC": "32"}
        common += (
            "distributed.enabled=true",
            f"distributed.coordinator=127.0.0.1:{free_port()}",
            "distributed.processes=2",
        )
        command = [sys.executable, "-c", WITH_PARENT]
        command += ["-m", "logra_jax", "train", str(config), *common]
        self.processes = [
            subprocess.Popen(
                [*command, f"distributed.process={rank}", *filter(None, [extra])],
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, extra in enumerate(own)
        ]

    def finish(self) -> list[tuple[int, str, str]]:
        """Status and output of each."""
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=240)
            found.append((process.returncode, out, err))
        return found

    def await_step(self, run_dir: Path, step: int) -> None:
        """Wait until the journal holds the step; fail if the run ends before."""
        deadline = time.monotonic() + 240
        pattern = re.compile(rf'^{{"step": {step},', re.MULTILINE)
        path = run_dir / "metrics.jsonl"
        while not (path.exists() and pattern.search(path.read_text())):
            for process in self.processes:
                assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def pair(config: Path, *common: str, own: tuple[str, ...] = ("", "")) -> Iterator[Pair]:
    """A run that does not outlive the test."""
    run = Pair(config, *common, own=own)
    try:
        yield run
    finally:
        for process in run.processes:
            process.kill()
            with contextlib.suppress(ValueError):  # its output has been read
                process.communicate()


# Its threads print at once: pieces of their lines come in any order.
GLOO = re.compile(
    r"\[Gloo\] Rank |\d+| is connected to "
    r"| peer ranks\. Expected number of connected peer ranks is : "
)


def finish(run: Pair) -> None:
    (leader, out, err), (follower, said, complaint) = run.finish()
    assert leader == follower == 0, err + complaint
    assert "trained model" in out
    assert GLOO.sub("", said).strip() == ""


def assert_same_update(one: Path, two: Path) -> None:
    """The first update, its metrics and what they began from.

    Gloo adds devices' numbers in another order than one process does: that moves
    float32 sums by 1e-7 of what they add, and can move a factor's integer by one, as on
    a mesh of one process (see test_mesh). Later batches may part in a token for it.
    """
    rows, others = ([deterministic(r) for r in read_metrics(d)] for d in (one, two))
    assert [row["step"] for row in others] == [row["step"] for row in rows]
    assert others[0] == rows[0]
    assert others[1].keys() == rows[1].keys()
    for name, value in rows[1].items():
        expected = pytest.approx(value, rel=2e-3, abs=1e-6, nan_ok=True)
        assert others[1][name] == expected, name
    wanted, found = (
        decode((d / "updates" / "000001.safetensors").read_bytes()).factors
        for d in (one, two)
    )
    assert found.keys() == wanted.keys()
    for name, integers in wanted.items():
        differ = np.abs(integers.astype(int) - found[name].astype(int))
        assert differ.max() <= 1, name
        assert differ.mean() <= 0.05, name


@pytest.mark.slow
def test_two_processes_train_the_model_of_one(
    tiny_run: Run, tiny_config: Path, tiny_model_dir: Path, tmp_path: Path
):
    """Monitor, evaluation, kept updates, checkpoints and export included."""
    monitor = ("monitor.every=1", "monitor.responses=4")
    options = (*BOTH, *monitor, "train.save_updates=true", "train.checkpoint_every=9")
    one, two = tiny_run("one", *options), tmp_path / "two"
    with pair(tiny_config, f"run_dir={two}", *options) as run:
        finish(run)
    assert_same_update(one, two)
    again = tmp_path / "replayed"
    # What the leader exports of all processes' parts is what the updates make.
    assert replay_command(tiny_model_dir, two / "updates", str(again)) == 0
    replayed, exported = (
        (d / "model.safetensors").read_bytes() for d in (again, two / "model")
    )
    assert exported == replayed
    # The leader writes what one process does, and the other nothing beside it.
    assert {p.name for p in two.iterdir()} == {p.name for p in one.iterdir()}
    kept = [sorted(p.name for p in (d / "updates").iterdir()) for d in (one, two)]
    assert kept[0] == kept[1]
    rows = read_metrics(two)
    assert rows[1]["seconds/compile"] > 0
    assert rows[3]["seconds/compile"] == 0


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_and_the_run_resumes(
    tiny_config: Path, tmp_path: Path
):
    """From the checkpoint of step 2: step 3 is made again, to the same numbers."""
    two = tmp_path / "two"
    with pair(tiny_config, f"run_dir={two}", *FSDP) as run:
        run.await_step(two, 3)
        run.processes[1].kill()
        leader, follower = (status for status, *_ in run.finish())
    assert leader != 0
    assert follower == -signal.SIGKILL
    assert not (two / "model").exists()
    before = [deterministic(row) for row in read_metrics(two)]
    assert [row["step"] for row in before] in ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    with pair(tiny_config, f"resume={two}", *FSDP) as run:
        finish(run)
    after = [deterministic(row) for row in read_metrics(two)]
    assert [row["step"] for row in after] == [0, 1, 2, 3, 4]
    assert after[:4] == before[:4]
    assert (two / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_signal_to_either_stops_both_after_the_same_update(
    tiny_run: Run, tiny_config: Path, tmp_path: Path
):
    two, options = tmp_path / "two", (*FSDP, "train.checkpoint_every=1000")
    with pair(tiny_config, f"run_dir={two}", *options, "train.steps=1000") as run:
        run.await_step(two, 1)
        run.processes[1].send_signal(signal.SIGTERM)
        found = run.finish()
    assert [status for status, *_ in found] == [128 + signal.SIGTERM] * 2, found
    done = read_metrics(two)[-1]["step"]
    assert f"stopped by SIGTERM after step {done}, all of it saved" in found[0][1]
    assert [path.name for path in (two / "checkpoints").iterdir()] == [str(done)]
    # One process goes on from it.
    tiny_run("unused", *options, f"resume={two}", f"train.steps={done + 1}")
    assert [row["step"] for row in read_metrics(two)] == list(range(done + 2))


BAD = {
    "one holds another config": (
        ("mesh.fsdp=4",),
        ("", "train.steps=5"),
        ("Another process of the run failed here", "`train.steps` must be 4 as in"),
    ),
    "the mesh leaves a process out": (
        ("mesh.fsdp=2",),
        ("", ""),
        (r"`mesh.data` times .* processes \(4\), got 2",) * 2,
    ),
    "the leader alone can know": (
        ("mesh.fsdp=4", "resume=nowhere"),
        ("", ""),
        ("`resume` must name a run directory, got 'nowhere'",) * 2,
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_in_one_process_ends_both_with_a_sentence(
    case: str, tiny_config: Path, tmp_path: Path
):
    common, own, messages = BAD[case]
    with pair(tiny_config, f"run_dir={tmp_path / 'run'}", *common, own=own) as run:
        found = run.finish()
    for (status, _, err), message in zip(found, messages, strict=True):
        assert status == 2, err
        sentences = [line for line in err.splitlines() if line.startswith("logra: ")]
        assert len(sentences) == 1, err
        assert re.search(message, sentences[0])
        assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_servers_are_refused(tiny_config: Path):
    from logra_jax.training.config import load_config

    several = ["distributed.enabled=true", "rollout.engine=sglang"]
    with pytest.raises(ValueError, match=r"`rollout\.engine` must be local when"):
        load_config(tiny_config, [*several, "rollout.urls=[http://127.0.0.1:9]"])

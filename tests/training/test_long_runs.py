"""What a run of many hours must not do: compile again, grow, wait, or lose a row."""

import hashlib
import io
import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from logra_jax.training import loop, minibatches
from logra_jax.training.checkpoint import Checkpoints
from logra_jax.training.compiles import CompileWatch
from logra_jax.training.config import (
    Config,
    ModelConfig,
    MonitorConfig,
    TrainConfig,
    load_config,
)
from logra_jax.training.display import Display
from logra_jax.training.interrupt import Interrupt
from logra_jax.training.journal import Journal, read_metrics
from logra_jax.training.loop import train
from logra_jax.training.recorder import Recorder, Row

STEPS = 6
# Prompts of many lengths; a small batch seldom holds the longest.
CONFIG = """
model: {{path: {model}, activations: float32}}
sketch: {{rank: 4}}
kl: {{share: 0.25, budget: constant}}  # one program whatever the number of steps
task: {{size: 128, held_out: 0.125, options: {{min_terms: 2, max_terms: 6}}}}
reward: {{answer: whole_text, partial: true}}
cache_dir: {cache}
rollout: {{max_new_tokens: 3, prompt_bucket: 1}}
train: {{steps: 6, batch: 8, microbatch: 4, eval_every: 4, checkpoint_every: 5}}
eval: {{samples: 8, batch: 8, keep_best: false}}
"""


class Watched(NamedTuple):
    """A run, and what was seen of it."""

    rows: list[dict]
    compiled: list[int]  # programs, by update
    alive: list[int]  # arrays on the device, by update
    widths: list[int]  # longest prompt of each batch
    events: list[tuple[str, int]]  # in order


@pytest.fixture(scope="session")
def long_config(
    tiny_model_dir: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("long") / "long.yaml"
    path.write_text(CONFIG.format(model=tiny_model_dir, cache=cache_dir))
    return path


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Trains under a transfer guard and takes notes."""
    seen = Watched([], [], [], [], [])
    update, write, save = loop._Run._update, Journal.write, Checkpoints.save
    batch_of, build = minibatches.to_batch, loop.build_training_step
    with CompileWatch() as compiles:

        def watched_update(run, state, batches):
            before = compiles.count
            with jax.transfer_guard("disallow"):
                after = update(run, state, batches)
            seen.compiled.append(compiles.count - before)
            seen.alive.append(len(jax.live_arrays()))
            return after

        def watched_batch(completions, *args):
            seen.widths.append(int(completions.prompts.lengths.max()))
            return batch_of(completions, *args)

        def watched_build(*args):
            step = build(*args)

            def watched_step(state, batch):
                after = step(state, batch)
                seen.events.append(("step", len(seen.widths)))
                return after

            return watched_step

        def watched_write(journal, step, values):
            write(journal, step, values)
            seen.events.append(("row", step))

        def watched_save(checkpoints, state):
            seen.events.append(("save", int(state.step)))
            save(checkpoints, state)

        patch.setattr(loop._Run, "_update", watched_update)
        patch.setattr(minibatches, "to_batch", watched_batch)
        patch.setattr(loop, "build_training_step", watched_build)
        patch.setattr(Journal, "write", watched_write)
        patch.setattr(Checkpoints, "save", watched_save)
        yield seen


@pytest.fixture(scope="module")
def run(long_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch, watched(patch) as seen:
        assert train(load_config(long_config, [f"run_dir={run_dir}"])) == 0
    seen.rows.extend(read_metrics(run_dir))
    return seen


# --- the loop


def test_nothing_compiles_after_the_first_update(run: Watched):
    assert len(set(run.widths)) > 1  # else nothing is tested
    assert len(run.compiled) == STEPS
    assert run.compiled[0] > 0
    assert run.compiled[1:] == [0] * (STEPS - 1)
    assert all(row["seconds/compile"] == 0 for row in run.rows[2:])
    assert run.rows[1]["seconds/compile"] > 0


def test_an_update_makes_no_hidden_transfer(run: Watched):
    """They ran under a transfer guard, which here sees what goes to the device."""
    assert [row["step"] for row in run.rows] == list(range(STEPS + 1))
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"),
    ):
        jnp.asarray(np.ones(3))


def test_the_number_of_arrays_on_the_device_does_not_grow(run: Watched):
    assert len(set(run.alive[1:5])) == 1, run.alive  # up to the first checkpoint


def test_a_row_is_written_while_the_next_update_runs(run: Watched):
    """Each step is asked for before the row of the one before it is fetched; rows that
    a checkpoint covers (5, and the end, 6) are written at once, and before it."""
    assert run.events == [
        ("row", 0),
        *(("step", 1), ("step", 2), ("row", 1), ("step", 3), ("row", 2)),
        *(("step", 4), ("row", 3), ("step", 5), ("row", 4)),
        *(("row", 5), ("save", 5), ("step", 6), ("row", 6), ("save", 6)),
    ]


def test_phases_do_not_overlap_and_do_not_exceed_the_total(run: Watched):
    for before, row in itertools.pairwise(run.rows):
        phases = {
            name: value
            for name, value in row.items()
            if name.startswith("seconds/")
            and name not in ("seconds/total", "seconds/compile")
        }
        assert {"seconds/rollout", "seconds/reward", "seconds/step"} <= set(phases)
        total = row["seconds/total"] - before["seconds/total"]
        assert 0 < sum(phases.values()) <= total + 1e-3


def test_an_error_loses_no_row_of_an_update_that_was_made(
    long_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls, batch_of = itertools.count(), minibatches.to_batch

    def fail(*args):
        if next(calls) == 2:
            raise RuntimeError("the disk is on fire")
        return batch_of(*args)

    monkeypatch.setattr(minibatches, "to_batch", fail)
    with pytest.raises(RuntimeError, match="on fire"):
        train(load_config(long_config, [f"run_dir={tmp_path / 'run'}"]))
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2]


# What is freed goes back at once: a process then has what it holds, and not what its
# allocator keeps, which differs by tens of MiB from run to run.
GIVING_BACK = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


@pytest.mark.slow
def test_host_memory_does_not_grow_over_400_steps(long_config: Path, tmp_path: Path):
    """In a process of its own, evaluations, checkpoints and kept updates included.

    Memory goes up and down by 6 MiB with what the next update holds at the moment. Over
    100 steps that is a slope of 20 KiB a step by chance, over 400 of 2 to 3.
    """
    options = [
        f"run_dir={tmp_path / 'run'}",
        *("train.steps=500", "train.eval_every=50", "train.checkpoint_every=50"),
        *("train.keep_checkpoints=1", "train.save_updates=true"),
    ]
    subprocess.run(
        [sys.executable, "-m", "logra_jax", "train", str(long_config), *options],
        env=os.environ | {"XLA_FLAGS": ""} | GIVING_BACK,
        check=True,
        capture_output=True,
        timeout=300,
    )
    rows = read_metrics(tmp_path / "run")
    if "memory/rss_gib" not in rows[-1]:
        pytest.skip("this system does not tell the memory of a process")
    kib = [row["memory/rss_gib"] * 2**20 for row in rows[101:]]
    # The median of slopes sees no single jump, such as a checkpoint's: 1 or 2 by luck.
    slope = statistics.median(
        (kib[j] - kib[i]) / (j - i)
        for i, j in itertools.combinations(range(len(kib)), 2)
        if j - i >= 20
    )
    # A copy of the model each step, 3 MiB, would be 3,000; measured: 1 to 2.
    assert slope < 16, f"{slope:.1f} KiB a step"


# --- the record


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[tuple[Recorder, Console, Path]]:
    console = Console(file=io.StringIO(), width=400)
    config = Config(
        model=ModelConfig(path="none"),
        train=TrainConfig(steps=9, batch=4, microbatch=4),
        monitor=MonitorConfig(),
    )
    display = Display(9, console=console)
    with Recorder(config, tmp_path, display, kept=None, began=time.monotonic()) as it:
        yield it, console, tmp_path


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_phase_that_compiles_again_and_again_is_told_of_once(recorder):
    record, console, _ = recorder
    double = jax.jit(lambda x: 2 * x)
    for n in range(1, 6):
        ones = jax.device_put(np.ones(n))
        with record.timed("rollout", "rollout"):
            double(ones)
        if n == 2:
            assert text(console) == ""
    assert text(console).startswith("! Phase rollout compiled 1 more programs after")
    assert text(console).count("!") == 1


def test_a_phase_counts_from_the_end_of_the_update_before_it(recorder):
    record, _, path = recorder
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.sin(y @ y), x))
    x = jax.block_until_ready(jax.device_put(np.ones((400, 400), np.float32)))
    jax.block_until_ready(slow(x))
    asked = time.monotonic()
    y = slow(x)
    record.hold(record.begin(1, {"loss": y[0, 0]}, asked))
    with record.timed("rollout", "rollout"):
        jax.block_until_ready(y)
        began = time.monotonic()
        time.sleep(0.05)
    waited = time.monotonic() - began
    record.hold(Row(2, {}))
    record.settle()
    first, second = read_metrics(path)
    assert first["seconds/step"] <= first["seconds/total"]
    assert 0.05 <= second["seconds/rollout"] <= waited + 0.02


def test_an_update_that_failed_is_an_error_and_not_a_row(recorder):
    record, _, path = recorder

    @jax.jit
    def fail(x):
        return jax.pure_callback(lambda x: 1 / 0, jax.ShapeDtypeStruct((), x.dtype), x)

    def update() -> None:
        with record:
            record.hold(record.begin(1, {"loss": fail(jnp.float32(1.0))}, 0.0))
            record.settle()

    with pytest.raises(jax.errors.JaxRuntimeError, match="division"):
        update()
    assert read_metrics(path) == []


# --- signals


def test_a_signal_is_acknowledged_while_the_main_thread_cannot_run():
    said = []
    pid = os.getpid()
    with Interrupt(lambda name: said.append((name, time.monotonic()))) as interrupt:
        threading.Timer(0.05, os.kill, (pid, signal.SIGTERM)).start()
        # C code that lets no handler run before it is done.
        rounds = 100_000
        while not interrupt:
            began = time.monotonic()
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", rounds)
            ended = time.monotonic()
            rounds = int(rounds * 0.5 / (ended - began)) + 1
        assert interrupt.name == "SIGTERM"
    ((name, when),) = said
    assert name == "SIGTERM"
    assert when < ended


def test_leaving_puts_the_handlers_back():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with Interrupt(lambda name: None) as interrupt:
        assert not interrupt
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1

"""The training loop: rollout, reward, update, and everything a run leaves behind."""

import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType

import jax
import numpy as np
from flax import nnx

from logra_jax.rl.rewards import RewardPool, Rewards
from logra_jax.rl.tasks import Task
from logra_jax.rollout.servers import ServerError
from logra_jax.rollout.types import Completions
from logra_jax.training.alarms import AlarmLog, find_alarms
from logra_jax.training.assemble import (
    Policy,
    basis_of,
    build_controller,
    build_optimizer,
    build_rewards,
    build_training_monitor,
    build_training_step,
    enable_compile_cache,
    load_policy,
    load_task,
    model_directory,
    stream_key,
    to_batch,
)
from logra_jax.training.batches import Batches, staleness
from logra_jax.training.checkpoint import (
    CONFIG_FILE,
    Checkpoints,
    check_resumable,
    discard_start,
    write_config,
)
from logra_jax.training.config import load_config, to_yaml
from logra_jax.training.display import Display
from logra_jax.training.evaluate import evaluate
from logra_jax.training.export import MODEL_DIRECTORY, export_model
from logra_jax.training.journal import Journal, has_metrics, read_metrics
from logra_jax.training.paths import default_run_dir
from logra_jax.training.plots import write_plots
from logra_jax.training.remote import Remote
from logra_jax.training.schema import Config
from logra_jax.training.state import TrainState, initial_state
from logra_jax.training.updates import Updates

_GIB = 2**30
_LINUX_RSS_UNIT = 1024  # ru_maxrss is in KiB on Linux, in bytes on macOS


def train(config: Config) -> int:
    """Run, or resume, the training that ``config`` describes.

    Everything lands in the run directory: ``config.yaml``, ``metrics.jsonl``,
    TensorBoard events, plots, Orbax checkpoints, and the trained model as a Hugging
    Face directory. SIGINT or SIGTERM ends the run after the update under way, with a
    checkpoint; a run killed at any instant resumes from its newest one.

    Returns:
        The exit status: 0, or 128 + the signal's number.

    Raises:
        ValueError: one sentence on what is wrong with the config or its inputs.
    """
    enable_compile_cache(config)
    run_dir = _choose_run_dir(config)
    with Display(config.train.steps) as display, build_rewards(config) as rewards:
        rewards.warm()
        task = load_task(config)
        with display.phase("preparing the model"):
            directory = model_directory(config)
        with display.phase("loading the model"):
            policy, weights = load_policy(config, task, directory)
        run = _Run(config, run_dir, directory, task, policy, rewards, display)
        # Only now: a start that was refused leaves no run behind.
        write_config(run_dir, to_yaml(config))
        del policy
        try:
            return run.go(weights)
        except ValueError:
            if config.resume is None and not has_metrics(run_dir):
                discard_start(run_dir)
            raise


def _choose_run_dir(config: Config) -> Path:
    """The run directory, new or to be continued; nothing is written yet.

    Raises:
        ValueError: resuming something that is no run, or another run than this; or
            starting where a run already is.
    """
    if config.resume is None:
        run_dir = default_run_dir(config, datetime.now())
        if (run_dir / CONFIG_FILE).exists():
            raise ValueError(
                f"`run_dir` must not hold a run yet, got {str(run_dir)!r}; choose "
                f"another, or continue that run with `resume={run_dir}`."
            )
    else:
        run_dir = Path(config.resume)
        stored = run_dir / CONFIG_FILE
        if not stored.exists():
            raise ValueError(
                f"`resume` must name a run directory, got {config.resume!r}, which "
                f"has no {CONFIG_FILE}."
            )
        check_resumable(config, load_config(stored))
    return run_dir


class _Run:
    """One process's part of a run: the loop, and its timings of the step at hand."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        source: Path,
        task: Task,
        policy: Policy,
        rewards: RewardPool,
        display: Display,
    ):
        self.config = config
        self.run_dir = run_dir
        self.source = source
        self.task = task
        self.policy = policy
        self.rewards = rewards
        self.display = display
        self.optimizer = build_optimizer(config)
        self.controller = build_controller(config)
        self.step = build_training_step(config, policy, self.optimizer, self.controller)
        self.monitor = build_training_monitor(config, policy)
        self.updates: Updates | None = None
        self.remote: Remote | None = None
        self.lost: ServerError | None = None  # why no server can go on
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}

    def go(self, weights: nnx.State) -> int:
        """From the first (or restored) state to the last; the exit status."""
        train = self.config.train
        state = initial_state(
            weights, self.policy.probes, self.optimizer, self.controller
        )
        del weights  # the state's buffers are donated: nothing else may hold them
        with Checkpoints(self.run_dir, train.keep_checkpoints) as checkpoints:
            saved = checkpoints.latest_step
            if saved is not None:
                with self._timed("checkpoint", "restoring the checkpoint"):
                    state = checkpoints.restore(state)
            kept, begun = self._kept_step(saved), None
            if saved is not None and (begun := self._unevaluated(saved)) is not None:
                kept = saved - 1
            self.alarms = AlarmLog(self.run_dir, resume_step=kept)
            with (
                _Interrupt() as interrupt,
                self._batches(state, interrupt) as batches,
                Journal(self.run_dir, resume_step=kept) as journal,
            ):
                if saved is None:
                    self._record(journal, 0, self._evaluate(state))
                elif begun is not None:
                    metrics = begun | self._evaluate(state)
                    self._record(journal, int(state.step), metrics)
                reached = self._reached()
                while int(state.step) < train.steps and not (
                    interrupt or reached or self.lost
                ):
                    state, metrics = self._update(state, batches)
                    if metrics is None:
                        break
                    step = int(state.step)
                    if self._is_evaluated(step):
                        metrics |= self._evaluate(state)
                    self._record(journal, step, metrics)
                    reached = self._reached(metrics)
                    if step % train.checkpoint_every == 0:
                        with self._timed("checkpoint", "checkpoint"):
                            checkpoints.save(state)
                with self._timed("checkpoint", "checkpoint"):
                    checkpoints.save(state)
            if interrupt:
                self.display.note(
                    f"stopped by {interrupt.name} after step {int(state.step)}, all of "
                    f"it saved; continue with the same command and "
                    f"resume={self.run_dir}"
                )
                return 128 + interrupt.number
            if self.lost:
                raise ValueError(
                    f"{self.lost} The run is saved up to step {int(state.step)}; "
                    f"continue with the same command and resume={self.run_dir}."
                )
        if reached and int(state.step) < train.steps:
            self.display.note(
                f"held-out accuracy reached {train.target_accuracy}: stopping"
            )
        self._finish(state)
        return 0

    @contextmanager
    def _batches(self, state: TrainState, interrupt: "_Interrupt") -> Iterator[Batches]:
        """The source of responses; servers, if any, hold the weights of ``state``."""
        config = self.config
        if config.train.save_updates or config.rollout.engine == "sglang":
            self.updates = Updates(
                self.run_dir,
                self.policy.graph,
                self.policy.probes,
                basis_of(config),
                config.sketch.rounding,
                int(state.step),
                state.weights,
                keep=None if config.train.save_updates else config.rollout.keep_updates,
            )
        if config.rollout.engine == "sglang":
            assert self.updates is not None
            self.remote = Remote(
                config,
                self.policy,
                self.source,
                self.updates,
                self._share_dir() / "weights",
                self.display.note,
                lambda: bool(interrupt),
            )
            self.policy = self.remote.policy
        batches = Batches(config, self.task, self.policy, self.remote)
        try:
            if self.remote:
                with self._timed("sync", "finding the servers"):
                    load = config.rollout.load_weights or config.resume is not None
                    self.remote.connect(int(state.step), state.weights, load=load)
            yield batches
        finally:
            batches.cancel()
            if self.remote:
                self.remote.close()

    def _share_dir(self) -> Path:
        share_dir = self.config.rollout.share_dir
        if share_dir is None:
            return self.run_dir.absolute()
        return Path(share_dir).absolute() / self.run_dir.resolve().name

    def _kept_step(self, saved: int | None) -> int | None:
        """The journal's last step to keep; None for a journal that is not there yet."""
        if self.config.resume is None:
            return None
        if saved is not None:
            return saved
        # Killed before its first checkpoint: the run begins again, journal and all.
        return -1 if has_metrics(self.run_dir) else None

    def _is_evaluated(self, step: int) -> bool:
        train = self.config.train
        return step % train.eval_every == 0 or step == train.steps

    def _unevaluated(self, step: int) -> dict[str, float] | None:
        """The journal's row of a step whose evaluation is due and missing, if it is.

        The servers were lost before it, or the run is to end at that step only now.
        """
        rows = [row for row in read_metrics(self.run_dir) if row["step"] == step]
        row = rows[0] if rows else {}
        if "heldout/sampled" in row or not self._is_evaluated(step):
            return None
        return {name: value for name, value in row.items() if name != "step"}

    def _update(
        self, state: TrainState, batches: Batches
    ) -> tuple[TrainState, dict[str, float] | None]:
        """Sample, score, step: the next state, and the step's metrics.

        None, and the state as it was, where the servers are lost.
        """
        index = int(state.step)
        try:
            with self._timed("rollout", "rollout"):
                questions, completions, texts = batches.take(index, state.weights)
        except ServerError as error:
            self.lost = error
            return state, None
        batches.start_ahead(index)
        seen = staleness(completions, index)
        with self._timed("reward", "reward"):
            rewards = self.rewards.score(questions, texts)
        batch = to_batch(completions, rewards)
        every = self.config.monitor.every
        if every and (index + 1) % every == 0:
            # Before the update, which the state does not survive.
            with self._timed("monitor", "measuring gradients"):
                seen |= self.monitor(state, batch)
        with self._timed("step", "update"):
            state, metrics, factors = self.step(state, batch)
            metrics = {name: float(value) for name, value in metrics.items()}
        if self.updates:
            with self._timed("save", "writing the update"):
                blob = self.updates.write(index + 1, factors, state.weights)
            if self.remote:
                with self._timed("sync", "sending the update"):
                    seen |= self.remote.push(index + 1, blob, state.weights)
        return state, _rollout_metrics(completions, rewards) | metrics | seen

    def _evaluate(self, state: TrainState) -> dict[str, float | int]:
        """Held-out accuracy; nothing where the servers are lost."""

        def measure() -> dict[str, float | int]:
            return evaluate(
                self.policy,
                state.weights,
                self.rewards,
                self.task.held_out,
                stream_key(self.config.seed, "eval", int(state.step)),
                samples=self.config.eval.samples,
                batch=self.config.eval.batch,
                max_new_tokens=self.config.rollout.max_new_tokens,
            )

        with self._timed("eval", "evaluation"):
            if self.remote is None:
                return measure()
            try:
                return self.remote.persist(int(state.step), state.weights, measure)
            except ServerError as error:
                self.lost = error
                return {}

    def _reached(self, metrics: dict | None = None) -> bool:
        target = self.config.train.target_accuracy
        if metrics is None:
            rows = [r for r in read_metrics(self.run_dir) if "heldout/sampled" in r]
            metrics = rows[-1] if rows else {}
        return target is not None and metrics.get("heldout/sampled", -1.0) >= target

    def _record(self, journal: Journal, step: int, metrics: dict) -> None:
        """Journal and show one step; its phases' seconds start again from here.

        An alarm is shown when it begins, and recorded at every step that it lasts.
        """
        config = self.config
        found = find_alarms(metrics, config.monitor, responses=config.train.batch)
        metrics = metrics | {"alarms": len(found)}
        self.seconds["total"] = time.monotonic() - self.began
        values = metrics | {f"seconds/{k}": v for k, v in self.seconds.items()}
        values |= _memory()
        self.seconds = {}
        journal.write(step, values)
        self.display.step(step, values)
        for alarm in self.alarms.write(step, found):
            self.display.warn(alarm.message)

    def _finish(self, state: TrainState) -> None:
        """Export the model, draw the plots, show what the run came to."""
        with self.display.phase("exporting the model"):
            export_model(
                self.policy.graph,
                nnx.merge_state(self.policy.probes, state.weights),
                self.source,
                self.run_dir / MODEL_DIRECTORY,
            )
        with self.display.phase("drawing plots"):
            write_plots(self.run_dir)
        rows = [r for r in read_metrics(self.run_dir) if "heldout/greedy" in r]
        self.display.before_after(rows[0], rows[-1])
        self.display.note(f"trained model: {self.run_dir / MODEL_DIRECTORY}")
        self.display.note(f"metrics, plots, checkpoints: {self.run_dir}")

    @contextmanager
    def _timed(self, name: str, phase: str) -> Iterator[None]:
        began = time.monotonic()
        with self.display.phase(phase):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


class _Interrupt:
    """Truthy once SIGINT or SIGTERM came; a second one ends the process as usual."""

    def __init__(self):
        self.number = 0
        self._before: dict[int, object] = {}

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    def __bool__(self) -> bool:
        return self.number != 0

    def __enter__(self) -> "_Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]


def _rollout_metrics(completions: Completions, rewards: Rewards) -> dict[str, float]:
    return {
        "reward": float(np.mean(rewards.values)),
        "reward/raised": rewards.raised,
        "reward/timed_out": rewards.timed_out,
        "length/mean": float(np.mean(completions.lengths)),
        "length/truncated": float(np.mean(~completions.finished)),
    }


def _memory() -> dict[str, float]:
    """Peak memory since the process began, GiB: host, and device where it says."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else _LINUX_RSS_UNIT
    values = {"memory/peak_rss_gib": peak * unit / _GIB}
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        values["memory/peak_device_gib"] = stats["peak_bytes_in_use"] / _GIB
    return values

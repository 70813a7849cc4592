"""The training loop: rollout, reward, update, and everything a run leaves behind."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import jax
from flax import nnx

from logra_jax.rl.reward_pool import RewardPool, ScoringError
from logra_jax.rl.tasks import Task
from logra_jax.rollout.servers import ServerError
from logra_jax.training.alarms import Alarm
from logra_jax.training.assemble import (
    build_controller,
    build_optimizer,
    build_training_monitor,
    build_training_step,
    enable_compile_cache,
    load_task,
)
from logra_jax.training.batches import Batches
from logra_jax.training.checkpoint import (
    Checkpoints,
    check_resumable,
    check_same,
    check_shared,
    discard_start,
    write_config,
)
from logra_jax.training.collect import Collector
from logra_jax.training.conclude import show_outcome
from logra_jax.training.config import load_config, to_yaml
from logra_jax.training.data_record import (
    check_data_record,
    data_record,
    describe_data,
    write_data_record,
)
from logra_jax.training.display import Display
from logra_jax.training.distributed import (
    agree,
    from_leader,
    is_leader,
    start,
    together,
)
from logra_jax.training.evaluate import Evaluation
from logra_jax.training.evaluator import Evaluator, is_evaluated
from logra_jax.training.export import export_model, take_best
from logra_jax.training.interrupt import Interrupt
from logra_jax.training.journal import has_metrics, read_metrics
from logra_jax.training.layout import first_state, gradient_shapes
from logra_jax.training.machine import write_machine
from logra_jax.training.memory import memory_parts, usage
from logra_jax.training.minibatches import Minibatches
from logra_jax.training.paths import (
    CONFIG_FILE,
    MODEL_DIRECTORY,
    default_run_dir,
    stored_config,
)
from logra_jax.training.policy import Policy, basis_of, load_policy, model_directory
from logra_jax.training.recorder import Recorder, Row
from logra_jax.training.remote import Remote
from logra_jax.training.schema import Config
from logra_jax.training.scoring import build_rewards
from logra_jax.training.state import TrainState
from logra_jax.training.updates import Updates

STOPPED_BY_ALARM = 3
"""Exit status of a run that an alarm has ended: see `monitor.stop_on`."""


def train(config: Config, *, on_phase: Callable[[str], None] | None = None) -> int:
    """Run, or resume, the training that ``config`` describes.

    Everything lands in the run directory: ``config.yaml``, ``metrics.jsonl``,
    TensorBoard events, plots, Orbax checkpoints, and the trained model as a Hugging
    Face directory. SIGINT or SIGTERM ends the run after the update under way, with a
    checkpoint; a run killed at any instant resumes from its newest one.

    Of several processes (:mod:`logra_jax.training.distributed`) each makes the same
    calls, with its devices' parts of them; the leader writes, shows and scores, and
    tells the others. A signal to any of them ends all after the same update.

    Args:
        config: of the run.
        on_phase: told what the run is doing, as often as that changes.

    Returns:
        The exit status: 0, 128 + the signal's number, or 3 where an alarm of
        `monitor.stop_on` ended the run: with a checkpoint and the export of the best.

    Raises:
        ValueError: one sentence on what is wrong with the config or its inputs.
    """
    start(config.distributed)
    enable_compile_cache(config)
    together(check_same, config, from_leader(lambda: config))
    run_dir = from_leader(_choose_run_dir, config)
    display = Display(config.train.steps, silent=not is_leader(), on_phase=on_phase)
    with display, build_rewards(config) as rewards:
        if is_leader():
            rewards.warm()
        with display.phase("loading the questions"):
            task = together(load_task, config)
        record = data_record(config, task)
        if config.resume is not None:
            together(check_data_record, run_dir, record)
        for line in describe_data(task):
            display.note(line)
        with display.phase("preparing the model"):
            directory = together(model_directory, config)
        program = usage().now
        with display.phase("loading the model"):
            policy, weights = together(load_policy, config, task, directory)
        if config.optimizer.kind == "logra":
            display.note(policy.sketch_table(weights))
        run = _Run(config, run_dir, directory, task, policy, rewards, display, program)
        # Only now: a start that was refused leaves no run behind.
        from_leader(write_config, run_dir, to_yaml(config))
        from_leader(write_data_record, run_dir, record)
        from_leader(write_machine, run_dir)
        del policy
        try:
            together(check_shared, run_dir)
            return run.go(weights)
        except ValueError:
            is_new = config.resume is None and not has_metrics(run_dir)
            if is_leader() and is_new:
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
        check_resumable(config, load_config(stored_config(run_dir, "resume")))
    return run_dir


class _Run:
    """One process's part of a run: the loop.

    The device is kept busy: an update is asked for, and while it runs the host records
    the update before it (see :class:`Recorder`) and prepares the next rollout. What the
    host decides on (stop, evaluate, save) it counts itself: nothing waits for a number
    from the device but where it needs one.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        source: Path,
        task: Task,
        policy: Policy,
        rewards: RewardPool,
        display: Display,
        program: int,
    ):
        self.config = config
        self.run_dir = run_dir
        self.source = source
        self.task = task
        self.policy = policy
        self.rewards = rewards
        self.display = display
        self.program = program  # bytes in use before the model was loaded
        self.optimizer = build_optimizer(config)
        self.controller = build_controller(config)
        self.evaluator = Evaluator(config, run_dir, task, policy, rewards, display)
        self.step = build_training_step(config, policy, self.optimizer, self.controller)
        self.monitor = (
            build_training_monitor(config, policy) if config.monitor.every else None
        )
        self.updates: Updates | None = None
        self.remote: Remote | None = None
        # Why the run cannot go on.
        self.lost: ServerError | ScoringError | None = None
        self.began = time.monotonic()
        self.done = 0  # updates, as the state counts them too

    def go(self, weights: nnx.State) -> int:
        """From the first (or restored) state to the last; the exit status."""
        train = self.config.train
        self.minibatches = Minibatches(self.config, self.policy, weights)
        with self.display.phase("preparing the optimizer"):
            state = first_state(
                weights,
                self.policy.method.trained,
                self.optimizer,
                self.controller,
                self.policy.layout,
            )
        del weights  # the state's buffers are donated: nothing else may hold them
        known = self.evaluator.scores if self.config.eval.keep_best else None
        with Checkpoints(self.run_dir, train.keep_checkpoints, known) as checkpoints:
            saved = checkpoints.latest_step
            if saved is not None:
                with self.display.phase("restoring the checkpoint"):
                    state = checkpoints.restore(state)
                self.done = saved
                self.display.start_from(saved)
            # An update's results are bound to their devices: so is what it begins with,
            # or the second update and rollout would be compiled once more.
            state = jax.tree.map(lambda a: jax.device_put(a, a.sharding), state)
            begun = None if saved is None else from_leader(self._unevaluated, saved)
            with (
                Interrupt(self._acknowledge) as interrupt,
                self._batches(state, interrupt) as batches,
                # Only now: without its servers a run does not begin.
                together(self._record, saved, begun, state) as self.recorder,
            ):
                collector = Collector(
                    self.config,
                    batches,
                    self.rewards,
                    self.recorder,
                    int(state.position),
                )
                if saved is None or begun is not None:
                    values = (begun or {}) | self._evaluate(state)
                    self.recorder.hold(Row(self.done, values))
                    self.recorder.settle()
                reached = from_leader(self._reached)
                while self.done < train.steps and not (
                    self.minibatches.is_used_up
                    and (
                        reached or self.lost or self._alarm() or agree(interrupt.number)
                    )
                ):
                    state, row = self._update(state, collector)
                    if row is None:
                        break
                    if self._is_evaluated(self.done):
                        self.recorder.wait(row, "update")
                        row.values |= self._evaluate(state)
                        reached = self._reached(row.values)
                    self.recorder.hold(row)
                    is_due = self.done % train.checkpoint_every == 0
                    if is_due or checkpoints.would_be_best(self.done):
                        self._save(checkpoints, state)
                self._save(checkpoints, state)
                alarm = from_leader(lambda: self.recorder.stop)
                best = checkpoints.best_step
            if number := agree(interrupt.number):
                self.display.note(
                    f"stopped by {signal.Signals(number).name} after step "
                    f"{self.done}, all of it saved; continue with the same command "
                    f"and resume={self.run_dir}"
                )
                return 128 + number
            if self.lost:
                raise ValueError(
                    f"{self.lost} The run is saved up to step {self.done}; "
                    f"continue with the same command and resume={self.run_dir}."
                )
        if reached and self.done < train.steps:
            self.display.note(
                f"{self.config.best_metric} reached {train.target_accuracy}: stopping"
            )
        if reached or self.done == train.steps:
            alarm = None  # it came too late to end anything
        self._finish(state, alarm, best)
        return 0 if alarm is None else STOPPED_BY_ALARM

    def _acknowledge(self, name: str) -> None:
        several = self.config.rl.updates_per_batch > 1
        last = "the updates of this batch" if several else "this update"
        self.display.note(f"{name}: stopping after {last}")

    def _record(
        self, saved: int | None, begun: dict | None, state: TrainState
    ) -> Recorder:
        """The record of a run from the checkpoint ``saved`` on.

        A row of that step that was only ``begun`` is written again.
        """
        kept = self._kept_step(saved) if begun is None or saved is None else saved - 1
        return Recorder(
            self.config,
            self.run_dir if is_leader() else None,
            self.display,
            kept=kept,
            began=self.began,
            parts=self._memory_parts(state),
        )

    def _memory_parts(self, state: TrainState) -> dict[str, float]:
        policy, layout = self.policy, self.policy.layout
        return memory_parts(
            self.program,
            devices=1 if layout is None else len(layout.mesh.local_devices),
            weights=state.weights,
            sketches=gradient_shapes(policy.method.trained, layout),
            optimizer=state.optimizer,
            reference=self.minibatches.reference,
        )

    @contextmanager
    def _batches(self, state: TrainState, interrupt: Interrupt) -> Iterator[Batches]:
        """The source of responses; servers, if any, hold the weights of ``state``."""
        config = self.config
        if config.train.save_updates or config.rollout.engine == "sglang":
            self.updates = Updates(
                self.run_dir,
                self.policy.graph,
                self.policy.probes,
                basis_of(config),
                config.sketch.rounding,
                self.done,
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
        batches = Batches(config, self.task, self.policy, self.remote, self.rewards)
        try:
            if self.remote:
                with self.display.phase("finding the servers"):
                    load = config.rollout.load_weights or config.resume is not None
                    self.remote.connect(self.done, state.weights, load=load)
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
        if is_evaluated(row) or not self._is_evaluated(step):
            return None
        return {name: value for name, value in row.items() if name != "step"}

    def _update(
        self, state: TrainState, collector: Collector
    ) -> tuple[TrainState, Row | None]:
        """Sample and score, where a batch is used up; one update.

        Returns the next state, and the update's metrics; or None, and the state as it
        was, where the servers are lost, or the rewards fail.
        """
        recorder = self.recorder
        try:
            drawn = self.minibatches.draw(self.done, state, collector, recorder)
        except (ServerError, ScoringError) as error:
            self.lost = error
            return state, None
        state, batch, seen = drawn
        every = self.config.monitor.every
        if self.monitor and (self.done + 1) % every == 0:
            # Before the update, which the state does not survive.
            with recorder.timed("monitor", "measuring gradients"):
                seen |= self.monitor(state, batch)
        asked = time.monotonic()
        with recorder.timed("step", "update"):
            state, metrics, factors = self.step(state, batch)
        self.done += 1
        row = recorder.begin(self.done, metrics, asked)
        recorder.settle()  # the update before this one, while this one runs
        if self.updates:
            assert factors is not None
            recorder.wait(row, "update")
            with recorder.timed("save", "writing the update"):
                blob = self.updates.write(self.done, factors, state.weights)
            if self.remote:
                with recorder.timed("sync", "sending the update"):
                    seen |= self.remote.push(self.done, blob, state.weights)
        row.values = seen
        return state, row

    def _evaluate(self, state: TrainState) -> dict[str, float | int]:
        """Metrics of all evaluation sets; nothing where the servers are lost."""

        def measure() -> Evaluation:
            return self.evaluator.measure(self.policy, state.weights)

        with self.recorder.timed("eval", "evaluation"):
            try:
                if self.remote is None:
                    found = measure()
                else:
                    found = self.remote.persist(self.done, state.weights, measure)
            except ServerError as error:
                self.lost = error
                return {}
        return self.evaluator.keep(self.done, found)

    def _alarm(self) -> bool:
        """Whether an alarm is to end the run."""
        stop_on = self.config.monitor.stop_on
        return bool(stop_on) and bool(agree(self.recorder.stop is not None))

    def _reached(self, metrics: dict | None = None) -> bool:
        target, best = self.config.train.target_accuracy, self.config.best_metric
        if metrics is None:
            rows = [r for r in read_metrics(self.run_dir) if best in r]
            metrics = rows[-1] if rows else {}
        return target is not None and metrics.get(best, -1.0) >= target

    def _save(self, checkpoints: Checkpoints, state: TrainState) -> None:
        """Write a checkpoint, and before it the rows that it covers."""
        self.recorder.settle()
        with self.recorder.timed("checkpoint", "checkpoint"):
            checkpoints.save(state)

    def _finish(self, state: TrainState, alarm: Alarm | None, best: int | None) -> None:
        """Export the model, draw the plots, show what the run came to.

        Args:
            state: the last.
            alarm: what has ended the run before its time, if anything has.
            best: step of the best checkpoint, if there is one.
        """
        if alarm:
            self.display.warn(
                f"stopped after step {self.done} by the alarm {alarm.name!r}: "
                f"{alarm.message}"
            )
        step, weights = self.done, state.weights
        chosen = self.config.eval.export or ("best" if alarm else "last")
        with self.display.phase("exporting the model"):
            if chosen == "best" and best is not None and best != step:
                step, weights = (
                    best,
                    take_best(self.run_dir, self.evaluator.scores, weights),
                )
            export_model(
                self.policy.method, weights, self.source, self.run_dir / MODEL_DIRECTORY
            )
        from_leader(
            show_outcome, self.run_dir, self.display, self.evaluator.shown, step
        )

"""A run's record, written of each step while the next one runs on the device."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
from jaxtyping import Array

from logra_jax.training.alarms import Alarm, AlarmLog
from logra_jax.training.compiles import CompileWatch
from logra_jax.training.degradation import Watch
from logra_jax.training.display import Display
from logra_jax.training.journal import Journal, read_metrics
from logra_jax.training.memory import GIB, MemoryWatch, memory_now
from logra_jax.training.schema import Config

_WARM = 2  # times that a phase may take to compile all it needs


@dataclasses.dataclass
class Row:
    """What is known of a step so far.

    Attributes:
        step: updates done.
        values: metrics that are on the host.
        device: metrics that the device may still be computing.
        asked: when the update was asked for, by ``time.monotonic``.
        ended: when the device was done with it; not set as long as it is not.
        seconds: by phase.
        until: when the host's last phase of this step ended.
    """

    step: int
    values: dict[str, float | int]
    device: dict[str, Array] = dataclasses.field(default_factory=dict)
    asked: float = 0.0
    ended: Future[float] | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    until: float = 0.0


class Recorder:
    """Journal, display and alarms of a run, one step behind the device.

    JAX returns from a call before the device has done the work. A step's row is held
    back until the next step has been asked for (:meth:`settle`), so that fetching,
    writing and showing it cost the device nothing. Leaving the block settles what is
    held, an error or not.

    What a row's seconds are of, none of which overlap:

    - ``seconds/step``: from asking for the update until the device has done it;
    - ``seconds/<phase>``: that the host took for the phase, what it waited for the
      device included, but not what it waited for the update before it to end: a rollout
      that is asked for while an update runs counts from the end of that update;
    - ``seconds/compile``: of them, that XLA compiled or read compiled programs;
    - ``seconds/total``: from the start of the process to the end of the step.

    And its memory (:mod:`logra_jax.training.memory`):

    - ``memory/update_peak_gib``: the most while the update ran;
    - ``memory/step_peak_gib``: the most since the row before, so of all phases: a
      rollout in this process is among them, one of servers is not.

    Args:
        config: of the run.
        run_dir: the run directory; None keeps no record, another process does.
        display: shows the rows.
        kept: the journal's last step to keep; None for a new one.
        began: when the process began, by ``time.monotonic``.
        parts: metrics of the process, written once, with the first row.

    Attributes:
        stop: the alarm that is to end the run, once a row that was settled, by this
            process or by one before it, has raised it; None in a process that keeps no
            record.
    """

    stop: Alarm | None

    def __init__(
        self,
        config: Config,
        run_dir: Path | None,
        display: Display,
        *,
        kept: int | None,
        began: float,
        parts: Mapping[str, float] | None = None,
    ):
        self._display, self._began = display, began
        self._parts = dict(parts or {})
        self._settled = time.monotonic()  # when the last row that is written ended
        self._held: Row | None = None
        self._seconds: dict[str, float] = {}
        self._phase_ended = began
        self._phases_met: dict[str, int] = {}
        self._warned: set[str] = set()
        self._compiled = 0.0  # seconds, as of the last row
        self._journal: Journal | None = None
        self._alarm_watch = Watch(config)
        self.stop = None
        with contextlib.ExitStack() as stack:
            self._compiles = stack.enter_context(CompileWatch())
            self._waiter = stack.enter_context(ThreadPoolExecutor(1, "waiter"))
            if run_dir is not None:
                self._memory = stack.enter_context(MemoryWatch())
                self._alarms = AlarmLog(run_dir, resume_step=kept)
                self._journal = stack.enter_context(Journal(run_dir, resume_step=kept))
                for row in read_metrics(run_dir):
                    self._alarm_watch.see(row)
                    self.stop = self.stop or self._alarm_watch.stop
            self._stack = stack.pop_all()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        with self._stack:
            # Where the update itself failed, its metrics fail alike: once is enough.
            failed = () if kind is None else (jax.errors.JaxRuntimeError,)
            with contextlib.suppress(*failed):
                self.settle()

    @property
    def is_ahead(self) -> bool:
        """Whether the device is still at the update of the row that is held."""
        ended = self._held.ended if self._held else None
        return ended is not None and not ended.done()

    @contextmanager
    def timed(self, name: str, phase: str) -> Iterator[None]:
        """Show ``phase`` and count its seconds as ``name`` while the block runs."""
        began, compiled = time.monotonic(), self._compiles.count
        with self._display.phase(phase):
            yield
        ended = time.monotonic()
        if self._held and (update := self._held.ended):
            began = max(began, update.result() if update.done() else ended)
        self._seconds[name] = self._seconds.get(name, 0.0) + ended - began
        self._phase_ended = ended
        self._watch(name, self._compiles.count - compiled)

    def begin(self, step: int, device: dict[str, Array], asked: float) -> Row:
        """The row of an update that was asked for at ``asked``, by its metrics."""
        ended = self._waiter.submit(_await, device)
        return Row(step, {}, device, asked, ended)

    def wait(self, row: Row, phase: str) -> None:
        """Wait until the device is done with a row's update."""
        if row.ended:
            with self._display.phase(phase):
                row.ended.result()

    def hold(self, row: Row) -> None:
        """Take a row that is complete but for what the device still computes."""
        self.settle()
        compiled, self._compiled = self._compiled, self._compiles.seconds
        row.seconds = self._seconds | {"compile": self._compiles.seconds - compiled}
        row.until, self._seconds = self._phase_ended, {}
        self._held = row

    def settle(self) -> None:
        """Journal, check and show the row that is held, if one is.

        An alarm is shown when it begins, and recorded at every step that it lasts.
        """
        row, self._held = self._held, None
        if row is None or self._journal is None:
            return
        if row.ended:
            ended = row.ended.result()
            row.seconds["step"] = ended - row.asked
            row.until = max(row.until, ended)
        fetched = jax.device_get(row.device)  # all of them in one go
        metrics = row.values | {name: value.item() for name, value in fetched.items()}
        found = self._alarm_watch.see(metrics)
        self.stop = self.stop or self._alarm_watch.stop
        metrics |= {"alarms": len(found)}
        row.seconds["total"] = row.until - self._began
        values = metrics | {f"seconds/{k}": v for k, v in row.seconds.items()}
        values |= memory_now() | self._peaks(row) | self._parts
        self._parts = {}
        self._journal.write(row.step, values)
        self._display.step(row.step, values)
        for alarm in self._alarms.write(row.step, found):
            self._display.warn(alarm.message)

    def _peaks(self, row: Row) -> dict[str, float]:
        """The most memory in use during a row, and during its update, GiB."""
        peaks = {"step": self._memory.peak(self._settled, row.until)}
        if row.ended:
            peaks["update"] = self._memory.peak(row.asked, row.ended.result())
        self._memory.forget(row.until)
        self._settled = row.until
        return {f"memory/{name}_peak_gib": size / GIB for name, size in peaks.items()}

    def _watch(self, name: str, compiled: int) -> None:
        """Warn of a phase that compiles although it has been through all it does."""
        times = self._phases_met[name] = self._phases_met.get(name, 0) + 1
        if compiled and times > _WARM and name not in self._warned:
            self._warned.add(name)
            self._display.warn(
                f"Phase {name} compiled {compiled} more programs after running "
                f"{times - 1} times: the shape of something changes from step to step, "
                "which costs time; `seconds/compile` in the journal says how much."
            )


def _await(device: dict[str, Array]) -> float:
    """The time at which the device is done with these."""
    jax.block_until_ready(device)
    return time.monotonic()

"""One process at a time that scores answers: its life here, and at its own end."""

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from logra_jax.rl.tasks import Question

Reward: TypeAlias = Callable[[Question, str], float]
Answer: TypeAlias = tuple[Question, str]
Cause: TypeAlias = Literal["raised", "timed_out", "out_of_memory", "died"]

# Seconds in which a worker must have imported its reward, on however busy a machine.
_START_LIMIT = 120.0
# Bytes by which a worker may grow before a fresh one takes its place: what checkers
# remember of the answers they saw (sympy does) must not add up over a long run.
_GROWTH = 256 * 2**20
_GIB = 2**30
# The stacks of a hundred idle BLAS threads would count as the worker's data.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Characters of an error's message that are kept.
_MESSAGE = 300


class Failure(NamedTuple):
    """Why an answer has no reward."""

    cause: Cause
    message: str


Verdict: TypeAlias = float | Failure


class Worker:
    """One process at a time that scores answers, replaced when it dies.

    The process sends each verdict as soon as it has it, so that a silence belongs to
    one known answer: that answer is lost, those before it are kept, and those after it
    go to the next process.
    """

    def __init__(self, reward: Reward, timeout: float, memory: float | None):
        self._reward = reward
        self._timeout = timeout
        self._limit = None if memory is None else int(memory * _GIB)
        self._born_with = 0  # bytes resident when it was ready
        self._process: subprocess.Popen | None = None
        self._pipe: Connection
        self._ready = False
        self._closed = False
        # `close` is called from another thread than the one that scores.
        self._lock = threading.Lock()

    def score(self, answers: list[Answer]) -> list[Verdict]:
        """One verdict for each answer.

        Raises:
            RuntimeError: the process cannot start, or this worker was closed.
        """
        self._start()
        verdicts: list[Verdict] = []
        if self._ready and self._resident() > self._born_with + _GROWTH:
            self._replace()
        while len(verdicts) < len(answers):
            self._await_ready()
            try:
                self._pipe.send(answers[len(verdicts) :])
                while len(verdicts) < len(answers):
                    if not self._pipe.poll(self._timeout):
                        verdicts.append(self._silence())
                        self._replace()
                        break
                    verdicts.append(self._pipe.recv())
            except (EOFError, OSError):
                verdicts.append(self._death())
                self._replace()
        return verdicts

    def close(self) -> None:
        """Ends the process for good, and thereby the thread's wait for it."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        """Starts a process unless one is alive; does not wait for it."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            if self._process is not None and self._process.poll() is None:
                return
            self._ready = False
            self._pipe, far_end = Pipe()
            call = f"serve({far_end.fileno()}, {os.getpid()}, {self._limit})"
            # Not multiprocessing's spawn: it would import our main script again, which
            # may import jax, or train.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import serve; {call}"],
                env=_ONE_THREAD
                | os.environ
                | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
            )
            # Else this process would hold the pipe open and never see the other's end.
            far_end.close()
            # If it is dead already, `_await_ready` will tell.
            with contextlib.suppress(OSError):
                self._pipe.send(self._reward)

    def _await_ready(self) -> None:
        if self._ready:
            return
        with contextlib.suppress(EOFError, OSError):
            self._ready = self._pipe.poll(_START_LIMIT) and self._pipe.recv()
        if not self._ready:
            self._kill()
            raise RuntimeError(
                f"the reward worker could not start {self._reward!r}: its traceback is "
                "above; define the reward in a module, not in a main script or notebook"
            )
        self._born_with = self._resident()

    def _silence(self) -> Failure:
        return Failure("timed_out", f"no verdict within {self._timeout:g} s")

    def _death(self) -> Failure:
        """How the process ended, which may take it a moment."""
        process, status = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=1.0)
        if status is not None and status < 0:
            how = f"by signal {-status} ({signal.strsignal(-status)})"
        else:
            how = f"with status {status}"
        return Failure("died", f"the scoring process ended {how}")

    def _resident(self) -> int:
        """Bytes of memory that the process holds; 0 where nobody can tell."""
        process = self._process
        if process is None:
            return 0
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _replace(self) -> None:
        self._kill()
        self._start()

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None


def serve(descriptor: int, parent: int, limit: int | None) -> None:
    """The life of a worker process: answers in, one verdict each out.

    Args:
        descriptor: file descriptor of our end of the pipe; the reward comes first.
        parent: process id of the pool's process.
        limit: bytes of data that this process may hold; None for any number.
    """
    # Ctrl-C and a batch system's SIGTERM reach the whole process group; when to stop is
    # the trainer's decision, and until then a dead worker would change the rewards.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if limit is not None:
        # Not the address space (RLIMIT_AS): libraries reserve much that they never use.
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        ours = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_DATA, (ours, most))
    pipe = Connection(descriptor)
    reward = pipe.recv()
    prepare = getattr(reward, "prepare", None)
    if prepare is not None:
        prepare()
    pipe.send(True)
    while True:
        try:
            answers = pipe.recv()
        except EOFError:
            return
        for question, text in answers:
            pipe.send(_verdict(reward, question, text))


def _verdict(reward: Reward, question: Question, text: str) -> Verdict:
    try:
        value = float(reward(question, text))
    except MemoryError:
        return Failure("out_of_memory", "the reward needs more memory than it may have")
    # A reward that calls sys.exit() is no reason to end either.
    except BaseException as error:
        return Failure("raised", _describe(error))
    # One NaN would reach every weight through the batch's baseline.
    if not math.isfinite(value):
        return Failure("raised", f"the reward was {value}")
    return value


def _describe(error: BaseException) -> str:
    """An error in one line."""
    try:
        text = " ".join(str(error)[:_MESSAGE].split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _end_with(parent: int) -> None:
    """Ends this process with its parent, even from the middle of a hanging reward."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)

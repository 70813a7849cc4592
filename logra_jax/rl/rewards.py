"""Rewards, and the processes in which they run where they can do no harm.

A reward is a callable `(question, text) -> float`. Checkers of free text are not to be
trusted with the training process: they raise, they recurse, they match regular
expressions for hours inside C code where no signal reaches them. `RewardPool` runs them
elsewhere and kills what does not answer.
"""

import contextlib
import functools
import math
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Literal, TypeAlias

import numpy as np

from logra_jax.rl.tasks import Question, check_data_set

Reward: TypeAlias = Callable[[Question, str], float]
_Answer: TypeAlias = tuple[Question, str]
_Verdict: TypeAlias = float | Literal["raised", "timed out"]

# Answers handed to a worker at a time: few enough to share a batch between workers,
# many enough that a round trip (0.1 ms) is nothing.
_CHUNK = 8
# Seconds in which a worker must have imported its reward, on however busy a machine.
_START_LIMIT = 120.0

# ASCII digits only. Thousands may be grouped by commas; a point counts only between
# digits, or before them where no word or ellipsis ends.
_NUMBER = re.compile(
    r"(?:[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))+|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![\w.])\.[0-9]+"
)
_MINUS = ("-", "\N{MINUS SIGN}", "\N{EN DASH}")
_OPERAND_END = tuple("0123456789)]}%")


def last_number(text: str) -> str | None:
    """Finds the last number of a text, in time linear in its length.

    Thousands lose their commas, a Unicode minus becomes "-", and the period that ends a
    sentence is no part of the number. A minus that touches the number is its sign
    unless an operand stands before it (5 - 3, 5-3, x-3); one that stands apart is a
    sign only after "=".

    Returns:
        The number as `Decimal` reads it, or None where the text has no ASCII digit.

    Example:
        >>> last_number("4 - 9 = -5.")
        '-5'
        >>> last_number("It costs $1,234.50 (was 7-3)")
        '3'
        >>> last_number("none") is None
        True
    """
    last = deque(_NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    number = last[0].group().replace(",", "")
    head = text[: last[0].start()].removesuffix("$")
    stripped = head.rstrip(" \t")
    if not stripped.endswith(_MINUS):
        return number
    left = stripped[:-1]
    if stripped == head:
        operand = left.rstrip(" \t").endswith(_OPERAND_END) or left[-1:].isalnum()
        return number if operand else f"-{number}"
    return f"-{number}" if left.rstrip(" \t").endswith("=") else number


@dataclass(frozen=True)
class ReasoningGymReward:
    """Scores a response by the data set's own scorer.

    Attributes:
        dataset: the reasoning-gym data set that the questions come from.
        answer: what of the response is scored: its "last_number" or the "whole_text"
            (without the white space around it).
        partial: False gives 1 to what the scorer finds fully right and 0 to the rest,
            because most scorers give credit to any answer that contains the right one
            ("15" for "5" is worth 0.5). True passes the scorer's number on.

    Raises:
        ValueError: `dataset` or `answer` is unknown.
    """

    dataset: str
    answer: str
    partial: bool = False

    def __post_init__(self) -> None:
        check_data_set("dataset", self.dataset)
        if self.answer not in ("last_number", "whole_text"):
            raise ValueError(
                f"`answer` must be 'last_number' or 'whole_text', got {self.answer!r}"
            )

    def prepare(self) -> None:
        """Imports and builds the scorer; `RewardPool` calls it in each worker."""
        _scorer(self.dataset)

    def __call__(self, question: Question, text: str) -> float:
        """The reward, inside [0, 1]; 0 where the response holds no answer."""
        answer = last_number(text) if self.answer == "last_number" else text.strip()
        if not answer:
            return 0.0
        score = _scorer(self.dataset)(answer, question.entry)
        return float(score) if self.partial else float(score == 1.0)


@functools.cache
def _scorer(dataset: str) -> Callable[..., float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(dataset)


@dataclass(frozen=True, eq=False)
class Rewards:
    """The rewards of a batch of answers.

    Attributes:
        values: float32 (n,); 0 for every answer counted below.
        raised: answers whose reward raised, was not finite or ended its process.
        timed_out: answers whose reward outlived the time limit and was killed.
    """

    values: np.ndarray
    raised: int
    timed_out: int


@dataclass(frozen=True, eq=False)
class PendingRewards:
    """A batch of answers being scored."""

    _futures: tuple[Future, ...]

    def result(self) -> Rewards:
        """Waits for the rewards, in the order in which the answers were submitted.

        Raises:
            RuntimeError: the workers cannot start, or the pool was closed meanwhile.
        """
        try:
            verdicts = [v for future in self._futures for v in future.result()]
        except CancelledError:
            raise RuntimeError("the reward pool is closed") from None
        values = [0.0 if isinstance(v, str) else v for v in verdicts]
        return Rewards(
            values=np.asarray(values, np.float32),
            raised=verdicts.count("raised"),
            timed_out=verdicts.count("timed out"),
        )


class RewardPool:
    """Scores answers in processes of their own, each answer under a time limit.

    An answer whose reward raises, hangs or takes its process down scores 0 and is
    counted; the answers around it keep their rewards and are scored once. A worker that
    hangs is killed (SIGKILL: code that never returns to Python dies too) and replaced.

    Workers are fresh interpreters, so that JAX's threads are not copied: they import
    what the reward needs and nothing else. They end with this process even when it is
    killed (but then code that never returns to Python outlives it).

    Args:
        reward: a picklable callable `(question, text) -> float`, importable from a
            module. If it has a method `prepare()`, each worker calls that first,
            outside the time limit.
        workers: number of processes, >= 1.
        timeout: time limit of one answer in seconds, > 0.

    Raises:
        ValueError: `workers` or `timeout` is out of range, or `reward` unpicklable.

    Example::

        reward = ReasoningGymReward("chain_sum", "last_number")
        with RewardPool(reward, workers=2) as pool:
            pool.warm()                                 # start while a model loads
            pending = pool.submit(questions, texts)     # score while a model computes
            rewards = pending.result()
    """

    def __init__(self, reward: Reward, workers: int = 1, timeout: float = 5.0):
        if workers < 1:
            raise ValueError(f"`workers` must be at least 1, got {workers}")
        if not 0 < timeout < math.inf:
            raise ValueError(
                f"`timeout` must be a finite number of seconds above 0, got {timeout}"
            )
        try:
            pickle.dumps(reward)
        except Exception as error:
            raise ValueError(
                f"`reward` must be picklable, got {reward!r}; define it at the top "
                "level of a module"
            ) from error
        self._workers = [_Worker(reward, timeout) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # One thread for each process: it does nothing but wait for it.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")

    def warm(self) -> None:
        """Starts the workers without waiting for them."""
        # The queue is first in, first out: so many empty chunks meet every worker once.
        for _ in self._workers:
            self._threads.submit(self._score, [])

    def submit(
        self, questions: Sequence[Question], texts: Sequence[str]
    ) -> PendingRewards:
        """Begins to score `texts[i]` as an answer to `questions[i]`.

        Raises:
            ValueError: the two differ in length.
            RuntimeError: the pool is closed.
        """
        if len(questions) != len(texts):
            raise ValueError(
                "`questions` and `texts` must be equally many, got "
                f"{len(questions)} and {len(texts)}"
            )
        answers = list(zip(questions, texts, strict=True))
        return PendingRewards(
            tuple(
                self._threads.submit(self._score, answers[start : start + _CHUNK])
                for start in range(0, len(answers), _CHUNK)
            )
        )

    def score(self, questions: Sequence[Question], texts: Sequence[str]) -> Rewards:
        """Scores `texts[i]` as an answer to `questions[i]` and waits."""
        return self.submit(questions, texts).result()

    def close(self) -> None:
        """Ends the workers at once; what is still pending is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _score(self, answers: list[_Answer]) -> list[_Verdict]:
        worker = self._idle.get()
        try:
            return worker.score(answers)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process at a time that scores answers, replaced when it dies.

    The process sends each verdict as soon as it has it, so that a silence belongs to
    one known answer: that answer is lost, those before it are kept, and those after it
    go to the next process.
    """

    def __init__(self, reward: Reward, timeout: float):
        self._reward = reward
        self._timeout = timeout
        self._process: subprocess.Popen | None = None
        self._pipe: Connection
        self._ready = False
        self._closed = False
        # `close` is called from another thread than the one that scores.
        self._lock = threading.Lock()

    def score(self, answers: list[_Answer]) -> list[_Verdict]:
        self._start()
        verdicts: list[_Verdict] = []
        while len(verdicts) < len(answers):
            self._await_ready()
            try:
                self._pipe.send(answers[len(verdicts) :])
                while len(verdicts) < len(answers):
                    if not self._pipe.poll(self._timeout):
                        verdicts.append("timed out")
                        self._replace()
                        break
                    verdicts.append(self._pipe.recv())
            except (EOFError, OSError):
                verdicts.append("raised")
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
            serve = f"_serve({far_end.fileno()}, parent={os.getpid()})"
            # Not multiprocessing's spawn: it would import our main script again, which
            # may import jax, or train.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import _serve; {serve}"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
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

    def _replace(self) -> None:
        self._kill()
        self._start()

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None


def _serve(descriptor: int, parent: int) -> None:
    """The life of a worker process: answers in, one verdict each out.

    Args:
        descriptor: file descriptor of our end of the pipe; the reward comes first.
        parent: process id of the pool's process.
    """
    # Ctrl-C and a batch system's SIGTERM reach the whole process group; when to stop is
    # the trainer's decision, and until then a dead worker would change the rewards.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
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


def _verdict(reward: Reward, question: Question, text: str) -> _Verdict:
    try:
        value = float(reward(question, text))
    # A reward that calls sys.exit() is no reason to end either.
    except BaseException:
        return "raised"
    # One NaN would reach every weight through the batch's baseline.
    return value if math.isfinite(value) else "raised"


def _end_with(parent: int) -> None:
    """Ends this process with its parent, even from the middle of a hanging reward."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)

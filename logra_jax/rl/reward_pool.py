"""The processes in which rewards run, where they can do no harm.

Checkers of free text are not to be trusted with the training process: they raise, they
recurse, they match regular expressions for hours inside C code where no signal reaches
them, they fill the memory. `RewardPool` runs them elsewhere, kills what does not answer
and counts what went wrong.
"""

import math
import pickle
import queue
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from logra_jax.rl.reward_worker import Answer, Failure, Reward, Verdict, Worker
from logra_jax.rl.tasks import Question

# Answers handed to a worker at a time: few enough to share a batch between workers,
# many enough that a round trip (0.1 ms) is nothing.
_CHUNK = 8


@dataclass(frozen=True, eq=False)
class Rewards:
    """The rewards of a batch of answers.

    Attributes:
        values: float32 (n,); 0 for every answer counted below.
        raised: answers whose reward raised, was not finite or ended its process; those
            that ran out of memory or died are among them.
        timed_out: answers whose reward outlived the time limit and was killed.
        out_of_memory: answers whose reward asked for more memory than it may have.
        died: answers whose reward took its process down.
        first_failure: what went wrong with the first answer that failed, in one line;
            None where none did.
        seconds: wall time from the submission to the last verdict.
    """

    values: np.ndarray
    raised: int = 0
    timed_out: int = 0
    out_of_memory: int = 0
    died: int = 0
    first_failure: str | None = None
    seconds: float = 0.0

    @classmethod
    def join(cls, parts: Sequence["Rewards"]) -> "Rewards":
        """Batches that were scored one after the other, as one.

        Raises:
            ValueError: there are no parts.
        """
        if not parts:
            raise ValueError("`parts` must hold at least one batch, got none")
        failures = (part.first_failure for part in parts if part.first_failure)
        return cls(
            np.concatenate([part.values for part in parts]),
            sum(part.raised for part in parts),
            sum(part.timed_out for part in parts),
            sum(part.out_of_memory for part in parts),
            sum(part.died for part in parts),
            next(failures, None),
            sum(part.seconds for part in parts),
        )

    @property
    def failed(self) -> int:
        """Answers that have no reward of their own, whatever the cause."""
        return self.raised + self.timed_out


class ScoringError(ValueError):
    """Too many answers of a batch could not be scored."""


def check_failures(rewards: Rewards, limit: float) -> None:
    """Stops a run whose reward is broken: its zeros would teach the policy nothing.

    Args:
        rewards: of a batch.
        limit: share of answers that may fail, inside [0, 1]; 1 never stops.

    Raises:
        ScoringError: more failed; names the share, the causes and the first failure.

    Example:
        >>> some = Rewards(np.zeros(4, np.float32), raised=1, first_failure="KeyError")
        >>> check_failures(some, limit=0.5)
        >>> check_failures(some, limit=0.2)
        Traceback (most recent call last):
        ...
        logra_jax.rl.reward_pool.ScoringError: \
`reward.max_failed_share` allows scoring to fail on 20% of a \
batch, got 25% (1 of 4: 1 raised), first with "KeyError"; mend the reward, or raise \
the limit to go on.
    """
    size = len(rewards.values)
    if rewards.failed <= limit * size:
        return
    other = rewards.raised - rewards.out_of_memory - rewards.died
    counts = {
        "raised": other,
        "timed out": rewards.timed_out,
        "ran out of memory": rewards.out_of_memory,
        "took their process down": rewards.died,
    }
    causes = ", ".join(f"{count} {cause}" for cause, count in counts.items() if count)
    raise ScoringError(
        f"`reward.max_failed_share` allows scoring to fail on {limit:.0%} of a batch, "
        f"got {rewards.failed / size:.0%} ({rewards.failed} of {size}: {causes}), "
        f'first with "{rewards.first_failure}"; mend the reward, or raise the limit '
        "to go on."
    )


@dataclass(frozen=True, eq=False)
class PendingRewards:
    """A batch of answers being scored."""

    _futures: tuple[Future, ...]
    _submitted: float

    @classmethod
    def join(cls, parts: Sequence["PendingRewards"]) -> "PendingRewards":
        """Batches that were submitted one by one, as they came, as a single one.

        Its seconds count from the first submission.

        Raises:
            ValueError: there are no parts.
        """
        if not parts:
            raise ValueError("`parts` must hold at least one batch, got none")
        futures = tuple(future for part in parts for future in part._futures)
        return cls(futures, min(part._submitted for part in parts))

    def result(self) -> Rewards:
        """Waits for the rewards, in the order in which the answers were submitted.

        Raises:
            RuntimeError: the workers cannot start, or the pool was closed meanwhile.
        """
        try:
            scored = [future.result() for future in self._futures]
        except CancelledError:
            raise RuntimeError("the reward pool is closed") from None
        verdicts = [verdict for verdicts, _ in scored for verdict in verdicts]
        failures = [v for v in verdicts if isinstance(v, Failure)]
        causes = [failure.cause for failure in failures]
        values = [0.0 if isinstance(v, Failure) else v for v in verdicts]
        finished = [at for _, at in scored]
        return Rewards(
            values=np.asarray(values, np.float32),
            raised=len(causes) - causes.count("timed_out"),
            timed_out=causes.count("timed_out"),
            out_of_memory=causes.count("out_of_memory"),
            died=causes.count("died"),
            first_failure=failures[0].message if failures else None,
            seconds=max(finished, default=self._submitted) - self._submitted,
        )


class RewardPool:
    """Scores answers in processes of their own, each answer under a time limit.

    An answer whose reward raises, hangs, wants too much memory or takes its process
    down scores 0 and is counted; the answers around it keep their rewards and are
    scored once. A worker that hangs is killed (SIGKILL: code that never returns to
    Python dies too) and replaced; so is one, between answers, that has grown by
    256 MiB.

    Workers are fresh interpreters, so that JAX's threads are not copied: they import
    what the reward needs and nothing else. They end with this process even when it is
    killed (but then code that never returns to Python outlives it).

    Args:
        reward: a picklable callable `(question, text) -> float`, importable from a
            module. If it has a method `prepare()`, each worker calls that first,
            outside the time limit.
        workers: number of processes, >= 1.
        timeout: time limit of one answer in seconds, > 0.
        memory: GiB of data that a worker may hold (Linux's RLIMIT_DATA: heap and
            anonymous maps), above 0; what the reward imports counts too. None sets no
            limit.

    Raises:
        ValueError: `workers`, `timeout` or `memory` is out of range, or `reward`
            unpicklable.

    Example::

        reward = ReasoningGymReward("last_number")
        with RewardPool(reward, workers=2) as pool:
            pool.warm()                                 # start while a model loads
            pending = pool.submit(questions, texts)     # score while a model computes
            rewards = pending.result()
    """

    def __init__(
        self,
        reward: Reward,
        workers: int = 1,
        timeout: float = 5.0,
        memory: float | None = None,
    ):
        if workers < 1:
            raise ValueError(f"`workers` must be at least 1, got {workers}")
        if not 0 < timeout < math.inf:
            raise ValueError(
                f"`timeout` must be a finite number of seconds above 0, got {timeout}"
            )
        if memory is not None and not 0 < memory < math.inf:
            raise ValueError(
                f"`memory` must be a finite number of GiB above 0, got {memory}; None "
                "sets no limit"
            )
        try:
            pickle.dumps(reward)
        except Exception as error:
            raise ValueError(
                f"`reward` must be picklable, got {reward!r}; define it at the top "
                "level of a module"
            ) from error
        self._workers = [Worker(reward, timeout, memory) for _ in range(workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
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
        submitted = time.monotonic()
        futures = tuple(
            self._threads.submit(self._score, answers[start : start + _CHUNK])
            for start in range(0, len(answers), _CHUNK)
        )
        return PendingRewards(futures, submitted)

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

    def _score(self, answers: list[Answer]) -> tuple[list[Verdict], float]:
        """The verdicts, and when the last of them was there."""
        worker = self._idle.get()
        try:
            return worker.score(answers), time.monotonic()
        finally:
            self._idle.put(worker)

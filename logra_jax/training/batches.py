"""The responses that each update learns from, sampled ahead where the engine can."""

import concurrent.futures
from typing import NamedTuple

import numpy as np
from flax import nnx

from logra_jax.rl.tasks import Question, Task
from logra_jax.rollout.servers import ServerError
from logra_jax.rollout.sglang import SGLangEngine
from logra_jax.rollout.types import Completions
from logra_jax.training.assemble import sampling_of, stream_key, training_questions
from logra_jax.training.policy import Policy
from logra_jax.training.remote import Remote
from logra_jax.training.schema import Config


class Responses(NamedTuple):
    """What one update learns from."""

    questions: list[Question]
    completions: Completions
    texts: list[str]


class Batches:
    """Samples the batch of each update; up to ``rollout.staleness`` of them ahead.

    Batch ``i`` is asked for after update ``i - staleness`` at the earliest: the weights
    that its tokens are sampled from are at most that many updates old.

    Args:
        config: of the run.
        task: gives the questions.
        policy: samples.
        remote: the servers, if the policy samples there.
    """

    def __init__(
        self, config: Config, task: Task, policy: Policy, remote: Remote | None
    ):
        self._config, self._task, self._policy = config, task, policy
        self._remote = remote
        self._sampling = sampling_of(config)
        self._ahead: dict[int, concurrent.futures.Future[Completions]] = {}

    def take(self, index: int, weights: nnx.State) -> Responses:
        """The batch of the update from version ``index`` to the next.

        Raises:
            ServerError: the servers cannot give it.
        """
        questions = training_questions(self._config, self._task, index)
        if self._remote is None:
            key = stream_key(self._config.seed, "rollout", index)
            answer = self._policy.respond(weights, questions, self._sampling, key)
            return Responses(questions, *answer)

        def wait() -> Completions:
            is_ahead = index in self._ahead
            self.start(index)
            try:
                return self._ahead.pop(index).result()
            except ServerError as error:
                self.cancel()
                if not is_ahead or error.kind == "refused":
                    raise
            return wait()  # servers that failed it may have been healed since

        completions = self._remote.persist(index, weights, wait)
        return Responses(questions, completions, self._policy.decode(completions))

    def start_ahead(self, index: int) -> None:
        """Ask for the batches after ``index`` that may be sampled already."""
        last = min(index + self._config.rollout.staleness, self._config.train.steps - 1)
        for later in range(index + 1, last + 1):
            self.start(later)

    def start(self, index: int) -> None:
        """Ask for one batch, unless that has been done."""
        engine = self._policy.engine
        if index in self._ahead or not isinstance(engine, SGLangEngine):
            return
        questions = training_questions(self._config, self._task, index)
        key = stream_key(self._config.seed, "rollout", index)
        prompts = self._policy.encode(questions)
        self._ahead[index] = engine.start(prompts, self._sampling, key)

    def cancel(self) -> None:
        """Give up what is under way."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()


def staleness(completions: Completions, version: int) -> dict[str, float]:
    """How many updates the sampled tokens' weights are behind ``version``.

    Raises:
        ValueError: tokens of weights that the trainer does not have yet.
    """
    if completions.versions is None:
        return {}
    behind = version - completions.versions[completions.mask]
    if behind.min() < 0:
        raise ValueError(
            f"Responses must come from weights of version {version} or earlier, got "
            f"{version - int(behind.min())}: another trainer updates these servers; "
            "give each run its own."
        )
    return {
        "staleness/mean": float(np.mean(behind)),
        "staleness/max": float(np.max(behind)),
    }

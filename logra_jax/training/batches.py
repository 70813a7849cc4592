"""The responses that each update learns from, sampled ahead where the engine can."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from flax import nnx

from logra_jax.rl.reward_pool import PendingRewards, RewardPool
from logra_jax.rl.tasks import Question, Task
from logra_jax.rollout.servers import ServerError
from logra_jax.rollout.sglang import OnAnswer, SGLangEngine
from logra_jax.rollout.types import Completions
from logra_jax.training.assemble import sampling_of, stream_key, training_questions
from logra_jax.training.policy import Policy
from logra_jax.training.remote import Remote
from logra_jax.training.schema import Config


class Responses(NamedTuple):
    """A batch of responses."""

    questions: list[Question]
    completions: Completions
    texts: list[str]
    # Of responses that were scored while others were still sampled.
    scores: PendingRewards | None = None


class Batches:
    """Samples batches; what the updates to come need, ``rollout.staleness`` ahead.

    The batch that is trained on after ``i`` updates is asked for after ``i -
    staleness`` of them at the earliest: the weights that its tokens are sampled from
    are at most that many updates old. It makes ``rl.updates_per_batch`` updates.

    Args:
        config: of the run.
        task: gives the questions.
        policy: samples.
        remote: the servers, if the policy samples there.
        rewards: scores what the servers answer as soon as it is there; None leaves it
            to the caller.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        policy: Policy,
        remote: Remote | None,
        rewards: RewardPool | None = None,
    ):
        self._config, self._task, self._policy = config, task, policy
        self._remote, self._rewards = remote, rewards
        # By index of a response, of the batches that are asked for.
        self._scores: dict[tuple[int, int], dict[int, PendingRewards]] = {}
        self._sampling = sampling_of(config)
        self._stride = config.rl.updates_per_batch
        self.prompts = config.train.batch // config.rl.responses_per_prompt
        self._ahead: dict[tuple[int, int], Future[Completions]] = {}

    def take(
        self, index: int, position: int, weights: nnx.State, attempt: int = 0
    ) -> Responses:
        """A batch for the update from version ``index`` to the next.

        Args:
            index: updates done.
            position: of its questions in their stream.
            weights: to sample from.
            attempt: number of the batch among those that are sampled for this update.

        Raises:
            ServerError: the servers cannot give it.
        """
        questions = training_questions(self._config, self._task, position)
        if self._remote is None:
            key = stream_key(self._config.seed, "rollout", index, attempt)
            answer = self._policy.respond(weights, questions, self._sampling, key)
            return Responses(questions, *answer)

        def wait() -> Completions:
            is_ahead = (index, attempt) in self._ahead
            self.start(index, position, attempt)
            try:
                return self._ahead.pop((index, attempt)).result()
            except ServerError as error:
                self.cancel()
                if not is_ahead or error.kind == "refused":
                    raise
            return wait()  # servers that failed it may have been healed since

        completions = self._remote.persist(index, weights, wait)
        texts = self._policy.decode(completions)
        scores = self._scores.pop((index, attempt), None)
        if scores is None:
            return Responses(questions, completions, texts)
        in_order = [scores[i] for i in range(len(questions))]
        return Responses(questions, completions, texts, PendingRewards.join(in_order))

    def start_ahead(self, index: int, position: int) -> None:
        """Ask for the batches to come that may be sampled already.

        Args:
            index: updates done.
            position: in the stream of questions, after the batch of that update.
        """
        last = min(index + self._config.rollout.staleness, self._config.train.steps - 1)
        following = index - index % self._stride + self._stride
        for later in range(following, last + 1, self._stride):
            self.start(later, position)
            position += self.prompts

    def start(self, index: int, position: int, attempt: int = 0) -> None:
        """Ask for one batch, unless that has been done; see :meth:`take`."""
        engine, at = self._policy.engine, (index, attempt)
        if at in self._ahead or not isinstance(engine, SGLangEngine):
            return
        questions = training_questions(self._config, self._task, position)
        key = stream_key(self._config.seed, "rollout", index, attempt)
        prompts = self._policy.encode(questions)
        scoring = () if self._rewards is None else (self._scorer(at, questions),)
        self._ahead[at] = engine.start(prompts, self._sampling, key, *scoring)

    def _scorer(self, at: tuple[int, int], questions: list[Question]) -> OnAnswer:
        """Hands the answers to a batch to the rewards as they come."""
        rewards, decode = self._rewards, self._policy.tokenizer.decode
        assert rewards is not None
        # Anew: a batch that is asked for once more has other answers.
        scores = self._scores[at] = {}

        def on_answer(i: int, tokens: Sequence[int]) -> None:
            scores[i] = rewards.submit([questions[i]], [decode(tokens)])

        return on_answer

    def cancel(self) -> None:
        """Give up what is under way."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        self._scores.clear()


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

"""What a batch is learned from: responses sampled, scored, shaped and filtered."""

from typing import NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Bool, Float32

from logra_jax.rl.reward_pool import RewardPool, Rewards, check_failures
from logra_jax.rl.shaping import is_mixed, shape_rewards
from logra_jax.rollout.types import Completions, concatenate, take_rows
from logra_jax.training.batches import Batches, Responses, staleness
from logra_jax.training.distributed import from_leader
from logra_jax.training.recorder import Recorder
from logra_jax.training.rollout_metrics import rollout_metrics
from logra_jax.training.schema import Config

# Responses, their scores, and the rewards that these became.
_Round = tuple[Responses, Rewards, Float32[np.ndarray, " batch"]]


class Collected(NamedTuple):
    """A batch, ready to be learned from."""

    completions: Completions
    rewards: Float32[np.ndarray, " batch"]  # shaped
    counts: Bool[np.ndarray, " batch"] | None  # has a say in the loss; None is all
    values: dict[str, float]  # metrics


class Collector:
    """Samples batches, scores them, and samples more where groups taught nothing.

    Args:
        config: of the run.
        batches: the source of responses.
        rewards: scores them.
        recorder: times the phases.
        position: in the stream of questions, of the next one.

    Attributes:
        position: the same, after the batches that were collected.
    """

    def __init__(
        self,
        config: Config,
        batches: Batches,
        rewards: RewardPool,
        recorder: Recorder,
        position: int,
    ):
        self._config, self._batches = config, batches
        self._rewards, self._recorder = rewards, recorder
        self.position = position

    def look_ahead(self, index: int) -> None:
        """Ask for what may be sampled already, in the middle of a batch."""
        self._batches.start_ahead(index, self.position)

    def collect(self, index: int, weights: nnx.State) -> Collected:
        """The batch that is trained on after ``index`` updates.

        Args:
            index: updates done.
            weights: to sample from.

        Raises:
            ServerError: the servers cannot give it.
            ScoringError: too many responses could not be scored.
        """
        shaping = self._config.shaping
        most = shaping.filter_rounds if shaping.filter_groups else 1
        rounds: list[_Round] = []
        missing = 1
        while missing > 0 and len(rounds) < most:
            rounds.append(self._sample(index, weights, len(rounds)))
            mixed = sum(
                int(self._mixed(responses.completions, shaped).sum())
                for responses, _, shaped in rounds
            )
            missing = self._batches.prompts - mixed
        completions, shaped, values = self._choose(rounds)
        counts = self._counts(completions)
        values |= staleness(completions, index)
        return Collected(completions, shaped, counts, values)

    def _sample(self, index: int, weights: nnx.State, attempt: int) -> _Round:
        recorder, shaping = self._recorder, self._config.shaping
        before = "update and rollout" if recorder.is_ahead else "rollout"
        with recorder.timed("rollout", before):
            responses = self._batches.take(index, self.position, weights, attempt)
        self.position += self._batches.prompts
        self._batches.start_ahead(index, self.position)
        with recorder.timed("reward", "reward"):
            rewards = from_leader(self._score, responses)
        check_failures(rewards, self._config.reward.max_failed_share)
        cut = shaping.truncated_reward if shaping.truncated == "penalise" else None
        shaped = shape_rewards(
            rewards.values,
            responses.completions.lengths,
            responses.completions.finished,
            limit=self._config.rollout.max_new_tokens,
            truncated_reward=cut,
            buffer=shaping.overlong_buffer,
            penalty=shaping.overlong_penalty,
            low=shaping.reward_min,
            high=shaping.reward_max,
        )
        return responses, rewards, shaped

    def _score(self, responses: Responses) -> Rewards:
        if responses.scores is not None:
            return responses.scores.result()
        return self._rewards.score(responses.questions, responses.texts)

    def _counts(self, completions: Completions) -> Bool[np.ndarray, " batch"] | None:
        masks = self._config.shaping.truncated == "mask"
        return completions.finished if masks else None

    def _mixed(
        self, completions: Completions, rewards: np.ndarray
    ) -> Bool[np.ndarray, " groups"]:
        group, counts = self._config.rl.responses_per_prompt, self._counts(completions)
        mixed = is_mixed(rewards, group)
        # Where no response has a say in the loss, a group teaches nothing either.
        return mixed if counts is None else mixed & counts.reshape(-1, group).any(1)

    def _choose(
        self, rounds: list[_Round]
    ) -> tuple[Completions, Float32[np.ndarray, " batch"], dict[str, float]]:
        """The responses that are kept, their rewards, and metrics of all rounds."""
        completions = concatenate([responses.completions for responses, *_ in rounds])
        scored = Rewards.join([rewards for _, rewards, _ in rounds])
        shaped = np.concatenate([shaped for *_, shaped in rounds])
        values = rollout_metrics(completions, scored)
        if np.any(shaped != scored.values):
            values["reward/shaped"] = float(np.mean(shaped))
        if not self._config.shaping.filter_groups:
            return completions, shaped, values
        group = self._config.rl.responses_per_prompt
        mixed = self._mixed(completions, shaped)
        # First those that teach, in the order of the stream; then what fills up.
        order = np.argsort(~mixed, kind="stable")[: self._batches.prompts]
        rows = (np.sort(order)[:, None] * group + np.arange(group)).reshape(-1)
        values |= {
            "filter/rounds": len(rounds),
            "filter/mixed": float(np.mean(mixed)),
            "filter/filled_up": float(np.mean(~mixed[order])),
        }
        return take_rows(completions, rows), shaped[rows], values

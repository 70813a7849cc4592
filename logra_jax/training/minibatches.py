"""What each update learns from: batches collected, judged, dealt out in minibatches."""

from typing import TypeVar

import jax
import numpy as np
from flax import nnx

from logra_jax.rollout.types import take_rows
from logra_jax.training.assemble import build_training_prepare, to_batch
from logra_jax.training.collect import Collected, Collector
from logra_jax.training.layout import put_whole
from logra_jax.training.policy import Policy
from logra_jax.training.prepare import minibatch_rows, select, trained_weights
from logra_jax.training.recorder import Recorder
from logra_jax.training.schema import Config
from logra_jax.training.state import Batch, Credit, TrainState

T = TypeVar("T")


class Minibatches:
    """The source of what updates learn from.

    Args:
        config: of the run.
        policy: of the run.
        base: weights before the first update; what the reference needs of them is
            copied.
    """

    def __init__(self, config: Config, policy: Policy, base: nnx.State):
        self._config, self._layout = config, policy.layout
        self._prepare = build_training_prepare(config, policy)
        self._reference: nnx.State | None = None
        if config.reference.policy == "base":
            trained = trained_weights(policy.method, base)
            self._reference = jax.tree.map(lambda a: a.copy(), trained)
        self._found: Collected
        self._credit: Credit | None = None
        self._left: list[np.ndarray] = []  # rows of the updates to come of the batch

    @property
    def reference(self) -> nnx.State | None:
        """Weights of the reference that is kept beside the policy, if one is."""
        return self._reference

    @property
    def is_used_up(self) -> bool:
        """Whether the next update begins a batch."""
        return not self._left

    def draw(
        self, done: int, state: TrainState, collector: Collector, recorder: Recorder
    ) -> tuple[TrainState, Batch, dict[str, float]]:
        """What the update after ``done`` others learns from.

        Args:
            done: updates.
            state: of the run.
            collector: gives a batch, where the last one is used up.
            recorder: times what is done.

        Returns:
            The state, that knows of the batch; the minibatch; metrics of its batch.

        Raises:
            ServerError: the servers cannot give a batch; nothing has changed.
        """
        if self.is_used_up:
            state = self._begin(done, state, collector, recorder)
        else:
            collector.look_ahead(done)
        return state, self._next(), dict(self._found.values)

    def _begin(
        self, done: int, state: TrainState, collector: Collector, recorder: Recorder
    ) -> TrainState:
        rl, size = self._config.rl, self._config.train.batch
        found = collector.collect(done, state.weights)
        credit = None
        if self._prepare:
            whole = to_batch(
                found.completions,
                found.rewards,
                layout=self._layout,
                counts=found.counts,
            )
            with recorder.timed("prepare", "judging the batch"):
                credit, baseline = self._prepare(
                    state.weights, state.baseline, whole, self._reference
                )
            state = state._replace(baseline=_like(state.baseline, baseline))
        self._found, self._credit = found, credit
        self._left = minibatch_rows(
            self._config.seed,
            done,
            size,
            epochs=rl.epochs,
            minibatches=rl.minibatches,
        )
        position = np.asarray(collector.position, np.int32)
        return state._replace(position=_like(state.position, position))

    def _next(self) -> Batch:
        rows, found, credit = self._left.pop(0), self._found, self._credit
        is_whole = len(rows) == len(found.rewards)
        if credit is not None and not is_whole:
            credit = select(credit, put_whole(rows, self._layout))
        batch = to_batch(
            found.completions if is_whole else take_rows(found.completions, rows),
            found.rewards[rows],
            self._config.train.microbatch_tokens,
            self._layout,
            None if found.counts is None else found.counts[rows],
        )
        return batch._replace(credit=credit)


def _like(before: T, after: T) -> T:
    """``after`` on the devices that hold ``before``."""
    return jax.tree.map(lambda a, b: jax.device_put(b, a.sharding), before, after)

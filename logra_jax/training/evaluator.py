"""A run's evaluations: measured, and what is left of each: a score, and samples."""

from functools import cached_property
from pathlib import Path

from flax import nnx

from logra_jax.rl.reward_pool import RewardPool
from logra_jax.rl.tasks import EvalSet, Task
from logra_jax.training.assemble import load_eval_sets
from logra_jax.training.checkpoint import read_scores
from logra_jax.training.display import Display
from logra_jax.training.distributed import from_leader, is_leader, together
from logra_jax.training.evaluate import Evaluation, Values, check_evaluation, evaluate
from logra_jax.training.policy import Policy
from logra_jax.training.samples import Sample, samples_path, to_show, write_samples
from logra_jax.training.schema import Config


class Evaluator:
    """Evaluates the weights of a run now and then.

    Args:
        config: of the run.
        run_dir: the run directory.
        task: of the run.
        policy: of the run.
        rewards: scores responses.
        display: shows samples, and how far an evaluation is.

    Attributes:
        sets: what the run is evaluated on.
        shown: responses of the last evaluation that the user gets to see.

    Raises:
        ValueError: sets that cannot be had, or not evaluated: see
            :func:`check_evaluation`.
    """

    sets: list[EvalSet]
    shown: list[Sample]

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        task: Task,
        policy: Policy,
        rewards: RewardPool,
        display: Display,
    ):
        self._config, self._run_dir = config, run_dir
        self._rewards, self._display = rewards, display
        self.sets = together(load_eval_sets, config, task)
        self.shown = []
        check_evaluation(policy, self.sets, config)

    @cached_property
    def scores(self) -> dict[int, float]:
        """Values of ``eval.best``, by step, which say which checkpoint is the best."""
        return from_leader(read_scores, self._run_dir, self._config.best_metric)

    def measure(self, policy: Policy, weights: nnx.State) -> Evaluation:
        """Evaluate the weights on all sets; see :func:`evaluate`."""
        show = self._display.advance
        return evaluate(
            policy, weights, self._rewards, self.sets, self._config, progress=show
        )

    def keep(self, step: int, found: Evaluation) -> Values:
        """Keep the score and some responses of an evaluation; its metrics.

        Args:
            step: updates that made the weights; at 0 responses are shown at once.
            found: the evaluation.
        """
        options, values = self._config.eval, found.values
        best = self._config.best_metric
        if best in values and step > 0:
            self.scores[step] = values[best]
        if is_leader():
            path = samples_path(self._run_dir, step)
            write_samples(path, found.samples, options.keep_samples)
            for later in path.parent.glob("*.jsonl"):
                if later.name > path.name:  # of a run that was killed after it
                    later.unlink()
            self.shown = to_show(found.samples, options.show_samples)
            if step == 0:
                self._display.samples(self.shown)
        return values


def is_evaluated(row: Values) -> bool:
    """Whether a row of the journal holds an evaluation."""
    return any(name.endswith("/sampled") for name in row)

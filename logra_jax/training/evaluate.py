"""Held-out accuracy: every question greedily, and samples at temperature 1."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
from flax import nnx
from jaxtyping import Array, Key

from logra_jax.rl.rewards import PendingRewards, RewardPool
from logra_jax.rl.tasks import Question
from logra_jax.rollout.types import Sampling
from logra_jax.training.assemble import (
    build_rewards,
    enable_compile_cache,
    load_task,
    repeat_to,
    stream_key,
)
from logra_jax.training.checkpoint import CONFIG_FILE, Checkpoints
from logra_jax.training.config import load_config
from logra_jax.training.display import Display
from logra_jax.training.distributed import from_leader, is_leader
from logra_jax.training.policy import Policy, load_policy, model_directory


def evaluate(
    policy: Policy,
    weights: nnx.State,
    rewards: RewardPool,
    questions: Sequence[Question],
    key: Key[Array, ""],
    *,
    samples: int,
    batch: int,
    max_new_tokens: int,
) -> dict[str, float | int]:
    """Accuracy on held-out questions, greedy and at temperature 1.

    Args:
        policy: static parts of the model.
        weights: to evaluate.
        rewards: scores the responses; accuracy is the mean score.
        questions: held out; each is answered once greedily.
        key: of the samples.
        samples: responses at temperature 1, spread evenly over the questions.
        batch: responses generated at once; the last batch is filled up, and what
            fills it is not counted.
        max_new_tokens: length limit of a response.

    Returns:
        ``heldout/greedy`` and ``heldout/sampled``, each with ``_se`` (binomial
        standard error) and ``_n`` (responses scored).
    """
    result: dict[str, float | int] = {}
    plan = {
        "greedy": (Sampling(0.0, max_new_tokens=max_new_tokens), list(questions)),
        "sampled": (
            Sampling(1.0, max_new_tokens=max_new_tokens),
            repeat_to(questions, samples),
        ),
    }
    for name, (sampling, asked) in plan.items():
        pending = []
        for start in range(0, len(asked), batch):
            part = asked[start : start + batch]
            key, batch_key = jax.random.split(key)
            filled = repeat_to(part, batch)
            _, texts = policy.respond(weights, filled, sampling, batch_key)
            if is_leader():
                pending.append(rewards.submit(part, texts[: len(part)]))
        values = from_leader(_scores, pending)
        mean = math.fsum(values) / len(values)
        variance = math.fsum((v - mean) ** 2 for v in values) / len(values)
        result[f"heldout/{name}"] = mean
        result[f"heldout/{name}_se"] = math.sqrt(variance / len(values))
        result[f"heldout/{name}_n"] = len(values)
    return result


def _scores(pending: Sequence[PendingRewards]) -> list[float]:
    return [float(value) for part in pending for value in part.result().values]


def evaluate_command(target: str, overrides: Sequence[str] = ()) -> int:
    """``logra eval``: a config's model, or the newest checkpoint of a run directory.

    Raises:
        ValueError: one sentence on what is wrong with the target or the config.
    """
    path = Path(target)
    run_dir = path if path.is_dir() else None
    config = load_config(path / CONFIG_FILE if run_dir else path, overrides)
    enable_compile_cache(config)
    task = load_task(config)
    with Display(total_steps=0) as display, build_rewards(config) as rewards:
        rewards.warm()
        with display.phase("loading the model"):
            policy, weights = load_policy(config, task, model_directory(config))
            step = 0
            if run_dir:
                with Checkpoints(run_dir) as checkpoints:
                    step, weights = checkpoints.restore_weights(weights)
        with display.phase("evaluating"):
            result = evaluate(
                policy,
                weights,
                rewards,
                task.held_out,
                stream_key(config.seed, "eval", step),
                samples=config.eval.samples,
                batch=config.eval.batch,
                max_new_tokens=config.rollout.max_new_tokens,
            )
        for name, label in (("greedy", "greedy"), ("sampled", "T=1   ")):
            mean, se, n = (result[f"heldout/{name}{s}"] for s in ("", "_se", "_n"))
            display.note(f"held-out accuracy, {label}: {mean:.3f} ± {se:.3f} (n = {n})")
    return 0

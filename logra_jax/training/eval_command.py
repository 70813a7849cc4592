"""``logra eval``: a model's accuracy, wherever the model is."""

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flax import nnx
from rich.console import Console

from logra_jax.rollout.servers import ServerError
from logra_jax.training.assemble import (
    enable_compile_cache,
    load_eval_sets,
    load_task,
)
from logra_jax.training.checkpoint import Checkpoints, read_scores
from logra_jax.training.config import load_config
from logra_jax.training.display import Display
from logra_jax.training.evaluate import evaluate
from logra_jax.training.paths import CONFIG_FILE
from logra_jax.training.policy import Policy, basis_of, load_policy, model_directory
from logra_jax.training.remote import Remote
from logra_jax.training.samples import to_show, write_samples
from logra_jax.training.schema import Config
from logra_jax.training.scoring import build_rewards
from logra_jax.training.updates import Updates


class Target(NamedTuple):
    """What is evaluated, and how."""

    config: Config
    run_dir: Path | None  # whose checkpoint it is; None for the model of the config


def evaluate_command(
    target: str,
    overrides: Sequence[str] = (),
    *,
    config: str | None = None,
    best: bool = False,
    as_json: bool = False,
    samples: str | None = None,
) -> int:
    """``logra eval``: see :func:`find_target` for what can be evaluated.

    With ``rollout.engine=sglang`` the servers are brought to the weights first.

    Args:
        target: config file, run directory, or model.
        overrides: of the config.
        config: a config file for a model that is the target.
        best: of a run's checkpoints the best, not the newest.
        as_json: print one JSON object in place of tables.
        samples: a file to write every response to.

    Raises:
        ValueError: one sentence on what is wrong with the target or the config.
    """
    found = find_target(target, overrides, config=config, best=best)
    settings = found.config
    enable_compile_cache(settings)
    task = load_task(settings)
    sets = load_eval_sets(settings, task)
    console = Console(file=sys.stderr, highlight=False) if as_json else None
    with (
        Display(total_steps=0, console=console) as display,
        build_rewards(settings) as rewards,
    ):
        rewards.warm()
        with display.phase("loading the model"):
            source = model_directory(settings)
            policy, weights = load_policy(settings, task, source)
            step = 0
            if found.run_dir:
                scores = read_scores(found.run_dir, settings.best_metric)
                run_dir = found.run_dir
                with Checkpoints(run_dir, scores=scores, read_only=True) as checkpoints:
                    step, weights = checkpoints.restore_weights(weights, best=best)
        with (
            _answering(settings, policy, weights, step, source, display) as answering,
            display.phase("evaluating"),
        ):
            values, answers = evaluate(
                answering, weights, rewards, sets, settings, progress=display.advance
            )
        if samples is not None:
            write_samples(Path(samples), answers)
        if not as_json:
            display.samples(to_show(answers, settings.eval.show_samples))
            display.evaluation(values)
    if as_json:
        numbers = {k: v if math.isfinite(v) else None for k, v in values.items()}
        print(json.dumps({"target": target, "step": step, "metrics": numbers}))
    return 0


def find_target(
    target: str, overrides: Sequence[str], *, config: str | None, best: bool
) -> Target:
    """What a target is: a config file, a run directory, or a model beside a config.

    Args:
        target: a YAML file, which names the model; the directory of a run; or, with
            ``config``, what `model.path` takes: a Hugging Face directory, a GGUF file,
            the name of a packaged model or one on the Hub.
        overrides: of the config.
        config: a config file that says what a model is asked, and how.
        best: of the run.

    Raises:
        ValueError: it is none of them, or not with these options.
    """
    path = Path(target)
    is_run = (path / CONFIG_FILE).is_file()
    if is_run and config is not None:
        raise ValueError(
            f"`--config` must go with a model, got the run directory {target!r}, which "
            f"has its own; write the run's model with `logra export {target} DIR`, and "
            "evaluate that."
        )
    if best and not is_run:
        raise ValueError(f"`--best` must go with a run directory, got {target!r}.")
    if is_run:
        return Target(load_config(path / CONFIG_FILE, overrides), path)
    if config is not None:
        return Target(load_config(config, [*overrides, f"model.path={target}"]), None)
    if path.suffix in (".yaml", ".yml"):
        return Target(load_config(path, overrides), None)
    raise ValueError(
        f"`target` must be a config file or the directory of a run, got {target!r}; to "
        "evaluate a model, say how with `--config CONFIG`."
    )


@contextlib.contextmanager
def _answering(
    config: Config,
    policy: Policy,
    weights: nnx.State,
    step: int,
    source: Path,
    display: Display,
) -> Iterator[Policy]:
    """What answers: the policy, or one on the servers of a config, with its weights.

    Raises:
        ValueError: a server that cannot be brought to the weights, or is lost.
    """
    if config.rollout.engine == "local":
        yield policy
        return
    with tempfile.TemporaryDirectory(prefix="logra-eval-") as scratch:
        updates = Updates(
            Path(scratch),
            policy.graph,
            policy.probes,
            basis_of(config),
            config.sketch.rounding,
            step,
            weights,
        )
        share = Path(config.rollout.share_dir or scratch).absolute()
        remote = Remote(
            config,
            policy,
            source,
            updates,
            share / f"eval-{Path(scratch).name}",
            display.note,
            lambda: False,
        )
        try:
            with display.phase("finding the servers"):
                remote.connect(step, weights, load=True)
            yield remote.policy
        except ServerError as error:
            raise ValueError(str(error)) from None
        finally:
            remote.close()

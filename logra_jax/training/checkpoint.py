"""Checkpoints of a run with Orbax, and what a resumed run must agree with."""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint import checkpoint_managers

from logra_jax.training.journal import has_metrics, read_metrics
from logra_jax.training.paths import (
    CONFIG_FILE,
    DATA_FILE,
    MACHINE_FILE,
    write_aside,
)
from logra_jax.training.schema import Config
from logra_jax.training.state import TrainState

_DIRECTORY = "checkpoints"
# What a resumed run may change: how long it goes on, how often it looks, where it is.
_FREE = (
    "name",
    "run_dir",
    "resume",
    "cache_dir",
    "distributed.",
    "mesh.",
    "train.steps",
    "train.eval_every",
    "train.checkpoint_every",
    "train.target_accuracy",
    "train.keep_checkpoints",
    "train.save_updates",
    "eval.",
    "monitor.",
    "reward.workers",
    "reward.memory",
    "reward.max_failed_share",
    "rollout.urls",
    "rollout.router",
    "rollout.api_key_env",
    "rollout.request_deadline",
    "rollout.batch_deadline",
    "rollout.concurrency",
    "rollout.push_deadline",
    "rollout.patience",
    "rollout.keep_updates",
    "rollout.load_weights",
    "rollout.share_dir",
    "serve.",
)
# What may differ between the processes of one run.
_OWN = ("distributed.", "cache_dir")


class Checkpoints:
    """The newest checkpoints of a run, and its best; each whole or not there.

    Which is best is not written into them: it is the checkpoint with the highest of
    ``scores`` (the first of several), which a run has in its journal before it saves.

    Args:
        run_dir: the run directory.
        keep: how many of the newest to keep; None keeps all.
        scores: of steps, as far as they are known; read whenever they are needed, so
            that more may come. Without any there is no best checkpoint.
        read_only: nothing is saved, made or cleaned up: another process may be saving.
    """

    def __init__(
        self,
        run_dir: str | Path,
        keep: int | None = None,
        scores: Mapping[int, float] | None = None,
        *,
        read_only: bool = False,
    ):
        self.run_dir = Path(run_dir)
        self._scores = {} if scores is None else scores
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_NewestAndBest(keep, self._scores),
            # On disk when `save` returns: buffers are donated to the next step.
            enable_async_checkpointing=False,
            # What a killed run left; but of a run that goes on it is what it writes.
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(
            (self.run_dir / _DIRECTORY).absolute(), options=options
        )

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, or None."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint, or None where no score of one is known."""
        return _best(self._manager.all_steps(), self._scores)

    def would_be_best(self, step: int) -> bool:
        """Whether a step's score is known and beats those of all checkpoints."""
        others = [s for s in self._manager.all_steps() if s != step]
        return _best([*others, step], self._scores) == step

    def save(self, state: TrainState) -> None:
        """Write ``state`` under its step, unless it is there already."""
        step = int(state.step)
        if step not in self._manager.all_steps():
            weights, rest = _to_trees(state)
            items = ocp.args.Composite(
                weights=ocp.args.StandardSave(weights), rest=ocp.args.StandardSave(rest)
            )
            self._manager.save(step, args=items)

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, with the structure, dtypes and shapes of ``like``.

        Raises:
            ValueError: there is none.
        """
        weights, rest = map(_abstract, _to_trees(like))
        items = ocp.args.Composite(
            weights=ocp.args.StandardRestore(weights),
            rest=ocp.args.StandardRestore(rest),
        )
        found = self._manager.restore(self._require_step(), args=items)
        state = jax.tree.unflatten(
            jax.tree.structure(like._replace(weights=None)),
            jax.tree.leaves(found["rest"]),
        )
        return state._replace(weights=_to_state(found["weights"], like.weights))

    def restore_weights(
        self, like: nnx.State, *, best: bool = False
    ) -> tuple[int, nnx.State]:
        """A checkpoint's step and weights, nothing else.

        Args:
            like: arrays or their shapes, dtypes and shardings.
            best: the best checkpoint, not the newest.

        Raises:
            ValueError: there is none.
        """
        step = self._require_step(best)
        weights = _abstract(nnx.to_pure_dict(like))
        items = ocp.args.Composite(weights=ocp.args.StandardRestore(weights))
        found = self._manager.restore(step, args=items)
        return step, _to_state(found["weights"], like)

    def _require_step(self, best: bool = False) -> int:
        step = self.best_step if best else self.latest_step
        if step is None:
            kind = "a checkpoint" + " with a value of `eval.best`" * best
            raise ValueError(
                f"`run_dir` must hold {kind}, got {str(self.run_dir)!r}, which has "
                "none yet."
            )
        return step

    def close(self) -> None:
        """Let go of the directory."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_scores(run_dir: Path, metric: str) -> dict[int, float]:
    """The journal's values of a metric after at least one update, by step.

    The model before it is at hand, and is no checkpoint.
    """
    rows = read_metrics(run_dir) if has_metrics(run_dir) else []
    return {
        row["step"]: row[metric]
        for row in rows
        if row["step"] > 0 and math.isfinite(row.get(metric, math.nan))
    }


@dataclasses.dataclass(frozen=True)
class _NewestAndBest(checkpoint_managers.PreservationPolicy):
    """Orbax's rule of what is not deleted after a save."""

    keep: int | None
    scores: Mapping[int, float]

    def should_preserve(
        self,
        checkpoints: Sequence[Any],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = steps if self.keep is None else sorted(steps)[-self.keep :]
        return [step in (*kept, _best(steps, self.scores)) for step in steps]


def _best(steps: Sequence[int], scores: Mapping[int, float]) -> int | None:
    """The first of the steps with the highest score."""
    known = [step for step in sorted(steps) if step in scores]
    return max(known, key=lambda step: scores[step], default=None)


def write_config(run_dir: Path, text: str) -> None:
    """Put the config as run into the run directory, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_aside(run_dir / CONFIG_FILE, text)


def check_shared(run_dir: Path) -> None:
    """See what the leader of several processes has begun.

    Raises:
        ValueError: this process has another file system.
    """
    if not (run_dir / CONFIG_FILE).exists():
        raise ValueError(
            "`run_dir` must lie on a file system that all processes of the run share, "
            f"got {str(run_dir)!r}, where this one finds no {CONFIG_FILE}."
        )


def discard_start(run_dir: Path) -> None:
    """Take back what a run that never began has left in its directory."""
    for name in (CONFIG_FILE, DATA_FILE, MACHINE_FILE):
        (run_dir / name).unlink(missing_ok=True)
    shutil.rmtree(run_dir / _DIRECTORY, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: somebody else's
        run_dir.rmdir()


def check_resumable(config: Config, stored: Config) -> None:
    """Refuse to resume under a config that would make it another run.

    Raises:
        ValueError: the first field that differs, with both values.
    """
    ours, theirs = (_flat(_settled(c)) for c in (config, stored))
    keys = ours.keys() | theirs.keys()  # an option may be in one alone
    # A kind comes before the usual values that it brings.
    for key in sorted(keys, key=lambda key: (not key.endswith(".kind"), key)):
        if key.startswith(_FREE) or ours.get(key) == theirs.get(key):
            continue
        raise ValueError(
            f"`{key}` must stay {theirs.get(key)!r} in a resumed run, got "
            f"{ours.get(key)!r}; put it back or start a new run."
        )


def check_same(config: Config, leaders: Config) -> None:
    """Refuse to take part in another run than the leader of several processes.

    Raises:
        ValueError: the first field that differs, with both values.
    """
    ours, theirs = (_flat(dataclasses.asdict(c)) for c in (config, leaders))
    for key in sorted(ours.keys() | theirs.keys()):
        if key.startswith(_OWN) or ours.get(key) == theirs.get(key):
            continue
        raise ValueError(
            f"`{key}` must be {theirs.get(key)!r} as in the first process of the run, "
            f"got {ours.get(key)!r}; start all with the same command but for "
            "`distributed.process`."
        )


def _settled(config: Config) -> dict[str, Any]:
    """The values that count: a usual one is the same, given or left to null."""
    values = dataclasses.asdict(config)
    values["optimizer"] |= config.optimizer.settled._asdict()
    return values


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_section = isinstance(value, dict)
        flat |= _flat(value, f"{name}.") if is_section else {name: value}
    return flat


def _to_trees(state: TrainState) -> tuple[dict[str, Any], list[jax.Array]]:
    """The weights as nested dicts; the leaves of the rest, in order."""
    rest = jax.tree.leaves(state._replace(weights=None))
    return nnx.to_pure_dict(state.weights), rest


def _to_state(tree: dict[str, Any], like: nnx.State) -> nnx.State:
    state = jax.tree.map(lambda x: x, like)
    nnx.replace_by_pure_dict(state, tree)
    return state


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)

"""Checkpoints with Orbax, resume, and export to a Hugging Face directory."""

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from logra_jax.models.hf import load_decoder, save_decoder
from logra_jax.training.schema import Config
from logra_jax.training.state import TrainState

CONFIG_FILE = "config.yaml"
_DIRECTORY = "checkpoints"
# What a resumed run may change: how long it goes on and what it reports.
_FREE = ("name", "run_dir", "resume", "cache_dir", "train", "eval", "reward")


class Checkpoints:
    """The newest checkpoints of a run; each is whole (written aside, renamed) or absent.

    Args:
        run_dir: the run directory.
        keep: how many to keep.
    """

    def __init__(self, run_dir: str | Path, keep: int | None = None):
        # Everything is on disk when `save` returns: a step costs seconds, a file one.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(
            (Path(run_dir) / _DIRECTORY).absolute(), options=options
        )

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Write ``state`` under its step, unless it is there already."""
        step = int(state.step)
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(_to_tree(state)))
            self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, with the structure, dtypes and shapes of ``like``.

        Raises:
            ValueError: there is none, or it does not fit.
        """
        step = self.latest_step
        if step is None:
            raise ValueError(
                f"`resume` must name a run with a checkpoint, got "
                f"{str(self._manager.directory.parent)!r}, which has none."
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _to_tree(like))
        tree = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        return _from_tree(tree, like)

    def close(self) -> None:
        """Wait for what is pending and let go."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def write_config(run_dir: Path, text: str) -> None:
    """Put the config as run into the run directory, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    aside = run_dir / f".{CONFIG_FILE}.tmp"
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, run_dir / CONFIG_FILE)


def check_resumable(config: Config, stored: Config) -> None:
    """Refuse to resume under a config that would make it another run.

    Raises:
        ValueError: the first field that differs, with both values.
    """
    ours, theirs = dataclasses.asdict(config), dataclasses.asdict(stored)
    # The batch is part of what a step means; the rest of `train` is only length.
    for field in ("batch", "microbatch"):
        ours[field], theirs[field] = ours["train"][field], theirs["train"][field]
    for name in ours.keys() - set(_FREE):
        if ours[name] == theirs[name]:
            continue
        if not isinstance(ours[name], dict):
            key, new, old = name, ours[name], theirs[name]
        else:
            key, new, old = next(
                (f"{name}.{k}", v, theirs[name].get(k))
                for k, v in ours[name].items()
                if v != theirs[name].get(k)
            )
        raise ValueError(
            f"`{key}` must stay {old!r} in a resumed run, got {new!r}; put it back or "
            "start a new run."
        )


def restore_weights(run_dir: Path, like: nnx.State) -> tuple[int, nnx.State]:
    """The newest checkpoint's step and weights, nothing else.

    Raises:
        ValueError: no checkpoint there.
    """
    with Checkpoints(run_dir) as checkpoints:
        step = checkpoints.latest_step
        if step is None:
            raise ValueError(
                f"`run_dir` must hold a checkpoint, got {str(run_dir)!r}, which has "
                "none yet."
            )
        ...

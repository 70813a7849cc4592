"""A run's model as a Hugging Face directory."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import jax
from flax import nnx

from logra_jax.algorithm.lora import merge_lora
from logra_jax.models.hf import named_tensors, save_tensors
from logra_jax.training.assemble import load_task
from logra_jax.training.checkpoint import Checkpoints, read_scores
from logra_jax.training.config import load_config
from logra_jax.training.display import Display
from logra_jax.training.distributed import from_leader, is_leader
from logra_jax.training.methods import Method
from logra_jax.training.paths import stored_config
from logra_jax.training.policy import load_policy, model_directory


def export_model(
    method: Method, weights: nnx.State, source: Path, directory: Path
) -> Path:
    """Write the weights as a Hugging Face directory, in place of an earlier export.

    The earlier one stays until the new one is whole.

    Adapters are merged into the kernels beside them. Of several processes all take
    part, and the leader writes.

    Args:
        method: of the run.
        weights: of the run.
        source: the directory the model came from (config, tokenizer).
        directory: to write.
    """
    model = merge_lora(nnx.merge(method.graph, method.whole(weights)))
    tensors = named_tensors(model)
    if jax.process_count() > 1:  # gathered by all before the leader does what may fail
        tensors = list(tensors) if is_leader() else deque(tensors, maxlen=0)

    def write() -> Path:
        return save_tensors(tensors, directory, source=source, replace=True)

    return from_leader(write)


def take_best(
    run_dir: Path, scores: Mapping[int, float], weights: nnx.State
) -> nnx.State:
    """The best checkpoint's weights, in place of others, which are freed.

    Args:
        run_dir: of the run.
        scores: of steps; see :class:`Checkpoints`.
        weights: of the run's last step; they may not be used any more.
    """
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), weights
    )
    for array in jax.tree.leaves(weights):
        array.delete()  # there may be no room for both
    with Checkpoints(run_dir, scores=scores) as checkpoints:
        return checkpoints.restore_weights(like, best=True)[1]


def export_command(
    run_dir: str | Path, out_dir: str | Path, *, best: bool = False
) -> int:
    """``logra export``: a checkpoint of a run as a Hugging Face directory.

    Args:
        run_dir: of the run.
        out_dir: to write.
        best: the checkpoint with the highest `eval.best`, not the newest.

    Raises:
        ValueError: no run or no checkpoint there, or the output exists already.
    """
    run_dir, out_dir = Path(run_dir), Path(out_dir)
    if out_dir.exists():
        raise ValueError(
            f"`out_dir` must not exist yet, got {str(out_dir)!r}; remove it or choose "
            "another."
        )
    config = load_config(stored_config(run_dir, "RUN_DIR"))
    with Display(total_steps=0) as display:
        with display.phase("loading the model"):
            source = model_directory(config)
            policy, weights = load_policy(config, load_task(config), source)
        with (
            display.phase("restoring the checkpoint"),
            Checkpoints(
                run_dir,
                scores=read_scores(run_dir, config.best_metric),
                read_only=True,
            ) as saved,
        ):
            step, weights = saved.restore_weights(weights, best=best)
        with display.phase("exporting"):
            export_model(policy.method, weights, source, out_dir)
        display.note(f"step {step} exported to {out_dir}")
    return 0

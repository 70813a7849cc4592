"""`logra replay`: a run's updates applied, in numpy, to the model it began from.

What a server does with each update as it arrives, done with files: the weights that
come out are the trainer's, bit for bit, or it says from where on they are not.
"""

from pathlib import Path

from logra_jax.models.hf import load_tensors, save_tensors
from logra_jax.rollout.replica import Replica
from logra_jax.rollout.wire import Refused, decode

PATTERN = "*.safetensors"


def replay_command(model_dir: str | Path, updates: str | Path, out_dir: str) -> int:
    """Apply every update in a directory, in the order of their names.

    Args:
        model_dir: Hugging Face directory of the weights that the run began from.
        updates: directory of update files, or one file.
        out_dir: Hugging Face directory to write; must not exist.

    Returns:
        The exit code 0.

    Raises:
        ValueError: nothing to read or a place that is taken; an update that is damaged
            or does not follow on the weights, with its name and the reason.
    """
    from rich.console import Console
    from rich.progress import track

    updates, target = Path(updates), Path(out_dir)
    if target.exists():
        raise ValueError(
            f"`OUT_DIR` must not exist yet, got {out_dir!r}; remove it or choose "
            "another."
        )
    files = [updates] if updates.is_file() else sorted(updates.glob(PATTERN))
    if not files:
        raise ValueError(
            f"`UPDATES` must hold update files ({PATTERN}), got {str(updates)!r}; a "
            "run keeps them with `train.save_updates=true`."
        )
    console = Console(stderr=True)
    tensors = load_tensors(model_dir)
    replica = None
    for file in track(files, "replaying", console=console):
        try:
            update = decode(file.read_bytes())
            replica = replica or Replica(tensors, update.base_version)
            replica.apply(update)
        except Refused as error:
            raise ValueError(f"{file.name} is refused: {error}") from None
    assert replica is not None
    dtype = tensors[next(iter(tensors))].dtype
    save_tensors(replica.tensors.items(), target, source=model_dir, dtype=dtype)
    print(f"version {replica.version}, digest {replica.digest}: {target}")
    return 0

"""Where a run's results and its caches lie, and how a file gets there whole."""

import os
from datetime import datetime
from pathlib import Path

from logra_jax.training.schema import Config

# What lies in a run directory.
CONFIG_FILE = "config.yaml"
DATA_FILE = "data.json"
MACHINE_FILE = "machine.json"
MODEL_DIRECTORY = "model"


def default_run_dir(config: Config, now: datetime) -> Path:
    """`config.run_dir`, or `runs/<name>-<YYYYmmdd-HHMMSS>` when it is null."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path("runs") / f"{config.name}-{now:%Y%m%d-%H%M%S}"


def stored_config(run_dir: Path, field: str) -> Path:
    """The config of a run, as it was run.

    Args:
        run_dir: of the run.
        field: what named it, for the error.

    Raises:
        ValueError: that is no run's directory.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        lacks = f"has no {CONFIG_FILE}" if run_dir.is_dir() else "is no directory"
        raise ValueError(
            f"`{field}` must name a run directory, got {str(run_dir)!r}, which "
            f"{lacks}; give the `run_dir` of a training run."
        )
    return path


def default_cache_dir(config: Config) -> Path:
    """`config.cache_dir`, or `logra_jax` in the user's cache directory."""
    if config.cache_dir is not None:
        return Path(config.cache_dir)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "logra_jax"


def write_aside(path: Path, text: str) -> None:
    """Put a file in place, whole or not at all: written beside it and renamed."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)

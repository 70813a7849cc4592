"""Where a run's results and its caches lie, and how a file gets there whole."""

import os
from datetime import datetime
from pathlib import Path

from logra_jax.training.schema import Config


def default_run_dir(config: Config, now: datetime) -> Path:
    """`config.run_dir`, or `runs/<name>-<YYYYmmdd-HHMMSS>` when it is null."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path("runs") / f"{config.name}-{now:%Y%m%d-%H%M%S}"


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

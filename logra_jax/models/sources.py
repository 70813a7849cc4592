"""What a model may be named by, and the Hugging Face directory that this stands for."""

from pathlib import Path

from logra_jax.models.gguf_files import converted
from logra_jax.models.hub import fetch_model, is_hub_name
from logra_jax.models.packaged import is_packaged, packaged_model


def find_model(name: str, cache_dir: Path, *, shapes_only: bool = False) -> Path:
    """The Hugging Face directory of a model, fetched or converted first if need be.

    Args:
        name: a packaged model, a directory, a GGUF file, or a model of the Hub, in this
            order; a directory may hold a GGUF file in place of safetensors.
        cache_dir: where converted models are kept.
        shapes_only: of a model of the Hub, only config.json is needed.

    Raises:
        ValueError: there is no such model, or it cannot be had.
    """
    if is_packaged(name):
        return packaged_model(name, cache_dir)
    path = Path(name).expanduser()
    if path.is_dir():
        file = _only_gguf(path)
        return path if file is None else converted(file, cache_dir)
    if path.is_file() and path.suffix == ".gguf":
        return converted(path, cache_dir)
    if is_hub_name(name):
        return fetch_model(name, shapes_only=shapes_only)
    raise ValueError(
        "`model.path` must be a Hugging Face directory, a GGUF file, the name of a "
        "packaged model or `owner/name` on the Hugging Face Hub, got "
        f"{name!r}, which is none of them."
    )


def _only_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory without safetensors; None where there is none.

    Raises:
        ValueError: several.
    """
    if any(directory.glob("*.safetensors*")):
        return None
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(
            "`model.path` must name one GGUF file of a directory that holds several, "
            f"got {str(directory)!r}; {files[0].name!r} is one of {len(files)}."
        )
    return files[0] if files else None

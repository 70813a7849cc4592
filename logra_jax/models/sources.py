"""What a model may be named by, and the Hugging Face directory that this stands for."""

from pathlib import Path

from logra_jax.models.hub import fetch_model, is_hub_name
from logra_jax.models.packaged import is_packaged, packaged_model


def find_model(name: str, cache_dir: Path, *, shapes_only: bool = False) -> Path:
    """The Hugging Face directory of a model, fetched or converted first if need be.

    Args:
        name: a packaged model, a directory, or a model of the Hub, in this order.
        cache_dir: where converted models are kept.
        shapes_only: of a model of the Hub, only config.json is needed.

    Raises:
        ValueError: there is no such model, or it cannot be had.
    """
    if is_packaged(name):
        return packaged_model(name, cache_dir)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if is_hub_name(name):
        return fetch_model(name, shapes_only=shapes_only)
    raise ValueError(
        "`model.path` must be a Hugging Face directory, the name of a packaged model "
        f"or `owner/name` on the Hugging Face Hub, got {name!r}, which is none of them."
    )

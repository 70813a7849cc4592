"""Models of the Hugging Face Hub, by their names there.

Downloads, the cache, tokens and `HF_HUB_OFFLINE` are those of `huggingface_hub`.
"""

import re
from pathlib import Path

from logra_jax.models.weight_files import INDEX, WEIGHTS

# Hugging Face's own rule for names, and a branch, tag or commit after them.
_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)

_SHAPES = ("config.json",)
_FILES = (
    *("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.txt", "*.model"),
    *("LICEN[CS]E*", "README*", "NOTICE*"),
)
# Other formats of the same weights, which repositories keep beside them.
_OTHERS = ("*/*", "consolidated*")


def is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form ``owner/name`` or ``owner/name@revision``."""
    return _NAME.fullmatch(name) is not None and not name.endswith(".gguf")


def fetch_model(name: str, *, shapes_only: bool = False) -> Path:
    """The Hugging Face directory of a model of the Hub, downloaded if it is not cached.

    Args:
        name: ``owner/name``, or with a branch, tag or commit, ``owner/name@revision``.
        shapes_only: download config.json alone.

    Raises:
        ValueError: there is no such model or revision, it is not for everybody, it has
            no safetensors, or the Hub cannot be reached.

    Example:
        directory = fetch_model("Qwen/Qwen2.5-0.5B")
    """
    from huggingface_hub import snapshot_download

    match = _NAME.fullmatch(name)
    assert match is not None, name
    try:
        directory = snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=list(_SHAPES if shapes_only else _FILES),
            ignore_patterns=list(_OTHERS),
        )
    except Exception as error:  # of its own, of its HTTP client, or the disk's
        raise ValueError(_explain(name, error)) from error
    directory = Path(directory)
    wanted = ("config.json",) if shapes_only else (WEIGHTS, INDEX)
    if not any((directory / file).exists() for file in wanted):
        raise ValueError(
            f"`model.path` must be a model of the Hub with {' or '.join(wanted)}, got "
            f"{name!r}, which has none (or the cache has none of it while the Hub "
            "cannot be reached); choose another, or convert it."
        )
    return directory


def _explain(name: str, error: Exception) -> str:
    from huggingface_hub import errors

    # The more special ones first: they are subclasses of the others.
    known = (
        (
            errors.GatedRepoError,
            "which asks for permission; accept its licence on huggingface.co and run "
            "`hf auth login`.",
        ),
        (
            errors.RepositoryNotFoundError,
            "which is not on the Hub, nor a directory here; correct it, or run `hf "
            "auth login` if it is private.",
        ),
        (
            errors.RevisionNotFoundError,
            "which has no such revision; leave out what follows the @, or correct it.",
        ),
        (
            (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled),
            "which is not in the cache, and the Hub cannot be reached; check the "
            "network and HF_HUB_OFFLINE, or give a local directory.",
        ),
    )
    rule = f"`model.path` must be a model that can be had, got {name!r}"
    for kind, sentence in known:
        if isinstance(error, kind):
            return f"{rule}, {sentence}"
    what = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return (
        f"{rule}, which could not be downloaded: {what}; try again, or give a local "
        "directory."
    )

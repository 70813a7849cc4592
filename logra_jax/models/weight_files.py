"""Weights of a Hugging Face directory: tensors by name, in one file or in shards."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # of a written file, at most, as is usual on the Hub


class WeightFiles:
    """Tensors by name from model.safetensors, or from shards named in an index.

    A context manager: files are opened when first read from, and kept open.

    Raises:
        ValueError: the directory holds neither.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        index = directory / INDEX
        if index.exists():
            self.files = read_json(index).get("weight_map", {})
        elif (directory / WEIGHTS).exists():
            self.files = None
        else:
            raise ValueError(
                f"`directory` must hold {WEIGHTS} or its shards and index, got "
                f"{str(directory)!r}, which holds neither."
            )
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *_) -> None:
        self._open.clear()

    def names(self) -> list[str]:
        """Of all tensors."""
        if self.files is not None:
            return sorted(self.files)
        return sorted(self._handle(WEIGHTS).keys())

    def read(
        self,
        name: str,
        part: tuple[slice, ...] = (),
        expected: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """One tensor, or a part of it; ``expected`` is the whole one's shape.

        Raises:
            ValueError: no such tensor, another shape, a damaged file.
        """
        from safetensors import SafetensorError

        file = WEIGHTS if self.files is None else self.files.get(name)
        if file is None or name not in self._handle(file).keys():  # noqa: SIM118
            raise ValueError(
                f"`{name}` is missing from the weights in {str(self.directory)!r}; the "
                "checkpoint is incomplete or not of this architecture."
            )
        try:
            tensor = self._handle(file).get_slice(name)
            shape = tuple(tensor.get_shape())
            if expected is not None and shape != expected:
                raise ValueError(
                    f"`{name}` must have shape {expected} by config.json, got {shape} "
                    f"in {str(self.directory)!r}."
                )
            return tensor[part] if part else self._handle(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._damaged(file, error) from None

    def _handle(self, file: str) -> Any:
        import ml_dtypes  # noqa: F401  lets numpy know bfloat16
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from None
        return self._open[file]

    def _damaged(self, file: str, error: Exception) -> ValueError:
        return ValueError(
            f"`{file}` in {str(self.directory)!r} cannot be read: {error}; it is "
            "damaged or incomplete, fetch it again."
        )


def write_weights(
    tensors: Iterable[tuple[str, np.ndarray]],
    directory: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write model.safetensors, or shards of it and their index.

    The host holds the tensors of one file at a time.

    Args:
        tensors: each with its name, in the order in which they are written.
        directory: that is there, and holds no weights.
        shard_bytes: of tensors in a file, at most; a larger tensor has its own.
    """
    files: list[tuple[Path, int, list[str]]] = []
    held: dict[str, np.ndarray] = {}

    def write() -> None:
        file = directory / f"part-{len(files)}.safetensors"
        _save(held, file)
        files.append((file, sum(a.nbytes for a in held.values()), list(held)))
        held.clear()

    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            write()
            size = 0
        held[name] = np.ascontiguousarray(tensor)
        size += tensor.nbytes
    write()
    if len(files) == 1:
        files[0][0].rename(directory / WEIGHTS)
        return
    weight_map = {}
    for i, (file, _, names) in enumerate(files, 1):
        shard = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        file.rename(directory / shard)
        weight_map |= dict.fromkeys(names, shard)
    index = {
        "metadata": {"total_size": sum(size for _, size, _ in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save(tensors: dict[str, np.ndarray], file: Path) -> None:
    import ml_dtypes  # noqa: F401  numpy's bfloat16, which safetensors looks up by name
    from safetensors.numpy import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a Hugging Face directory.

    Raises:
        ValueError: there is none.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"`{path.name}` must be in {str(path.parent)!r}, but is not; give a "
            "Hugging Face model directory."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"`{path}` is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(
            f"`{path}` must hold a JSON object, got {type(value).__name__}."
        )
    return value

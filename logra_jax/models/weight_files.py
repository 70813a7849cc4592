"""Weights of a Hugging Face directory: tensors by name, in one file or in shards."""

import json
import math
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # of a written file, at most, as is usual on the Hub

# Files of a model that also sees name its text part otherwise, and hold more.
_TEXT, _TEXT_OF_WHOLE = "model.", "model.language_model."
_NOT_TEXT = ("model.visual.", "mtp.")

# By the names that safetensors gives them.
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies.

    Attributes:
        file: that holds it.
        offset: bytes from the file's beginning to the tensor's.
        shape: of the tensor.
        dtype: of its entries, which lie in row-major order, lowest byte first.
    """

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def first_byte(self, row: int) -> int:
        """Where a row begins in the file."""
        return self.offset + row * math.prod(self.shape[1:]) * self.dtype.itemsize


class WeightFiles:
    """Tensors by name from model.safetensors, or from shards named in an index.

    Names are those of a model of text alone; of one that also sees, its text part.
    A context manager: files are opened when first read from, and kept open. They are
    read, not mapped: pages of a mapped file would count as this process's memory.
    Several threads may read.

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
        self._headers: dict[str, dict[str, Stored]] = {}
        self._open: dict[Path, IO[bytes]] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *_) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def names(self) -> list[str]:
        """Of all tensors of the text model."""
        there = self._header(WEIGHTS) if self.files is None else self.files
        text = (name for name in there if not name.startswith(_NOT_TEXT))
        return sorted(name.replace(_TEXT_OF_WHOLE, _TEXT, 1) for name in text)

    def find(self, name: str, expected: tuple[int, ...] | None = None) -> Stored:
        """Where a tensor lies; ``expected`` is the shape it should have.

        Raises:
            ValueError: no such tensor, another shape, a damaged file.
        """
        whole = name.replace(_TEXT, _TEXT_OF_WHOLE, 1)
        stored = self._look_up(name) or self._look_up(whole)
        if stored is None:
            raise ValueError(
                f"`{name}` is missing from the weights in {str(self.directory)!r}; the "
                "checkpoint is incomplete or not of this architecture."
            )
        if expected is not None and stored.shape != expected:
            raise ValueError(
                f"`{name}` must have shape {expected} by config.json, got "
                f"{stored.shape} in {str(self.directory)!r}."
            )
        return stored

    def _look_up(self, name: str) -> Stored | None:
        file = WEIGHTS if self.files is None else self.files.get(name)
        return None if file is None else self._header(file).get(name)

    def read(self, name: str) -> np.ndarray:
        """One tensor, writable.

        Raises:
            ValueError: no such tensor, a damaged file.
        """
        stored = self.find(name)
        rows = stored.shape[0] if stored.shape else 1
        return self.read_rows(stored, 0, rows).reshape(stored.shape)

    def read_rows(self, stored: Stored, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop`` of a tensor, writable.

        Raises:
            ValueError: the file cannot be read, or ends before they do.
        """
        shape = (stop - start, *stored.shape[1:])
        rows = np.empty(shape, stored.dtype)
        left = memoryview(rows.reshape(-1).view(np.uint8).data)
        at = stored.first_byte(start)
        try:
            while left.nbytes:
                count = os.preadv(self._file(stored), [left], at)
                if not count:
                    raise OSError("it ends too early")
                left, at = left[count:], at + count
        except OSError as error:
            raise self._damaged(stored.file.name, error) from None
        return rows

    def expect_rows(self, stored: Stored, start: int, stop: int) -> None:
        """Let the system fetch rows from the disk that will be read soon."""
        if hasattr(os, "posix_fadvise") and stop > start:
            at = stored.first_byte(start)
            size = stored.first_byte(stop) - at
            with suppress(OSError):  # it is advice
                os.posix_fadvise(self._file(stored), at, size, os.POSIX_FADV_WILLNEED)

    def _file(self, stored: Stored) -> int:
        with self._opening:
            file = self._open.get(stored.file)
            if file is None:
                file = self._open[stored.file] = stored.file.open("rb", buffering=0)
            return file.fileno()

    def _header(self, file: str) -> dict[str, Stored]:
        import ml_dtypes  # noqa: F401  lets numpy know bfloat16
        from safetensors import SafetensorError, safe_open

        if file not in self._headers:
            path = self.directory / file
            try:
                with safe_open(path, framework="numpy"):
                    pass  # all that a header must obey has been checked
                with path.open("rb") as opened:
                    size = int.from_bytes(opened.read(8), "little")
                    header = json.loads(opened.read(size))
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from None
            header.pop("__metadata__", None)
            self._headers[file] = {
                name: self._stored(path, 8 + size, name, entry)
                for name, entry in header.items()
            }
        return self._headers[file]

    def _stored(self, path: Path, base: int, name: str, entry: dict) -> Stored:
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"`{name}` must be of one of the dtypes {', '.join(_DTYPES)}, got "
                f"{entry['dtype']} in {str(path)!r}; convert the checkpoint."
            )
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        offset = base + entry["data_offsets"][0]
        return Stored(path, offset, tuple(entry["shape"]), dtype)

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

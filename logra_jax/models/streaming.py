"""Weights from files into arrays on devices, a block of rows at a time.

A matrix is never whole on the host: an array on its device is allocated first, and
blocks of rows are written into it in place. Where the device's memory is the host's,
threads write there themselves; elsewhere a thread reads the next block meanwhile.
"""

import ctypes
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from logra_jax.models.weight_files import Stored, WeightFiles

Name = TypeVar("Name", bound=Hashable)
_Device: TypeAlias = Any  # a jax.Device, or None for JAX's default

# Of a matrix, read at once. The host holds two for each thread: as read, and as cast.
BLOCK_BYTES = 8 * 2**20

# Blocks that the system is asked to fetch from the disk before they are read: 512 MiB.
_EXPECTED = 64

# Threads that read and write, where both are done by the host; more wait for memory.
_THREADS = min(4, os.cpu_count() or 1)

# Rows transposed at once: their columns stay in a core's cache.
_TILE = 64

# Wider or rarer ones are cast on the host.
_CAST_ON_DEVICE = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Wanted:
    """An array that is to hold tensors of a file.

    Attributes:
        names: of the tensors: one, or one for each layer of a stack.
        stacked: whether ``shape`` has a leading axis of layers.
        turned: whether the last two axes are those of the tensors, exchanged.
        shape: of the array.
        dtype: of the array.
        sharding: None puts it where JAX puts things, and does not bind it to stay.
    """

    names: Sequence[str]
    stacked: bool
    turned: bool
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of each tensor, in the file."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.turned else shape


class _Place(NamedTuple):
    """A device's part of an array."""

    name: Hashable
    device: _Device


class _Block(NamedTuple):
    """Rows of a tensor, and where they go."""

    stored: Stored
    rows: range
    holders: list[tuple[_Place, range]]  # each with the columns that it holds
    start: tuple[int, ...]  # of the block, in each holder's part
    dtype: np.dtype  # of the array
    turned: bool


def load_arrays(
    files: WeightFiles, wanted: Mapping[Name, Wanted]
) -> dict[Name, jax.Array]:
    """Every wanted array, each device's part read from the files.

    All names and shapes are checked before anything is read. The host holds a few
    blocks of ``BLOCK_BYTES``, and vectors.

    Raises:
        ValueError: missing or misshapen tensor, damaged file.
    """
    found = {
        name: [files.find(tensor, w.tensor_shape) for tensor in w.names]
        for name, w in wanted.items()
    }
    matrices = {name: w for name, w in wanted.items() if len(w.tensor_shape) == 2}
    arrays = {
        name: _gather(files, w, found[name])
        for name, w in wanted.items()
        if name not in matrices
    }
    parts = {name: _parts(w) for name, w in matrices.items()}
    blocks = [
        block
        for name, w in matrices.items()
        for layer, stored in enumerate(found[name])
        for block in _blocks(name, w, stored, layer, parts[name])
    ]
    # As they lie in the files, which disks are fastest at.
    blocks.sort(key=lambda b: (str(b.stored.file), b.stored.first_byte(b.rows.start)))
    for block in blocks[:_EXPECTED]:
        files.expect_rows(block.stored, block.rows.start, block.rows.stop)
    buffers = _allocate(matrices, parts)
    fill = _fill_on_host if _on_host(buffers) else _fill_on_devices
    fill(files, blocks, buffers)
    for name, w in matrices.items():
        held = [buffers[_Place(name, device)] for device in parts[name]]
        arrays[name] = (
            held[0]
            if w.sharding is None
            else jax.make_array_from_single_device_arrays(w.shape, w.sharding, held)
        )
    return {name: arrays[name] for name in wanted}


def _gather(files: WeightFiles, wanted: Wanted, found: Sequence[Stored]) -> jax.Array:
    """An array of vectors, by way of the host."""
    rows = [files.read_rows(s, 0, s.shape[0]).astype(wanted.dtype) for s in found]
    value = np.stack(rows) if wanted.stacked else rows[0]
    if wanted.sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(
        wanted.shape, wanted.sharding, lambda index: value[index], dtype=wanted.dtype
    )


def _parts(wanted: Wanted) -> dict[_Device, tuple[range, ...]]:
    """Which indices of the array each device of this process holds, axis by axis."""
    if wanted.sharding is None:
        return {None: tuple(range(size) for size in wanted.shape)}
    held = wanted.sharding.addressable_devices_indices_map(wanted.shape)
    return {
        device: tuple(
            range(*part.indices(size))
            for part, size in zip(index or (), wanted.shape, strict=True)
        )
        for device, index in held.items()
    }


def _allocate(
    wanted: Mapping[Name, Wanted],
    parts: Mapping[Name, Mapping[_Device, tuple[range, ...]]],
) -> dict[_Place, Array]:
    """An array for each device's part of each one, by one program a device."""
    shapes: dict[_Device, dict[_Place, tuple]] = {}
    for name, held in parts.items():
        for device, index in held.items():
            shape = tuple(map(len, index))
            own = shapes.setdefault(device, {})
            own[_Place(name, device)] = (shape, wanted[name].dtype.name)
    buffers = {}
    for device, own in shapes.items():
        where = None if device is None else SingleDeviceSharding(device)
        made = _empty(tuple(own.values()), where)()
        buffers |= zip(own, made, strict=True)
    return buffers


@lru_cache(maxsize=16)
def _empty(
    shapes: tuple[tuple[tuple[int, ...], str], ...], where: Sharding | None
) -> Callable[[], list[Array]]:
    def empty() -> list[Array]:
        return [lax.empty(shape, dtype) for shape, dtype in shapes]

    return jax.jit(empty, out_shardings=where)


def _blocks(
    name: Hashable,
    wanted: Wanted,
    stored: Stored,
    layer: int,
    parts: Mapping[_Device, tuple[range, ...]],
) -> Iterator[_Block]:
    """The blocks of one tensor, each row read once however many devices hold it."""
    by_rows: dict[range, list[tuple[_Place, range]]] = {}
    for device, index in parts.items():
        rows, columns = index[-2:][::-1] if wanted.turned else index[-2:]
        by_rows.setdefault(rows, []).append((_Place(name, device), columns))
    width = stored.shape[1] * stored.dtype.itemsize
    for rows, holders in by_rows.items():
        count = max(1, min(len(rows), BLOCK_BYTES // max(1, width)))
        for at in range(0, len(rows), count):
            # As large as the others: what was compiled for them takes it.
            at = min(at, len(rows) - count)
            within = (0, at) if wanted.turned else (at, 0)
            start = (layer, *within) if wanted.stacked else within
            yield _Block(
                stored,
                rows[at : at + count],
                holders,
                start,
                wanted.dtype,
                wanted.turned,
            )


def _on_host(buffers: Mapping[_Place, Array]) -> bool:
    """Whether the arrays lie in memory that this process writes to by itself."""
    devices = [device for a in buffers.values() for device in a.devices()]
    return all(device.platform == "cpu" for device in devices)


def _fill_on_host(
    files: WeightFiles, blocks: Sequence[_Block], buffers: Mapping[_Place, Array]
) -> None:
    """Write the blocks, a few at a time, into the memory of the arrays themselves.

    Nobody else has seen the arrays yet. XLA would transpose at a third of the speed,
    and before JAX 0.12 go through all of a bfloat16 stack to write a part of it.
    """
    memory = {place: _memory(array) for place, array in buffers.items()}

    def fill(block: _Block, later: _Block | None) -> None:
        read = _read(files, block, later)
        for place, columns in block.holders:
            target = memory[place]
            part = read[:, columns.start : columns.stop].astype(
                target.dtype, copy=False
            )
            *layer, row, column = block.start
            target = target[(*layer, slice(row, None), slice(column, None))]
            if block.turned:
                _transpose_into(target[:, : len(part)], part)
            else:
                target[: len(part)] = part

    with ThreadPoolExecutor(_THREADS, "weights") as pool:
        try:
            for _ in pool.map(fill, blocks, _later(blocks)):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def _later(blocks: Sequence[_Block]) -> list[_Block | None]:
    """For each block the one that should be fetched from the disk as it is read."""
    return [*blocks[_EXPECTED:], *(None for _ in blocks[:_EXPECTED])]


def _read(files: WeightFiles, block: _Block, later: _Block | None) -> np.ndarray:
    if later is not None:
        files.expect_rows(later.stored, later.rows.start, later.rows.stop)
    return files.read_rows(block.stored, block.rows.start, block.rows.stop)


def _memory(array: Array) -> np.ndarray:
    """An array on a CPU device as numpy sees it, writable."""
    array.block_until_ready()
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(raw).view(array.dtype).reshape(array.shape)


def _transpose_into(
    out: Shaped[np.ndarray, "columns rows"], block: Shaped[np.ndarray, "rows columns"]
) -> None:
    """``out[:] = block.T``, a few rows at a time."""
    bits = f"u{block.dtype.itemsize}"  # numpy moves its own types faster
    out, block = out.view(bits), block.view(bits)
    for start in range(0, len(block), _TILE):
        rows = slice(start, start + _TILE)
        out[:, rows] = block[rows].T


def _fill_on_devices(
    files: WeightFiles, blocks: Sequence[_Block], buffers: dict[_Place, Array]
) -> None:
    """Send the blocks, the next one read while one is written; replaces the arrays."""

    def read(at: int) -> np.ndarray:
        block = blocks[at]
        rows = _read(files, block, later[at])
        if rows.dtype.name in _CAST_ON_DEVICE:
            return rows
        return rows.astype(block.dtype)

    later = _later(blocks)
    last: Array | None = None
    with ThreadPoolExecutor(1, "weights") as reader:
        ahead = reader.submit(read, 0)
        for at, block in enumerate(blocks):
            rows = ahead.result()
            if at + 1 < len(blocks):
                ahead = reader.submit(read, at + 1)
            start = tuple(np.int32(i) for i in block.start)
            for place, columns in block.holders:
                if last is not None:
                    last.block_until_ready()  # or blocks would pile up
                part = rows[:, columns.start : columns.stop]
                written = _write(buffers.pop(place), part, start, turn=block.turned)
                last = buffers[place] = written


@partial(jax.jit, donate_argnums=0, static_argnames="turn")
def _write(
    buffer: Shaped[Array, "..."],
    block: Shaped[Array, "rows columns"],
    start: tuple[Array, ...],
    *,
    turn: bool,
) -> Shaped[Array, "..."]:
    """``buffer`` with ``block`` (transposed first, or not) in it, in place."""
    block = (block.T if turn else block).astype(buffer.dtype)
    block = block.reshape((1,) * (buffer.ndim - 2) + block.shape)
    return lax.dynamic_update_slice(buffer, block, start)

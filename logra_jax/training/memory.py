"""Memory that a run takes: its parts, and the peak of any stretch of time.

    with MemoryWatch() as memory:
        ...
        memory.peak(began, ended)  # bytes

On an accelerator it is what JAX has allocated on the first local device; on CPUs, and
where a device does not say, the resident memory of this process.
"""

import math
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

GIB = 2**30
INTERVAL = 0.02
"""Seconds between two samples."""

_LINUX_RSS_UNIT = 1024  # ru_maxrss is in KiB on Linux, in bytes on macOS
_STATM = Path("/proc/self/statm")


class Usage(NamedTuple):
    """Bytes in use now, and the most since the process began."""

    now: int
    peak: int


def process_usage() -> Usage:
    """Resident memory of this process; where there is no ``/proc``, its peak twice."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else _LINUX_RSS_UNIT
    if not _STATM.exists():
        return Usage(peak, peak)
    pages = int(_STATM.read_text().split()[1])
    return Usage(pages * resource.getpagesize(), peak)


def device_usage() -> Usage | None:
    """What JAX has allocated on the first local device; None where it does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return None
    return Usage(stats["bytes_in_use"], stats["peak_bytes_in_use"])


def usage() -> Usage:
    """Of the first local device, or of this process where that does not say."""
    return device_usage() or process_usage()


def memory_now() -> dict[str, float]:
    """Memory in GiB, for the journal: of the process now and at most, of a device."""
    process, device = process_usage(), device_usage()
    values = {"memory/peak_rss_gib": process.peak / GIB}
    if _STATM.exists():
        values["memory/rss_gib"] = process.now / GIB
    if device is not None:
        values["memory/peak_device_gib"] = device.peak / GIB
    return values


class MemoryWatch:
    """Samples :func:`usage` from a thread of its own while the block runs.

    A peak between two samples is seen where it is the highest of the process so far,
    for of that the system keeps count; others that last less than ``INTERVAL`` can be
    missed.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []  # (time.monotonic(), bytes)
        self._highest = usage().peak
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def peak(self, since: float, until: float) -> int:
        """The most bytes in use between two times, by ``time.monotonic``.

        A stretch without a sample of its own is judged by what is in use now.
        """
        self._sample()
        with self._lock:
            inside = [size for at, size in self._samples if since <= at <= until]
            return max(inside, default=self._samples[-1][1])

    def forget(self, before: float) -> None:
        """Drop the samples of a time that nobody will ask for again."""
        with self._lock:
            self._samples = [s for s in self._samples if s[0] >= before]

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            found = usage()
            size = found.peak if found.peak > self._highest else found.now
            self._highest = max(self._highest, found.peak)
            self._samples.append((time.monotonic(), size))


def device_bytes(tree: PyTree) -> int:
    """Of the largest part of each array, or shape, that one device holds."""

    def size(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def memory_parts(
    program: int, *, devices: int = 1, **parts: PyTree
) -> dict[str, float]:
    """What is held through every update, in GiB, for the journal.

    Args:
        program: bytes in use before the model was loaded. Counted on CPUs only: on an
            accelerator it is next to nothing.
        devices: that this process drives; on CPUs they share the process's memory.
        **parts: trees of arrays or shapes, by name.
    """
    together = devices if device_usage() is None else 1
    values = {n: device_bytes(tree) * together for n, tree in parts.items()}
    values["program"] = program
    return {f"memory/{name}_gib": size / GIB for name, size in values.items()}

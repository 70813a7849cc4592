"""The platform that a program is traced for, which need not be this machine's."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_PLATFORM: ContextVar[str | None] = ContextVar("platform", default=None)


def platform() -> str:
    """``"cpu"``, ``"gpu"``, ``"tpu"``: JAX's own, or that of :func:`tracing_for`."""
    return _PLATFORM.get() or jax.default_backend()


@contextmanager
def tracing_for(name: str) -> Iterator[None]:
    """Programs traced within are for the platform ``name``, and compiled ahead."""
    token = _PLATFORM.set(name)
    try:
        yield
    finally:
        _PLATFORM.reset(token)

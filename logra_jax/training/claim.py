"""One process at a time goes on with a run: a lock in its directory, gone with it."""

import fcntl
from pathlib import Path
from types import TracebackType
from typing import IO

from logra_jax.training.paths import LOCK_FILE


class Claim:
    """Holds a run directory from :meth:`take` to the end of the block.

    The system lets go of it however the process ends. A file system without locks has
    none to give, and the run goes on without.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, run_dir: Path, field: str) -> None:
        """Hold the run directory; it is made if missing.

        Args:
            run_dir: of the run.
            field: what named it, for the error.

        Raises:
            ValueError: another process holds it.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / LOCK_FILE).open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"`{field}` must name a directory that no other process trains in, got "
                f"{str(run_dir)!r}; end that process first, or choose another."
            ) from None
        except OSError:
            pass

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

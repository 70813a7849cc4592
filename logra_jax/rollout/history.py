"""A run's updates as files, the bytes that a rollout server receives.

``000001.safetensors`` and so on, in wire format v1 (:mod:`logra_jax.rollout.wire`),
named by the version that they make: with the weights that the run began from they are
the run's model at every step, and what a server that fell behind needs to catch up.
"""

import itertools
import os
from pathlib import Path

from logra_jax.rollout.wire import Refused, Update, decode, encode


class History:
    """The newest updates of a run, each written whole or not at all.

    Args:
        directory: of the files; made when it is needed.
        keep: number of newest updates that are kept; None keeps all.
        version: of the weights now; files of later versions, from a run that was killed
            and is continued from before them, are removed.

    Raises:
        Refused: a file that is kept is damaged.
    """

    def __init__(self, directory: Path, *, keep: int | None = None, version: int = 0):
        self.directory = directory
        self._keep = keep
        self._links: dict[int, tuple[int, str, str]] = {}  # version -> what it is on
        for path in sorted(directory.glob("*.safetensors")):
            update = _read(path)
            if update.version > version:
                path.unlink()
            else:
                self._note(update)
        self._prune()

    def write(self, update: Update) -> bytes:
        """Keep an update; its bytes on the wire."""
        blob = encode(update)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._path(update.version)
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_bytes(blob)
        os.replace(aside, path)
        self._note(update)
        self._prune()
        return blob

    @property
    def versions(self) -> dict[str, int]:
        """The version of the weights of each digest before or after a kept update."""
        known = {}
        for version, (base_version, base_digest, digest) in self._links.items():
            known |= {base_digest: base_version, digest: version}
        return known

    def between(self, base_version: int, version: int) -> list[Path] | None:
        """The updates that take weights from one version to another, in order.

        None where one of them is no longer kept.
        """
        path = []
        while version > base_version and version in self._links:
            path.append(self._path(version))
            version = self._links[version][0]
        return path[::-1] if version == base_version else None

    def _note(self, update: Update) -> None:
        link = update.base_version, update.base_digest, update.digest
        self._links[update.version] = link

    def _prune(self) -> None:
        if self._keep is None:
            return
        surplus = max(0, len(self._links) - self._keep)
        for version in list(itertools.islice(sorted(self._links), surplus)):
            self._path(version).unlink(missing_ok=True)
            del self._links[version]

    def _path(self, version: int) -> Path:
        return self.directory / f"{version:06d}.safetensors"


def _read(path: Path) -> Update:
    try:
        return decode(path.read_bytes())
    except Refused as error:
        problem = f"{path} must be an update of the run that is continued: {error}"
        raise Refused(error.reason, problem) from None

"""Weights outside the trainer that follow it, update by update and bit for bit.

numpy arrays or torch tensors; imports neither JAX nor torch by itself.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from logra_jax.algorithm.arrays import library_of
from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.digest import TensorDigest, digest_array, model_digest
from logra_jax.algorithm.replay import replay
from logra_jax.rollout.wire import Refused, Update, decode


class Replica:
    """The weights of a model and their version, moved by updates alone.

    Example:
        >>> import numpy as np
        >>> from logra_jax.rollout.replica import Replica
        >>> weights = {"proj.weight": np.zeros((2, 3), np.float32)}
        >>> replica = Replica(weights, version=0)
        >>> replica.version, len(replica.digest)
        (0, 16)
    """

    version: int
    tensors: Mapping[str, Any]
    diverged: bool  # the weights are not those of ``version``: only a load helps

    def __init__(self, tensors: Mapping[str, Any], version: int):
        self.load(tensors, version)

    def load(self, tensors: Mapping[str, Any], version: int) -> None:
        """Hold other weights: a full push, after which updates are taken again.

        Args:
            tensors: every weight of the model by its Hugging Face name, a tied one
                once, in (out, in) order: numpy arrays or torch tensors, bfloat16 or
                float32; uint16 numpy arrays are taken as the bits of bfloat16. They
                are held, not copied, and updates change them in place.
            version: of these weights.

        Raises:
            ValueError: a tensor of another kind, or one that cannot be written to.
        """
        for name, tensor in tensors.items():
            _check_writable(name, tensor)
        self._digests = {name: _digest(tensor) for name, tensor in tensors.items()}
        self.tensors = dict(tensors)
        self.version = version
        self.diverged = False

    @property
    def digest(self) -> str:
        """Of the model, as of the last load or update."""
        return model_digest(self._digests)

    def apply(self, update: bytes | bytearray | memoryview | Update) -> int:
        """Move the weights to the update's version.

        Everything about the update is checked before a weight changes. Afterwards the
        words of the changed matrices must be those of the trainer; what lies outside
        the update is not read again (a new :meth:`load` of ``tensors`` reads it all).
        At most a block of one matrix is held besides the weights and the update.

        Args:
            update: or its bytes on the wire.

        Returns:
            The new version.

        Raises:
            Refused: nothing has changed; or, for the reason ``"digest"``, the weights
                have come out otherwise than the trainer's: they have ``diverged``, and
                every update is refused until the next :meth:`load`.
        """
        if not isinstance(update, Update):
            update = decode(update)
        self._check(update)
        basis = Basis(seed=update.seed, refresh=update.refresh, kind=update.kind)
        self.diverged = True  # until the end: an interruption leaves it so
        for name, factor in update.factors.items():
            self._replay(name, factor, update, basis)
        wrong = sorted(
            name
            for name, word in update.digests.items()
            if self._digests[name].word != word
        )
        if wrong:
            raise Refused(
                "digest",
                f"Version {update.version} must have the digest "
                f"{update.digests[wrong[0]]:08x} in {wrong[0]!r}, got "
                f"{self._digests[wrong[0]].word:08x}; {len(wrong)} of "
                f"{len(update.digests)} updated matrices differ: load all weights.",
            )
        self.diverged = False
        self.version = update.version
        return self.version

    def _replay(
        self, name: str, factor: np.ndarray, update: Update, basis: Basis
    ) -> None:
        weight = self.tensors[name]
        factor = _beside(weight, factor)
        replay(
            weight,
            factor[:, :-1],
            factor[:, -1],
            basis.address(name, update.step),
            basis,
            rounding=update.rounding,
        )
        self._digests[name] = _digest(weight)

    def _check(self, update: Update) -> None:
        """Refuse what does not belong on the weights that are held."""
        if self.diverged:
            raise Refused(
                "diverged",
                f"The weights are no longer those of version {self.version}, nor of "
                "any other: load all weights before the next update.",
            )
        if update.version <= self.version:
            raise Refused(
                "repeated",
                f"The update to version {update.version} must not be applied again, "
                f"version {self.version} is held.",
            )
        if update.base_version != self.version:
            raise Refused(
                "base_version",
                f"The update must apply to version {self.version}, which is held, got "
                f"one for version {update.base_version}: send what lies between, or "
                "load all weights.",
            )
        if update.base_digest != self.digest:
            raise Refused(
                "base_digest",
                f"The update must apply to weights of the digest {self.digest}, which "
                f"are held, got one for {update.base_digest}: load all weights.",
            )
        after = dict(self._digests)
        for name, factor in update.factors.items():
            if name not in self.tensors:
                raise Refused(
                    "unknown_name", f"The update must name weights, got {name!r}."
                )
            shape = after[name].shape
            if len(shape) != 2 or shape[0] != len(factor):
                raise Refused(
                    "shape",
                    f"The factor of {name!r} must have the rows of its weights, "
                    f"{shape}, got {len(factor)}.",
                )
            after[name] = after[name]._replace(word=update.digests[name])
        if model_digest(after) != update.digest:
            raise Refused(
                "metadata",
                "`digest` must be that of the model with the `digests` of the update, "
                f"{model_digest(after)}, got {update.digest}.",
            )


def _check_writable(name: str, tensor: Any) -> None:
    package = type(tensor).__module__.partition(".")[0]
    if package not in ("numpy", "torch"):
        raise ValueError(
            "`tensors` must hold numpy arrays or torch tensors, got "
            f"{type(tensor).__name__} for {name!r}."
        )
    if _dtype(tensor) not in ("bfloat16", "float32") or not all(tensor.shape or (0,)):
        raise ValueError(
            "`tensors` must be bfloat16 or float32 and not be empty or scalar, got "
            f"{tensor.dtype} {tuple(tensor.shape)} for {name!r}."
        )
    if package == "numpy" and not tensor.flags.writeable:
        raise ValueError(
            "`tensors` must be writable, since updates change them in place, got a "
            f"read-only array for {name!r}; copy it first."
        )


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return "bfloat16" if name == "uint16" else name


def _digest(tensor: Any) -> TensorDigest:
    return TensorDigest(_dtype(tensor), tuple(tensor.shape), digest_array(tensor))


def _beside(weight: Any, factor: np.ndarray) -> Any:
    """``factor`` in the library and on the device of ``weight``."""
    library = library_of(weight)
    like = library.arange(0, 0)
    return factor if isinstance(like, np.ndarray) else like.new_tensor(factor)

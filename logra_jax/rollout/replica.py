"""Weights outside the trainer that follow it, update by update and bit for bit.

numpy arrays or torch tensors, whole or spread over the ranks of a tensor-parallel
group; imports neither JAX nor torch by itself.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from logra_jax.algorithm.arrays import library_of
from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.digest import TensorDigest, digest_array, model_digest
from logra_jax.algorithm.replay import replay
from logra_jax.rollout.wire import Refused, Update, decode


class Shard(NamedTuple):
    """A part of a weight that this process holds.

    Attributes:
        tensor: the part, (rows, columns) or a vector.
        shape: of the whole weight, (out, in) or (n,).
        row: index of the part's first row in the whole; 0 of a vector.
        column: index of its first column, or of a vector's first entry.
    """

    tensor: Any
    shape: tuple[int, ...]
    row: int = 0
    column: int = 0


# Value of this rank -> values of all ranks, in their order; each rank calls it.
Gather = Callable[[Any], list[Any]]


class _Part(NamedTuple):
    """What one rank says about its part of a weight."""

    dtype: str
    shape: tuple[int, ...]  # of the whole
    place: tuple[int, int, int]  # first row, first column, number of entries
    word: int


class Replica:
    """The weights of a model and their version, moved by updates alone.

    Of a model that is spread over ranks, each rank has a replica of its own, and all of
    them make the same calls; what one refuses, all refuse.

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
    digests: Mapping[str, TensorDigest]  # of the whole weights
    diverged: bool  # the weights are not those of ``version``: only a load helps

    def __init__(
        self,
        tensors: Mapping[str, Any],
        version: int,
        gather: Gather = lambda value: [value],
    ):
        self._gather = gather
        self.load(tensors, version)

    def load(self, tensors: Mapping[str, Any], version: int) -> None:
        """Hold other weights: a full push, after which updates are taken again.

        Args:
            tensors: every weight of the model by its Hugging Face name, a tied one
                once, in (out, in) order: numpy arrays or torch tensors, bfloat16 or
                float32; uint16 numpy arrays are taken as the bits of bfloat16. Or each
                a :class:`Shard` of it, this rank's, or a tuple of several. They are
                held, not copied, and updates change them in place.
            version: of these weights.

        Raises:
            Refused: a ValueError; nothing has changed. For the reason ``"failed"``: a
                tensor of another kind, or one that cannot be written to; ``"shape"``:
                ranks whose parts do not make up whole weights; ``"digest"``: ranks that
                hold the same part with other bits.
        """

        def read() -> dict[str, list[_Part]]:
            for name, tensor in tensors.items():
                for shard in _shards(tensor):
                    _check_writable(name, shard.tensor)
            return {
                name: [_part(shard) for shard in _shards(tensor)]
                for name, tensor in tensors.items()
            }

        self.digests = _add_up(together(self._gather, read))
        self.tensors = dict(tensors)
        self.version = version
        self.diverged = False

    @property
    def digest(self) -> str:
        """Of the model, as of the last load or update."""
        return model_digest(self.digests)

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
            Refused: nothing has changed; or, for the reasons ``"digest"`` and
                ``"failed"``, the weights have come out otherwise than the trainer's:
                they have ``diverged``, and every update is refused until the next
                :meth:`load`.
        """

        decoded: list[Update] = []

        def check() -> None:
            read = update if isinstance(update, Update) else decode(update)
            self._check(read)
            decoded.append(read)

        together(self._gather, check)
        (update,) = decoded
        basis = Basis(seed=update.seed, refresh=update.refresh, kind=update.kind)
        self.diverged = True  # until the end: an interruption leaves it so

        def change() -> dict[str, list[_Part]]:
            return {
                name: [
                    _replay(name, shard, factor, update, basis)
                    for shard in _shards(self.tensors[name])
                ]
                for name, factor in update.factors.items()
            }

        changed = _add_up(together(self._gather, change))
        self.digests = {**self.digests, **changed}
        wrong = sorted(
            name for name, word in update.digests.items() if changed[name].word != word
        )
        if wrong:
            raise Refused(
                "digest",
                f"Version {update.version} must have the digest "
                f"{update.digests[wrong[0]]:08x} in {wrong[0]!r}, got "
                f"{changed[wrong[0]].word:08x}; {len(wrong)} of "
                f"{len(update.digests)} updated matrices differ: load all weights.",
            )
        self.diverged = False
        self.version = update.version
        return self.version

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
        after = dict(self.digests)
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


def together(gather: Gather, work: Callable[[], Any]) -> list[Any]:
    """What ``work`` gave on every rank; where it failed on one, it fails on all.

    Raises:
        Refused: for the reason of the first rank that failed; ``"failed"`` where that
            was another error than ``Refused``.
    """
    result, fault = None, None
    try:
        result = work()
    except Refused as error:
        fault = error.reason, str(error)
    except ValueError as error:
        fault = "failed", str(error)
    except Exception as error:
        fault = "failed", f"{type(error).__name__}: {error}"
    given = gather((result, fault))
    for _, fault in given:
        if fault is not None:
            raise Refused(*fault)
    return [result for result, _ in given]


def _shards(tensor: Any) -> tuple[Shard, ...]:
    if isinstance(tensor, Shard):
        return (tensor,)
    return tensor if isinstance(tensor, tuple) else (all_of(tensor),)


def all_of(tensor: Any) -> Shard:
    """A whole weight as a part of itself."""
    return Shard(tensor, tuple(np.shape(tensor)))


def _replay(
    name: str, shard: Shard, factor: np.ndarray, update: Update, basis: Basis
) -> _Part:
    """Move the shard by its rows of the factor."""
    rows = slice(shard.row, shard.row + shard.tensor.shape[0])
    factor = _beside(shard.tensor, factor[rows])
    replay(
        shard.tensor,
        factor[:, :-1],
        factor[:, -1],
        basis.address(name, update.step),
        basis,
        rounding=update.rounding,
        rows=shard.row,
        columns=shard.column,
        width=shard.shape[1],
    )
    return _part(shard)


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


def _part(shard: Shard) -> _Part:
    word = digest_array(
        shard.tensor, rows=shard.row, columns=shard.column, width=shard.shape[-1]
    )
    place = shard.row, shard.column, math.prod(shard.tensor.shape)
    return _Part(_dtype(shard.tensor), shard.shape, place, word)


def _add_up(ranks: list[dict[str, list[_Part]]]) -> dict[str, TensorDigest]:
    """Digests of whole weights from those of their parts.

    Raises:
        Refused: ranks that hold the same part hold it with other bits, or parts that do
            not make up a whole.
    """
    digests = {}
    for name in {name: None for rank in ranks for name in rank}:
        parts = [part for rank in ranks for part in rank.get(name, ())]
        first = parts[0]
        places: dict[tuple[int, int, int], int] = {}
        for part in parts:
            if places.setdefault(part.place, part.word) != part.word:
                raise Refused(
                    "digest",
                    f"Ranks must hold the same bits where they hold the same part of "
                    f"{name!r}, got digests {places[part.place]:08x} and "
                    f"{part.word:08x}: load all weights.",
                )
        alike = {(part.dtype, part.shape) for part in parts}
        entries = sum(number for _, _, number in places)
        if (
            any(name not in rank for rank in ranks)
            or len(alike) > 1
            or entries != math.prod(first.shape)
        ):
            raise Refused(
                "shape",
                f"The parts of {name!r} on {len(ranks)} ranks must make up its shape "
                f"{first.shape}, got {entries} of {math.prod(first.shape)} entries.",
            )
        word = sum(places.values()) % 2**32
        digests[name] = TensorDigest(first.dtype, first.shape, word)
    return digests


def _beside(weight: Any, factor: np.ndarray) -> Any:
    """``factor`` in the library and on the device of ``weight``."""
    library = library_of(weight)
    like = library.arange(0, 0)
    return factor if isinstance(like, np.ndarray) else like.new_tensor(factor)

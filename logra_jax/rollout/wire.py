"""Wire format v1: one update of a model's weights as bytes.

This text is the specification: a reader in any language needs nothing else. The
docstrings of :mod:`logra_jax.algorithm` (random_bits, basis, factor, rounding, digest)
give the reasons. Arithmetic on *words* is modulo 2**32, shifts bring in zeros, ``^``
and ``&`` act on bits, division ``/`` of integers rounds down, ``crc32`` is zlib's, and
names are encoded in UTF-8. Indices count from zero.

**Bytes.** A safetensors file: ``n``, 8 bytes, little endian; ``n`` bytes of JSON, the
header, which begins with ``{`` and ends in spaces that make ``8 + n`` a multiple of 8;
then the data. The header holds ``"__metadata__": {"logra": text}`` and, for each matrix
that the update changes, under its Hugging Face name::

    {"dtype": "I16" or "I8", "shape": [out, r + 1], "data_offsets": [begin, end]}

where the offsets count from the end of the header. A matrix's data are its factor: rows
of ``r`` integers and one exponent, two's complement, little endian, row after row.
``1 <= r <= 1024``, exponents are in ``[-111, 113]``; ``out`` is the matrix's number of
rows (output features), and ``k`` below is its number of columns (input features), which
the receiver knows. Ranks and dtypes may differ between matrices.

**Metadata.** The text under ``"logra"`` is a JSON object with these keys and no others;
an integer has no fraction, and a *word* is an integer in ``[0, 2**32)``:

- ``format``: ``"logra-update"``. ``format_version``: 1.
- ``checksum``: 64 hexadecimal digits in lower case, of the sha256 of all bytes of the
  file with the first occurrence of these 64 digits replaced by 64 characters ``0``.
- ``base_version``, ``version``: integers in ``[0, 2**63)``, ``version`` the larger. The
  update takes weights of the first to the second. Applied to weights of any other
  version it must be refused.
- ``seed``, ``step``: words. ``refresh``: true or false.
- ``kind``: ``"rademacher"`` or ``"gaussian"``, of the basis.
- ``rounding``: ``"stochastic"`` or ``"nearest"``, of bfloat16 weights.
- ``base_digest``, ``digest``: of the model before and after, 16 hexadecimal digits in
  lower case.
- ``digests``: an object that gives the word (see *Digest*) of each matrix in the file,
  and of no other, after the update.

**Key** of a matrix, two words: ``fold(fold((0, seed), step if refresh else 0),
crc32(name))`` with ``fold(key, word) = threefry(key, (0, word))``. ``threefry`` is
threefry2x32 with 20 rounds, as JAX has it, of a key ``(k0, k1)`` and a counter
``(x, y)``. With ``k2 = k0 ^ k1 ^ 0x1BD11BDA`` start from ``x += k0, y += k1``; then
for ``b = 0 .. 4`` do, for each turn ``t`` of ``(13, 15, 26, 6)`` if ``b`` is even, of
``(17, 29, 16, 24)`` if it is odd, ``x += y, y = rotate_left(y, t) ^ x``, and after
these four ``x += k[(b + 1) % 3], y += k[(b + 2) % 3] + b + 1``. The result is
``(x, y)``.

**Basis** ``B`` (r, k), integers. Random word ``i`` of a key is ``x ^ y`` of
``threefry(key, (0, i))``.

- rademacher: ``B[l, j]`` is +1 if bit ``j % 32`` (bit 0 is the least significant) of
  random word ``l * ((k + 31) / 32) + j / 32`` is set, else -1.
- gaussian: ``B[l, j] = T[byte j % 4]`` (byte 0 is the least significant) of random word
  ``l * ((k + 3) / 4) + j / 4``, where ``T[b]`` is ``44 * Q((b + 0.5) / 256)``, rounded
  to the nearest integer, and ``Q`` is the quantile function of the standard normal
  distribution. ``T`` rises from -127 to 127; the crc32 of its 256 int8 bytes is
  0x476E7925.

**Change** of the weight at row ``i``, column ``j`` of the matrix:
``C[i, j] = float32(sum over l of F[i, l] * B[l, j]) * 2**e[i]``, ``F`` the integers and
``e`` the exponents of the factor. The sum is that of integers, exact, and rounded once,
to the nearest float32, ties to even. (Halves of the integers, ``F = 256 * high + low``
with ``-128 <= low < 128``, give sums below 2**24, which float32 holds: so in floating
point too the order does not matter.) The scale of the basis is in the factor.

**Landing** of the change on a weight, whose bits as float32 are ``w`` (bfloat16: its 16
bits above 16 zeros):

1. If ``C`` is zero, of either sign, the weight keeps its bits. Else:
2. if the exponent field of ``w`` (bits 23 to 30) is 0, then ``w`` is +0;
3. ``s`` is the float32 sum of ``w`` and ``C``, to nearest, ties to even; if its
   exponent field is 0, then ``s`` is +0;
4. float32 weights: ``s`` is the new weight. bfloat16 weights: it is the upper 16 bits
   of ``s + noise`` (as words) if ``s`` is finite, of ``s`` if it is infinite, of
   ``s | 0x00400000`` if it is not a number.

``noise`` of ``"nearest"`` is ``0x7FFF + ((s >> 16) & 1)``. Of ``"stochastic"`` it is
``mix(mix(i * k + j) ^ mix(mix(mix(seed) + step) + crc32(name))) >> 16``, always with
the true ``step``, where ``mix`` of a word is::

    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)

**Digest.** The word of a tensor is the sum, over its weights, of ``mix(mix(i * k + j) ^
bits)``, where ``bits`` are the 16 or 32 bits of the weight; a vector is one row. The
digest of a model is the first 16 hexadecimal digits of the sha256 of its lines
``name dtype shape word``, one for each of its tensors, changed or not (a tied one
once), sorted by name, each ended by a line feed: ``bfloat16`` or ``float32``, sizes
joined by ``x``, the word as 8 hexadecimal digits. For example
``model.norm.weight bfloat16 576 0badcafe``.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, get_args

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from logra_jax.algorithm.basis import KINDS
from logra_jax.algorithm.factor import HIGHEST_EXPONENT, LOWEST_EXPONENT, MAX_RANK
from logra_jax.algorithm.rounding import ROUNDINGS

FORMAT = "logra-update"
FORMAT_VERSION = 1

Reason = Literal[
    # of the bytes
    "not_safetensors",
    "truncated",
    "corrupted",
    "format",
    "format_version",
    "metadata",
    "factor",
    "rank",
    "exponent",
    # of the bytes for the weights that are held
    "diverged",
    "repeated",
    "base_version",
    "base_digest",
    "unknown_name",
    "shape",
    "digest",
    "failed",
]
REASONS: tuple[str, ...] = get_args(Reason)

_NO_CHECKSUM = "0" * 64
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
_DTYPES = {"I16": np.dtype("<i2"), "I8": np.dtype("i1")}


class Refused(ValueError):  # noqa: N818  an answer, not a fault
    """An update that is not applied; the weights are as they were before.

    But for the reasons ``"digest"`` and ``"failed"``, which may show only after weights
    have changed.

    Attributes:
        reason: one of ``REASONS``, for programs; the message is for people.
    """

    def __init__(self, reason: Reason, message: str):
        super().__init__(reason, message)
        self.reason: Reason = reason

    def __str__(self) -> str:
        return self.args[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """One update of a model's weights, complete and in range: see the module's text.

    Attributes:
        base_version: of the weights that it applies to.
        version: of the weights that it makes.
        seed: first word of the matrices' addresses.
        step: their second word.
        kind: of the basis, ``"rademacher"`` or ``"gaussian"``.
        refresh: whether the basis depends on the step.
        rounding: of bfloat16 weights, ``"stochastic"`` or ``"nearest"``.
        base_digest: of the model before, see ``model_digest``.
        digest: of the model after.
        digests: word of each updated matrix after, by Hugging Face name.
        factors: (out, rank + 1) of each updated matrix, int16 or int8: the integers of
            its factor, and the exponent of each row in the last column.

    Raises:
        Refused: a field or factor is out of its range.
    """

    base_version: int
    version: int
    seed: int
    step: int
    kind: str
    refresh: bool
    rounding: str
    base_digest: str
    digest: str
    digests: Mapping[str, int]
    factors: Mapping[str, np.ndarray]

    def __post_init__(self):
        fields = dict(vars(self))
        factors = fields.pop("factors")
        _check_fields(fields)
        if not factors:
            raise Refused("factor", "An update must hold a factor, got none.")
        for name, factor in factors.items():
            _check_factor(name, factor)
        if set(factors) != set(self.digests):
            name = min(set(factors) ^ set(self.digests))
            raise Refused(
                "metadata",
                "`digests` must name the updated matrices and no others, got only one "
                f"of digest and factor for {name!r}.",
            )


def encode(update: Update) -> bytes:
    """The bytes of ``update``; equal updates give equal bytes.

    Example:
        >>> import numpy as np
        >>> from logra_jax.rollout.wire import Update, decode, encode
        >>> update = Update(
        ...     base_version=3, version=4, seed=0, step=3, kind="rademacher",
        ...     refresh=True, rounding="stochastic", base_digest="0" * 16,
        ...     digest="1" * 16, digests={"proj.weight": 7},
        ...     factors={"proj.weight": np.array([[5, -6, -20]], np.int16)},
        ... )
        >>> decode(encode(update)).factors["proj.weight"].tolist()
        [[5, -6, -20]]
    """
    metadata = dict(vars(update)) | {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "checksum": _NO_CHECKSUM,
        "digests": dict(update.digests),
    }
    factors = metadata.pop("factors")
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
    # safetensors writes an array's memory whatever its strides.
    tensors = {name: np.ascontiguousarray(factor) for name, factor in factors.items()}
    blob = save(tensors, {"logra": text})
    # The first 64 zeros: sorted, the keys before it hold only shorter values.
    at = blob.index(_NO_CHECKSUM.encode())
    checksum = hashlib.sha256(blob).hexdigest().encode()
    return b"".join((blob[:at], checksum, blob[at + len(checksum) :]))


def decode(blob: bytes | bytearray | memoryview) -> Update:
    """The update in ``blob``, every byte of it checked.

    Raises:
        Refused: the first of what is wrong with it.
    """
    blob = bytes(blob)
    header, start = _read_header(blob)
    metadata = _read_metadata(header)
    _check_whole(blob, header, start, metadata)
    fields = {
        name: value
        for name, value in metadata.items()
        if name not in ("format", "format_version", "checksum")
    }
    _check_fields(fields)
    try:
        tensors = deserialize(blob)
    except SafetensorError as error:
        raise Refused(
            "not_safetensors", f"The update's tensors cannot be read: {error}."
        ) from None
    factors = {}
    for name, tensor in tensors:
        dtype = _DTYPES.get(tensor["dtype"])
        if dtype is None:
            _refuse_dtype(name, tensor["dtype"])
        factors[name] = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
    return Update(**fields, factors=factors)


def _read_header(blob: bytes) -> tuple[dict[str, Any], int]:
    """The header and where the data start."""
    start = 8 + int.from_bytes(blob[:8], "little")
    if start - 8 > _LONGEST_HEADER or blob[8:9] not in (b"{", b""):
        raise Refused(
            "not_safetensors",
            f"An update must be a safetensors blob, got {len(blob)} bytes of "
            "something else.",
        )
    if len(blob) < max(start, 9):
        raise Refused(
            "truncated",
            f"The update ends within its header, after {len(blob)} bytes; send it "
            "again.",
        )
    try:
        header = json.loads(blob[8:start].decode())
    except (ValueError, RecursionError):
        raise Refused(
            "corrupted", "The update's header is not valid JSON; send it again."
        ) from None
    return header, start  # it begins with "{": an object


def _read_metadata(header: Mapping[str, Any]) -> dict[str, Any]:
    """The text under ``logra``, of a format and version that we can read."""
    try:
        metadata = json.loads(header["__metadata__"]["logra"])
        found = metadata["format"]
    except (KeyError, TypeError, ValueError, RecursionError):
        metadata, found = {}, None
    if found != FORMAT:
        raise Refused(
            "format",
            f"The metadata `logra` must be of the format {FORMAT!r}, got {found!r}; "
            "this is another safetensors file.",
        )
    version = metadata.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise Refused(
            "format_version",
            f"`format_version` must be {FORMAT_VERSION}, the only one that this "
            f"version of logra_jax reads, got {version!r}; use the same version on "
            "both sides.",
        )
    return metadata


def _check_whole(
    blob: bytes, header: Mapping[str, Any], start: int, metadata: Mapping[str, Any]
) -> None:
    """Not a byte is missing, and not a bit has changed."""
    try:
        ends = [t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"]
        expected = start + max(ends, default=0)
    except (KeyError, TypeError, IndexError):
        expected = len(blob)  # the checksum will tell
    if len(blob) < expected:
        raise Refused(
            "truncated",
            f"The update must have {expected} bytes by its header, got {len(blob)}; "
            "send it again.",
        )
    checksum = metadata.get("checksum")
    if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{64}", checksum):
        raise Refused(
            "metadata",
            f"`checksum` must be 64 hexadecimal digits, got {checksum!r}.",
        )
    at = blob.find(checksum.encode(), 8, start)
    whole = hashlib.sha256(blob[: max(at, 0)])
    whole.update(_NO_CHECKSUM.encode())
    whole.update(memoryview(blob)[max(at, 0) + len(checksum) :])
    if at < 0 or whole.hexdigest() != checksum:
        raise Refused(
            "corrupted",
            f"The checksum of the update must be {checksum[:12]}..., got "
            f"{whole.hexdigest()[:12]}...: bits of it have changed; send it again.",
        )


def _is_integer(value: Any, stop: int) -> bool:
    return type(value) is int and 0 <= value < stop  # True is no integer


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "base_version": ("an integer in [0, 2**63)", lambda v: _is_integer(v, 2**63)),
    "version": ("an integer in [0, 2**63)", lambda v: _is_integer(v, 2**63)),
    "seed": ("an integer in [0, 2**32)", lambda v: _is_integer(v, 2**32)),
    "step": ("an integer in [0, 2**32)", lambda v: _is_integer(v, 2**32)),
    "kind": (f"one of {KINDS}", lambda v: v in KINDS),
    "refresh": ("true or false", lambda v: isinstance(v, bool)),
    "rounding": (f"one of {ROUNDINGS}", lambda v: v in ROUNDINGS),
    "base_digest": ("16 hexadecimal digits", _is_digest),
    "digest": ("16 hexadecimal digits", _is_digest),
    "digests": (
        "an object of integers in [0, 2**32)",
        lambda v: (
            isinstance(v, Mapping) and all(_is_integer(w, 2**32) for w in v.values())
        ),
    ),
}


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Every field is there and in range, and there is no other."""
    for name in sorted(_FIELDS.keys() | fields.keys()):
        if name not in fields:
            raise Refused("metadata", f"`{name}` is missing from the metadata.")
        if name not in _FIELDS:
            raise Refused(
                "metadata",
                f"`{name}` is not a key of the metadata in version {FORMAT_VERSION} of "
                "the format.",
            )
        rule, holds = _FIELDS[name]
        if not holds(fields[name]):
            got = repr(fields[name])[:80]
            raise Refused("metadata", f"`{name}` must be {rule}, got {got}.")
    if fields["version"] <= fields["base_version"]:
        raise Refused(
            "metadata",
            "`version` must be above `base_version`, got "
            f"{fields['version']} after {fields['base_version']}.",
        )


def _check_factor(name: str, factor: np.ndarray) -> None:
    if factor.dtype not in _DTYPES.values():
        _refuse_dtype(name, str(factor.dtype))
    if factor.ndim != 2 or factor.shape[0] < 1 or name in ("", "__metadata__"):
        raise Refused(
            "factor",
            "A factor must be a matrix (out, rank + 1) under the name of its weights, "
            f"got shape {factor.shape} for {name!r}.",
        )
    rank = factor.shape[1] - 1
    if not 1 <= rank <= MAX_RANK:
        raise Refused(
            "rank",
            f"A factor's rank must be in [1, {MAX_RANK}], got {rank} for {name!r}.",
        )
    exponents = factor[:, -1]
    lowest, highest = int(exponents.min()), int(exponents.max())
    if lowest < LOWEST_EXPONENT or highest > HIGHEST_EXPONENT:
        raise Refused(
            "exponent",
            f"The exponents of a factor must be in [{LOWEST_EXPONENT}, "
            f"{HIGHEST_EXPONENT}], got [{lowest}, {highest}] for {name!r}.",
        )


def _refuse_dtype(name: str, dtype: str) -> NoReturn:
    raise Refused(
        "factor", f"A factor must be int16 or int8, got {dtype} for {name!r}."
    )

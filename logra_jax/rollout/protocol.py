"""What a trainer and the loader in an SGLang server say to each other.

There: a *command* is one entry of ``update_weights_from_tensor``. Its name is a tuple
(text, body) in place of a string, so that the body stays in the host's memory; SGLang
moves tensors to the accelerator, and the tensor beside the name is empty. Only the
entry of rank 0 holds the body; the loader hands it to the other ranks.

Back: SGLang answers 200 whatever a loader did, so each rank leaves its *status* as the
name of an empty buffer of the model, and ``/weights_checker`` returns the names of
buffers, of every rank. (``skip_tensor_list: ["."]`` leaves out all names with a dot,
which are those of weights: nothing is hashed.)

Imports neither JAX nor torch.
"""

import base64
import dataclasses
import json
import pickle
import re
from typing import Any, Literal

LOADER = "logra_jax.rollout.sglang_loader.apply"
# The first release with begin_weight_update and end_weight_update.
OLDEST_SGLANG = "0.5.21"
TESTED_SGLANG = "0.5.23"
STATUS_PREFIX = "logra "
STATUS_QUERY = {"action": "checksum", "skip_tensor_list": ["."], "selector": "target"}


def is_supported(sglang: str) -> bool:
    """Whether a release of SGLang, such as "0.5.23.post1", can be kept in step."""
    return _release(sglang) >= _release(OLDEST_SGLANG)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall("[0-9]+", version)[:3])


Action = Literal["identify", "update"]


@dataclasses.dataclass(frozen=True)
class Command:
    """One order to the loader.

    Attributes:
        action: ``"identify"``: read all weights and say which version they are, of
            those in ``known``; ``"update"``: apply the update in ``body``.
        nonce: comes back in the status, so that an old one is not taken for an answer.
        known: versions by digest, for ``"identify"``.
        body: wire format v1, for ``"update"``.
    """

    action: Action
    nonce: str
    known: dict[str, int] = dataclasses.field(default_factory=dict)
    body: bytes = b""

    def entries(self, ranks: int) -> list[str]:
        """``serialized_named_tensors`` for a server of so many tensor-parallel ranks.

        Base64 of pickles that SGLang's restricted reader takes; torch is not needed.
        """
        text = json.dumps(
            {"action": self.action, "nonce": self.nonce, "known": self.known}
        )
        first, other = (
            base64.b64encode(_pickle_entry(text, body)).decode()
            for body in (self.body, b"")
        )
        return [first] + [other] * (ranks - 1)

    @classmethod
    def read(cls, name: Any) -> "Command":
        """The command in an entry's name, on rank 0.

        Raises:
            ValueError: it is none of ours.
        """
        if not (isinstance(name, tuple) and len(name) == 2):
            raise ValueError(
                f"A command must be a tuple (text, body), got {str(name)[:80]!r}."
            )
        text, body = name
        try:
            fields = json.loads(text)
            command = cls(**fields, body=bytes(body))
        except (TypeError, ValueError):
            raise ValueError(
                f"A command's text must be JSON of a known form, got {str(text)[:80]!r}"
                "; use the same version of logra_jax on both sides."
            ) from None
        if command.action not in ("identify", "update"):
            raise ValueError(
                f"`action` must be identify or update, got {str(command.action)[:80]!r}"
                "; use the same version of logra_jax on both sides."
            )
        return command


@dataclasses.dataclass(frozen=True)
class Status:
    """What one rank holds after a command.

    Attributes:
        nonce: of the command; empty if it could not be read.
        reason: why it was refused, one of :data:`logra_jax.rollout.wire.REASONS` or
            ``"command"``; None if it was done.
        message: the same in words.
        version: of the weights, None if unknown.
        digest: of the whole model, None if unknown.
        tensors: dtype, shape and digest's word of every weight, after ``"identify"``.
    """

    nonce: str
    reason: str | None = None
    message: str = ""
    version: int | None = None
    digest: str | None = None
    tensors: dict[str, tuple[str, tuple[int, ...], int]] | None = None

    def name(self) -> str:
        """As the name of a buffer, which must hold no dot."""
        text = json.dumps(dataclasses.asdict(self), separators=(",", ":"))
        return STATUS_PREFIX + text.replace(".", "\\u002e")

    @classmethod
    def read(cls, name: str) -> "Status":
        """The status in a buffer's name.

        Raises:
            ValueError: it is none.
        """
        try:
            fields = json.loads(name.removeprefix(STATUS_PREFIX))
            if fields["tensors"] is not None:
                fields["tensors"] = {
                    name: (dtype, tuple(shape), word)
                    for name, (dtype, shape, word) in fields["tensors"].items()
                }
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(
                f"A status must be JSON of a known form, got {name[:80]!r}; use the "
                "same version of logra_jax on both sides."
            ) from None


def read_statuses(reply: Any) -> list[Status | None]:
    """The status of every rank in a reply of ``/weights_checker``; None where none is.

    Raises:
        ValueError: a reply of another form.
    """
    try:
        names = [list(rank["checksums"].keys()) for rank in reply["ranks"]]
    except (AttributeError, KeyError, TypeError):
        raise ValueError(
            "`/weights_checker` must answer with `ranks` and their `checksums`, got "
            f"{str(reply)[:80]!r}."
        ) from None
    statuses: list[Status | None] = []
    for of_rank in names:
        ours = [name for name in of_rank if name.startswith(STATUS_PREFIX)]
        statuses.append(Status.read(ours[0]) if ours else None)
    return statuses


def _pickle_entry(text: str, body: bytes) -> bytes:
    """A pickle of ``[((text, body), torch.ByteTensor())]``, without torch."""
    encoded = text.encode()
    return b"".join(
        (
            pickle.PROTO + b"\x04" + pickle.EMPTY_LIST,
            pickle.BINUNICODE8 + len(encoded).to_bytes(8, "little") + encoded,
            pickle.BINBYTES8 + len(body).to_bytes(8, "little") + body,
            pickle.TUPLE2,
            pickle.GLOBAL + b"torch\nByteTensor\n" + pickle.EMPTY_TUPLE + pickle.REDUCE,
            pickle.TUPLE2 + pickle.APPEND + pickle.STOP,
        )
    )

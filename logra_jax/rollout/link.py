"""One server's side of a weight sync: the calls, in the order that keeps it whole.

    pause -> begin -> update -> end -> account of every rank -> ... -> continue

Requests wait from before a weight changes until the server is known to hold what it
should; a server that goes on in between would answer from weights of no version.
"""

import contextlib
import time
import uuid
from pathlib import Path
from typing import Any, Literal

from logra_jax.rollout.protocol import (
    LOADER,
    OLDEST_SGLANG,
    STATUS_QUERY,
    TESTED_SGLANG,
    Command,
    Status,
    is_supported,
    read_statuses,
)
from logra_jax.rollout.servers import Server, ServerError

Pause = Literal["retract", "in_place", "abort"]

_QUICK = 30.0  # seconds for a call that moves no weights
_NO_VERSION = "unknown"  # as which nobody takes what is sampled


class Unfit(Exception):  # noqa: N818  an answer about a server
    """The server cannot take part, for a reason that a user must see to."""


class Link:
    """The calls of one sync with one server.

    Args:
        server: the server.
        pause: what becomes of its running requests.
        deadline: seconds for each call.

    Attributes:
        server: the server.
        bytes: sent to it.
        seconds: from pause to continue.
        said: what SGLang answered last in place of success.
    """

    def __init__(self, server: Server, pause: Pause, deadline: float):
        self.server = server
        self.bytes = 0
        self.seconds = 0.0
        self._pause: Pause = pause
        self._deadline = deadline
        self.said = ""
        self._ranks = 1
        self._flush_refused = False
        self._has_moved = False

    async def inspect(self) -> None:
        """See that the server is of a kind that can be synced.

        Raises:
            Unfit: it is not.
        """
        quick = min(_QUICK, self._deadline)
        info = await self.server.call("/server_info", deadline=quick, retries=2)
        url = self.server.url
        if not isinstance(info, dict) or "version" not in info:
            raise Unfit(f"{url} must be an SGLang server, but does not say so.")
        version = str(info["version"])
        if not is_supported(version):
            raise Unfit(
                f"{url} must run SGLang {OLDEST_SGLANG} or later, which brackets a "
                f"weight update, got {version}; install sglang=={TESTED_SGLANG}."
            )
        if LOADER not in (info.get("custom_weight_loader") or []):
            raise Unfit(
                f"{url} must have the weight loader {LOADER}, got "
                f"{info.get('custom_weight_loader')}; start it with `logra serve`, or "
                f"with --custom-weight-loader {LOADER}."
            )
        for name, flag in (("dp_size", "--dp"), ("pp_size", "--pp")):
            if info.get(name, 1) != 1:
                raise Unfit(
                    f"{url} must have {name} 1, got {info[name]}; SGLang updates "
                    f"tensor-parallel servers only: use --tp, not {flag}, and several "
                    "servers for more throughput."
                )
        self._ranks = int(info.get("tp_size", 1))

    @contextlib.asynccontextmanager
    async def paused(self):
        """Requests wait; they go on whatever happens, if the server is there."""
        began = time.monotonic()
        go_on = "/continue_generation"
        try:
            await self._call("/pause_generation", {"mode": self._pause})
            yield
        except BaseException:
            # What it answers to the requests that it has would pass for that of the
            # version that it was being brought to.
            if self._has_moved:
                with contextlib.suppress(ServerError):
                    await self._label(_NO_VERSION)
            # Left paused, the server would hang every later request.
            with contextlib.suppress(ServerError):
                await self.server.call(go_on, {}, deadline=_QUICK, retries=2)
            raise
        await self.server.call(go_on, {}, deadline=_QUICK, retries=2)
        self.seconds = time.monotonic() - began

    async def send(self, command: Command, version: int | None = None) -> Status:
        """Give the loader a command; what it made of it, the same on every rank.

        Never sent again: whatever the server answers, only the status counts. Its
        reason is ``"unknown"`` where ranks disagree or have not seen the command.

        Raises:
            ServerError: the server is unreachable or does not answer in time.
        """
        entries = command.entries(self._ranks)
        body = {
            "serialized_named_tensors": entries,
            "load_format": LOADER,
            "flush_cache": _flushes(self._pause),
            "abort_all_requests": False,
            "selector": "target",
        }
        if version is not None:
            body["weight_version"] = str(version)
            self._has_moved = True
        self.bytes += sum(map(len, entries))
        self.said = ""
        await self._begin()
        try:
            await self._call("/update_weights_from_tensor", body)
        except ServerError as error:
            if error.kind != "refused":
                raise
            # Perhaps after the weights did change: the cache was not flushed, say.
            self.said = str(error)
            self._flush_refused = True
        finally:
            with contextlib.suppress(ServerError):
                await self._call("/end_weight_update", {})
        return await self._status(command.nonce)

    async def identify(self, known: dict[str, int]) -> Status:
        """Have all weights read: which of the known versions they are.

        None, for the reason ``"digest"``, where ranks hold the same part otherwise.

        Raises:
            Unfit: they cannot be followed.
        """
        status = await self.send(Command("identify", nonce(), known=known))
        if status.reason not in (None, "digest"):
            raise Unfit(
                f"{self.server.url} must serve weights that can be followed, but "
                f"refused ({status.reason}): {status.message}"
            )
        return status

    async def label(self, version: int) -> None:
        """Have the server name this version with the tokens it samples."""
        await self._label(str(version))

    async def load(self, directory: Path, version: int) -> None:
        """Have all weights loaded from disk."""
        body = {
            "model_path": str(directory),
            # Always: what has this version's name in the cache may be of other weights.
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": str(version),
        }
        self._has_moved = True
        self.bytes += sum(f.stat().st_size for f in directory.glob("*.safetensors"))
        try:
            await self._call("/update_weights_from_disk", body)
        except ServerError as error:
            if error.kind != "refused":
                raise
            self.said = str(error)
            self._flush_refused = True  # or not loaded at all: the digest will tell

    async def flush_if_refused(self) -> None:
        """No prefix of older weights stays in the cache.

        Raises:
            ServerError: the cache cannot be flushed.
        """
        if not self._flush_refused:
            return
        harder: list[Pause] = ["retract", "abort"]
        for mode in harder:
            try:
                return await self._call("/flush_cache", {})
            except ServerError as error:
                if error.kind != "refused":
                    raise
            await self._call("/pause_generation", {"mode": mode})
        await self._call("/flush_cache", {})

    async def _label(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        deadline = min(_QUICK, self._deadline)
        await self.server.call("/update_weight_version", body, deadline=deadline)

    async def _begin(self) -> None:
        """Open a session; one that a trainer that died left open is closed first."""
        try:
            await self._call("/begin_weight_update", {"selector": "target"})
        except ServerError as error:
            if error.kind != "refused":
                raise
            await self._call("/end_weight_update", {})
            await self._call("/begin_weight_update", {"selector": "target"})

    async def _status(self, nonce: str) -> Status:
        reply = await self.server.call(
            "/weights_checker", STATUS_QUERY, deadline=self._deadline, retries=2
        )
        try:
            statuses = read_statuses(reply)
        except ValueError as error:
            return Status(nonce, "unknown", str(error))
        first = statuses[0] if statuses else None
        if len(statuses) != self._ranks or first is None or first.nonce != nonce:
            said = self.said
            if first is not None and not first.nonce:
                said = first.message
            return Status(
                nonce,
                "unknown",
                f"no account of it from all of {self._ranks} ranks"
                f"{f': {said}' if said else ''}; see its log.",
            )
        if any(status != first for status in statuses):
            return Status(nonce, "unknown", "one rank holds other weights than another")
        return first

    async def _call(self, path: str, body: dict[str, Any]) -> Any:
        return await self.server.call(path, body, deadline=self._deadline)


def _flushes(pause: Pause) -> bool:
    """Whether the prefix cache goes with the weights: not while requests run on it."""
    return pause != "in_place"


def nonce() -> str:
    """A name for one command, never used before."""
    return uuid.uuid4().hex

"""Weight sync: every server at the trainer's weights, bit for bit, and known to be.

SGLang answers an update with success whatever the loader made of it, and an update that
is sent twice would be added twice. So nothing here trusts an answer to a push: each
server says afterwards, from every rank, which version it holds and the digest of its
weights (:mod:`~logra_jax.rollout.protocol`). What is not exactly the trainer's is
healed: the updates that are missing, in order; failing that, all weights from disk;
and asked again. A server that cannot be healed takes no part in generation.
"""

import asyncio
import contextlib
import dataclasses
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from logra_jax.algorithm.digest import TensorDigest, model_digest
from logra_jax.rollout.history import History
from logra_jax.rollout.protocol import (
    LOADER,
    OLDEST_SGLANG,
    STATUS_QUERY,
    Command,
    Status,
    read_statuses,
)
from logra_jax.rollout.servers import Server, ServerError, Servers

Pause = Literal["retract", "in_place", "abort"]
Outcome = Literal["pushed", "held", "caught_up", "loaded", "lost"]

_QUICK = 30.0  # seconds for a call that moves no weights


@dataclasses.dataclass(frozen=True)
class Weights:
    """The trainer's weights at one version.

    Attributes:
        version: number of updates that made them.
        digests: of every weight, by Hugging Face name.
        export: writes them as a Hugging Face directory that the servers can read, and
            returns its path; called only for a full push.
    """

    version: int
    digests: Mapping[str, TensorDigest]
    export: Callable[[], Path]

    @property
    def digest(self) -> str:
        """Of the model."""
        return model_digest(self.digests)


@dataclasses.dataclass(frozen=True)
class ServerReport:
    """What came of one server in a sync.

    Attributes:
        url: of the server.
        outcome: ``"pushed"``: the update was taken; ``"held"``: it held the weights
            already; ``"caught_up"``: by older updates too; ``"loaded"``: all weights
            were; ``"lost"``: it does not hold the weights.
        message: why it is lost, or had to be healed.
        seconds: from pause to continue.
        bytes: sent to it.
    """

    url: str
    outcome: Outcome
    message: str
    seconds: float
    bytes: int


class _Unfit(Exception):  # noqa: N818  an answer about a server
    """The server cannot take part, for a reason that a user must see to."""


class WeightSync:
    """Brings servers to the trainer's weights, all of them side by side.

    Args:
        servers: the servers; ``Server.ready`` says afterwards which hold the weights.
        history: the updates that can be sent again.
        pause: what becomes of running requests during a push. ``"retract"``: they start
            over from their tokens so far, on an empty cache; ``"in_place"``: they go on
            over the keys and values of the old weights, and so does the prefix cache;
            ``"abort"``: they end.
        deadline: seconds for one push to one server.
    """

    def __init__(
        self,
        servers: Servers,
        history: History,
        *,
        pause: Pause = "retract",
        deadline: float = 600.0,
    ):
        self._servers = servers
        self._history = history
        self._pause: Pause = pause
        self._deadline = deadline

    def connect(self, weights: Weights, *, load: bool = False) -> list[ServerReport]:
        """The handshake at a run's start: every server is fit and holds the weights.

        Args:
            weights: the trainer's.
            load: a server of the same model that holds other weights is brought to
                these; otherwise that is an error.

        Raises:
            ValueError: one sentence on the first server that is not fit.
        """
        goal = _Goal(weights)

        async def one(server: Server) -> ServerReport:
            try:
                return await self._bring(server, goal, heal=load)
            except (_Unfit, ServerError) as error:
                server.ready = False
                raise ValueError(str(error)) from None

        return self._on_all(one, self._servers.servers)

    def push(self, weights: Weights, update: bytes) -> list[ServerReport]:
        """Send an update to every server and see that it arrived.

        Servers that are not ready are healed by the way, if they can be.

        Args:
            weights: the trainer's, after the update.
            update: in wire format v1; kept in the history already.
        """
        goal = _Goal(weights, update)
        return self._on_all(self._surely(goal), self._servers.servers)

    def revive(self, weights: Weights) -> list[ServerReport]:
        """Bring servers that were lost back to the weights, if they can be."""
        lost = [server for server in self._servers.servers if not server.ready]
        return self._on_all(self._surely(_Goal(weights)), lost)

    def _on_all(
        self,
        one: Callable[[Server], Awaitable[ServerReport]],
        servers: "list[Server] | tuple[Server, ...]",
    ) -> list[ServerReport]:
        async def all_of_them() -> list[ServerReport]:
            each = [asyncio.ensure_future(one(server)) for server in servers]
            # All end, whatever comes of one: no server is left in the middle of it.
            await asyncio.gather(*each, return_exceptions=True)
            return [future.result() for future in each]

        return self._servers.run(all_of_them())

    def _surely(self, goal: "_Goal") -> Callable[[Server], Awaitable[ServerReport]]:
        """Like ``_bring``, with a report where it fails."""

        async def one(server: Server) -> ServerReport:
            began = time.monotonic()
            try:
                return await self._bring(server, goal, heal=True)
            except (_Unfit, ServerError) as error:
                server.ready = False
                seconds = time.monotonic() - began
                return ServerReport(server.url, "lost", str(error), seconds, 0)

        return one

    async def _bring(self, server: Server, goal: "_Goal", *, heal: bool):
        """One server to the goal; ``ready`` only if it is seen to be there."""
        # It stays ready meanwhile: requests that it is given wait until it goes on.
        link = _Link(server, self._pause, self._deadline)
        # Each time: it may have been restarted, and SGLang ends when it is sent an
        # update for a loader that it does not have.
        await link.inspect()
        async with link.paused():
            outcome, message = "pushed", "not pushed to"
            if server.ready and goal.update is not None:
                command = Command("update", _nonce(), body=goal.update)
                status = await link.send(command, goal.version)
                message = _difference(status, goal)
            if message:
                outcome, message = await self._heal(link, goal, heal)
            await link.flush_if_refused()
        server.ready = True
        return ServerReport(server.url, outcome, message, link.seconds, link.bytes)

    async def _heal(self, link: "_Link", goal: "_Goal", allowed: bool):
        """From weights that are not known to the goal's; how, and from where."""
        known = {**self._history.versions, goal.digest: goal.version}
        status = await link.identify(known)
        if status.tensors is not None:
            _check_same_model(link.server, status.tensors, goal)
        if status.reason is None and status.digest == goal.digest:
            await link.label(goal.version)
            return "held", ""
        if not allowed:
            raise _Unfit(
                f"{link.server.url} must hold the trainer's weights at the start, of "
                f"the digest {goal.digest}, got {status.digest or 'none'}; start it "
                "with the model of this run, or set `rollout.load_weights=true` to "
                "have them loaded into it."
            )
        held = status.version
        why = f"it held {'other weights' if held is None else f'version {held}'}"
        if held is not None and held <= goal.version:
            missing = self._history.between(held, goal.version) or []
            for path in missing:
                body = await asyncio.to_thread(path.read_bytes)
                command = Command("update", _nonce(), body=body)
                status = await link.send(command, int(path.stem))
                if status.reason is not None:
                    break
            if not _difference(status, goal):
                return "caught_up", why
        await link.load(await goal.exported(), goal.version)
        status = await link.identify({goal.digest: goal.version})
        difference = _difference(status, goal)
        if difference:
            raise _Unfit(
                f"{link.server.url} must hold version {goal.version} after all weights "
                f"were loaded, but {difference}; restart it with the model of this run."
            )
        return "loaded", why


class _Goal:
    """The weights to come to, and the update that leads there from the last ones."""

    def __init__(self, weights: Weights, update: bytes | None = None):
        self.weights = weights
        self.update = update
        self.version = weights.version
        self.digest = weights.digest
        self._lock = asyncio.Lock()
        self._path: Path | None = None

    async def exported(self) -> Path:
        """The directory with all weights, written once for all servers."""
        async with self._lock:
            if self._path is None:
                self._path = await asyncio.to_thread(self.weights.export)
        return self._path


class _Link:
    """The calls of one sync with one server."""

    def __init__(self, server: Server, pause: Pause, deadline: float):
        self.server = server
        self.bytes = 0
        self.seconds = 0.0
        self._pause: Pause = pause
        self._deadline = deadline
        self._ranks = 1
        self._flush_refused = False

    async def inspect(self) -> None:
        """See that the server is of a kind that can be synced.

        Raises:
            _Unfit: it is not.
        """
        quick = min(_QUICK, self._deadline)
        info = await self.server.call("/server_info", deadline=quick, retries=2)
        url = self.server.url
        if not isinstance(info, dict) or "version" not in info:
            raise _Unfit(f"{url} must be an SGLang server, but does not say so.")
        version = str(info["version"])
        if _release(version) < OLDEST_SGLANG:
            oldest = ".".join(map(str, OLDEST_SGLANG))
            raise _Unfit(
                f"{url} must run SGLang {oldest} or later, which can hold requests "
                f"during a weight update, got {version}; install sglang=={oldest}."
            )
        if LOADER not in (info.get("custom_weight_loader") or []):
            raise _Unfit(
                f"{url} must have the weight loader {LOADER}, got "
                f"{info.get('custom_weight_loader')}; start it with `logra serve`, or "
                f"with --custom-weight-loader {LOADER}."
            )
        for name, flag in (("dp_size", "--dp"), ("pp_size", "--pp")):
            if info.get(name, 1) != 1:
                raise _Unfit(
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
        self.bytes += sum(map(len, entries))
        answer = ""
        await self._begin()
        try:
            await self._call("/update_weights_from_tensor", body)
        except ServerError as error:
            if error.kind != "refused":
                raise
            # Perhaps after the weights did change: the cache was not flushed, say.
            answer = str(error)
            self._flush_refused = True
        finally:
            with contextlib.suppress(ServerError):
                await self._call("/end_weight_update", {})
        return await self._status(command.nonce, answer)

    async def identify(self, known: dict[str, int]) -> Status:
        """Have all weights read: which of the known versions they are.

        None, for the reason ``"digest"``, where ranks hold the same part otherwise.

        Raises:
            _Unfit: they cannot be followed.
        """
        status = await self.send(Command("identify", _nonce(), known=known))
        if status.reason not in (None, "digest"):
            raise _Unfit(
                f"{self.server.url} must serve weights that can be followed, but "
                f"refused ({status.reason}): {status.message}"
            )
        return status

    async def label(self, version: int) -> None:
        """Have the server name this version with the tokens it samples."""
        await self._call(
            "/update_weight_version",
            {"new_version": str(version), "abort_all_requests": False},
        )

    async def load(self, directory: Path, version: int) -> None:
        """Have all weights loaded from disk."""
        body = {
            "model_path": str(directory),
            "flush_cache": _flushes(self._pause),
            "abort_all_requests": False,
            "weight_version": str(version),
        }
        self.bytes += sum(f.stat().st_size for f in directory.glob("*.safetensors"))
        try:
            await self._call("/update_weights_from_disk", body)
        except ServerError as error:
            if error.kind != "refused":
                raise
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

    async def _begin(self) -> None:
        """Open a session; one that a trainer that died left open is closed first."""
        try:
            await self._call("/begin_weight_update", {"selector": "target"})
        except ServerError as error:
            if error.kind != "refused":
                raise
            await self._call("/end_weight_update", {})
            await self._call("/begin_weight_update", {"selector": "target"})

    async def _status(self, nonce: str, answer: str) -> Status:
        reply = await self.server.call(
            "/weights_checker", STATUS_QUERY, deadline=self._deadline, retries=2
        )
        try:
            statuses = read_statuses(reply)
        except ValueError as error:
            return Status(nonce, "unknown", str(error))
        first = statuses[0] if statuses else None
        if len(statuses) != self._ranks or first is None or first.nonce != nonce:
            said = first.message if first is not None and not first.nonce else answer
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


def _nonce() -> str:
    return uuid.uuid4().hex


def _release(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23.post1"."""
    return tuple(int(number) for number in re.findall("[0-9]+", version)[:3])


def _difference(status: Status, goal: _Goal) -> str:
    """Why the status is not that of the goal; empty if it is."""
    if status.reason is not None:
        return f"it refused ({status.reason}): {status.message}"
    if (status.version, status.digest) != (goal.version, goal.digest):
        return (
            f"it holds version {status.version} with digest {status.digest}, not "
            f"version {goal.version} with {goal.digest}"
        )
    return ""


def _check_same_model(
    server: Server, theirs: Mapping[str, tuple[Any, ...]], goal: _Goal
) -> None:
    """The server's weights have the trainer's names, shapes and dtypes.

    Raises:
        _Unfit: the first that differs.
    """
    ours = goal.weights.digests
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            side = "the server" if mine is None else "the trainer"
            rule = f"weight {name!r} is only in the model of {side}"
        elif mine.shape != other[1]:
            kind = "vocabulary of " if "embed_tokens" in name else ""
            rule = f"{kind}{name!r} has shape {other[1]}, the trainer's {mine.shape}"
        elif mine.dtype != other[0]:
            rule = f"{name!r} is {other[0]}, the trainer's {mine.dtype}"
        else:
            continue
        raise _Unfit(
            f"{server.url} must serve the trainer's model, but {rule}; start it with "
            "`logra serve` and the same config."
        )

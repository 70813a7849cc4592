"""Weight sync: every server at the trainer's weights, bit for bit, and known to be.

SGLang answers an update with success whatever the loader made of it, and an update that
is sent twice would be added twice. So nothing here trusts an answer to a push: each
server says afterwards, from every rank, which version it holds and the digest of its
weights (:mod:`~logra_jax.rollout.protocol`). What is not exactly the trainer's is
healed: the updates that are missing, in order; failing that, all weights from disk;
and asked again. A server that cannot be healed takes no part in generation.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from logra_jax.algorithm.digest import TensorDigest, model_digest
from logra_jax.rollout.history import History
from logra_jax.rollout.link import Link, Pause, Unfit, nonce
from logra_jax.rollout.protocol import Command, Status
from logra_jax.rollout.servers import Server, ServerError, Servers

Outcome = Literal["pushed", "held", "caught_up", "loaded", "lost"]


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
            except (Unfit, ServerError) as error:
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
            except (Unfit, ServerError) as error:
                server.ready = False
                seconds = time.monotonic() - began
                return ServerReport(server.url, "lost", str(error), seconds, 0)

        return one

    async def _bring(self, server: Server, goal: "_Goal", *, heal: bool):
        """One server to the goal; ``ready`` only if it is seen to be there."""
        # It stays ready meanwhile: requests that it is given wait until it goes on.
        link = Link(server, self._pause, self._deadline)
        # Each time: it may have been restarted, and SGLang ends when it is sent an
        # update for a loader that it does not have.
        await link.inspect()
        async with link.paused():
            outcome, message = "pushed", "not pushed to"
            if server.ready and goal.update is not None:
                command = Command("update", nonce(), body=goal.update)
                status = await link.send(command, goal.version)
                message = _difference(status, goal)
            if message:
                outcome, message = await self._heal(link, goal, heal)
            await link.flush_if_refused()
        server.ready, server.version = True, goal.version
        return ServerReport(server.url, outcome, message, link.seconds, link.bytes)

    async def _heal(self, link: "Link", goal: "_Goal", allowed: bool):
        """From weights that are not known to the goal's; how, and from where."""
        known = {**self._history.versions, goal.digest: goal.version}
        status = await link.identify(known)
        if status.tensors is not None:
            _check_same_model(link.server, status.tensors, goal)
        if status.reason is None and status.digest == goal.digest:
            await link.label(goal.version)
            return "held", ""
        if not allowed:
            raise Unfit(
                f"{link.server.url} must hold the trainer's weights at the start, of "
                f"the digest {goal.digest}, got {status.digest or 'none'}; restart it "
                "if another run has used it, or set `rollout.load_weights=true` to "
                "have them loaded into it."
            )
        held = status.version
        why = f"it held {'other weights' if held is None else f'version {held}'}"
        if held is not None and held <= goal.version:
            missing = self._history.between(held, goal.version) or []
            for path in missing:
                try:
                    body = await asyncio.to_thread(path.read_bytes)
                except OSError:  # no longer there: all weights, then
                    break
                command = Command("update", nonce(), body=body)
                status = await link.send(command, int(path.stem))
                if status.reason is not None:
                    break
            if not _difference(status, goal):
                return "caught_up", why
        await link.load(await goal.exported(), goal.version)
        status = await link.identify({goal.digest: goal.version})
        difference = _difference(status, goal)
        if difference:
            raise Unfit(
                f"{link.server.url} must hold version {goal.version} after all weights "
                f"were loaded, but {difference}{f' ({link.said})' if link.said else ''}"
                "; see that it can read `rollout.share_dir`, or restart it with the "
                "model of this run."
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
        """The directory with all weights, written once for all servers.

        Raises:
            Unfit: it cannot be written.
        """
        async with self._lock:
            if self._path is None:
                try:
                    self._path = await asyncio.to_thread(self.weights.export)
                except OSError as error:
                    raise Unfit(
                        f"All weights must be written for servers to load, but: "
                        f"{error}; see `rollout.share_dir`."
                    ) from error
        return self._path


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
        Unfit: the first that differs.
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
        raise Unfit(
            f"{server.url} must serve the trainer's model, but {rule}; start it with "
            "`logra serve` and the same config."
        )

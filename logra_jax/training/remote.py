"""The SGLang servers of a run: a policy that samples there, and their weights."""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from flax import nnx

from logra_jax.models.hf import save_decoder
from logra_jax.models.hf_config import read_config
from logra_jax.rollout.servers import ServerError, Servers
from logra_jax.rollout.sglang import SGLangEngine
from logra_jax.rollout.sync import ServerReport, Weights, WeightSync
from logra_jax.training.policy import Policy
from logra_jax.training.schema import Config
from logra_jax.training.updates import Updates

T = TypeVar("T")
_ATTEMPTS = 5  # how often a prompt may be asked
_PAUSE = 2.0  # seconds between two looks for a server that may have come back


class Remote:
    """Servers that are kept at the weights of a run.

    Args:
        config: of the run; ``rollout`` names the servers.
        policy: of the run.
        source: Hugging Face directory that its model came from.
        updates: of the run.
        share_dir: where all weights are written when a server needs them.
        say: shows a line to the user.
        is_stopping: whether the run was told to end: then nothing is waited for.

    Attributes:
        policy: the run's, which samples on the servers.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        source: Path,
        updates: Updates,
        share_dir: Path,
        say: Callable[[str], None],
        is_stopping: Callable[[], bool],
    ):
        rollout = config.rollout
        self._config, self._source, self._share = config, source, share_dir
        self._graph, self._probes = policy.graph, policy.probes
        self._updates, self._say = updates, say
        self._is_stopping = is_stopping
        self._servers = Servers(
            rollout.urls,
            router=rollout.router,
            api_key=os.environ.get(rollout.api_key_env),
            concurrency=rollout.concurrency,
        )
        self._sync = WeightSync(
            self._servers,
            updates.history,
            pause=rollout.pause,
            deadline=rollout.push_deadline,
        )
        local = policy.engine
        engine = SGLangEngine(
            self._servers,
            max_positions=local.max_positions,
            eos_ids=local.eos_ids,
            pad_id=local.pad_id,
            prefix=local.prefix,
            bucket=local.bucket,
            request_deadline=rollout.request_deadline,
            batch_deadline=rollout.batch_deadline,
            attempts=_ATTEMPTS,
            vocab_size=read_config(source).vocab_size,
        )
        self.policy = dataclasses.replace(policy, engine=engine)

    def close(self) -> None:
        """End every request and the thread that makes them."""
        self._servers.close()

    def connect(self, version: int, weights: nnx.State, *, load: bool) -> None:
        """The handshake: see :meth:`WeightSync.connect`."""
        with self._weights(version, weights) as target:
            self._sync.connect(target, load=load)

    def push(
        self, version: int, blob: bytes, weights: nnx.State
    ) -> dict[str, float | int]:
        """Send the update to ``version``, see that it arrived; metrics of that."""
        with self._weights(version, weights) as target:
            reports = self._sync.push(target, blob)
        self._tell(reports)
        return {
            "sync/seconds": max(report.seconds for report in reports),
            "sync/payload_bytes": len(blob),
            "sync/sent_bytes": sum(report.bytes for report in reports),
            "sync/ready": sum(report.outcome != "lost" for report in reports),
            "sync/healed": sum(
                report.outcome in ("caught_up", "loaded") for report in reports
            ),
        }

    def persist(self, version: int, weights: nnx.State, work: Callable[[], T]) -> T:
        """What ``work`` gives, done again whenever servers were lost and came back.

        Raises:
            ServerError: none came back in ``rollout.patience`` seconds, or it is not
                for the loss of servers that ``work`` failed.
        """
        first = None  # failure
        while True:
            try:
                return work()
            except ServerError as error:
                if self._servers.router and error.kind == "unreachable":
                    # Which of the servers it was, or the router, nobody knows.
                    first = first or time.monotonic()
                    if time.monotonic() - first > self._config.rollout.patience:
                        raise
                    for server in self._servers.servers:
                        server.ready = False
                if error.kind == "refused" or self._usable():
                    raise
                self._await_servers(version, weights, error)

    def _await_servers(
        self, version: int, weights: nnx.State, error: ServerError
    ) -> None:
        self._say(f"{error} Waiting for servers to come back.")
        last = time.monotonic() + self._config.rollout.patience
        while not self._usable():
            time.sleep(_PAUSE)
            if time.monotonic() > last or self._is_stopping():
                raise error
            with self._weights(version, weights) as target:
                reports = self._sync.revive(target)
            self._tell([r for r in reports if r.outcome != "lost"])

    def _usable(self) -> bool:
        ready = [server.ready for server in self._servers.servers]
        return all(ready) if self._servers.router else any(ready)

    def _tell(self, reports: list[ServerReport]) -> None:
        for report in reports:
            if report.outcome != "pushed":
                why = f": {report.message}" if report.message else ""
                self._say(f"{report.url} {_TOLD[report.outcome]}{why}")

    @contextmanager
    def _weights(self, version: int, weights: nnx.State) -> Iterator[Weights]:
        """What a sync needs to know; files that it had written are gone afterwards."""
        model = nnx.merge(self._graph, self._probes, weights)

        def export() -> Path:
            shutil.rmtree(self._share, ignore_errors=True)  # of a run that was killed
            directory = self._share / f"{version:06d}"
            dtype = self._config.model.dtype
            return save_decoder(model, directory, source=self._source, dtype=dtype)

        try:
            yield Weights(version, self._updates.digests, export)
        finally:
            shutil.rmtree(self._share, ignore_errors=True)


_TOLD = {
    "held": "held the weights",
    "caught_up": "caught up by the updates that it had missed",
    "loaded": "was given all weights",
    "lost": "is lost",
}

"""How a run waits for servers, with a sync that brings back those that are there."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flax import nnx

import logra_jax.training.remote as remote_module
from logra_jax.rollout.servers import ServerError
from logra_jax.rollout.sync import Weights
from logra_jax.training.remote import Remote

WEIGHTS = nnx.State({})


class Bare(Remote):
    """Two servers that are always there when they are looked for."""

    def __init__(self, router: str | None, patience: float = 60.0):
        self.looked = 0
        servers: Any = SimpleNamespace(
            router=router,
            servers=[SimpleNamespace(ready=True, url=f"http://{n}") for n in "ab"],
        )
        rollout = SimpleNamespace(patience=patience)
        self._servers, self._sync = servers, self
        self._config: Any = SimpleNamespace(rollout=rollout)
        self._say = self._is_stopping = lambda *_: None

    @contextmanager
    def _weights(self, version, weights):
        yield Weights(version, {}, Path)

    def revive(self, target):
        self.looked += 1
        for server in self._servers.servers:
            server.ready = True
        return []


def failing(times: int, kind: Any):
    """Work that fails so often with all servers ready, and then gives 5."""
    left = [times]

    def work() -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise ServerError("http://r", kind, "It failed.")
        return 5

    return work


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(remote_module, "_PAUSE", 0.01)


def test_behind_a_router_all_servers_are_looked_at_when_it_fails():
    """One that was restarted without the weights looks as ready as the others."""
    remote = Bare("http://r")
    assert remote.persist(0, WEIGHTS, failing(3, "unreachable")) == 5
    assert remote.looked == 3


def test_a_router_that_never_answers_is_not_waited_for_longer_than_patience():
    with pytest.raises(ServerError, match="It failed"):
        Bare("http://r", 0.1).persist(0, WEIGHTS, failing(10**9, "unreachable"))


@pytest.mark.parametrize(
    ("router", "kind"),
    [("http://r", "refused"), ("http://r", "deadline"), (None, "unreachable")],
)
def test_what_is_no_loss_of_servers_is_not_tried_again(router, kind):
    remote = Bare(router)
    with pytest.raises(ServerError, match="It failed"):
        remote.persist(0, WEIGHTS, failing(1, kind))
    assert remote.looked == 0


def test_what_a_killed_run_left_is_not_in_the_way_of_all_weights(tmp_path, monkeypatch):
    share = tmp_path / "weights"
    (share / "000003").mkdir(parents=True)
    monkeypatch.setattr(remote_module, "nnx", SimpleNamespace(merge=lambda *_: None))

    def save(model, directory, **_):
        assert not directory.exists()
        directory.mkdir(parents=True)
        return directory

    monkeypatch.setattr(remote_module, "save_decoder", save)
    remote: Any = Bare(None)
    remote._share, remote._source = share, tmp_path
    remote._graph = remote._probes = None
    remote._updates = SimpleNamespace(digests={})
    remote._config.model = SimpleNamespace(dtype="float32")
    with Remote._weights(remote, 3, WEIGHTS) as target:
        assert target.export() == share / "000003"
    assert not share.exists()

"""A small HTTP server with every fault that a real one can have; random updates."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.digest import TensorDigest, digest_array, model_digest
from logra_jax.algorithm.replay import replay
from logra_jax.rollout.serve import free_port
from logra_jax.rollout.wire import Update

# What a fake server does with a request: answer with JSON (a dict), a text or a status
# (an int), or "drop" the connection, "hang", or "die" (drop this and all that follow).
# Or a response of aiohttp.
Reaction = Any


@dataclass
class FakeServer:
    """One fake server.

    Attributes:
        react: called with (path, body) for each request.
        url: its base URL.
        requests: path, body and headers of each request, in the order of arrival.
        dead: it drops every connection.
    """

    react: Callable[[str, Any], Reaction]
    url: str = ""
    dead: bool = False
    requests: list[tuple[str, Any, Any]] = field(default_factory=list)

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    async def handle(self, request):
        from aiohttp import web

        body = await request.json() if request.can_read_body else None
        self.requests.append((request.path, body, request.headers))
        reaction = "drop" if self.dead else self.react(request.path, body)
        if isinstance(reaction, Awaitable):
            reaction = await reaction
        if reaction == "die":
            self.dead, reaction = True, "drop"
        if reaction == "drop":
            request.transport.abort()
        if reaction == "hang":
            await asyncio.sleep(3600)
        if isinstance(reaction, int):
            return web.json_response(
                {"error": {"message": "out of order"}}, status=reaction
            )
        if isinstance(reaction, web.StreamResponse):
            return reaction
        if isinstance(reaction, str):
            return web.Response(text=reaction)
        return web.json_response(reaction)


@pytest.fixture(scope="session")
def serving_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def fake_server(serving_loop) -> Iterator[Callable[..., FakeServer]]:
    """A function that starts a fake server on a free port of this machine."""
    from aiohttp import web

    runners = []

    async def start(fake: FakeServer) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", fake.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        host, port = runner.addresses[0]
        fake.url = f"http://{host}:{port}"

    def make(react) -> FakeServer:
        fake = FakeServer(react)
        asyncio.run_coroutine_threadsafe(start(fake), serving_loop).result()
        return fake

    async def cleanup() -> None:
        await asyncio.gather(*(runner.cleanup() for runner in runners))

    yield make
    asyncio.run_coroutine_threadsafe(cleanup(), serving_loop).result()


@pytest.fixture
def closed_url() -> str:
    """The URL of a port where nobody listens."""
    return f"http://127.0.0.1:{free_port()}"


def digests_of(weights: dict[str, np.ndarray]) -> dict[str, TensorDigest]:
    return {
        name: TensorDigest(str(w.dtype), w.shape, digest_array(w))
        for name, w in weights.items()
    }


def random_update(
    weights: dict[str, np.ndarray],
    version: int = 0,
    *,
    bits: int = 16,
    kind: str = "rademacher",
    rounding: str = "stochastic",
) -> tuple[Update, dict[str, np.ndarray]]:
    """An update of all matrices from `version` to the next, and the weights after."""
    random, limit = np.random.default_rng(version), 2 ** (bits - 1)
    basis = Basis(seed=7, kind=kind)
    after = {name: w.copy() for name, w in weights.items()}
    factors = {}
    for name, weight in after.items():
        if weight.ndim == 2:
            factor = random.integers(-limit, limit, (len(weight), 4))
            factor[:, -1] = random.integers(-6 - bits, -3 - bits, len(factor))
            factors[name] = factor = factor.astype(f"i{bits // 8}")
            address = basis.address(name, version)
            replay(
                weight, factor[:, :-1], factor[:, -1], address, basis, rounding=rounding
            )
    digests = digests_of(after)
    update = Update(
        base_version=version,
        version=version + 1,
        seed=basis.seed,
        step=version,
        kind=kind,
        refresh=basis.refresh,
        rounding=rounding,
        base_digest=model_digest(digests_of(weights)),
        digest=model_digest(digests),
        digests={name: digests[name].word for name in factors},
        factors=factors,
    )
    return update, after


@pytest.fixture(scope="session")
def make_update() -> Callable[..., tuple[Update, dict[str, np.ndarray]]]:
    """`random_update`, for tests, which cannot import from here."""
    return random_update

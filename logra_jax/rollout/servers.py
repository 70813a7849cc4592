"""HTTP to one or many SGLang servers, from a program that is not asynchronous.

One thread runs one event loop with one session. Every call has a deadline, and every
way in which it can fail is a :class:`ServerError` of one of three kinds. Connections
are not kept between calls: one that the server closes just as the next call is sent
looks like a server that died, and a weight update must never be sent twice.
"""

import asyncio
import concurrent.futures
import io
import json
import random
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
Kind = Literal["unreachable", "deadline", "refused"]

_FIRST_WAIT = 0.25  # seconds before the first retry, twice as long before each next one
_LONGEST_WAIT = 8.0
_LONGEST_TEXT = 500  # characters of a server's message that an error repeats


class ServerError(Exception):
    """A call to a server failed.

    Attributes:
        url: base URL of the server.
        kind: ``"unreachable"``: no connection, one that broke, or a status of 500 and
            above: what the server did is not known. ``"deadline"``: no answer in time:
            neither is it. ``"refused"``: the server answered that it will not, or with
            something that is no answer.
        status: of the HTTP answer, where there was one.
    """

    def __init__(self, url: str, kind: Kind, message: str, status: int | None = None):
        super().__init__(url, kind, message, status)
        self.url = url
        self.kind: Kind = kind
        self.status = status

    def __str__(self) -> str:
        return self.args[2]


class Server:
    """One server; its methods run in the loop of the :class:`Servers` that made it.

    Attributes:
        url: base URL, without a slash at its end.
        ready: it holds verified weights of the current version, so that generation may
            use it. Weight sync sets it; generation takes it back when the server dies,
            hangs, or turns out to hold other weights.
        version: of the weights that it was last seen to hold; None before that.
    """

    def __init__(self, url: str, session: "_Session"):
        self.url = url
        self.ready = False
        self.version: int | None = None
        self._session = session

    def __repr__(self) -> str:
        return f"Server({self.url!r}, ready={self.ready})"

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        deadline: float,
        retries: int = 0,
    ) -> Any:
        """What the server answers: parsed JSON, or the text where it is none.

        Args:
            path: of the endpoint, with its leading slash.
            body: posted as JSON; None makes it a GET.
            deadline: seconds for all of it, retries and the waits before them included.
            retries: how often to try again when the server is unreachable, after a wait
                that doubles. Only for what may be done twice.

        Returns:
            The answer; ``{}`` for an empty one.

        Raises:
            ServerError: of the last try.
        """
        failed = None
        try:
            async with asyncio.timeout(deadline):
                for attempt in range(retries + 1):
                    if attempt:
                        await asyncio.sleep(backoff(attempt))
                    try:
                        return await self._call(path, body)
                    except ServerError as error:
                        failed = error
                        if error.kind != "unreachable":
                            raise
        except TimeoutError:
            if failed is None:
                failed = ServerError(
                    self.url,
                    "deadline",
                    f"{self.url} did not answer {path} within {deadline:g} s.",
                )
        assert failed is not None
        raise failed

    async def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        import aiohttp

        try:
            async with self._session.client.request(
                "GET" if body is None else "POST",
                self.url + path,
                # As a stream: a large body is then sent in parts, between other work.
                data=None if body is None else io.BytesIO(json.dumps(body).encode()),
                headers=None if body is None else {"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            cause = getattr(error, "os_error", None) or error
            reason = getattr(cause, "strerror", None) or str(cause)
            reason = reason or type(error).__name__
            raise ServerError(
                self.url,
                "unreachable",
                f"{self.url} cannot be reached for {path}: {reason}.",
            ) from error
        text = content.decode(errors="replace")
        try:
            answer = json.loads(text) if text else {}
        except ValueError:
            answer = text
        if status >= 300:
            remedy = (
                "; set the variable that `rollout.api_key_env` names"
                if status in (401, 403)
                else ""
            )
            raise ServerError(
                self.url,
                "unreachable" if status >= 500 else "refused",
                f"{self.url} answered {path} with status {status}: "
                f"{_message(answer)}{remedy}.",
                status,
            )
        return answer


class Servers:
    """Servers, the thread that speaks to them, and their session; a context manager.

    Args:
        urls: base URLs of the servers, ``http(s)://host[:port]``.
        router: base URL of an SGLang router in front of all of them, if there is one:
            generation goes there, everything else to the servers themselves.
        api_key: sent as ``Authorization: Bearer ...``, which is what SGLang checks.
        concurrency: most requests in flight to a server for generation; other calls are
            never held up by it.

    Attributes:
        servers: in the order of ``urls``.
        router: None where there is none.
        concurrency: as given.

    Raises:
        ValueError: no URL, one that is given twice, or one of another form.

    Example:
        >>> from logra_jax.rollout.servers import Servers
        >>> with Servers(["http://127.0.0.1:30000/"]) as servers:
        ...     servers.servers
        (Server('http://127.0.0.1:30000', ready=False),)
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        router: str | None = None,
        api_key: str | None = None,
        concurrency: int = 256,
    ):
        if not urls:
            raise ValueError(
                "`rollout.urls` must name at least one server, got none; start one "
                "with `logra serve` and give the URL that it prints."
            )
        if concurrency < 1:
            raise ValueError(
                f"`rollout.concurrency` must be at least 1, got {concurrency}."
            )
        bases = [base_url("rollout.urls", url) for url in urls]
        for base in bases:
            if bases.count(base) > 1:
                raise ValueError(
                    f"`rollout.urls` must name each server once, got {base!r} twice."
                )
        front = None if router is None else base_url("rollout.router", router)
        self.concurrency = concurrency
        self._session = _Session(api_key)
        self.servers = tuple(Server(base, self._session) for base in bases)
        self.router = None if front is None else Server(front, self._session)

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs in the loop, from any other thread.

        An interrupt of the waiting thread cancels the coroutine and waits until it has
        ended: nothing of it goes on behind the caller's back.

        Raises:
            RuntimeError: called within the loop, or after :meth:`close`.
        """
        if self._session.is_loop_thread():
            coroutine.close()
            raise RuntimeError("`run` would wait for its own thread; await instead.")
        started, ended = threading.Event(), threading.Event()

        async def tracked() -> T:
            started.set()
            try:
                return await coroutine
            finally:
                ended.set()

        task = tracked()
        try:
            future = self.start(task)
        except RuntimeError:
            coroutine.close()
            raise
        try:
            return future.result()
        except BaseException:
            if not future.done():  # it is this thread that was interrupted
                started.wait()  # before that it would be dropped without being told
                future.cancel()
                ended.wait()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Let a coroutine run in the loop; cancelling the future cancels it.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        return self._session.start(coroutine)

    def close(self) -> None:
        """Cancel what still runs, wait until it has ended, end the thread."""
        self._session.close()


class _Session:
    """The thread with the event loop, and the HTTP session that lives in it."""

    client: Any  # aiohttp.ClientSession

    def __init__(self, api_key: str | None):
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._begun = threading.Event()
        self._failed: BaseException | None = None
        self._futures = set[concurrent.futures.Future[Any]]()
        self._thread = threading.Thread(
            target=self._main, name="logra-servers", daemon=True
        )
        self._thread.start()
        self._begun.wait()
        if self._failed is not None:
            self._thread.join()
            raise self._failed

    def is_loop_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise RuntimeError("These servers are closed; make a new one.") from None
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def close(self) -> None:
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            self._failed = error
        finally:
            self._begun.set()

    async def _live(self) -> None:
        try:
            import aiohttp
        except ImportError:
            raise ModuleNotFoundError(
                "Speaking to servers needs aiohttp; install `logra-jax[sglang]`.",
                name="aiohttp",
            ) from None
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as self.client:
            self._begun.set()
            await self._end.wait()
            await asyncio.sleep(0)  # what was just handed in has begun
            # Each once, and not the tasks within it: a second time would cut off what
            # the first has set going, such as telling the servers to abort.
            for future in tuple(self._futures):
                future.cancel()
            while rest := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(rest)


def backoff(attempt: int) -> float:
    """Seconds to wait before a retry: they double, and no two clients wait the same."""
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (attempt - 1)) * random.uniform(0.5, 1)


def base_url(field: str, url: str) -> str:
    """``url`` without what follows its host and port.

    Raises:
        ValueError: it is no base URL; names ``field``.
    """
    parts = urlsplit(url)
    try:
        port_is_valid = parts.port != 0
    except ValueError:
        port_is_valid = False
    rest = (parts.path.rstrip("/"), parts.query, parts.fragment, parts.username)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not port_is_valid
        or any(rest)
    ):
        raise ValueError(
            f"`{field}` must hold URLs of the form http(s)://host[:port], got {url!r}."
        )
    return f"{parts.scheme}://{parts.netloc}"


def _message(answer: Any) -> str:
    """What a server says went wrong, in one line, wherever in its answer it stands."""
    for key in ("error", "message", "detail"):
        if isinstance(answer, dict) and answer.get(key):
            return _message(answer[key])
    text = " ".join(str(answer).split()).rstrip(".")
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."

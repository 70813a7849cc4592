import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from logra_jax.rollout import servers as module
from logra_jax.rollout.servers import ServerError, Servers


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.01)


def one_call(url, path="/x", body=None, *, api_key=None, deadline=10.0, retries=0):
    with Servers([url], api_key=api_key) as servers:
        call = servers.servers[0].call(path, body, deadline=deadline, retries=retries)
        return servers.run(call)


def test_body_is_posted_and_the_json_of_the_answer_comes_back(fake_server):
    fake = fake_server(lambda path, body: {"path": path, "body": body})
    assert one_call(fake.url, "/a", {"b": 1}) == {"path": "/a", "body": {"b": 1}}
    assert one_call(fake.url, "/a") == {"path": "/a", "body": None}


def test_empty_answer_is_an_empty_object_and_text_stays_text(fake_server):
    assert one_call(fake_server(lambda *_: "").url) == {}
    assert one_call(fake_server(lambda *_: "so [").url) == "so ["


def test_api_key_is_a_bearer_token(fake_server):
    fake = fake_server(lambda *_: {})
    one_call(fake.url, api_key="s3cret")
    one_call(fake.url)
    keys = [headers.get("Authorization") for _, _, headers in fake.requests]
    assert keys == ["Bearer s3cret", None]


def test_refusal_carries_the_servers_message_and_is_not_retried(fake_server):
    fake = fake_server(lambda *_: 400)
    with pytest.raises(ServerError) as caught:
        one_call(fake.url, retries=3)
    assert (caught.value.kind, caught.value.status) == ("refused", 400)
    assert caught.value.url == fake.url
    assert str(caught.value) == f"{fake.url} answered /x with status 400: out of order."
    assert len(fake.requests) == 1


def test_wrong_key_names_the_field_to_set(fake_server):
    with pytest.raises(ServerError, match=r"status 401: .*; set the variable"):
        one_call(fake_server(lambda *_: 401).url)


@pytest.mark.parametrize("fault", [500, 503, "drop"])
def test_fault_that_may_pass_is_retried(fake_server, fault):
    faults = [fault, fault]
    fake = fake_server(lambda *_: faults.pop() if faults else {"ok": True})
    assert one_call(fake.url, retries=2) == {"ok": True}
    assert len(fake.requests) == 3


@pytest.mark.parametrize("fault", [500, "drop"])
def test_nothing_is_sent_twice_unless_asked_for(fake_server, fault):
    fake = fake_server(lambda *_: fault)
    with pytest.raises(ServerError) as caught:
        one_call(fake.url, body={})
    assert caught.value.kind == "unreachable"
    assert caught.value.status == (fault if fault == 500 else None)
    assert len(fake.requests) == 1


def test_no_server_behind_the_url_is_unreachable(closed_url):
    with pytest.raises(ServerError, match="cannot be reached for /x: ") as caught:
        one_call(closed_url, retries=1)
    assert caught.value.kind == "unreachable"


def test_hanging_server_meets_the_deadline(fake_server):
    fake = fake_server(lambda *_: "hang")
    begin = time.monotonic()
    with pytest.raises(ServerError, match=r"did not answer /x within 0.2 s") as caught:
        one_call(fake.url, deadline=0.2, retries=9)
    assert caught.value.kind == "deadline"
    assert time.monotonic() - begin < 5


def test_deadline_covers_retries_and_tells_why_they_were_needed(fake_server):
    fake = fake_server(lambda *_: 500)
    with pytest.raises(ServerError, match="out of order"):
        one_call(fake.url, deadline=0.3, retries=10**6)


def test_redirect_is_not_followed(fake_server):
    with pytest.raises(ServerError) as caught:
        one_call(fake_server(lambda *_: 302).url)
    assert caught.value.kind == "refused"


def test_long_message_is_cut_to_one_line(fake_server):
    from aiohttp import web

    async def page(*_):
        return web.Response(status=404, text="<html>\n" + "x" * 5000)

    fake = fake_server(page)
    with pytest.raises(ServerError) as caught:
        one_call(fake.url)
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:30000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host/v1",
        "http://host?a=b",
        "http://me:pw@host",
        "",
    ],
)
def test_url_of_another_form_is_named(url):
    with pytest.raises(ValueError, match=r"`rollout.urls` must hold URLs") as caught:
        Servers([url])
    assert repr(url) in str(caught.value)
    with pytest.raises(ValueError, match=r"`rollout.router` must hold URLs"):
        Servers(["http://host"], router=url)


def test_urls_are_bases_each_named_once():
    with Servers(["http://b:1/", "https://a"], router="http://r/") as servers:
        assert [s.url for s in servers.servers] == ["http://b:1", "https://a"]
        assert servers.router is not None
        assert servers.router.url == "http://r"
        assert not any(s.ready for s in servers.servers)
    with pytest.raises(ValueError, match="once, got 'http://a' twice"):
        Servers(["http://a", "http://a/"])
    with pytest.raises(ValueError, match="at least one server"):
        Servers([])
    with pytest.raises(ValueError, match=r"`rollout.concurrency` .* got 0"):
        Servers(["http://a"], concurrency=0)


def test_interrupt_cancels_the_coroutine_and_waits_until_it_has_ended():
    events = []

    async def work():
        await asyncio.sleep(0.1)  # the caller waits by now
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            events.append("ended")

    with Servers(["http://a"]) as servers:
        with pytest.raises(KeyboardInterrupt):
            servers.run(work())
        assert events == ["ended"]

        async def next_work():
            return 5

        assert servers.run(next_work()) == 5


def test_cancelling_a_future_cancels_its_coroutine():
    started, ended = threading.Event(), threading.Event()

    async def work():
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with Servers(["http://a"]) as servers:
        future = servers.start(work())
        assert started.wait(10)
        future.cancel()
        assert ended.wait(10)


def test_close_ends_what_runs_and_may_be_repeated():
    ended = []

    async def work(i):
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(i)

    servers = Servers(["http://a"])
    futures = [servers.start(work(i)) for i in range(3)]
    servers.close()
    servers.close()
    assert sorted(ended) == [0, 1, 2]
    assert all(future.cancelled() for future in futures)
    with pytest.raises(RuntimeError, match="closed"):
        servers.run(work(3))


def test_run_within_its_own_loop_is_refused():
    with Servers(["http://a"]) as servers:

        async def inner():
            pass

        async def outer():
            servers.run(inner())

        with pytest.raises(RuntimeError, match="await instead"):
            servers.run(outer())


def test_error_of_the_coroutine_is_the_callers():
    async def work():
        raise LookupError("mine")

    with Servers(["http://a"]) as servers, pytest.raises(LookupError, match="mine"):
        servers.run(work())


def test_import_is_light_and_a_missing_package_is_named():
    code = """
import sys
from logra_jax.rollout.servers import Servers
assert not {"aiohttp", "jax", "torch"} & set(sys.modules), set(sys.modules)
sys.modules["aiohttp"] = None
try:
    Servers(["http://a"])
except ModuleNotFoundError as error:
    assert "logra-jax[sglang]" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)

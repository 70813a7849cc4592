"""The engine against servers with faults; tests/sglang has the real server."""

import asyncio
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logra_jax.rollout import servers as servers_module
from logra_jax.rollout.servers import ServerError, Servers
from logra_jax.rollout.sglang import SGLangEngine
from logra_jax.rollout.types import Sampling

EOS = 9
KEY = jax.random.key(0)
SAMPLING = Sampling(max_new_tokens=4)


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch):
    monkeypatch.setattr(servers_module, "_FIRST_WAIT", 0.01)


def tokens_for(prompt, new):
    """A completion that only this prompt has: it ends early for even first tokens."""
    tokens = [10 + prompt[0], 10 + prompt[-1], EOS]
    return tokens[:new] if prompt[0] % 2 == 0 else [*tokens[:2], *[10] * (new - 2)]


def answer(body, **meta):
    """What a healthy server answers."""
    parameters = body["sampling_params"]
    tokens = tokens_for(body["input_ids"], parameters["max_new_tokens"])
    if tokens[-1] == EOS:
        reason = {"type": "stop", "matched": EOS}
    else:
        reason = {"type": "length", "length": len(tokens)}
    return {
        "output_ids": tokens,
        "meta_info": {
            "id": body["rid"],
            "finish_reason": reason,
            "output_token_logprobs": [
                [-0.5 - i, t, None] for i, t in enumerate(tokens)
            ],
            "weight_version": "3",
            **meta,
        },
    }


def aborted(body):
    return answer(body, finish_reason={"type": "abort", "message": "Aborted"})


def healthy(path, body):
    return answer(body) if path == "/generate" else {}


def engine_of(servers, **options):
    for server in servers.servers:
        server.ready = True
    options = {"eos_ids": [EOS], "max_positions": 64, "attempts": 20} | options
    return SGLangEngine(servers, **options)


def generate(fakes, prompts, sampling=SAMPLING, **options):
    with Servers([fake.url for fake in fakes]) as servers:
        return engine_of(servers, **options).generate(None, prompts, sampling, KEY)


def check(completions, prompts, sampling=SAMPLING):
    """Each prompt has its own completion, in order."""
    new = sampling.max_new_tokens
    for i, prompt in enumerate(prompts):
        expected = tokens_for(prompt, new)
        length = len(expected)
        assert completions.lengths[i] == length
        assert completions.tokens[i, :length].tolist() == expected
        assert (completions.tokens[i, length:] == 0).all()
        assert completions.logprobs[i].tolist() == [
            -0.5 - t if t < length else 0.0 for t in range(new)
        ]
        assert completions.versions[i].tolist() == [3] * length + [-1] * (new - length)
        assert completions.finished[i] == (prompt[0] % 2 == 0)


PROMPTS = [[i, 2, i + 1] for i in range(12)]


def test_every_prompt_gets_its_completion_in_order(fake_server):
    completions = generate([fake_server(healthy), fake_server(healthy)], PROMPTS)
    check(completions, PROMPTS)
    assert completions.tokens.dtype == completions.versions.dtype == np.int32
    assert completions.logprobs.dtype == np.float32
    assert completions.finished.dtype == bool
    np.testing.assert_array_equal(completions.prompts.tokens[:, -3:], PROMPTS)


def test_a_request_says_how_many_tokens_come_before_the_end(fake_server):
    fake = fake_server(healthy)
    generate([fake], [[1]], Sampling(max_new_tokens=4, min_new_tokens=2))
    _, body, _ = fake.requests[0]
    assert body["sampling_params"]["min_new_tokens"] == 2


def test_each_answer_is_told_once_while_others_are_still_sampled(fake_server):
    may_end = threading.Event()

    def slow_last(path, body):
        if body.get("input_ids") == PROMPTS[-1]:
            assert may_end.wait(30)
        return healthy(path, body)

    told: list[tuple[int, list[int]]] = []

    def on_answer(index, tokens):
        told.append((index, list(tokens)))
        # The last prompt is answered only when the others have been told.
        if len(told) == len(PROMPTS) - 1:
            may_end.set()

    with Servers([fake_server(slow_last).url]) as servers:
        future = engine_of(servers).start(PROMPTS, SAMPLING, KEY, on_answer)
        check(future.result(timeout=60), PROMPTS)
    assert told[-1][0] == len(PROMPTS) - 1
    new = SAMPLING.max_new_tokens
    assert sorted(told) == [(i, tokens_for(p, new)) for i, p in enumerate(PROMPTS)]


def test_error_of_a_listener_ends_the_batch(fake_server):
    def on_answer(index, tokens):
        raise RuntimeError("the reward pool is closed")

    with Servers([fake_server(healthy).url]) as servers:
        future = engine_of(servers).start(PROMPTS, SAMPLING, KEY, on_answer)
        with pytest.raises(RuntimeError, match="the reward pool is closed"):
            future.result(timeout=60)


def test_request_carries_tokens_parameters_and_a_seed_of_the_key(fake_server):
    fake = fake_server(healthy)
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=4)
    prompts = [[1, 2, 3]] * 3
    generate([fake], prompts, sampling, prefix=(1, 2))
    seeds = [
        body["sampling_params"].pop("sampling_seed") for _, body, _ in fake.requests
    ]
    assert len(set(seeds)) == 3
    generate([fake], prompts, sampling, prefix=(1, 2))
    again = [
        body["sampling_params"]["sampling_seed"] for _, body, _ in fake.requests[3:]
    ]
    assert sorted(seeds) == sorted(again)
    _, body, _ = fake.requests[0]
    assert body["input_ids"] == [1, 2, 3]
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "max_new_tokens": 4,
        "stop_token_ids": [EOS],
    }


def test_no_filter_is_minus_one_and_greedy_has_no_seed(fake_server):
    fake = fake_server(healthy)
    generate([fake], [[1]], Sampling(temperature=0.0, max_new_tokens=4))
    parameters = fake.requests[0][1]["sampling_params"]
    assert parameters["top_k"] == -1
    assert "sampling_seed" not in parameters


def test_spans_of_versions_reach_the_tokens(fake_server):
    spans = [
        {"version": "3", "start": 0, "end": 1},
        {"version": "5", "start": 1, "end": 4},
    ]
    fake = fake_server(lambda _, body: answer(body, weight_versions=spans))
    completions = generate([fake], [[1, 2], [2, 2]])
    assert completions.versions.tolist() == [[3, 5, 5, 5], [3, 5, 5, -1]]


def test_load_is_shared_and_bounded(fake_server):
    running, most = [0, 0], [0, 0]

    def busy(i):
        async def react(path, body):
            running[i] += 1
            most[i] = max(most[i], running[i])
            await asyncio.sleep(0.05)
            running[i] -= 1
            return answer(body)

        return react

    fakes = [fake_server(busy(0)), fake_server(busy(1))]
    with Servers([fake.url for fake in fakes], concurrency=3) as servers:
        completions = engine_of(servers).generate(None, PROMPTS * 2, SAMPLING, KEY)
    check(completions, PROMPTS * 2)
    assert most == [3, 3]
    assert all(len(fake.requests) >= 9 for fake in fakes)


def test_only_ready_servers_are_asked(fake_server):
    fakes = [fake_server(healthy), fake_server(healthy)]
    with Servers([fake.url for fake in fakes]) as servers:
        engine = engine_of(servers)
        servers.servers[0].ready = False
        check(engine.generate(None, PROMPTS, SAMPLING, KEY), PROMPTS)
    assert not fakes[0].requests
    assert len(fakes[1].requests) == len(PROMPTS)


@pytest.mark.parametrize(
    "fault", ["die", "drop", 500, 503, "so [", {}, {"meta_info": 3}]
)
def test_prompts_of_a_failing_server_go_to_the_others(fake_server, fault):
    fakes = [fake_server(lambda *_: fault), fake_server(healthy)]
    with Servers([fake.url for fake in fakes]) as servers:
        completions = engine_of(servers).generate(None, PROMPTS, SAMPLING, KEY)
        assert [server.ready for server in servers.servers] == [False, True]
    check(completions, PROMPTS)
    assert len(fakes[1].requests) == len(PROMPTS)


def test_nobody_behind_a_url_is_left_out(fake_server, closed_url):
    with Servers([closed_url, fake_server(healthy).url]) as servers:
        check(engine_of(servers).generate(None, PROMPTS, SAMPLING, KEY), PROMPTS)
        assert [server.ready for server in servers.servers] == [False, True]


def test_hung_request_is_aborted_and_goes_to_another_server(fake_server):
    hung = fake_server(lambda path, _: "hang" if path == "/generate" else {})
    fakes = [hung, fake_server(healthy)]
    with Servers([fake.url for fake in fakes]) as servers:
        engine = engine_of(servers, request_deadline=0.5)
        check(engine.generate(None, PROMPTS[:4], SAMPLING, KEY), PROMPTS[:4])
        assert [server.ready for server in servers.servers] == [False, True]
    asked = [b["rid"] for path, b, _ in hung.requests if path == "/generate"]
    stopped = [b["rid"] for path, b, _ in hung.requests if path == "/abort_request"]
    assert len(asked) == 2
    assert sorted(asked) == sorted(stopped)


def test_server_that_dies_in_the_middle_loses_and_doubles_nothing(fake_server):
    count = iter(range(100))

    async def dying(path, body):
        if next(count) >= 3:
            return "die"
        await asyncio.sleep(0.05)
        return answer(body)

    fakes = [fake_server(dying), fake_server(healthy)]
    check(generate(fakes, PROMPTS * 3), PROMPTS * 3)


def test_aborted_answer_is_not_used_and_its_server_stays(fake_server):
    aborts = [True] * 5
    fake = fake_server(
        lambda _, b: aborted(b) if aborts and aborts.pop() else answer(b)
    )
    with Servers([fake.url]) as servers:
        check(engine_of(servers).generate(None, PROMPTS, SAMPLING, KEY), PROMPTS)
        assert servers.servers[0].ready
    assert len(fake.requests) == len(PROMPTS) + 5
    assert len({body["rid"] for _, body, _ in fake.requests}) == len(PROMPTS) + 5


def test_prompt_is_not_asked_for_ever(fake_server):
    fake = fake_server(lambda _, body: aborted(body))
    with pytest.raises(
        ServerError, match=r"`prompts\[0\]` was asked 3 times"
    ) as caught:
        generate([fake], [[1]], attempts=3)
    assert "aborted the request" in str(caught.value)
    assert len(fake.requests) == 3


def test_no_server_left_says_why_of_each(fake_server, closed_url):
    fake = fake_server(lambda *_: 500)
    with Servers([fake.url, closed_url, "http://127.0.0.1:9"]) as servers:
        engine = engine_of(servers)
        servers.servers[2].ready = False
        with pytest.raises(ServerError, match="No server is left") as caught:
            engine.generate(None, PROMPTS, SAMPLING, KEY)
    message = str(caught.value)
    assert f"{fake.url} answered /generate with status 500" in message
    assert f"{closed_url} cannot be reached" in message
    assert "http://127.0.0.1:9 has not been given the trainer's weights" in message


def test_refused_prompt_ends_the_batch_and_aborts_the_rest(fake_server):
    def react(path, body):
        if path == "/generate":
            return 400 if body["input_ids"][0] == 3 else "hang"
        return {}

    fake = fake_server(react)
    with Servers([fake.url]) as servers:
        engine = engine_of(servers)
        with pytest.raises(ServerError, match=r"`prompts\[3\]` was refused: .*out of"):
            engine.generate(None, PROMPTS, SAMPLING, KEY)
        assert servers.servers[0].ready
    asked = {b["rid"] for path, b, _ in fake.requests if path == "/generate"}
    stopped = {b["rid"] for path, b, _ in fake.requests if path == "/abort_request"}
    assert stopped < asked
    assert len(stopped) == len(asked) - 1


def test_batch_deadline_says_how_many_were_answered(fake_server):
    def react(path, body):
        slow = path == "/generate" and body["input_ids"][0] >= 5
        return "hang" if slow else healthy(path, body)

    fake = fake_server(react)
    with pytest.raises(ServerError, match="5 of 12 prompts were answered") as caught:
        generate([fake], PROMPTS, batch_deadline=1.0)
    assert caught.value.kind == "deadline"
    assert fake.paths().count("/abort_request") == 7


def test_interrupt_aborts_what_is_outstanding(fake_server):
    fake = fake_server(lambda path, _: "hang" if path == "/generate" else {})
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    with Servers([fake.url]) as servers:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine_of(servers).generate(None, PROMPTS, SAMPLING, KEY)
        assert fake.paths().count("/abort_request") == len(PROMPTS)


def test_started_batch_runs_beside_and_can_be_cancelled(fake_server):
    gate = threading.Event()

    async def react(path, body):
        while path == "/generate" and not gate.is_set():
            await asyncio.sleep(0.01)
        return healthy(path, body)

    fake = fake_server(react)
    with Servers([fake.url]) as servers:
        engine = engine_of(servers)
        kept = engine.start(PROMPTS, SAMPLING, KEY)
        dropped = engine.start(PROMPTS[:2], SAMPLING, KEY)
        while fake.paths().count("/generate") < len(PROMPTS) + 2:
            time.sleep(0.01)
        dropped.cancel()
        while fake.paths().count("/abort_request") < 2:
            time.sleep(0.01)
        gate.set()
        check(kept.result(timeout=10), PROMPTS)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_close_aborts_what_is_outstanding(fake_server, is_cancelled):
    fake = fake_server(lambda path, _: "hang" if path == "/generate" else {})
    with Servers([fake.url]) as servers:
        future = engine_of(servers).start(PROMPTS, SAMPLING, KEY)
        while fake.paths().count("/generate") < len(PROMPTS):
            time.sleep(0.01)
        if is_cancelled:
            future.cancel()
    assert fake.paths().count("/abort_request") == len(PROMPTS)


def test_cancelled_batch_leaves_room_for_the_next(fake_server):
    hang = [True]

    def react(path, body):
        return "hang" if path == "/generate" and hang else healthy(path, body)

    fake = fake_server(react)
    with Servers([fake.url], concurrency=2) as servers:
        engine = engine_of(servers)
        future = engine.start(PROMPTS, SAMPLING, KEY)
        while fake.paths().count("/generate") < 2:
            time.sleep(0.01)
        future.cancel()
        hang.clear()
        check(engine.generate(None, PROMPTS, SAMPLING, KEY), PROMPTS)


def test_restarted_server_without_our_weights_is_left(fake_server):
    stale = fake_server(lambda _, body: answer(body, weight_version="default"))
    with Servers([stale.url, fake_server(healthy).url]) as servers:
        check(engine_of(servers).generate(None, PROMPTS, SAMPLING, KEY), PROMPTS)
        assert [server.ready for server in servers.servers] == [False, True]
    with pytest.raises(ServerError, match=r"no longer holds .* 'default'; it was prob"):
        generate([stale], PROMPTS)


@pytest.mark.parametrize(
    ("meta", "rule"),
    [
        (
            {"finish_reason": {"type": "stop", "matched": "NaN happened"}},
            "logits are not finite",
        ),
        (
            {"output_token_logprobs": [[None, t, None] for t in (11, 12, 10, 10)]},
            "logits are not finite",
        ),
        (
            {"finish_reason": {"type": "stop", "matched": 10}},
            r"ended a completion at 10, .* not an end of sequence here \(\[9\]\)",
        ),
    ],
)
def test_answer_that_every_server_would_give_is_an_error(fake_server, meta, rule):
    fake = fake_server(lambda _, body: answer(body, **meta))
    with pytest.raises(ServerError, match=rule):
        generate([fake, fake_server(healthy)], [[1, 2]])
    assert len(fake.requests) == 1


def test_completion_cut_by_the_servers_own_limit_is_an_error(fake_server):
    def react(_, body):
        body["sampling_params"]["max_new_tokens"] = 3
        return answer(body)

    with pytest.raises(ServerError, match=r"after 3 tokens of 4; .*--context-length"):
        generate([fake_server(react)], [[1, 2]])


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.pop("output_token_logprobs"),
        lambda meta: meta["output_token_logprobs"].pop(),
        lambda meta: meta["output_token_logprobs"].clear(),
        lambda meta: meta["output_token_logprobs"][0].__setitem__(1, 99),
        lambda meta: meta.update(finish_reason=None),
        lambda meta: meta.update(finish_reason={"type": "other"}),
        lambda meta: meta.update(weight_versions=[{"version": "3"}]),
        lambda meta: meta.update(
            weight_versions=[{"version": "3", "start": 0, "end": 2}]
        ),
    ],
)
def test_answer_that_is_not_whole_is_another_servers_turn(fake_server, change):
    def react(_, body):
        reply = answer(body)
        change(reply["meta_info"])
        return reply

    fakes = [fake_server(react), fake_server(healthy)]
    check(generate(fakes, PROMPTS), PROMPTS)


def test_router_is_asked_again_after_a_wait(fake_server):
    faults = [500, "drop", 503]
    router = fake_server(lambda _, body: faults.pop() if faults else answer(body))
    behind = fake_server(healthy)
    with Servers([behind.url], router=router.url) as servers:
        check(engine_of(servers).generate(None, PROMPTS, SAMPLING, KEY), PROMPTS)
    assert len(router.requests) == len(PROMPTS) + 3
    assert not behind.requests


def test_servers_behind_a_router_are_told_to_abort(fake_server):
    router = fake_server(lambda *_: "hang")
    behind = [fake_server(healthy), fake_server(healthy)]
    with (
        Servers([fake.url for fake in behind], router=router.url) as servers,
        pytest.raises(ServerError, match="asked 1 times"),
    ):
        engine_of(servers, request_deadline=0.2, attempts=1).generate(
            None, [[1]], SAMPLING, KEY
        )
    assert [fake.paths() for fake in behind] == [["/abort_request"]] * 2


@pytest.mark.parametrize("token", [-1, 50])
def test_token_outside_the_vocabulary_is_not_sent(fake_server, token):
    fake = fake_server(healthy)
    with pytest.raises(ValueError, match=rf"`prompts\[1\]` .* \[0, 50\), got {token};"):
        generate([fake], [[1], [2, token]], vocab_size=50)
    assert not fake.requests


def test_places_that_the_server_cannot_use_are_counted(fake_server):
    fake = fake_server(healthy)
    generate([fake], [[1] * 57])
    with pytest.raises(ValueError, match="at most 57 tokens"):
        generate([fake], [[1] * 58])  # 58 + 4 = 64 - 2, but a prompt leaves seven
    long = Sampling(max_new_tokens=20)
    with pytest.raises(ValueError, match="at most 42 tokens"):
        generate([fake], [[1] * 43], long)


@pytest.mark.parametrize(
    ("field", "value"),
    [("request_deadline", 0.0), ("batch_deadline", -1.0), ("attempts", 0)],
)
def test_option_out_of_range_is_named(field, value):
    with (
        Servers(["http://a"]) as servers,
        pytest.raises(ValueError, match=f"`{field}` must be positive, got {value}"),
    ):
        engine_of(servers, **{field: value})


FAULT = st.sampled_from(["ok", "ok", "abort", "die", "drop", 500, "so [", "stale"])


@given(st.lists(st.lists(FAULT, max_size=6), max_size=3), st.integers(1, 4))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_prompt_is_answered_once_whichever_servers_fail(
    fake_server, scripts, concurrency
):
    def follow(script):
        steps = iter(script)

        def react(_, body):
            step = next(steps, "ok")
            if step == "stale":
                return answer(body, weight_version="default")
            return {"ok": answer, "abort": aborted}.get(step, lambda _: step)(body)

        return react

    fakes = [fake_server(follow(script)) for script in scripts]
    survivor = fake_server(healthy)
    urls = [fake.url for fake in (*fakes, survivor)]
    with Servers(urls, concurrency=concurrency) as servers:
        check(engine_of(servers).generate(None, PROMPTS, SAMPLING, KEY), PROMPTS)
        assert servers.servers[-1].ready

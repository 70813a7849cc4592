"""The engine on the real SGLang: what comes back is what the engine says it is."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from logra_jax.models.hf import load_decoder
from logra_jax.rollout.local import LocalEngine
from logra_jax.rollout.serve import Launched
from logra_jax.rollout.servers import ServerError, Servers
from logra_jax.rollout.sglang import SGLangEngine
from logra_jax.rollout.types import Completions, Sampling

CONTEXT = 512
EOS = 1
KEY = jax.random.key(0)
PROMPTS = [
    np.random.default_rng(i).integers(4, 260, 3 + 2 * i).tolist() for i in range(10)
]
LONG = Sampling(max_new_tokens=450)

StartServer = Callable[..., Launched]
TinyModel = Callable[[str, str], Path]


def post(servers: Servers, path: str, body: dict, index: int = 0):
    return servers.run(servers.servers[index].call(path, body, deadline=60.0))


def set_version(servers: Servers, version: str) -> None:
    body = {"new_version": version, "abort_all_requests": False}
    for i in range(len(servers.servers)):
        post(servers, "/update_weight_version", body, i)


def running(servers: Servers, index: int = 0) -> int:
    """Requests that a server works on or keeps waiting."""
    loads = servers.run(servers.servers[index].call("/v1/loads", deadline=60.0))
    return sum(
        rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads["loads"]
    )


def await_running(servers: Servers, least: int, index: int = 0) -> None:
    """Wait until a server works on so many requests; some may have ended already."""
    end = time.monotonic() + 60
    while running(servers, index) < least:
        assert time.monotonic() < end
        time.sleep(0.02)


def await_idle(servers: Servers, index: int = 0) -> None:
    end = time.monotonic() + 60
    while running(servers, index):
        assert time.monotonic() < end
        time.sleep(0.02)


def engine_of(servers: Servers, **options) -> SGLangEngine:
    set_version(servers, "3")
    for server in servers.servers:
        server.ready = True
    defaults = {"max_positions": CONTEXT, "eos_ids": [EOS], "vocab_size": 512}
    return SGLangEngine(servers, **(defaults | options))


def oracle(directory: Path, completions: Completions, prompts, temperature: float):
    """Log-probabilities of the sampled tokens in transformers, unfiltered."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).float().eval()
    rows = []
    for i, prompt in enumerate(prompts):
        n = completions.lengths[i]
        tokens = torch.tensor([[*prompt, *completions.tokens[i, :n]]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1].double()
        logprobs = (logits / temperature).log_softmax(-1)
        rows.append(logprobs.gather(-1, tokens[0, len(prompt) :, None])[:, 0].numpy())
    return rows


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (1.0, 1.0, 0),
        (0.5, 1.0, 0),
        (1.7, 1.0, 0),
        (1.0, 0.5, 0),
        (1.0, 1.0, 3),
        (0.7, 0.6, 20),
        (0.0, 1.0, 0),
    ],
)
def test_logprobs_are_unfiltered_at_the_sampling_temperature(
    shared_server, tiny_model: TinyModel, kind, temperature, top_p, top_k
):
    sampling = Sampling(temperature, top_p, top_k, max_new_tokens=16)
    with Servers([shared_server(kind, "float32").url]) as servers:
        completions = engine_of(servers).generate(None, PROMPTS, sampling, KEY)
    directory = tiny_model(kind, "float32")
    expected = oracle(directory, completions, PROMPTS, temperature or 1.0)
    for i, row in enumerate(expected):
        n = completions.lengths[i]
        np.testing.assert_allclose(completions.logprobs[i, :n], row, atol=1e-4, rtol=0)
        assert (completions.versions[i, :n] == 3).all()
        assert (completions.versions[i, n:] == -1).all()


def test_filters_keep_what_they_should(shared_server, tiny_model: TinyModel):
    sampling = Sampling(1.0, 1.0, 2, max_new_tokens=16)
    with Servers([shared_server("qwen2", "float32").url]) as servers:
        completions = engine_of(servers).generate(None, PROMPTS, sampling, KEY)
    assert (completions.logprobs < 0).any(1).all()
    # Of two tokens kept, the sampled one has at most one that is likelier.
    import torch
    import transformers

    directory = tiny_model("qwen2", "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    for i, prompt in enumerate(PROMPTS):
        answer = completions.tokens[i, : completions.lengths[i]].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
        best = logits[len(prompt) - 1 : -1].topk(2).indices.tolist()
        assert all(token in kept for token, kept in zip(answer, best, strict=True))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_greedy_completions_are_the_local_engines(
    shared_server, tiny_model: TinyModel, kind
):
    sampling = Sampling(temperature=0.0, max_new_tokens=24)
    model = load_decoder(tiny_model(kind, "float32"), dtype="float32")
    graph, weights = nnx.split(model)
    options = {"max_positions": CONTEXT, "eos_ids": [EOS]}
    local = LocalEngine(graph, **options).generate(weights, PROMPTS, sampling, KEY)
    with Servers([shared_server(kind, "float32").url]) as servers:
        remote = engine_of(servers).generate(None, PROMPTS, sampling, KEY)
    np.testing.assert_array_equal(remote.tokens, local.tokens)
    np.testing.assert_array_equal(remote.lengths, local.lengths)
    np.testing.assert_array_equal(remote.finished, local.finished)
    np.testing.assert_allclose(remote.logprobs, local.logprobs, atol=1e-4)


def test_end_of_sequence_is_part_of_the_completion(shared_server):
    sampling = Sampling(temperature=0.0, max_new_tokens=12)
    with Servers([shared_server("qwen2", "float32").url]) as servers:
        whole = engine_of(servers).generate(None, PROMPTS[:1], sampling, KEY)
        end = int(whole.tokens[0, 5])
        first = int(np.argmax(whole.tokens[0] == end))
        engine = engine_of(servers, eos_ids=[EOS, end])
        ended = engine.generate(None, PROMPTS[:1], sampling, KEY)
    assert not whole.finished[0]
    assert whole.lengths[0] == 12
    assert ended.finished[0]
    assert ended.lengths[0] == first + 1
    assert ended.tokens[0, first] == end
    assert (ended.tokens[0, first + 1 :] == 0).all()


def test_models_own_end_of_sequence_must_be_ours(shared_server):
    """SGLang stops at `eos_token_id` of the model's files whatever is asked for."""
    prompts, sampling = PROMPTS * 30, Sampling(temperature=3.0, max_new_tokens=64)
    with Servers([shared_server("qwen2", "float32").url]) as servers:
        completions = engine_of(servers).generate(None, prompts, sampling, KEY)
        last = completions.tokens[np.arange(300), completions.lengths - 1]
        assert completions.finished.any()
        np.testing.assert_array_equal(completions.finished, last == EOS)
        with pytest.raises(ServerError, match="not an end of sequence here"):
            engine_of(servers, eos_ids=[5]).generate(None, prompts, sampling, KEY)
        await_idle(servers)


def test_longest_prompts_are_answered_in_full(shared_server):
    with Servers([shared_server("qwen2", "float32").url]) as servers:
        engine = engine_of(servers, eos_ids=[EOS])
        for room, new in ((7, 1), (7, 5), (8, 6), (102, 100)):
            prompt = [5 + i % 7 for i in range(CONTEXT - room)]
            sampling = Sampling(temperature=0.0, max_new_tokens=new)
            completions = engine.generate(None, [prompt], sampling, KEY)
            assert completions.finished[0] or completions.lengths[0] == new


def test_versions_change_within_a_completion(shared_server):
    with Servers([shared_server("qwen2", "float32").url]) as servers:
        future = engine_of(servers).start(PROMPTS[:4], LONG, KEY)
        await_running(servers, 2)
        time.sleep(0.2)
        set_version(servers, "4")
        completions = future.result()
        assert completions.versions is not None
        for i, n in enumerate(completions.lengths):
            versions = completions.versions[i, :n].tolist()
            assert versions == sorted(versions)
            assert set(versions) <= {3, 4}
        assert {3, 4} == set(completions.versions.flat) - {-1}


def test_aborted_requests_are_asked_again_in_full(shared_server, tiny_model: TinyModel):
    with Servers([shared_server("qwen2", "float32").url]) as servers:
        future = engine_of(servers).start(PROMPTS, LONG, KEY)
        await_running(servers, 5)
        time.sleep(0.2)
        post(servers, "/abort_request", {"abort_all": True})
        completions = future.result()
        assert servers.servers[0].ready
    full = completions.lengths == LONG.max_new_tokens
    assert (full | completions.finished).all()
    expected = oracle(tiny_model("qwen2", "float32"), completions, PROMPTS, 1.0)
    for i, row in enumerate(expected):
        actual = completions.logprobs[i, : completions.lengths[i]]
        np.testing.assert_allclose(actual, row, atol=1e-4, rtol=0)


def test_cancelled_requests_do_not_go_on(shared_server):
    with Servers([shared_server("qwen2", "float32").url]) as servers:
        future = engine_of(servers).start(PROMPTS, LONG, KEY)
        await_running(servers, 5)
        future.cancel()
        begin = time.monotonic()
        await_idle(servers)
        # Sooner than SGLang itself would find the connections closed.
        assert time.monotonic() - begin < 1.0


def test_interrupted_requests_do_not_go_on(shared_server):
    with Servers([shared_server("qwen2", "float32").url]) as servers:
        engine = engine_of(servers)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(None, PROMPTS * 20, LONG, KEY)
        await_idle(servers)


def test_killed_and_hung_servers_lose_nothing(
    start_server: StartServer, shared_server, tiny_model: TinyModel
):
    directory = tiny_model("qwen2", "float32")
    killed = start_server(directory, "float32", args=["--api-key", "s3cret"])
    hung = start_server(directory, "float32", args=["--api-key", "s3cret"])
    urls = [killed.url, hung.url, shared_server("qwen2", "float32").url]
    prompts = PROMPTS * 6
    with Servers(urls, api_key="s3cret") as servers:
        engine = engine_of(servers, request_deadline=20.0)
        # So many to each that hardly ever all are over before the last is seen to run.
        future = engine.start(prompts, LONG, KEY)
        await_running(servers, 1, 1)
        os.killpg(hung.process.pid, signal.SIGSTOP)
        await_running(servers, 1, 0)
        killed.stop()
        completions = future.result()
        assert [server.ready for server in servers.servers] == [False, False, True]
    full = completions.lengths == LONG.max_new_tokens
    assert (full | completions.finished).all()
    expected = oracle(directory, completions, prompts, 1.0)
    for i, row in enumerate(expected):
        actual = completions.logprobs[i, : completions.lengths[i]]
        np.testing.assert_allclose(actual, row, atol=1e-4, rtol=0)


def test_server_that_is_not_ours_is_told_apart(
    start_server: StartServer, tiny_model: TinyModel
):
    directory = tiny_model("qwen2", "float32")
    server = start_server(directory, "float32", args=["--api-key", "s3cret"])
    sampling = Sampling(max_new_tokens=2)
    options = {"max_positions": CONTEXT, "eos_ids": [EOS]}
    with Servers([server.url]) as servers:
        servers.servers[0].ready = True
        with pytest.raises(ServerError, match=r"401: Unauth.*; set the variable"):
            SGLangEngine(servers, **options).generate(None, PROMPTS, sampling, KEY)
    with Servers([server.url], api_key="s3cret") as servers:
        servers.servers[0].ready = True
        with pytest.raises(ServerError, match="no longer holds the trainer's weights"):
            SGLangEngine(servers, **options).generate(None, PROMPTS, sampling, KEY)

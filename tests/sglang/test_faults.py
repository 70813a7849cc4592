"""Every fault of weight sync, each on a real server: none ends with wrong weights."""

import base64
import concurrent.futures
import dataclasses
import json
import os
import pickle
import shutil
import signal
import time
import uuid

import numpy as np
import pytest
import safetensors.numpy

import logra_jax.rollout.link as link_module
from logra_jax.rollout.protocol import LOADER, STATUS_QUERY, Command, read_statuses
from logra_jax.rollout.servers import ServerError, Servers
from logra_jax.rollout.sglang import SGLangEngine
from logra_jax.rollout.sync import WeightSync
from logra_jax.rollout.types import Sampling

PROMPTS = [np.random.default_rng(i).integers(4, 260, 6).tolist() for i in range(4)]


@pytest.fixture
def pair(trainer, shared_server):
    """A trainer, and the sync with a server that many tests share."""
    sender = trainer("qwen2", "bfloat16")
    server = shared_server("qwen2", "bfloat16")
    with Servers([server.url]) as servers:
        sync = WeightSync(servers, sender.updates.history, deadline=60.0)
        sync.connect(sender.state(), load=True)
        yield sender, sync, servers, server


def call(servers: Servers, path: str, body=None, deadline: float = 60.0):
    return servers.run(servers.servers[0].call(path, body, deadline=deadline))


def give(servers: Servers, entries: list[str], load_format: str = LOADER):
    """An update as SGLang takes it; the status that the loader left."""
    call(servers, "/begin_weight_update", {})
    body = {"serialized_named_tensors": entries, "load_format": load_format}
    answer = call(servers, "/update_weights_from_tensor", body)
    call(servers, "/end_weight_update", {})
    assert answer["success"]  # whatever the loader made of it
    (status,) = read_statuses(call(servers, "/weights_checker", STATUS_QUERY))
    assert status is not None
    return status


def push(sync: WeightSync, sender):
    """One more update, sent; what came of it."""
    blob = sender.step()
    (report,) = sync.push(sender.state(), blob)
    return report


def holds(servers: Servers, sender) -> bool:
    """Read anew, the server's weights are the trainer's."""
    digest = sender.state().digest
    command = Command("identify", uuid.uuid4().hex, known={digest: sender.version})
    status = give(servers, command.entries(1))
    return (status.version, status.digest) == (sender.version, digest)


def refused(servers: Servers, body: bytes) -> str:
    status = give(servers, Command("update", "n", body=body).entries(1))
    assert status.nonce == "n"
    assert status.reason is not None
    return status.reason


def test_a_push_that_is_repeated_is_not_added_twice(pair):
    sender, sync, servers, _ = pair
    blob = sender.step()
    assert sync.push(sender.state(), blob)[0].outcome == "pushed"
    assert refused(servers, blob) == "repeated"
    assert holds(servers, sender)
    # The trainer, pushing it again, finds that it is there.
    assert sync.push(sender.state(), blob)[0].outcome == "held"


def test_a_push_that_was_skipped_is_caught_up(pair):
    sender, sync, servers, _ = pair
    sender.step()
    newest = sender.step()
    assert refused(servers, newest) == "base_version"
    (report,) = sync.push(sender.state(), newest)
    assert (report.outcome, servers.servers[0].ready) == ("caught_up", True)
    assert "version 0" in report.message
    assert holds(servers, sender)


def test_updates_that_are_no_longer_kept_are_a_full_push(pair):
    sender, sync, servers, _ = pair
    sender.step()
    (sender.where / "updates" / "000001.safetensors").unlink()
    sender.updates.history._links.clear()
    report = push(sync, sender)
    assert report.outcome == "loaded", report.message
    size = (sender.where / "full-2" / "model.safetensors").stat().st_size
    assert report.bytes > size
    assert holds(servers, sender)
    # And goes on from there by updates.
    assert push(sync, sender).outcome == "pushed"
    assert holds(servers, sender)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda blob: blob[:-1], "truncated"),
        (lambda blob: blob[:20], "truncated"),
        (lambda blob: b"", "truncated"),
        (lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]), "corrupted"),
        (lambda blob: os.urandom(1000), "not_safetensors"),
        (
            lambda blob: safetensors.numpy.save({"w": np.zeros(3, np.float32)}),
            "format",
        ),
    ],
)
def test_a_spoilt_blob_is_refused_and_the_next_push_arrives(pair, spoil, reason):
    sender, sync, servers, server = pair
    blob = sender.step()
    assert refused(servers, spoil(blob)) == reason
    assert server.process.poll() is None
    assert sync.push(sender.state(), blob)[0].outcome == "pushed"
    assert holds(servers, sender)


def test_a_spoilt_blob_of_the_trainers_own_is_healed(pair):
    sender, sync, servers, _ = pair
    blob = sender.step()
    (report,) = sync.push(sender.state(), blob[:-7])
    assert report.outcome == "caught_up"
    assert holds(servers, sender)


@pytest.mark.parametrize(
    "name", ["weights", ("a", b"b", 3), ("{}", b""), ('{"action": "dance"}', b"")]
)
def test_what_is_no_command_is_refused(pair, name):
    sender, sync, servers, _ = pair
    # [(name, torch.ByteTensor())], whatever the name is.
    inner = pickle.dumps(name, protocol=4)[11:-1]  # without frame and end
    entry = b"\x80\x04]" + inner + b"ctorch\nByteTensor\n)R\x86a."
    status = give(servers, [base64.b64encode(entry).decode()])
    assert (status.nonce, status.reason) == ("", "command")
    report = push(sync, sender)
    assert report.outcome == "pushed"
    assert holds(servers, sender)


def test_weights_that_somebody_else_changed_are_found_and_loaded(pair, tmp_path):
    sender, sync, servers, _ = pair
    other = tmp_path / "other"
    shutil.copytree(sender.source, other)
    tensors = safetensors.numpy.load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.roll(tensors[name], 1, axis=0)
    safetensors.numpy.save_file(
        tensors, other / "model.safetensors", metadata={"format": "pt"}
    )
    call(servers, "/update_weights_from_disk", {"model_path": str(other)})
    report = push(sync, sender)
    assert report.outcome == "loaded"
    assert holds(servers, sender)


def test_a_trainer_that_is_refused_leaves_another_ones_server_in_step(pair):
    sender, sync, servers, _ = pair
    assert push(sync, sender).outcome == "pushed"
    status = give(servers, Command("identify", "n", known={"0" * 16: 7}).entries(1))
    assert (status.version, status.digest) == (1, sender.state().digest)
    assert push(sync, sender).outcome == "pushed"


def test_a_session_that_a_dead_trainer_left_open_is_closed(pair):
    sender, sync, servers, _ = pair
    call(servers, "/begin_weight_update", {})
    call(servers, "/pause_generation", {"mode": "retract"})
    assert push(sync, sender).outcome == "pushed"
    assert holds(servers, sender)
    assert generate(servers, sender, 4).versions is not None  # and is not paused


def generate(servers: Servers, sender, new: int):
    engine = SGLangEngine(
        servers, max_positions=sender.max_positions, eos_ids=(), bucket=4
    )
    return engine.generate(
        None, PROMPTS, Sampling(temperature=0.0, max_new_tokens=new), None
    )


def slow_down(servers: Servers, seconds: float | None) -> None:
    """Each forward pass sleeps so long: requests run as long as the test needs."""
    call(servers, "/slow_down", {"forward_sleep_time": seconds})


def while_generating(servers: Servers, sender, work, new: int = 60):
    """``work`` done while requests run; what they came to."""
    slow_down(servers, 0.05)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        future = threads.submit(generate, servers, sender, new)
        try:
            end = time.monotonic() + 60
            while True:
                loads = call(servers, "/v1/loads")["loads"]
                if sum(load["num_running_reqs"] for load in loads) == len(PROMPTS):
                    break
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(0.3)
            work()
        finally:
            slow_down(servers, None)
        completions = future.result()
    assert (completions.lengths == new).all()
    return completions


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_requests_survive_a_push_and_say_which_version_made_each_token(pair, pause):
    sender, _, servers, _ = pair
    sync = WeightSync(servers, sender.updates.history, pause=pause, deadline=60.0)
    blob = sender.step()
    outcomes = []
    completions = while_generating(
        servers,
        sender,
        lambda: outcomes.extend(sync.push(sender.state(), blob)),
    )
    assert [report.outcome for report in outcomes] == ["pushed"]
    assert completions.versions is not None
    for row in completions.versions:
        assert set(row) == {0, 1}
        assert (np.diff(row) >= 0).all()
    assert holds(servers, sender)
    if pause == "retract":
        # No prefix of the old weights is left in the cache.
        body = {
            "input_ids": PROMPTS[0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        answer = call(servers, "/generate", body)
        assert answer["meta_info"]["cached_tokens"] in (0, 6)


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_no_prefix_of_older_weights_is_used_after_a_push(pair, tmp_path, pause):
    sender, _, servers, _ = pair
    sync = WeightSync(servers, sender.updates.history, pause=pause, deadline=60.0)
    sync.connect(sender.state())
    prompt = [PROMPTS[0] * 8]
    engine = SGLangEngine(
        servers, max_positions=sender.max_positions, eos_ids=(), bucket=4
    )
    cached = []
    server = servers.servers[0]
    ask = server.call

    async def watched(path, body=None, **options):
        answer = await ask(path, body, **options)
        cached.append(answer["meta_info"]["cached_tokens"])
        return answer

    def generate() -> int:
        sampling = Sampling(temperature=0.0, max_new_tokens=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "call", watched)
            engine.generate(None, prompt, sampling, None)
        return cached.pop()

    generate()
    assert generate() > 0
    assert push(sync, sender).outcome == "pushed"
    assert generate() == 0
    assert generate() > 0

    # Nor what an earlier run left at the version that another begins at.
    assert push(sync, sender).outcome == "pushed"
    other = type(sender)(sender.source, sender.dtype, tmp_path / "other")
    other.step()
    sync = WeightSync(servers, other.updates.history, pause=pause, deadline=60.0)
    assert sync.connect(other.state(), load=True)[0].outcome == "loaded"
    assert server.version == 1
    assert generate() == 0


def test_what_a_server_samples_after_it_was_lost_is_not_taken(pair, tmp_path):
    """Its requests go on, over weights that could not be brought to the trainer's."""
    sender, _, servers, _ = pair
    sync = WeightSync(servers, sender.updates.history, pause="in_place", deadline=60.0)
    sender.step()
    sender.updates.history._links.clear()
    blob = sender.step()
    nothing = dataclasses.replace(sender.state(), export=lambda: tmp_path / "nothing")
    outcomes = []
    with pytest.raises(ServerError, match="no longer holds the trainer's weights"):
        while_generating(
            servers, sender, lambda: outcomes.extend(sync.push(nothing, blob))
        )
    assert [report.outcome for report in outcomes] == ["lost"]
    assert sync.revive(sender.state())[0].outcome == "loaded"
    assert holds(servers, sender)
    assert (generate(servers, sender, 4).versions == 2).all()


def test_a_flush_that_is_refused_is_no_reason_to_send_the_update_again(
    pair, monkeypatch
):
    """SGLang changes the weights, then answers 400 as it cannot flush the cache."""
    sender, _, servers, _ = pair
    monkeypatch.setattr(link_module, "_flushes", lambda pause: True)
    sync = WeightSync(servers, sender.updates.history, pause="in_place", deadline=60.0)
    blob = sender.step()
    outcomes = []
    completions = while_generating(
        servers, sender, lambda: outcomes.extend(sync.push(sender.state(), blob))
    )
    assert [report.outcome for report in outcomes] == ["pushed"]
    assert completions.versions is not None
    assert set(completions.versions[0]) == {0, 1}
    assert holds(servers, sender)


def test_a_server_killed_in_a_push_and_restarted_from_the_base_catches_up(
    trainer, start_server
):
    sender = trainer("qwen2", "bfloat16")
    first = start_server(sender.source, "bfloat16")
    port = int(first.url.rsplit(":", 1)[1])
    with Servers([first.url]) as servers:
        sync = WeightSync(servers, sender.updates.history, deadline=20.0)
        sync.connect(sender.state())
        for _ in range(3):
            assert push(sync, sender).outcome == "pushed"
        blob = sender.step()
        original = link_module.Link._begin

        async def die(link):
            await original(link)
            os.killpg(first.process.pid, signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link_module.Link, "_begin", die)
            (report,) = sync.push(sender.state(), blob)
        assert report.outcome == "lost"
        assert not servers.servers[0].ready
        assert "cannot be reached" in report.message
        report = push(sync, sender)
        assert report.outcome == "lost"
        start_server(sender.source, "bfloat16", port=port)
        (report,) = sync.revive(sender.state())
        assert report.outcome == "caught_up"
        assert "version 0" in report.message
        assert holds(servers, sender)
        assert push(sync, sender).outcome == "pushed"
        assert holds(servers, sender)

        # It hangs: that is found in time, and healed once it answers again.
        again = WeightSync(servers, sender.updates.history, deadline=3.0)
        stopped = [int(pid) for pid in _tree(servers, port)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        blob = sender.step()
        began = time.monotonic()
        (report,) = again.push(sender.state(), blob)
        assert report.outcome == "lost"
        assert "did not answer" in report.message
        assert time.monotonic() - began < 20
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        (report,) = sync.revive(sender.state())
        assert report.outcome in ("caught_up", "held")
        assert holds(servers, sender)


def _tree(servers: Servers, port: int) -> list[int]:
    """Processes of the server that listens at ``port``, found by its command line."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                line = file.read()
        except OSError:
            continue
        if f"\0{port}\0".encode() in line and b"sglang_start" in line:
            found.append(int(entry))
    return found


def test_a_server_of_another_model_is_one_sentence(trainer, shared_server):
    sender = trainer("qwen3", "float32")
    server = shared_server("qwen2", "bfloat16")
    with Servers([server.url]) as servers:
        sync = WeightSync(servers, sender.updates.history, deadline=60.0)
        with pytest.raises(ValueError, match="must serve the trainer's model, but"):
            sync.connect(sender.state(), load=True)
        assert not servers.servers[0].ready


def test_a_server_of_another_dtype_is_one_sentence(trainer, shared_server):
    sender = trainer("qwen2", "float32")
    server = shared_server("qwen2", "bfloat16")
    with Servers([server.url]) as servers:
        sync = WeightSync(servers, sender.updates.history, deadline=60.0)
        said = "'lm_head|is bfloat16, the trainer's float32"
        with pytest.raises(ValueError, match=said):
            sync.connect(sender.state(), load=True)


def test_a_server_of_other_weights_is_refused_unless_they_may_be_loaded(
    trainer, shared_server
):
    sender = trainer("qwen2", "bfloat16")
    server = shared_server("qwen2", "bfloat16")
    with Servers([server.url]) as servers:
        sync = WeightSync(servers, sender.updates.history, deadline=60.0)
        sync.connect(sender.state(), load=True)
        sender.step()
        sender.updates.history._links.clear()
        with pytest.raises(ValueError, match=r"rollout\.load_weights=true"):
            sync.connect(sender.state())
        assert sync.connect(sender.state(), load=True)[0].outcome == "loaded"
        assert holds(servers, sender)


def test_a_server_without_the_loader_is_one_sentence_and_lives(
    trainer, sglang_python, start_server, monkeypatch
):
    import logra_jax.rollout.serve as serve_module

    monkeypatch.setattr(serve_module, "LOADER", "json.dumps")
    sender = trainer("qwen2", "bfloat16")
    server = start_server(sender.source, "bfloat16")
    with Servers([server.url]) as servers:
        sync = WeightSync(servers, sender.updates.history, deadline=60.0)
        with pytest.raises(ValueError, match="must have the weight loader"):
            sync.connect(sender.state(), load=True)
        # So is one that was ready once, and was restarted without it.
        servers.servers[0].ready = True
        report = push(sync, sender)
        assert report.outcome == "lost"
        assert "must have the weight loader" in report.message
        assert server.process.poll() is None
        assert call(servers, "/server_info")["version"]


def test_nobody_there_is_one_sentence(trainer):
    sender = trainer("qwen2", "bfloat16")
    with Servers(["http://127.0.0.1:9"]) as servers:
        sync = WeightSync(servers, sender.updates.history, deadline=5.0)
        with pytest.raises(ValueError, match=r"127\.0\.0\.1:9 cannot be reached"):
            sync.connect(sender.state())


def test_statuses_are_json(pair):
    """What anybody can read: the last status, of every rank."""
    sender, sync, servers, _ = pair
    push(sync, sender)
    reply = call(servers, "/weights_checker", STATUS_QUERY)
    (name,) = reply["ranks"][0]["checksums"]
    status = json.loads(name.removeprefix("logra "))
    assert status["version"] == sender.version
    assert status["digest"] == sender.state().digest

"""`logra serve` with the real SGLang: it starts, or says why not, and never stays."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logra_jax.rollout.serve import Launched, LaunchError, is_healthy

CONFIG = """
model: {{path: {model}, dtype: float32}}
train: {{steps: 1}}
serve: {{python: {python}, port: 0, device: cpu, threads: 1, max_tokens: 16384}}
"""


def generate(url: str, key: str | None = None) -> Any:
    body = {
        "input_ids": [5, 6, 7],
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
    }
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/generate", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def processes() -> dict[int, list[str]]:
    """State, parent, group, ... of every process that runs, by its id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            if fields[0] != "Z":  # ended, and not waited for yet
                found[int(entry.name)] = fields
    return found


def children(parent: int) -> list[int]:
    return [pid for pid, fields in processes().items() if int(fields[1]) == parent]


def assert_ends(group: int, seconds: float = 20.0) -> None:
    """Every process of a group ends within a time."""
    deadline = time.monotonic() + seconds
    while True:
        left = [pid for pid, f in processes().items() if int(f[2]) == group]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert left == []


def test_token_ids_go_in_and_come_out_with_log_probs(
    shared_server: Callable[..., Launched],
):
    server = shared_server("qwen2", "float32")
    answer = generate(server.url)
    logprobs = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == answer["output_ids"]
    assert len(logprobs) == 3
    assert all(logprob < 0 for logprob, _, _ in logprobs)


def test_a_server_that_dies_while_starting_says_what_sglang_said(
    start_server: Callable[..., Launched], tiny_model: Callable[[str, str], Path]
):
    model = tiny_model("qwen2", "float32")
    with pytest.raises(LaunchError, match="ended while starting") as error:
        start_server(model, "float32", args=("--no-such-flag",))
    assert "unrecognized arguments: --no-such-flag" in str(error.value)


StartCommand = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start_command(
    sglang_python: str, tiny_model: Callable[[str, str], Path], tmp_path: Path
) -> Iterator[StartCommand]:
    """`logra serve` in a process of its own, its output in `tmp_path`, with a key."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        config = tmp_path / "config.yaml"
        model = tiny_model("qwen2", "float32")
        config.write_text(CONFIG.format(model=model, python=sglang_python))
        command = [sys.executable, "-m", "logra_jax", "serve", str(config)]
        with (tmp_path / "output").open("wb") as file:
            process = subprocess.Popen(
                [*command, f"serve.log={tmp_path / 'log'}"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"SGLANG_API_KEY": "secret"},
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_serves_until_it_is_told_to_stop_or_dies(
    start_command: StartCommand, tmp_path: Path, end: signal.Signals
):
    serve = start_command()
    while "Ctrl-C stops it." not in (text := (tmp_path / "output").read_text()):
        assert serve.poll() is None, text
        time.sleep(0.2)
    [trained] = [line for line in text.splitlines() if "logra train" in line]
    url = trained.partition("rollout.urls=[")[2].partition("]")[0]
    [server] = children(serve.pid)

    assert generate(url, "secret")["meta_info"]["completion_tokens"] == 3
    with pytest.raises(urllib.error.HTTPError, match="401"):
        generate(url)
    # SGLang writes its options there, the key among them.
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0

    serve.send_signal(end)
    assert serve.wait(30) == {signal.SIGTERM: 0, signal.SIGKILL: -9}[end]
    assert_ends(server)
    assert not is_healthy(url)


def test_workers_that_are_still_starting_die_with_the_command(
    start_command: StartCommand, tmp_path: Path
):
    serve = start_command()
    servers: list[int] = []
    # Workers, and the process in which Python keeps track of what they share.
    while not any(len(children(server)) >= 2 for server in servers):
        assert serve.poll() is None, (tmp_path / "output").read_text()
        servers = children(serve.pid)
    serve.kill()
    assert_ends(servers[0])


@pytest.mark.parametrize(
    ("cuda", "chosen", "platform"),
    [
        (True, None, "CudaSRTPlatform"),
        (False, None, "SRTPlatform"),
        (False, "logra_cpu", "TorchPlatform"),
    ],
)
def test_plain_torch_takes_over_only_where_it_is_chosen(
    sglang_python: str, cuda: bool, chosen: str | None, platform: str
):
    code = f"""
import torch
from logra_jax.rollout.sglang_start import stand_in
stand_in()  # SGLang itself needs triton; this environment has none
torch.cuda.is_available = lambda: {cuda}
torch.cuda.get_device_name = lambda *_: "H200"
from sglang.srt.platforms import current_platform
print(type(current_platform).__name__)
"""
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_PLATFORM"}
    if chosen is not None:
        environment["SGLANG_PLATFORM"] = chosen
    result = subprocess.run(
        [sglang_python, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.stdout.split() == [platform], result.stderr

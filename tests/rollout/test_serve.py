"""Starting and stopping a server, with a stand-in for SGLang: its command, its end."""

import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logra_jax.rollout.serve import (
    LaunchError,
    ServeOptions,
    free_port,
    is_healthy,
    launch,
    server_command,
    server_environment,
)

# A Python with "SGLang": says what it has, and serves /health.
FAKE = """\
#!{python}
import sys, os
sys.path.insert(0, {repo!r})
if sys.argv[1] == "-c":
    print({has!r})
    sys.exit()
assert sys.argv[1:3] == ["-m", "logra_jax.rollout.sglang_start"], sys.argv
from logra_jax.rollout.sglang_start import tie_to_parent
tie_to_parent()
print("loading", *sys.argv[3:], flush=True)
{body}
"""
HAS = ["0.5.23", "0.1.0", ["logra_cpu"], False]
SERVES = """
import http.server, subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # a worker
asked = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        self.send_response(200 if asked > 2 else 503)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
# Run before other code: Python as it is where triton and torchvision are missing.
WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in ("triton", "torchvision"):
            return super().find_spec(name, path, target)
sys.meta_path = [Without if f is PathFinder else f for f in sys.meta_path]
"""
REPO = str(Path(__file__).parents[2])


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


@pytest.fixture
def options(tmp_path: Path, model_dir: Path) -> Callable[..., ServeOptions]:
    """Options of a server whose interpreter is the stand-in with this `body`."""

    def build(body: str = SERVES, has: Any = HAS, **fields: Any) -> ServeOptions:
        fake = tmp_path / "python"
        text = FAKE.format(
            python=sys.executable, repo=REPO, has=json.dumps(has), body=body
        )
        fake.write_text(text)
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        defaults = {"python": str(fake), "port": 0, "log": tmp_path / "log"}
        return ServeOptions(model_dir=model_dir, dtype="float32", **(defaults | fields))

    return build


def running(group: int) -> list[int]:
    """Processes of a group that run; those dead but not yet waited for do not."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def test_a_gpu_server_gets_the_loader_and_token_ids_only(model_dir: Path):
    options = ServeOptions(
        model_dir=model_dir,
        dtype="bfloat16",
        python="py",
        tp=2,
        memory=0.8,
        args=("--log-level", "debug"),
    )
    assert server_command(options, "cuda", 30000) == [
        *("py", "-m", "logra_jax.rollout.sglang_start"),
        *("--model-path", str(model_dir)),
        *("--dtype", "bfloat16"),
        *("--device", "cuda"),
        *("--host", "127.0.0.1"),
        *("--port", "30000"),
        *("--tp-size", "2"),
        *("--mem-fraction-static", "0.8"),
        *("--custom-weight-loader", "logra_jax.rollout.sglang_loader.apply"),
        "--skip-tokenizer-init",
        *("--log-level", "debug"),
    ]


def test_a_cpu_server_gets_a_bounded_cache_and_leaves_cores_alone_when_idle(
    model_dir: Path,
):
    options = ServeOptions(model_dir=model_dir, dtype="float32", text=True)
    command = server_command(options, "cpu", 30000)
    assert command[command.index("--max-total-tokens") + 1] == "32768"
    assert "--sleep-on-idle" in command
    assert "--skip-tokenizer-init" not in command


def test_only_a_cpu_server_chooses_plain_torch(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 8})
    options = ServeOptions(
        model_dir=model_dir,
        dtype="float32",
        tp=2,
        threads=2,
        environment={"MORE": "1"},
    )
    gpu, cpu = (server_environment(options, device) for device in ("cuda", "cpu"))
    assert "SGLANG_PLATFORM" not in gpu
    assert gpu["MORE"] == cpu["MORE"] == "1"
    assert cpu["SGLANG_PLATFORM"] == "logra_cpu"
    assert cpu["OMP_NUM_THREADS"] == "2"
    assert cpu["SGLANG_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
    # It would make log-probs those of temperature 1.
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in gpu


def test_launch_waits_until_the_server_answers_and_stop_leaves_no_process(
    options: Callable[..., ServeOptions],
):
    with launch(options()) as server:
        assert is_healthy(server.url)
        assert server.device == "cpu"
        assert len(running(server.process.pid)) == 2
        assert "--dtype float32" in server.log_tail()
    assert running(server.process.pid) == []
    assert not is_healthy(server.url)


def test_a_server_that_dies_while_starting_is_an_error_with_its_last_words(
    options: Callable[..., ServeOptions],
):
    words = '[print("line", i) for i in range(100)]; sys.exit("out of memory")'
    with pytest.raises(LaunchError) as error:
        launch(options(words))
    lines = str(error.value).splitlines()
    assert "ended while starting, with status 1" in lines[0]
    assert lines[-1] == "out of memory"
    assert len(lines) == 21


def test_a_server_that_does_not_answer_in_time_is_an_error_and_is_killed(
    options: Callable[..., ServeOptions],
):
    sleeps = "print(os.getpid(), flush=True); import time; time.sleep(600)"
    with pytest.raises(LaunchError, match="did not answer within 1 seconds") as error:
        launch(options(sleeps, start_timeout=1.0))
    assert running(int(str(error.value).splitlines()[-1])) == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_server_dies_with_the_process_that_launched_it(
    options: Callable[..., ServeOptions],
):
    body = SERVES.replace("subprocess.Popen", "0 and subprocess.Popen")
    given = options(body)
    code = """
import os, signal, sys
from pathlib import Path
from logra_jax.rollout.serve import ServeOptions, launch
model, python, log = sys.argv[1:]
server = launch(ServeOptions(
    model_dir=Path(model), dtype="float32", python=python, port=0, log=Path(log)
))
print(server.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", code, str(given.model_dir), given.python]
    command.append(str(given.log))
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert result.returncode == -signal.SIGKILL, result.stderr
    server = int(result.stdout)
    deadline = time.monotonic() + 10
    while running(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(server) == []


@pytest.mark.parametrize(
    ("has", "message"),
    [
        ([None, "0.1.0", [], False], "must have SGLang, got"),
        (["0.5.20", "0.1.0", ["logra_cpu"], False], "SGLang must be 0.5.21 or newer"),
        (["0.5.23", None, [], True], "must have logra-jax too, got"),
        (["0.5.23", "0.1.0", [], False], "must have logra-jax too, got"),
    ],
)
def test_an_environment_that_lacks_something_is_refused_before_anything_starts(
    options: Callable[..., ServeOptions], has: list[Any], message: str
):
    with pytest.raises(ValueError, match=message):
        launch(options(has=has))


@pytest.mark.parametrize("python", ["no-such-python", "/bin/false", "/bin/echo"])
def test_an_interpreter_that_is_none_is_refused(
    options: Callable[..., ServeOptions], python: str
):
    with pytest.raises(ValueError, match=r"`serve\.python` must be a Python"):
        launch(options(python=python))


def test_a_directory_that_holds_no_model_is_refused(
    options: Callable[..., ServeOptions], tmp_path: Path, model_dir: Path
):
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"which has no \*\.safetensors file"):
        launch(options())
    with pytest.raises(ValueError, match=r"which has no config\.json"):
        launch(dataclasses.replace(options(), model_dir=tmp_path / "none"))


def test_a_port_in_use_is_refused(options: Callable[..., ServeOptions]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"`serve\.port` must be free"):
            launch(options(port=taken.getsockname()[1]))


def test_an_address_of_another_machine_is_refused(options: Callable[..., ServeOptions]):
    with pytest.raises(ValueError, match=r"`serve\.host` .* 192\.0\.2\.1 .* assign"):
        launch(options(host="192.0.2.1"))  # an address for documentation (RFC 5737)


def test_no_outgoing_connection_takes_a_free_port():
    ports = [free_port() for _ in range(50)]
    assert all(1024 <= port < 32_768 for port in ports)  # where Linux's range begins
    assert len(set(ports)) > 40  # two who ask at once get two


def test_a_gpu_is_used_where_there_is_one(options: Callable[..., ServeOptions]):
    has = ["0.5.23", "0.1.0", ["logra_cpu"], True]
    with launch(options(has=has)) as server:
        assert server.device == "cuda"
    with launch(options(has=has, device="cpu")) as server:
        assert server.device == "cpu"


def test_gated_delta_nets_are_served_on_gpus_only(options: Callable[..., ServeOptions]):
    has = ["0.5.23", "0.1.0", ["logra_cpu"], False]
    with pytest.raises(ValueError, match=r"must be served on a GPU.* 'auto'.* a CPU"):
        launch(options(has=has, has_delta=True))
    with launch(options(has=[*has[:3], True], has_delta=True)) as server:
        assert server.device == "cuda"


def test_an_api_key_is_in_no_command_line_and_no_representation(model_dir: Path):
    options = ServeOptions(model_dir=model_dir, dtype="float32", api_key="secret")
    assert "secret" not in " ".join(server_command(options, "cpu", 30000))
    assert "secret" not in repr(options)
    assert "secret" in server_environment(options, "cpu").values()


def test_missing_packages_are_stood_in_for_only_where_plain_torch_is_chosen():
    code = """
import logra_jax.rollout.sglang_start
import triton, torchvision.transforms
import triton.language as tl
from torchvision.transforms import InterpolationMode
@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=[])
@triton.jit
def kernel(x: tl.constexpr): return x
print(triton.cdiv(7, 2), triton.next_power_of_2(5), kernel(3), tl.float32 is not None)
"""
    chosen = os.environ | {"SGLANG_PLATFORM": "logra_cpu"}
    command = [sys.executable, "-c", WITHOUT + code]
    result = subprocess.run(command, capture_output=True, text=True, env=chosen)
    assert result.stdout.split() == ["4", "8", "3", "True"], result.stderr
    other = {k: v for k, v in chosen.items() if k != "SGLANG_PLATFORM"}
    result = subprocess.run(command, capture_output=True, text=True, env=other)
    assert "No module named" in result.stderr

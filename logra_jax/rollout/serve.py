"""Starting an SGLang server that follows a trainer's updates, and stopping it.

The server runs in an environment of its own (another Python, with SGLang and torch and
without JAX) in which this package is installed too; `launch` asks that Python what it
has, starts it as a process, and waits until it answers.

    with launch(ServeOptions(model_dir=Path("my-model"), dtype="bfloat16")) as server:
        print(server.url)

The server never outlives the process that launched it: it is stopped at the end of the
`with`, and on Linux the kernel kills it when the launching thread is gone.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

from logra_jax.rollout.protocol import (
    LOADER,
    OLDEST_SGLANG,
    TESTED_SGLANG,
    is_supported,
)
from logra_jax.rollout.sglang_start import (
    API_KEY,
    CPU_ENVIRONMENT,
    CPU_PLATFORM,
    PARENT,
)

CPU_POOL = 32768
"""Default of `max_tokens` on a CPU, where SGLang would take most of the memory."""

_PORTS = range(20_000, 30_000)  # of `free_port`
_TAIL = 20  # lines of the log in an error
_POLL = 0.2  # seconds between two looks at a server that starts

# Asked of the server's Python: what is installed there, and is there a GPU?
_QUESTION = """\
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
cuda = False
if sys.argv[1] == "auto" and version("torch"):
    import torch
    cuda = torch.cuda.is_available()
platforms = [e.name for e in m.entry_points(group="sglang.srt.platforms")]
print(json.dumps([version("sglang"), version("logra-jax"), platforms, cuda]))
"""


class LaunchError(Exception):
    """A server did not start: why, and the last lines of its log."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to serve, where, and with how much.

    Attributes:
        model_dir: Hugging Face directory of the model that the trainer begins from.
        dtype: of the weights, as the trainer holds them: "bfloat16" or "float32".
        python: the interpreter that has SGLang.
        host: the address to listen at.
        port: the port to listen at; 0 takes a free one.
        tp: tensor-parallel ranks.
        device: "cuda"; "cpu" for plain torch; "auto" for a GPU where torch finds one.
        has_delta: the model has Gated DeltaNet layers, which need a GPU and bfloat16.
        memory: share of the GPU's memory for weights and KV cache; None lets SGLang
            choose.
        max_tokens: size of the KV cache, tokens; None fits it to the memory on a GPU,
            and is `CPU_POOL` on a CPU.
        max_running: requests answered at once; None lets SGLang choose.
        threads: of each rank, on a CPU; None is 1.
        text: load the tokenizer, for text in and out; training needs token ids only.
        start_timeout: seconds until the server must answer.
        api_key: that requests must bring; None is no key.
        log: file for the server's output; None makes a temporary one.
        args: further flags of SGLang, as given; they come last.
        environment: further environment variables.
    """

    model_dir: Path
    dtype: str
    python: str = sys.executable
    host: str = "127.0.0.1"
    port: int = 30000
    tp: int = 1
    device: Literal["auto", "cuda", "cpu"] = "auto"
    has_delta: bool = False
    memory: float | None = None
    max_tokens: int | None = None
    max_running: int | None = None
    threads: int | None = None
    text: bool = False
    start_timeout: float = 600.0
    api_key: str | None = field(default=None, repr=False)
    log: Path | None = None
    args: Sequence[str] = ()
    environment: Mapping[str, str] | None = None


def server_command(
    options: ServeOptions, device: Literal["cuda", "cpu"], port: int
) -> list[str]:
    """The command line of the server's process, for a device and a port."""
    flags: dict[str, object] = {
        "--model-path": options.model_dir,
        "--dtype": options.dtype,
        "--device": device,
        "--host": options.host,
        "--port": port,
        "--tp-size": options.tp,
        "--mem-fraction-static": options.memory,
        "--max-total-tokens": options.max_tokens,
        "--max-running-requests": options.max_running,
        "--custom-weight-loader": LOADER,
    }
    if device == "cpu" and options.max_tokens is None:
        flags["--max-total-tokens"] = CPU_POOL
    command = [options.python, "-m", "logra_jax.rollout.sglang_start"]
    for name, value in flags.items():
        command += [name, str(value)] if value is not None else []
    if not options.text:
        command.append("--skip-tokenizer-init")
    if device == "cpu":
        command.append("--sleep-on-idle")  # or it takes a core while the trainer works
    return [*command, *options.args]


def server_environment(
    options: ServeOptions, device: Literal["cuda", "cpu"]
) -> dict[str, str]:
    """The environment of the server's process: this one's, and what it needs."""
    environment = dict(os.environ)
    # Log-probs are to be those of the sampling temperature.
    environment.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
    environment[PARENT] = str(os.getpid())
    environment.setdefault("HF_HUB_OFFLINE", "1")  # the model is a directory
    if options.api_key is not None:
        environment[API_KEY] = options.api_key
    if device == "cpu":
        # One by default: plain torch attends to one sequence at a time, which is too
        # little work for two, and threads that wait for each other stall where the
        # machine is busy.
        threads = options.threads or 1
        environment |= CPU_ENVIRONMENT
        environment["OMP_NUM_THREADS"] = str(threads)
        if options.tp > 1:  # SGLang wants to be told each rank's cores
            cores = sorted(os.sched_getaffinity(0))
            groups = [
                {cores[(rank * threads + i) % len(cores)] for i in range(threads)}
                for rank in range(options.tp)
            ]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                ",".join(map(str, sorted(group))) for group in groups
            )
    return environment | dict(options.environment or {})


class Launched:
    """A server that answers; stopped at the end of a `with`, or by `stop`.

    Attributes:
        url: where it answers, without a slash at the end.
        process: the server's first process; its workers are in the same process group.
        log: the file with its output.
        device: "cuda" or "cpu".
    """

    def __init__(
        self, url: str, process: subprocess.Popen[bytes], log: Path, device: str
    ):
        self.url = url
        self.process = process
        self.log = log
        self.device = device

    def __enter__(self) -> "Launched":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self, grace: float = 0.0) -> None:
        """End the server and all its workers.

        Args:
            grace: seconds for it to finish what it is answering; 0 kills at once.
        """
        try:
            if grace and self.process.poll() is None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(grace)
        finally:
            # The group outlives its first process while a worker lives.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def log_tail(self, lines: int = _TAIL) -> str:
        """The last lines of its output."""
        return "\n".join(
            self.log.read_text(errors="replace").rstrip().splitlines()[-lines:]
        )


def launch(options: ServeOptions) -> Launched:
    """Start a server and wait until it answers.

    Args:
        options: what to serve, where, and with how much.

    Raises:
        ValueError: an option that cannot be, a Python without SGLang or this package.
        LaunchError: the server ended, or did not answer in time.
    """
    _check(options)
    device = _choose_device(options)
    _require_free(options.host, options.port)
    port = options.port or free_port(options.host)
    log, output = _open_log(options.log, port)
    with output:
        process = subprocess.Popen(
            server_command(options, device, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=server_environment(options, device),
            start_new_session=True,  # Ctrl-C comes to us, and `stop` finds them all
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    where = f"[{host}]" if ":" in host else host
    server = Launched(f"http://{where}:{port}", process, log, device)
    try:
        _await_health(server, options.start_timeout)
    except BaseException:
        server.stop()
        raise
    return server


def is_healthy(url: str, timeout: float = 20.0) -> bool:
    """Whether the server at `url` generates a token within `timeout` seconds."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=timeout) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """A port for a server that will listen at it some seconds later.

    It lies below the ports from which systems take one for every outgoing connection
    (from 32,768 on Linux, 49,152 elsewhere): of those, any may be taken until then.

    Raises:
        OSError: none was found.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket(_family(host)) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(
        f"of 100 ports from {_PORTS[0]} to {_PORTS[-1]} none was free at {host!r}"
    )


def _open_log(log: Path | None, port: int) -> tuple[Path, BinaryIO]:
    """For its owner's eyes: SGLang writes all its options there, the key among them."""
    if log is None:
        number, name = tempfile.mkstemp(".log", f"logra-serve-{port}-")
        return Path(name), os.fdopen(number, "wb")
    log.parent.mkdir(parents=True, exist_ok=True)
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    return log, os.fdopen(number, "wb")


def _await_health(server: Launched, timeout: float) -> None:
    start = time.monotonic()
    while True:
        seconds = time.monotonic() - start
        status = server.process.poll()
        if status is not None:
            server.stop()  # the workers' last lines are in the log then
            reason = f"The server ended while starting, with status {status}"
        elif seconds > timeout:
            reason = f"The server did not answer within {timeout:g} seconds"
        elif is_healthy(server.url):
            return
        else:
            time.sleep(_POLL)
            continue
        raise LaunchError(
            f"{reason}; the last lines of {server.log}:\n{server.log_tail()}"
        )


def _check(options: ServeOptions) -> None:
    if not (options.model_dir / "config.json").is_file():
        raise ValueError(
            "The model must be a Hugging Face directory, got "
            f"{str(options.model_dir)!r}, which has no config.json."
        )
    if not any(options.model_dir.glob("*.safetensors")):
        raise ValueError(
            "The model must be a Hugging Face directory, got "
            f"{str(options.model_dir)!r}, which has no *.safetensors file."
        )


def _choose_device(options: ServeOptions) -> Literal["cuda", "cpu"]:
    """Ask the server's Python what it has.

    Raises:
        ValueError: no such Python, no SGLang, too old a SGLang, or not this package.
    """
    python = options.python
    question = [python, "-c", _QUESTION, options.device]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, check=True)
        sglang, logra, platforms, cuda = json.loads(answer.stdout)
    except OSError as error:
        raise ValueError(
            f"`serve.python` must be a Python interpreter, got {python!r}: "
            f"{error.strerror}."
        ) from None
    except (subprocess.CalledProcessError, ValueError):
        raise ValueError(
            f"`serve.python` must be a Python interpreter, got {python!r}, which does "
            "not run Python code."
        ) from None
    if sglang is None:
        raise ValueError(
            f"`serve.python` must have SGLang, got {python!r}, which has none; name "
            "the interpreter of the environment that has it."
        )
    if not is_supported(sglang):
        raise ValueError(
            f"SGLang must be {OLDEST_SGLANG} or newer "
            f"({TESTED_SGLANG} is tested), got {sglang} in {python!r}; upgrade it."
        )
    device = options.device
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    if logra is None or (device == "cpu" and CPU_PLATFORM not in platforms):
        raise ValueError(
            f"`serve.python` must have logra-jax too, got {python!r}, which has none "
            f"of this version; run `{python} -m pip install --no-deps logra-jax`."
        )
    if device == "cpu" and options.has_delta:
        raise ValueError(
            "A model with Gated DeltaNet layers must be served on a GPU, since SGLang "
            "has them in Triton only, got `serve.device` "
            f"{options.device!r} and {python!r}, which gives a CPU; use "
            "`rollout.engine=local` here."
        )
    return device


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _require_free(host: str, port: int) -> None:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"`serve.host` and `serve.port` must be free to listen at, got {host} "
                f"and {port}: {error.strerror}; choose another port, or 0 for any."
            ) from None

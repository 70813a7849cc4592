"""What benches against SGLang servers share: the servers, and the way to report."""

import contextlib
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import jax

from logra_jax.rollout.serve import LaunchError, launch
from logra_jax.rollout.servers import Servers
from logra_jax.training.display import Display
from logra_jax.training.schema import Config
from logra_jax.training.serve import serve_options

_QUICK = 30.0  # seconds for a question to a server

Result = dict[str, Any]


def run_bench(
    measure: Callable[[], Result],
    print_table: Callable[[Result], None],
    *,
    as_json: bool,
) -> int:
    """Measure, print, and return the exit code.

    Returns:
        0, or 1 where a server did not start.
    """
    # SIGTERM, like Ctrl-C, unwinds the stack: no server and no files stay behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = measure()
    except LaunchError as error:
        print(f"logra: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    print(json.dumps(result)) if as_json else print_table(result)
    return 0


@contextlib.contextmanager
def server_urls(config: Config, display: Display) -> Iterator[list[str]]:
    """``rollout.urls``, or a server of section ``serve`` that lives as long as this.

    Raises:
        LaunchError: the server did not start.
        ValueError: no such model, one that cannot be trained, too many ranks for it.
    """
    if config.rollout.urls:
        yield config.rollout.urls
        return
    options = serve_options(config)
    with contextlib.ExitStack() as stack:
        with display.phase(f"starting SGLang with {options.model_dir}"):
            server = stack.enter_context(launch(options))
        yield [server.url]


def connect(config: Config, urls: list[str]) -> Servers:
    """The client of servers, with the API key of a config."""
    return Servers(urls, api_key=os.environ.get(config.rollout.api_key_env))


def describe(servers: Servers) -> Result:
    """What a result says of the machine, the versions and the servers."""
    call = servers.servers[0].call("/server_info", deadline=_QUICK, retries=2)
    info = servers.run(call)
    return {
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "cores": os.cpu_count(),
        "versions": {n: metadata.version(n) for n in ("logra-jax", "jax")}
        | {"python": platform.python_version(), "sglang": str(info["version"])},
        "servers": len(servers.servers),
        "server_device": info.get("device"),
        "tensor_parallel": info.get("tp_size"),
    }


def setting(result: Result) -> str:
    """What `describe` found, in two lines for the head of a table."""
    servers = result["servers"]
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    return (
        f"{servers} server{'s' if servers > 1 else ''} on {result['server_device']}, "
        f"tensor parallel {result['tensor_parallel']}; trainer on {result['device']}, "
        f"{result['cores']} cores\n{versions}"
    )

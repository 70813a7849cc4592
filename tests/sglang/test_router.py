"""Generation through a real SGLang router, updates to the servers behind it."""

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from logra_jax.rollout.serve import free_port
from logra_jax.rollout.servers import Servers
from logra_jax.rollout.sglang import SGLangEngine
from logra_jax.rollout.sync import WeightSync
from logra_jax.rollout.types import Sampling

PROMPTS = [
    np.random.default_rng(i).integers(4, 260, 5 + i % 7).tolist() for i in range(24)
]
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)


@contextmanager
def router(python: str, urls: list[str], log: Path) -> Iterator[str]:
    """A router in front of servers, ended with the block."""
    port, metrics = free_port(), free_port()
    command = [python, "-m", "sglang_router.launch_router", "--worker-urls", *urls]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            assert time.monotonic() < end, log.read_text(errors="replace")[-2000:]
            try:
                with urllib.request.urlopen(f"{url}/readiness", timeout=5) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_requests_go_through_the_router_and_updates_to_the_servers(
    trainer, start_server: Callable, sglang_python: str, tmp_path: Path
):
    sender = trainer("qwen2", "float32")
    both = [start_server(sender.source, "float32") for _ in range(2)]
    urls = [server.url for server in both]
    with (
        router(sglang_python, urls, tmp_path / "router.log") as front,
        Servers(urls, router=front) as servers,
    ):
        sync = WeightSync(servers, sender.updates.history, deadline=60.0)
        assert [r.outcome for r in sync.connect(sender.state())] == ["held", "held"]
        engine = SGLangEngine(
            servers, max_positions=sender.max_positions, eos_ids=(1,), bucket=4
        )
        for version in range(3):
            through = engine.generate(None, PROMPTS, GREEDY, None)
            assert through.versions is not None
            assert set(through.versions[through.mask]) == {version}
            blob = sender.step()
            reports = sync.push(sender.state(), blob)
            assert [report.outcome for report in reports] == ["pushed", "pushed"]
        through = engine.generate(None, PROMPTS, GREEDY, None)
        direct = []
        for url in urls:
            with Servers([url]) as one:
                one.servers[0].ready = True
                alone = SGLangEngine(
                    one, max_positions=sender.max_positions, eos_ids=(1,), bucket=4
                )
                direct.append(alone.generate(None, PROMPTS, GREEDY, None))
        for other in direct:
            np.testing.assert_array_equal(through.tokens, other.tokens)
            np.testing.assert_allclose(through.logprobs, other.logprobs, atol=1e-4)
        served = [
            text.count("POST /generate")
            for text in (server.log.read_text(errors="replace") for server in both)
        ]
        assert min(served) > len(PROMPTS)  # the router spread them

        # One dies: nothing is lost, whatever the router does with it.
        both[0].stop()
        through = engine.generate(None, PROMPTS, GREEDY, None)
        np.testing.assert_array_equal(through.tokens, direct[1].tokens)

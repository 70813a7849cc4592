"""`logra bench sync` against real servers: its figures are those of what was sent."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from logra_jax import cli
from logra_jax.models.hf import load_tensors
from logra_jax.rollout.serve import Launched
from logra_jax.rollout.servers import Servers
from logra_jax.training.updates import Updates

REPEAT = 2
CONFIG = """
model: {{path: {model}, dtype: bfloat16}}
sketch: {{rank: 4}}
train: {{steps: 1}}
serve: {{python: {python}, port: 0, device: cpu, threads: 1, max_tokens: 16384}}
"""


@pytest.fixture
def config(
    tiny_model: Callable[[str, str], Path], sglang_python: str, tmp_path: Path
) -> str:
    path = tmp_path / "tiny.yaml"
    model = tiny_model("qwen2", "bfloat16")
    path.write_text(CONFIG.format(model=model, python=sglang_python))
    return str(path)


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the updates that the trainer makes."""
    sizes: list[int] = []
    write = Updates.write

    def noted(self: Updates, *args) -> bytes:
        blob = write(self, *args)
        sizes.append(len(blob))
        return blob

    monkeypatch.setattr(Updates, "write", noted)
    return sizes


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """What `--json` prints: one line, one object."""
    argv = ["bench", "sync", "--json", "--repeat", str(REPEAT), *arguments]
    assert cli.main(argv) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_figures_are_of_what_was_sent_to_a_server_of_its_own(
    config, blobs, capsys, tmp_path
):
    result = bench(capsys, config)
    push, full = result["measured"]["push"], result["measured"]["full"]
    # updates in turns: one is pushed, the next one's weights are loaded; two warm up
    assert len(blobs) == 2 * (1 + REPEAT)
    assert push["payload_bytes"] == blobs[2::2]
    for payload, sent in zip(push["payload_bytes"], push["sent_bytes"], strict=True):
        assert 4 * payload / 3 < sent < 4 * payload / 3 + 500
    tensors = load_tensors(_model_of(config))
    raw = sum(tensor.nbytes for tensor in tensors.values())
    assert all(raw < size < raw + 8192 for size in full["bytes"])
    assert result["weights"] == raw // 2  # bfloat16
    assert result["ratios"]["bytes"] > 1

    for kind, lists in result["measured"].items():
        for name, values in lists.items():
            assert len(values) == REPEAT
            assert min(values) > 0
            assert result["medians"][kind][name] == statistics.median(values)
    for i in range(REPEAT):
        parts = push["apply_seconds"][i] + push["acknowledge_seconds"][i]
        assert parts < push["paused_seconds"][i] < push["total_seconds"][i]
        assert full["load_seconds"][i] < full["paused_seconds"][i]
        total = full["write_seconds"][i] + full["paused_seconds"][i]
        assert full["total_seconds"][i] == pytest.approx(total)
    assert result["verified"] is True
    assert (result["servers"], result["server_device"]) == (1, "cpu")
    assert result["rank"] == 4
    assert result["shape"]["num_layers"] == 2
    assert {"sglang", "jax", "python"} < set(result["versions"])


def test_servers_that_run_already_end_at_the_digest_that_is_told(
    config, start_server, capsys, tmp_path
):
    """Two servers, one of which holds other weights at first; both live on."""
    model = _model_of(config)
    servers = [start_server(model, "bfloat16", tp=1) for _ in range(2)]
    urls = [server.url for server in servers]
    where = tmp_path / "shared"
    arguments = [
        config,
        "rollout.engine=sglang",
        f"rollout.urls=[{','.join(urls)}]",
        f"rollout.share_dir={where}",
    ]
    first = bench(capsys, arguments[0], arguments[1], f"rollout.urls=[{urls[0]}]")
    second = bench(capsys, *arguments)
    assert second["servers"] == 2
    # the same random updates of the same model, from the start
    assert second["digest"] == first["digest"]
    assert _checksums(servers[0]) == _checksums(servers[1])
    assert list(where.iterdir()) == []


def _model_of(config: str) -> Path:
    from logra_jax.training.config import load_config

    return Path(load_config(config).model.path)


def _checksums(server: Launched) -> dict[str, str]:
    with Servers([server.url]) as servers:
        call = servers.servers[0].call(
            "/weights_checker", {"action": "checksum"}, deadline=60.0
        )
        (rank,) = servers.run(call)["ranks"]
    return {n: c for n, c in rank["checksums"].items() if not n.startswith("logra")}

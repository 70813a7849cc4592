"""What needs no server; the bench itself runs in tests/sglang/test_bench_sync.py."""

import re
from pathlib import Path

import pytest

from logra_jax import cli
from logra_jax.rollout.sync import ServerReport
from logra_jax.study.bench_sync import _print_table, _require, _summary, bench_sync
from logra_jax.training.config import load_config

PUSH = {
    "payload_bytes": 1000,
    "sent_bytes": 1400,
    "make_seconds": 0.25,
    "paused_seconds": 0.25,
    "apply_seconds": 0.125,
    "acknowledge_seconds": 0.0625,
    "total_seconds": 0.5,
}
FULL = {
    "bytes": 64_000,
    "write_seconds": 1.0,
    "paused_seconds": 2.0,
    "load_seconds": 1.5,
    "total_seconds": 3.0,
    "verify_seconds": 0.75,
}


def summary() -> dict:
    """Of one usual push of each kind, one faster and one much slower."""
    return _summary(
        **{
            kind: [{name: value * f for name, value in one.items()} for f in (9, 1, 1)]
            for kind, one in (("push", PUSH), ("full", FULL))
        }
    )


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text("model: {path: none}\ntrain: {steps: 1}\n")
    return str(path)


def test_ratios_are_of_the_medians():
    found = summary()
    assert found["medians"] == {"push": PUSH, "full": FULL}
    assert found["ratios"] == {"bytes": 64, "seconds": 6, "paused": 8}
    assert found["measured"]["push"]["payload_bytes"] == [9000, 1000, 1000]
    assert found["measured"]["full"]["load_seconds"] == [13.5, 1.5, 1.5]


def test_people_get_a_table(capsys):
    result = {
        "device": "cpu, x86_64",
        "cores": 2,
        "versions": {"jax": "0.10", "sglang": "0.5"},
        "servers": 2,
        "server_device": "cuda",
        "tensor_parallel": 4,
        "model": "[tiny]",
        "weights": 1_500_000,
        "dtype": "bfloat16",
        "rank": {"mlp": 8},
        "bits": 16,
        "repetitions": 3,
        "digest": "0123456789abcdef",
        **summary(),
    }
    _print_table(result)
    text = capsys.readouterr().out
    assert "[tiny], 1.5M weights in bfloat16" in text
    assert "to 2 servers on cuda" in text
    assert "0123456789abcdef" in text

    def row(name: str) -> list[str]:
        (line,) = [line for line in text.splitlines() if name in line]
        return [cell.strip() for cell in re.split("[│|]", line)[1:-1]]

    assert row("size")[1:] == ["1000 B", "62.50 KiB", "64.0x"]
    assert row("pause to continue")[1:] == ["0.250 s", "2.000 s", "8.0x"]
    assert row("in all")[1:] == ["0.500 s", "3.000 s", "6.0x"]
    assert row("check afterwards")[1:] == ["", "0.750 s", ""]


@pytest.mark.parametrize("outcome", ["caught_up", "loaded", "lost"])
def test_another_outcome_than_the_measured_one_is_an_error(outcome):
    reports = [
        ServerReport("http://a", "pushed", "", 0.1, 10),
        ServerReport("http://b", outcome, "it held other weights", 0.1, 10),
    ]
    with pytest.raises(ValueError, match=f"http://b .* got '{outcome}' .*other"):
        _require(reports, "pushed")
    _require(reports[:1], "pushed")


def test_wrong_input_is_one_sentence(config):
    given = load_config(config)
    with pytest.raises(ValueError, match="`--repeat` must be at least 1, got 0"):
        bench_sync(given, True, repetitions=0)
    with pytest.raises(ValueError, match=r"`model\.path` must be a Hugging Face"):
        bench_sync(given, True)


def test_the_command_takes_its_flags_on_either_side_of_the_overrides(
    config, monkeypatch
):
    calls = []

    def stand_in(config, as_json, *, repetitions):
        calls.append((config.seed, as_json, repetitions))
        return 7

    monkeypatch.setattr("logra_jax.study.bench_sync.bench_sync", stand_in)
    assert cli.main(["bench", "sync", config, "seed=1"]) == 7
    cli.main(["bench", "sync", "--json", config, "seed=1", "--repeat", "2"])
    assert calls == [(1, False, 5), (1, True, 2)]


def test_help_says_that_servers_are_changed_and_has_an_example(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["bench", "sync", "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert "are changed, and left so" in text
    assert "  logra bench sync configs/" in text

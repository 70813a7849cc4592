"""`logra bench sync`: sending an update to a server, next to sending all weights.

Both against the same real SGLang server, in turns, each with an update that is new to
it: the trainer moves, and the server follows once by the update alone
(:meth:`WeightSync.push`) and once by SGLang's own way, all weights written to disk and
``/update_weights_from_disk``. Either way the server is then asked for its digest.

    push    make (digest, encode) -> pause -> send and apply -> acknowledge -> continue
    full    write to disk         -> pause -> load                          -> continue

What an update is charged with holds its verification, that all ranks hold the
trainer's digest. SGLang's own way has none: there it is a line apart, in no ratio.
Where trainer and server are one machine, files just written are read from memory: what
a full push takes there is the least that it can take, and no network slows it down.
"""

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from logra_jax.rollout.history import History
from logra_jax.rollout.servers import Server, Servers
from logra_jax.rollout.sync import Outcome, ServerReport, Weights, WeightSync
from logra_jax.study.random_trainer import RandomTrainer
from logra_jax.study.serving import (
    Result,
    connect,
    describe,
    run_bench,
    server_urls,
    setting,
)
from logra_jax.study.tables import make_table
from logra_jax.training.display import Display
from logra_jax.training.schema import Config

REPETITIONS = 5
_SEND = "/update_weights_from_tensor"
_ACKNOWLEDGE = "/weights_checker"
_LOAD = "/update_weights_from_disk"

Measured = dict[str, int | float]  # one push, in bytes and seconds


def bench_sync(config: Config, as_json: bool, *, repetitions: int = REPETITIONS) -> int:
    """Measure, print, and return the exit code.

    Args:
        config: its model and sketch are used, and the servers at ``rollout.urls``;
            where there are none, one is started as section ``serve`` says, and stopped.
            The servers' weights are changed and left so. ``rollout.share_dir`` is where
            all weights are written; null is the temporary directory.
        as_json: print one JSON object instead of a table.
        repetitions: timed pushes of each kind, in turns, after one that compiles.

    Returns:
        0, or 1 where the server did not start.

    Raises:
        ValueError: ``repetitions`` below 1, a bad model, a server that is not fit or
            did not arrive at the trainer's weights.
    """
    if repetitions < 1:
        raise ValueError(f"`--repeat` must be at least 1, got {repetitions}.")
    return run_bench(lambda: _bench(config, repetitions), _print_table, as_json=as_json)


def _bench(config: Config, repetitions: int) -> Result:
    from rich.console import Console

    share = config.rollout.share_dir
    if share is not None:
        Path(share).mkdir(parents=True, exist_ok=True)
    with (
        # Standard error: standard output is for the result.
        Display(total_steps=0, console=Console(stderr=True)) as display,
        tempfile.TemporaryDirectory(prefix="logra-bench-", dir=share) as scratch,
    ):
        with display.phase("loading the model"):
            trainer = RandomTrainer(config, Path(scratch).resolve())
        with server_urls(config, display) as urls, connect(config, urls) as servers:
            servers.servers = tuple(_TimedServer(server) for server in servers.servers)
            with display.phase("pushing updates and all weights in turns"):
                bench = _Bench(config, servers, trainer)
                pushes = bench.measure(repetitions)
            described = describe(servers)
    return {
        **described,
        "pause": config.rollout.pause,
        **trainer.setup,
        "repetitions": repetitions,
        **_summary(**pushes),
        "digest": trainer.weights.digest,
        "verified": True,  # or an error was raised
    }


class _TimedServer(Server):
    """A server that notes how long its calls take.

    Attributes:
        calls: path and seconds of each, in order.
    """

    def __init__(self, server: Server):
        self._server = server
        self.url = server.url
        self.ready = server.ready
        self.calls: list[tuple[str, float]] = []

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        deadline: float,
        retries: int = 0,
    ) -> Any:
        began = time.perf_counter()
        try:
            return await self._server.call(
                path, body, deadline=deadline, retries=retries
            )
        finally:
            self.calls.append((path, time.perf_counter() - began))


class _Bench:
    """Both kinds of push, to the same servers."""

    def __init__(self, config: Config, servers: Servers, trainer: RandomTrainer):
        rollout = config.rollout
        self._servers, self._trainer = servers, trainer
        history = trainer.updates.history
        # With no update to catch up by, all weights are sent.
        self._sync, self._full_sync = (
            WeightSync(
                servers, known, pause=rollout.pause, deadline=rollout.push_deadline
            )
            for known in (history, History(history.directory / "none"))
        )

    def measure(self, repetitions: int) -> dict[str, list[Measured]]:
        """``push`` and ``full``, in turns; the first of each warms up and is dropped.

        Raises:
            ValueError: a server is not fit, or not at the trainer's weights after it.
        """
        self._sync.connect(self._trainer.weights, load=True)
        pushes: dict[str, list[Measured]] = {"push": [], "full": []}
        for _ in range(1 + repetitions):
            pushes["push"].append(self.push())
            pushes["full"].append(self.push_all())
        self._forget()
        _require(self._sync.revive(self._trainer.weights), "held")
        return {kind: values[1:] for kind, values in pushes.items()}

    def push(self) -> Measured:
        """One update, as training sends it."""
        blob, made = self._trainer.step()
        self._start_clocks()
        reports = self._sync.push(self._trainer.weights, blob)
        _require(reports, "pushed")
        paused = max(report.seconds for report in reports)
        return {
            "payload_bytes": len(blob),
            "sent_bytes": max(report.bytes for report in reports),
            "make_seconds": made,
            "paused_seconds": paused,
            "apply_seconds": self._slowest(_SEND),
            "acknowledge_seconds": self._slowest(_ACKNOWLEDGE),
            "total_seconds": made + paused,
        }

    def push_all(self) -> Measured:
        """All weights, over the disk."""
        self._trainer.step()
        weights = self._trainer.weights
        began = time.perf_counter()
        directory = weights.export()
        written = time.perf_counter() - began
        self._forget()
        self._start_clocks()
        weights = Weights(weights.version, weights.digests, lambda: directory)
        _require(self._full_sync.revive(weights), "loaded")
        paused = self._slowest("/pause_generation", _LOAD, "/continue_generation")
        size = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
        shutil.rmtree(directory)
        return {
            "bytes": size,
            "write_seconds": written,
            "paused_seconds": paused,
            "load_seconds": self._slowest(_LOAD),
            "total_seconds": written + paused,
            "verify_seconds": self._slowest(_SEND, _ACKNOWLEDGE, after=_LOAD),
        }

    def _forget(self) -> None:
        """Take no server's weights for known."""
        for server in self._servers.servers:
            server.ready = False

    def _start_clocks(self) -> None:
        for server in self._timed():
            server.calls.clear()

    def _slowest(self, *paths: str, after: str | None = None) -> float:
        """Seconds of the calls of some paths, of the server where they took longest."""
        seconds = []
        for server in self._timed():
            names = [path for path, _ in server.calls]
            calls = server.calls[0 if after is None else names.index(after) + 1 :]
            seconds.append(sum(s for path, s in calls if path in paths))
        return max(seconds)

    def _timed(self) -> list[_TimedServer]:
        return [s for s in self._servers.servers if isinstance(s, _TimedServer)]


def _require(reports: list[ServerReport], outcome: Outcome) -> None:
    """Every server came to the trainer's weights in the way that is measured.

    Raises:
        ValueError: the first that did not.
    """
    for report in reports:
        if report.outcome != outcome:
            raise ValueError(
                f"{report.url} must arrive at the trainer's weights with the outcome "
                f"{outcome!r}, got {report.outcome!r} ({report.message}); let nothing "
                "else update it meanwhile."
            )


def _summary(push: list[Measured], full: list[Measured]) -> Result:
    """All measurements, their medians, and the medians' ratios."""
    kinds = {"push": push, "full": full}
    measured = {
        kind: {name: [one[name] for one in values] for name in values[0]}
        for kind, values in kinds.items()
    }
    medians = {
        kind: {name: statistics.median(each) for name, each in lists.items()}
        for kind, lists in measured.items()
    }
    return {
        "measured": measured,
        "medians": medians,
        "ratios": _ratios(medians["push"], medians["full"]),
    }


def _ratios(push: Measured, full: Measured) -> dict[str, float]:
    """How many times more a full push takes.

    Returns:
        ``bytes``: of the weights' files, to the payload; ``seconds``: from merged
        weights to a server that has them, writing or making included; ``paused``: for
        which the server generates nothing.
    """
    return {
        "bytes": full["bytes"] / push["payload_bytes"],
        "seconds": full["total_seconds"] / push["total_seconds"],
        "paused": full["paused_seconds"] / push["paused_seconds"],
    }


def _print_table(result: Result) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        f"{result['model']}, {result['weights'] / 1e6:.1f}M weights in "
        f"{result['dtype']}, updates of rank {result['rank']}, {result['bits']} bits\n"
        f"to {setting(result)}",
        markup=False,
    )
    columns = ("", "update", "all weights", "ratio")
    console.print(make_table(columns, _rows(result)))
    console.print(
        f"Medians of {result['repetitions']} pushes of each kind, in turns. An update "
        "is checked within\nits pause, all weights after it, which is in no ratio. "
        f"The servers hold the\ntrainer's digest, {result['digest']}.",
        markup=False,
    )


def _rows(result: Result) -> list[tuple[str, str, str, str]]:
    """Of the table: what, for an update, for all weights, and their ratio."""
    ratios = {name: _ratio(ratio) for name, ratio in result["ratios"].items()}
    push, full = (
        {
            name: (_seconds if name.endswith("seconds") else _size)(value)
            for name, value in result["medians"][kind].items()
        }
        for kind in ("push", "full")
    )
    return [
        ("size", push["payload_bytes"], full["bytes"], ratios["bytes"]),
        ("sent, in base64", push["sent_bytes"], "", ""),
        ("make, or write to disk", push["make_seconds"], full["write_seconds"], ""),
        (
            "from pause to continue",
            push["paused_seconds"],
            full["paused_seconds"],
            ratios["paused"],
        ),
        ("  send and apply, or load", push["apply_seconds"], full["load_seconds"], ""),
        ("  acknowledge", push["acknowledge_seconds"], "", ""),
        ("in all", push["total_seconds"], full["total_seconds"], ratios["seconds"]),
        ("check afterwards", "", full["verify_seconds"], ""),
    ]


def _size(count: int | float) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2g}x"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"

"""Weight sync against a server with faults; tests/sglang has the real one.

Whatever goes wrong, a server that is called ready holds the trainer's weights, and no
update is sent to it twice.
"""

import base64
import collections
import dataclasses
import io
import itertools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from logra_jax.algorithm.digest import TensorDigest, digest_array, model_digest
from logra_jax.rollout import link as link_module
from logra_jax.rollout import servers as servers_module
from logra_jax.rollout.history import History
from logra_jax.rollout.protocol import LOADER, STATUS_QUERY, Command, Status
from logra_jax.rollout.replica import Replica
from logra_jax.rollout.servers import Servers
from logra_jax.rollout.sync import Weights, WeightSync
from logra_jax.rollout.wire import Refused

BEGIN, UPDATE, END = (
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
)
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
ASK, LABEL, FLUSH = "/weights_checker", "/update_weight_version", "/flush_cache"
LOAD, INFO = "/update_weights_from_disk", "/server_info"
COMMAND = [BEGIN, UPDATE, END, ASK]


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch):
    monkeypatch.setattr(servers_module, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(link_module, "_QUICK", 5.0)


def digests_of(weights) -> dict[str, TensorDigest]:
    return {
        name: TensorDigest(str(w.dtype), w.shape, digest_array(w))
        for name, w in weights.items()
    }


class Trainer:
    """The sending side."""

    def __init__(self, make_update, where: Path):
        random = np.random.default_rng(0)
        shapes = {"a.weight": (5, 7), "b.weight": (4, 3), "norm.weight": (7,)}
        self.weights = {
            n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()
        }
        self.first = {n: w.copy() for n, w in self.weights.items()}
        self.version, self.exports = 0, 0
        self.where, self._make = where, make_update
        self.history = History(where / "updates")

    def step(self) -> bytes:
        update, self.weights = self._make(self.weights, self.version)
        self.version += 1
        return self.history.write(update)

    def state(self) -> Weights:
        return Weights(self.version, digests_of(self.weights), self._export)

    def _export(self) -> Path:
        self.exports += 1
        directory = self.where / "full"
        directory.mkdir(exist_ok=True)
        save_file(self.weights, directory / "model.safetensors")
        return directory


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        assert (module, name) == ("torch", "ByteTensor")
        return list


class Server:
    """What SGLang and the loader in it do with each call.

    `faults` says, for a path, what comes of the next calls instead: ("before", fault)
    where they do nothing, ("after", fault) where they do and answer otherwise.
    """

    def __init__(self, fake_server, weights, ranks: int = 1):
        self.tensors = {name: w.copy() for name, w in weights.items()}
        self.replica: Replica | None = None
        self.ranks = ranks
        self.info = {
            "version": "0.5.23",
            "custom_weight_loader": [LOADER],
            "tp_size": ranks,
            "dp_size": 1,
            "pp_size": 1,
        }
        self.is_open = self.is_paused = False
        self.label = "default"
        self.statuses: list[Status | None] = [None] * ranks
        self.tamper = lambda statuses: statuses
        self.faults = collections.defaultdict(list)
        self.bodies: list[bytes] = []  # of updates that were sent
        self.fake = fake_server(self.react)

    @property
    def calls(self) -> list[str]:
        return self.fake.paths()

    def count(self, path: str) -> int:
        return self.calls.count(path)

    @property
    def digest(self) -> str:
        return model_digest(digests_of(self.tensors))

    def react(self, path, body):
        when, fault = self.faults[path].pop(0) if self.faults[path] else ("", None)
        if when == "before":
            return fault
        answer = getattr(self, path[1:])(body)
        return fault if when == "after" else answer

    def server_info(self, _):
        return self.info

    def pause_generation(self, body):
        self.is_paused = True
        return {"status": "ok"}

    def continue_generation(self, _):
        self.is_paused = False
        return {"status": "ok"}

    def begin_weight_update(self, _):
        if self.is_open:
            return 400
        self.is_open = True
        return {"success": True}

    def end_weight_update(self, _):
        if not self.is_open:
            return 400
        self.is_open = False
        return {"success": True}

    def flush_cache(self, _):
        return "Cache flushed.\n"

    def update_weight_version(self, body):
        self.label = body["new_version"]
        return {"success": True}

    def update_weights_from_disk(self, body):
        loaded = load_file(Path(body["model_path"]) / "model.safetensors")
        for name, tensor in self.tensors.items():
            tensor[...] = loaded[name]
        self.label = body["weight_version"]
        return {"success": True}

    def update_weights_from_tensor(self, body):
        assert self.is_paused
        if not self.is_open:
            return 400
        assert body["load_format"] == LOADER
        entries = body["serialized_named_tensors"]
        assert len(entries) == self.ranks
        ((name, _),) = Reader(io.BytesIO(base64.b64decode(entries[0]))).load()
        command = Command.read(name)
        if command.action == "update":
            self.bodies.append(command.body)
        self.statuses = [self._obey(command)] * self.ranks
        self.label = body.get("weight_version", self.label)
        return {"success": True, "message": "Success"}

    def _obey(self, command: Command) -> Status:
        status = Status(command.nonce)
        try:
            if command.action == "identify":
                self.replica = Replica(self.tensors, -1)
                self.replica.version = command.known.get(self.replica.digest, -1)
                tensors = {n: tuple(d) for n, d in self.replica.digests.items()}
                status = dataclasses.replace(status, tensors=tensors)
            elif self.replica is None:
                raise Refused("base_version", "Not identified.")
            else:
                self.replica.apply(command.body)
        except Refused as error:
            status = dataclasses.replace(
                status, reason=error.reason, message=str(error)
            )
        if self.replica is None or self.replica.diverged:
            return status
        version = self.replica.version if self.replica.version >= 0 else None
        return dataclasses.replace(status, version=version, digest=self.replica.digest)

    def weights_checker(self, body):
        assert body == STATUS_QUERY
        names = [
            {} if s is None else {s.name(): ""} for s in self.tamper(self.statuses)
        ]
        return {"success": True, "ranks": [{"checksums": name} for name in names]}


@pytest.fixture
def trainer(make_update, tmp_path) -> Trainer:
    return Trainer(make_update, tmp_path)


class Pair:
    """A trainer and its servers, connected."""

    def __init__(self, trainer, servers: Servers, reals: list[Server], **options):
        self.trainer, self.servers, self.reals = trainer, servers, reals
        options = {"deadline": 5.0} | options
        self.sync = WeightSync(servers, trainer.history, **options)
        self.sync.connect(trainer.state())
        self.forget()

    def forget(self) -> None:
        for real in self.reals:
            real.fake.requests.clear()
            real.bodies.clear()

    def push(self):
        blob = self.trainer.step()
        return self.sync.push(self.trainer.state(), blob)

    def revive(self):
        return self.sync.revive(self.trainer.state())

    def check(self) -> None:
        """What must be so after every sync."""
        for server, real in zip(self.servers.servers, self.reals, strict=True):
            if server.ready:
                assert real.digest == self.trainer.state().digest
                assert real.label == str(self.trainer.version)
                assert not real.is_paused
            assert len(set(real.bodies)) == len(real.bodies)
            if PAUSE in real.calls:
                assert real.calls[-1] == CONTINUE


@pytest.fixture
def connect(trainer, fake_server):
    """A function that connects so many servers of so many ranks."""
    opened = []

    def make(number: int = 1, ranks: int = 1, **options) -> Pair:
        reals = [Server(fake_server, trainer.first, ranks) for _ in range(number)]
        servers = Servers([real.fake.url for real in reals])
        opened.append(servers)
        return Pair(trainer, servers, reals, **options)

    yield make
    for servers in opened:
        servers.close()


def refused_at_the_start(trainer, server: Server, **options) -> str:
    """Why the handshake fails, after which the server serves nothing of this run."""
    with Servers([server.fake.url]) as servers:
        sync = WeightSync(servers, trainer.history, deadline=5.0)
        with pytest.raises(ValueError) as caught:
            sync.connect(trainer.state(), **options)
        assert not servers.servers[0].ready
    message = str(caught.value)
    assert message.startswith(server.fake.url)
    assert message.endswith(".")
    assert "\n" not in message
    return message


# --- the handshake


def test_a_server_of_the_weights_is_identified_and_labelled(trainer, fake_server):
    server = Server(fake_server, trainer.weights)
    with Servers([server.fake.url]) as servers:
        sync = WeightSync(servers, trainer.history)
        (report,) = sync.connect(trainer.state())
        assert servers.servers[0].ready
    assert (report.outcome, report.message) == ("held", "")
    assert server.calls == [INFO, PAUSE, *COMMAND, LABEL, CONTINUE]
    assert server.label == "0"


@pytest.mark.parametrize("version", ["0.5.20", "0.5.9rc2", "0.4.30.post1", "0.0.0", ""])
def test_an_sglang_that_is_too_old_is_refused(trainer, fake_server, version):
    server = Server(fake_server, trainer.weights)
    server.info["version"] = version
    said = refused_at_the_start(trainer, server)
    assert "SGLang 0.5.21 or later, which brackets a weight" in said
    assert f"got {version}" in said
    assert server.calls == [INFO]


@pytest.mark.parametrize(
    "version", ["0.5.21", "0.5.21.post1", "0.6.0rc1", "1.0", "v2.0.1"]
)
def test_a_newer_sglang_is_taken(trainer, fake_server, version):
    server = Server(fake_server, trainer.weights)
    server.info["version"] = version
    with Servers([server.fake.url]) as servers:
        WeightSync(servers, trainer.history).connect(trainer.state())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dp_size": 2}, "must have dp_size 1, got 2; .* not --dp, and several"),
        ({"pp_size": 4}, "must have pp_size 1, got 4; .* not --pp, and several"),
        ({"custom_weight_loader": None}, "must have the weight loader .*, got None"),
        ({"custom_weight_loader": ["x.y"]}, r"weight loader .*, got \['x.y'\]; start"),
    ],
)
def test_a_server_that_cannot_be_synced_is_sent_nothing(
    trainer, fake_server, changes, said
):
    server = Server(fake_server, trainer.weights)
    server.info |= changes
    message = refused_at_the_start(trainer, server)
    assert re.search(said, message)
    assert server.calls == [INFO]


@pytest.mark.parametrize("answer", [{}, [], "Welcome to nginx", {"name": "vllm"}, 404])
def test_what_is_no_sglang_server_is_refused(trainer, fake_server, answer):
    server = Server(fake_server, trainer.weights)
    server.faults[INFO] = [("before", answer)]
    message = refused_at_the_start(trainer, server)
    said = "status 404" if answer == 404 else "must be an SGLang server"
    assert said in message
    assert server.calls == [INFO]


def test_a_server_of_another_model_is_refused_before_anything_is_loaded(
    trainer, fake_server
):
    for change, said in [
        ({"a.weight": np.ones((5, 8), np.float32)}, "'a.weight' has shape (5, 8)"),
        ({"b.weight": trainer.weights["b.weight"].view(np.uint16)}, "'b.weight' "),
        ({"more.weight": np.ones(3, np.float32)}, "only in the model of the server"),
    ]:
        server = Server(fake_server, trainer.weights | change)
        assert said in refused_at_the_start(trainer, server, load=True)
        assert LOAD not in server.calls
        assert server.calls[-1] == CONTINUE
    less = {n: w for n, w in trainer.weights.items() if n != "norm.weight"}
    server = Server(fake_server, less)
    said = refused_at_the_start(trainer, server, load=True)
    assert "'norm.weight' is only in the model of the trainer" in said


def test_other_weights_are_loaded_over_only_where_that_was_asked_for(
    trainer, fake_server
):
    other = {name: w + 1 for name, w in trainer.weights.items()}
    server = Server(fake_server, other)
    assert "rollout.load_weights=true" in refused_at_the_start(trainer, server)
    assert LOAD not in server.calls
    assert not server.is_paused
    with Servers([server.fake.url]) as servers:
        sync = WeightSync(servers, trainer.history)
        (report,) = sync.connect(trainer.state(), load=True)
    assert (report.outcome, report.message) == ("loaded", "it held other weights")
    assert server.digest == trainer.state().digest
    size = (trainer.where / "full" / "model.safetensors").stat().st_size
    assert report.bytes > size


def test_all_weights_are_written_once_for_all_servers(trainer, fake_server):
    other = {name: w + 1 for name, w in trainer.weights.items()}
    reals = [Server(fake_server, other) for _ in range(3)]
    with Servers([real.fake.url for real in reals]) as servers:
        sync = WeightSync(servers, trainer.history)
        reports = sync.connect(trainer.state(), load=True)
    assert [report.outcome for report in reports] == ["loaded"] * 3
    assert trainer.exports == 1


def test_one_unfit_server_of_several_leaves_none_paused(trainer, fake_server):
    reals = [Server(fake_server, trainer.weights) for _ in range(3)]
    reals[1].info["dp_size"] = 2
    with Servers([real.fake.url for real in reals]) as servers:
        sync = WeightSync(servers, trainer.history)
        with pytest.raises(ValueError, match="dp_size"):
            sync.connect(trainer.state())
        # Already, not only when `servers` are closed.
        assert [real.calls[-1] for real in reals] == [CONTINUE, INFO, CONTINUE]


# --- a push


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_push_is_one_update_and_one_question(connect, ranks):
    pair = connect(number=2, ranks=ranks)
    for _ in range(3):
        reports = pair.push()
        assert [(r.outcome, r.message) for r in reports] == [("pushed", "")] * 2
        for real in pair.reals:
            assert real.calls == [INFO, PAUSE, *COMMAND, CONTINUE]
        pair.check()
        pair.forget()


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_the_cache_goes_with_the_weights_unless_requests_go_on_over_it(connect, pause):
    pair = connect(pause=pause)
    pair.push()
    bodies = {path: body for path, body, _ in pair.reals[0].fake.requests}
    assert bodies[PAUSE] == {"mode": pause}
    assert bodies[UPDATE]["flush_cache"] == (pause != "in_place")
    assert not bodies[UPDATE]["abort_all_requests"]


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_the_cache_goes_with_weights_that_are_replaced(connect, pause):
    """Or a run that begins again would find what an earlier one left at its version."""
    pair = connect(pause=pause)
    pair.reals[0].tensors["b.weight"][0, 0] += 1
    assert pair.push()[0].outcome == "loaded"
    bodies = {path: body for path, body, _ in pair.reals[0].fake.requests}
    assert bodies[LOAD]["flush_cache"]


def test_a_server_that_missed_updates_gets_them_in_order(connect):
    pair = connect()
    pair.trainer.step()
    pair.trainer.step()
    (report,) = pair.push()
    assert report.outcome == "caught_up"
    assert report.message == "it held version 0"
    files = [path.read_bytes() for path in pair.trainer.history.between(0, 3)]
    # The newest was tried first, and sent again only after it was seen to be refused.
    assert pair.reals[0].bodies == [files[2], *files]
    assert pair.reals[0].digest == pair.trainer.state().digest
    assert pair.push()[0].outcome == "pushed"


def test_updates_that_are_not_kept_are_all_weights(connect):
    pair = connect()
    pair.trainer.history = History(pair.trainer.where / "few", keep=1)
    pair.sync = WeightSync(pair.servers, pair.trainer.history)
    pair.trainer.step()
    assert pair.push()[0].outcome == "loaded"
    pair.check()
    assert pair.push()[0].outcome == "pushed"


# --- acknowledgements


def with_rank(statuses, rank: int, **changes):
    changed = list(statuses)
    changed[rank] = dataclasses.replace(statuses[rank], **changes)
    return changed


def once(change):
    """Tampers with the statuses of the first question only."""
    first = itertools.chain([True], itertools.repeat(False))
    return lambda statuses: change(statuses) if next(first) else statuses


DISAGREE = {
    "version": lambda s: with_rank(s, 1, version=0),
    "digest": lambda s: with_rank(s, 1, digest="0" * 16),
    "refusal": lambda s: with_rank(s, 1, reason="failed", message="out of memory"),
    "silence": lambda s: [s[0], None],
    "silent first": lambda s: [None, s[1]],
    "old": lambda s: with_rank(s, 1, nonce="0" * 32),
    "fewer": lambda s: s[:1],
    "more": lambda s: [*s, s[0]],
    "none": lambda s: [],
}


@pytest.mark.parametrize("change", list(DISAGREE.values()), ids=list(DISAGREE))
def test_ranks_that_do_not_agree_are_no_acknowledgement(connect, change):
    pair = connect(ranks=2)
    pair.reals[0].tamper = once(change)
    (report,) = pair.push()
    # Read again, they agree: the update had arrived, and is not sent again.
    assert report.outcome == "held"
    assert pair.reals[0].count(UPDATE) == 2
    assert len(pair.reals[0].bodies) == 1
    pair.check()


def test_ranks_that_hold_other_weights_than_each_other_are_given_all(connect):
    pair = connect(ranks=2)
    real = pair.reals[0]

    def tamper(statuses):
        if LOAD in real.calls:
            return statuses
        if statuses[0].tensors is None:  # after the update
            return with_rank(statuses, 1, digest="0" * 16)
        # What each rank says that is asked to read them all.
        status = Status(statuses[0].nonce, "digest", "Ranks must hold the same bits.")
        return [status] * 2

    real.tamper = tamper
    (report,) = pair.push()
    assert (report.outcome, report.message) == ("loaded", "it held other weights")
    assert len(real.bodies) == 1
    pair.check()
    assert pair.push()[0].outcome == "pushed"
    pair.check()


def test_ranks_that_never_agree_are_lost(connect):
    pair = connect(ranks=2)
    pair.reals[0].tamper = lambda s: with_rank(s, 1, digest="0" * 16)
    (report,) = pair.push()
    assert report.outcome == "lost"
    assert "one rank holds other weights than another" in report.message
    assert not pair.servers.servers[0].ready
    assert LOAD not in pair.reals[0].calls
    pair.check()
    pair.reals[0].tamper = lambda s: s
    assert pair.revive()[0].outcome == "held"
    pair.check()


def test_a_status_of_an_earlier_command_is_no_acknowledgement(connect):
    pair = connect()
    pair.push()
    pair.forget()
    old = pair.reals[0].statuses
    pair.reals[0].tamper = once(lambda _: old)
    assert pair.push()[0].outcome == "held"
    assert len(pair.reals[0].bodies) == 1
    pair.check()

    # As if the loader did nothing at all, now and later.
    pair.forget()
    old = pair.reals[0].statuses
    pair.reals[0].tamper = lambda _: old
    (report,) = pair.push()
    assert report.outcome == "lost"
    assert "no account of it from all of 1 ranks" in report.message
    pair.check()


def test_weights_that_changed_unseen_are_found_by_the_push_and_healed(connect):
    pair = connect()
    pair.reals[0].tensors["b.weight"][0, 0] += 1
    assert pair.push()[0].outcome == "loaded"
    pair.check()


def test_a_load_that_did_not_bring_the_weights_is_seen(connect):
    pair = connect()
    pair.reals[0].tensors["b.weight"][0, 0] += 1
    pair.reals[0].faults[LOAD] = [("before", {"success": True})]
    (report,) = pair.push()
    assert report.outcome == "lost"
    assert "after all weights were loaded, but it holds" in report.message
    pair.check()
    # The requests that it has end: what they give is of no version.
    assert pair.reals[0].label == "unknown"
    assert pair.reals[0].calls[-2:] == [LABEL, CONTINUE]
    assert pair.revive()[0].outcome == "loaded"
    pair.check()


def test_an_update_that_cannot_be_read_is_all_weights(connect):
    pair = connect()
    pair.trainer.step()
    pair.trainer.history.between(0, 1)[0].unlink()
    assert pair.push()[0].outcome == "loaded"
    pair.check()


def test_weights_that_cannot_be_written_lose_the_server_and_not_the_run(connect):
    pair = connect(number=2)
    pair.reals[0].tensors["b.weight"][0, 0] += 1

    def export():
        raise OSError("No space left on device")

    blob = pair.trainer.step()
    full = dataclasses.replace(pair.trainer.state(), export=export)
    first, second = pair.sync.push(full, blob)
    assert (first.outcome, second.outcome) == ("lost", "pushed")
    assert "No space left on device; see `rollout.share_dir`." in first.message
    pair.check()


# --- sessions, pauses


def test_a_session_that_was_left_open_is_closed_first(connect):
    pair = connect()
    real = pair.reals[0]
    real.is_open = real.is_paused = True
    assert pair.push()[0].outcome == "pushed"
    assert real.calls == [INFO, PAUSE, BEGIN, END, *COMMAND, CONTINUE]
    pair.check()


def test_a_session_that_cannot_be_opened_loses_the_server(connect):
    pair = connect()
    pair.reals[0].faults[BEGIN] = [("before", 400)] * 2
    (report,) = pair.push()
    assert report.outcome == "lost"
    assert pair.reals[0].bodies == []
    pair.check()


@pytest.mark.parametrize("fault", [500, "drop"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_update_whose_fate_is_unknown_is_not_sent_again(connect, when, fault):
    pair = connect()
    pair.reals[0].faults[UPDATE] = [(when, fault)]
    (report,) = pair.push()
    assert report.outcome == "lost"
    assert UPDATE in report.message
    assert pair.reals[0].calls == [INFO, PAUSE, BEGIN, UPDATE, END, LABEL, CONTINUE]
    assert not pair.servers.servers[0].ready
    # It is asked what it holds before anything else is sent.
    (report,) = pair.revive()
    assert report.outcome == ("held" if when == "after" else "caught_up")
    assert len(pair.reals[0].bodies) == 1
    pair.check()


def test_a_flush_that_is_refused_is_made_up_for(connect):
    """SGLang changes the weights, then answers 400 as it cannot flush the cache."""
    pair = connect()
    pair.reals[0].faults[UPDATE] = [("after", 400)]
    pair.reals[0].faults[FLUSH] = [("before", 400)]
    assert pair.push()[0].outcome == "pushed"
    expected = [INFO, PAUSE, *COMMAND, FLUSH, PAUSE, FLUSH, CONTINUE]
    assert pair.reals[0].calls == expected
    pair.check()


FAULTY = [INFO, PAUSE, BEGIN, UPDATE, END, ASK, LABEL, LOAD, FLUSH, CONTINUE]


CASES = [
    *itertools.product(FAULTY, ["before", "after"], [400, 500, "drop"]),
    *itertools.product([PAUSE, UPDATE, ASK, CONTINUE], ["before", "after"], ["hang"]),
    *itertools.product([INFO, BEGIN, UPDATE, ASK, LOAD], ["before"], ["nonsense"]),
]


@pytest.mark.parametrize(("path", "when", "fault"), CASES)
def test_after_any_fault_a_ready_server_holds_the_weights(
    connect, monkeypatch, path, when, fault
):
    pair = connect(number=2)
    real, patient = pair.reals[0], pair.sync
    # A healthy push does not need these.
    if path == LOAD:
        real.tensors["b.weight"][0, 0] += 1
    if path == LABEL:
        real.tamper = once(lambda statuses: [None])
    if path == FLUSH:
        real.faults[UPDATE] = [("after", 400)]
    if fault == "hang":
        monkeypatch.setattr(link_module, "_QUICK", 0.4)
        pair.sync = WeightSync(pair.servers, pair.trainer.history, deadline=0.4)
    real.faults[path] = [(when, fault)]
    first, second = pair.push()
    assert (first.outcome != "lost") == pair.servers.servers[0].ready
    if fault != "hang":  # a busy machine may hang for so long as well
        assert second.outcome == "pushed"
    assert real.faults[path] == []
    pair.check()
    pair.sync = patient
    monkeypatch.setattr(link_module, "_QUICK", 5.0)
    for _ in range(2):
        assert "lost" not in {report.outcome for report in pair.push()}
        pair.check()
    assert [server.ready for server in pair.servers.servers] == [True, True]


def test_a_server_that_is_gone_is_lost_and_comes_back(connect):
    pair = connect(number=2)
    pair.reals[0].fake.dead = True
    for _ in range(2):
        first, second = pair.push()
        assert (first.outcome, second.outcome) == ("lost", "pushed")
        assert "cannot be reached" in first.message
    assert pair.revive()[0].outcome == "lost"
    # Started again, from the weights of the beginning.
    real = pair.reals[0]
    real.fake.dead, real.replica, real.label = False, None, "default"
    for name, weight in pair.trainer.first.items():
        real.tensors[name][...] = weight
    (report,) = pair.revive()
    assert (report.outcome, report.message) == ("caught_up", "it held version 0")
    pair.check()
    assert pair.revive() == []

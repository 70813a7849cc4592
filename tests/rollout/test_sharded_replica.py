"""A model spread over the ranks of a server: threads that wait for each other."""

import itertools
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import logra_jax.rollout.replica as replica_module
from logra_jax.rollout.replica import Replica, Shard
from logra_jax.rollout.wire import Refused, encode

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
Q, K, OUT, EMBED = "q.weight", "k.weight", "o.weight", "embed.weight"
BIAS, NORM = "q.bias", "norm.weight"
THREADS = ThreadPoolExecutor(4)


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Ranks:
    """So many threads, and what their gather needs."""

    def __init__(self, number: int):
        self.number = number
        self._given: list = [None] * number
        self._barrier = threading.Barrier(number, timeout=10)

    def gather(self, rank: int):
        def gather(value) -> list:
            self._given[rank] = pickle.dumps(value)  # as between processes
            self._barrier.wait()
            given = [pickle.loads(value) for value in self._given]
            self._barrier.wait()
            return given

        return gather

    def each(self, work) -> list:
        """What `work(rank)` gave on each rank, or the error that it raised there."""

        def attempt(rank: int):
            try:
                return work(rank)
            except ValueError as error:
                return error

        return list(THREADS.map(attempt, range(self.number)))

    def load(self, tensors: list[dict], version: int = 0) -> list:
        return self.each(
            lambda rank: Replica(tensors[rank], version, self.gather(rank))
        )


def model(dtype: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    shapes = {
        Q: (16, 13),
        K: (8, 13),
        OUT: (13, 16),
        EMBED: (23, 13),
        BIAS: (16,),
        NORM: (13,),
    }
    return {n: random.normal(size=s).astype(DTYPES[dtype]) for n, s in shapes.items()}


def pieces(ranks: int, heads: int, cuts: list[int], columns: list[int]) -> list[dict]:
    """Where each rank's parts begin and end: (row, stop, column, stop).

    Rows of the embedding and columns of the output are cut anywhere; several ranks hold
    one key-value head where there are fewer heads than ranks.
    """
    rows = list(itertools.pairwise([0, *cuts, 23]))
    across = list(itertools.pairwise([0, *columns, 16]))
    q, k = 16 // ranks, 8 // heads
    found = []
    for rank in range(ranks):
        head = rank * heads // ranks
        found.append(
            {
                Q: (rank * q, rank * q + q, 0, 13),
                K: (head * k, head * k + k, 0, 13),
                OUT: (0, 13, *across[rank]),
                EMBED: (*rows[rank], 0, 13),
                BIAS: (0, 1, rank * q, rank * q + q),
                NORM: (0, 1, 0, 13),
            }
        )
    return found


def bits_of(tensor) -> np.ndarray:
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    array = np.asarray(tensor)
    return array.view(f"u{array.itemsize}")


def in_library(library: str, array: np.ndarray):
    array = np.array(array, order="C")
    if library == "numpy":
        return array
    dtype = {2: torch.bfloat16, 4: torch.float32}[array.itemsize]
    return torch.tensor(array.view(f"i{array.itemsize}")).view(dtype)


def spread(weights, places: list[dict], library: str) -> list[dict[str, Shard]]:
    """Each rank's shards, in memory of their own."""

    def shard(name: str, place) -> Shard:
        top, bottom, left, right = place
        whole = weights[name]
        at = (slice(left, right),)
        if whole.ndim == 2:
            at = (slice(top, bottom), *at)
        return Shard(in_library(library, whole[at]), whole.shape, row=top, column=left)

    return [{n: shard(n, place) for n, place in rank.items()} for rank in places]


def put_together(ranks: list[dict[str, Shard]]) -> dict[str, np.ndarray]:
    """The bits of the whole weights; every entry is held by some rank."""
    whole = {}
    for name in ranks[0]:
        shards = [rank[name] for rank in ranks]
        first = bits_of(shards[0].tensor)
        bits = np.zeros(shards[0].shape, first.dtype)
        held = np.zeros(bits.shape, bool)
        for shard in shards:
            part = bits_of(shard.tensor)
            at = (slice(shard.column, shard.column + part.shape[-1]),)
            if bits.ndim == 2:
                at = (slice(shard.row, shard.row + len(part)), *at)
            bits[at], held[at] = part, True
        assert held.all()
        whole[name] = bits
    return whole


def assert_holds(ranks: list[dict[str, Shard]], weights) -> None:
    for name, bits in put_together(ranks).items():
        np.testing.assert_array_equal(bits, bits_of(weights[name]))


@st.composite
def layouts(draw):
    ranks = draw(st.sampled_from([2, 4]))
    heads = draw(st.sampled_from([h for h in (1, 2, 4) if h <= ranks]))

    def cuts(stop: int) -> list[int]:
        places = st.integers(1, stop - 1)
        return sorted(draw(st.sets(places, min_size=ranks - 1, max_size=ranks - 1)))

    return pieces(ranks, heads, cuts(23), cuts(16))


FOUR = pieces(4, 2, [6, 12, 18], [4, 8, 12])
TWO = pieces(2, 2, [12], [8])


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(
    places=layouts(),
    bits=st.sampled_from([8, 16]),
    kind=st.sampled_from(["rademacher", "gaussian"]),
    rounding=st.sampled_from(["stochastic", "nearest"]),
)
def test_parts_on_ranks_move_as_the_whole_does(
    make_update, library, dtype, places, bits, kind, rounding
):
    weights = model(dtype)
    whole = Replica({n: in_library(library, w) for n, w in weights.items()}, 0)
    shards = spread(weights, places, library)
    ranks = Ranks(len(places))
    replicas = ranks.load(shards)
    for version in range(2):
        rule = {"bits": bits, "kind": kind, "rounding": rounding}
        update, after = make_update(weights, version, **rule)
        assert np.any(bits_of(after[OUT]) != bits_of(weights[OUT]))
        weights = after
        blob = encode(update)
        whole.apply(blob)
        assert ranks.each(lambda rank, b=blob: replicas[rank].apply(b)) == [
            version + 1
        ] * len(places)
        assert_holds(shards, weights)
        for name, tensor in whole.tensors.items():
            np.testing.assert_array_equal(bits_of(tensor), bits_of(weights[name]))
        for replica in replicas:
            assert replica.digests == whole.digests
            assert replica.digest == update.digest
            assert not replica.diverged


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_rank_may_hold_several_pieces_of_a_weight(make_update, library):
    """As of queries, keys and values that are one weight, each cut over the ranks."""
    weights = model("bfloat16")
    update, after = make_update(weights)
    held = spread(weights, TWO, library)
    for rank, shards in enumerate(held):
        shards[Q] = tuple(
            Shard(in_library(library, weights[Q][row : row + 4]), (16, 13), row=row)
            for row in (4 * rank, 8 + 4 * rank)
        )
    ranks = Ranks(2)
    replicas = ranks.load(held)
    assert ranks.each(lambda rank: replicas[rank].apply(update)) == [1, 1]
    for shards in held:
        for piece in shards[Q]:
            rows = slice(piece.row, piece.row + 4)
            np.testing.assert_array_equal(
                bits_of(piece.tensor), bits_of(after[Q])[rows]
            )
    assert all(replica.digest == update.digest for replica in replicas)

    held[1][Q] = held[1][Q][:1]
    for error in ranks.load(held):
        assert error.reason == "shape"
        assert "got 156 of 208 entries" in str(error)


# --- what one rank cannot do, none does


class Spread:
    """A model on four ranks (on two of which each key-value head lies), and updates."""

    def __init__(self, make_update, places=FOUR, library="numpy"):
        self.before = model("bfloat16")
        self.update, self.after = make_update(self.before)
        self.blob = encode(self.update)
        self.shards = spread(self.before, places, library)
        self.ranks = Ranks(len(places))
        self.replicas = self.ranks.load(self.shards)
        assert [replica.version for replica in self.replicas] == [0] * len(places)

    def apply(self, blobs=None) -> list:
        given = blobs or [self.blob] * self.ranks.number
        return self.ranks.each(lambda rank: self.replicas[rank].apply(given[rank]))

    def refused(self, blobs=None) -> tuple[str, str]:
        """The reason and message that all ranks refuse an update for."""
        errors = self.apply(blobs)
        assert all(isinstance(error, Refused) for error in errors)
        told = {(error.reason, str(error)) for error in errors}
        assert len(told) == 1
        return told.pop()

    def load(self, version: int = 0) -> list:
        """All ranks load the weights from before the update again."""
        self.shards = spread(self.before, FOUR, "numpy")
        return self.ranks.each(
            lambda rank: self.replicas[rank].load(self.shards[rank], version)
        )

    def is_as_before(self) -> None:
        """Nothing has moved, and the next update is taken."""
        assert_holds(self.shards, self.before)
        assert {(r.version, r.diverged) for r in self.replicas} == {(0, False)}
        assert {r.digest for r in self.replicas} == {self.update.base_digest}

    def has_diverged(self) -> None:
        """No rank takes an update until all have loaded."""
        assert {(r.version, r.diverged) for r in self.replicas} == {(0, True)}
        assert self.refused()[0] == "diverged"
        assert self.load() == [None] * self.ranks.number
        assert self.apply() == [1] * self.ranks.number
        assert_holds(self.shards, self.after)


@pytest.fixture
def spread_model(make_update) -> Spread:
    return Spread(make_update)


@pytest.mark.parametrize("at", range(4))
def test_an_update_that_one_rank_got_damaged_moves_none(spread_model, at):
    blobs = [spread_model.blob] * 4
    blobs[at] = spread_model.blob[:-1]
    assert spread_model.refused(blobs)[0] == "truncated"
    spread_model.is_as_before()
    assert spread_model.apply() == [1] * 4
    assert_holds(spread_model.shards, spread_model.after)


@pytest.mark.parametrize("at", range(4))
def test_a_rank_of_another_version_keeps_all_where_they_are(spread_model, at):
    spread_model.replicas[at].version = 5
    assert spread_model.refused()[0] == "repeated"
    spread_model.replicas[at].version = 0
    spread_model.is_as_before()
    spread_model.replicas[at].diverged = True
    assert spread_model.refused()[0] == "diverged"
    spread_model.replicas[at].diverged = False
    spread_model.is_as_before()


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
        (MemoryError(), "MemoryError: "),
        (ValueError("no such kernel"), "no such kernel"),
    ],
)
def test_a_tensor_that_fails_on_one_rank_stops_all(
    spread_model, monkeypatch, at, error, message
):
    broken = spread_model.shards[at][OUT].tensor
    replay = replica_module.replay

    def fail_at_one(weight, *args, **kwargs):
        if weight is broken:
            raise error
        replay(weight, *args, **kwargs)

    monkeypatch.setattr(replica_module, "replay", fail_at_one)
    assert spread_model.refused() == ("failed", message)
    spread_model.has_diverged()


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("name", [Q, K, OUT, EMBED])
def test_a_bit_that_flipped_on_one_rank_stops_all(spread_model, at, name):
    bits_of(spread_model.shards[at][name].tensor)[0, 0] ^= 0x100
    reason, message = spread_model.refused()
    assert reason == "digest"
    assert repr(name) in message
    ranks_differ = "Ranks must hold the same bits where they hold the same part"
    assert (ranks_differ in message) == (name == K)  # which two ranks hold
    spread_model.has_diverged()


def test_a_vector_that_flipped_is_found_when_all_is_read(spread_model):
    bits_of(spread_model.shards[2][NORM].tensor)[3] ^= 1
    ranks, shards = spread_model.ranks, spread_model.shards
    errors = ranks.load(shards)
    assert {error.reason for error in errors} == {"digest"}
    assert {"load all weights" in str(error) for error in errors} == {True}
    for rank in (0, 1, 3):  # on all, and it is a model again, but another one
        bits_of(shards[rank][NORM].tensor)[3] ^= 1
    replicas = ranks.load(shards)
    assert {r.digest for r in replicas} != {spread_model.update.base_digest}


# --- parts that do not make up a model


def without(shards: list[dict], at: int, name: str) -> list[dict]:
    return [
        {n: s for n, s in rank.items() if (i, n) != (at, name)}
        for i, rank in enumerate(shards)
    ]


def changed(shards: list[dict], at: int, name: str, change) -> list[dict]:
    return [
        rank | {name: change(rank[name])} if i == at else rank
        for i, rank in enumerate(shards)
    ]


def read_only(shard: Shard) -> Shard:
    tensor = shard.tensor.copy()
    tensor.flags.writeable = False
    return shard._replace(tensor=tensor)


FAULTS = {
    "missing": lambda s, at: without(s, at, OUT),
    "missing replicated": lambda s, at: without(s, at, NORM),
    "short": lambda s, at: changed(
        s, at, EMBED, lambda p: p._replace(tensor=p.tensor[1:], row=p.row + 1)
    ),
    "twice": lambda s, at: changed(s, at, Q, lambda p: s[(at + 1) % 4][Q]),
    "dtype": lambda s, at: changed(
        s, at, OUT, lambda p: p._replace(tensor=p.tensor.astype(np.float32))
    ),
    "whole shape": lambda s, at: changed(
        s, at, OUT, lambda p: p._replace(shape=(13, 17))
    ),
    "read-only": lambda s, at: changed(s, at, BIAS, read_only),
    "no array": lambda s, at: changed(s, at, K, lambda p: p._replace(tensor=[1.0])),
    "float16": lambda s, at: changed(
        s, at, NORM, lambda p: p._replace(tensor=p.tensor.astype(np.float16))
    ),
}


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("fault", list(FAULTS))
def test_ranks_whose_parts_make_no_model_all_refuse_to_load(spread_model, fault, at):
    bad = FAULTS[fault](spread(spread_model.after, FOUR, "numpy"), at)
    replicas = spread_model.replicas
    errors = spread_model.ranks.each(lambda rank: replicas[rank].load(bad[rank], 1))
    told = {(error.reason, str(error)) for error in errors}
    assert len(told) == 1
    (reason, message) = told.pop()
    refused = ("read-only", "no array", "float16")
    assert reason == ("failed" if fault in refused else "shape")
    assert message.count(". ") == 0
    spread_model.is_as_before()
    assert spread_model.apply() == [1] * 4
    assert_holds(spread_model.shards, spread_model.after)


def test_parts_are_counted_once_where_ranks_hold_the_same(make_update):
    one_head = pieces(2, 1, [12], [8])
    for places in (TWO, one_head):
        held = Spread(make_update, places)
        digests = held.replicas[1].digests
        assert digests == Replica(dict(held.before), 0).digests
        assert math.prod(digests[K].shape) == 8 * 13

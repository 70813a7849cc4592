import dataclasses
import hashlib
import itertools
import json
import tracemalloc
import zlib
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx

import logra_jax as logra
import logra_jax.rollout.replica as replica_module
from logra_jax.algorithm.digest import TensorDigest, digest_array, model_digest
from logra_jax.algorithm.factor import quantise
from logra_jax.algorithm.merge import merge
from logra_jax.algorithm.replay import replay
from logra_jax.models.decoder import Decoder
from logra_jax.models.hf import named_factors, named_tensors, tensor_digests
from logra_jax.models.layers import DecoderConfig
from logra_jax.rollout.replica import Replica
from logra_jax.rollout.wire import Refused, Update, decode, encode

DOWN = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]
FIRST, SECOND, NORM = "a.weight", "b.weight", "norm.weight"
LIBRARIES = ["numpy", "torch"]
MERGES = 1000


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """For matrices as small as these, threads cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Trainer:
    """The sending side: a small decoder in bfloat16, moved by random updates."""

    def __init__(self):
        config = DecoderConfig(
            vocab_size=32,
            hidden_size=48,
            intermediate_size=72,
            num_layers=2,
            num_heads=3,
            num_kv_heads=1,
            head_dim=16,
            max_positions=64,
            rope_theta=1e4,
            rms_norm_eps=1e-6,
            tie_embeddings=True,
        )
        random = np.random.default_rng(0)
        graph, state = nnx.split(
            nnx.eval_shape(
                lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            )
        )
        state = jax.tree.map(
            lambda a: jnp.array(0.02 * random.normal(size=a.shape), a.dtype), state
        )
        self.basis = logra.Basis(seed=2**32 - 5)
        model = logra.sketch(nnx.merge(graph, state), 16, "down_proj", self.basis)
        self.graph, self.probes, self.weights = nnx.split(model, logra.Probe, ...)
        self.version = 0
        self.digests = tensor_digests(model)

        @jax.jit
        def step(weights, probes, key):
            noise = jax.random.normal(key, (2, 48, 16)) * 1e-4
            factors = quantise(jax.tree.map(lambda p: p + noise, probes), self.basis)
            return merge(weights, factors, self.basis), factors

        self._step = step

    @property
    def model(self) -> Decoder:
        return nnx.merge(self.graph, self.probes, self.weights)

    def tensors(self) -> dict[str, np.ndarray]:
        """Copies of the weights, (out, in)."""
        return {name: np.array(t, order="C") for name, t in named_tensors(self.model)}

    def update(self) -> Update:
        """Move the weights, and say how."""
        key = jax.random.key(self.version)
        self.weights, moved = self._step(self.weights, self.probes, key)
        before, self.digests = self.digests, tensor_digests(self.model)
        factors = dict(named_factors(self.model, moved))
        self.version += 1
        return Update(
            base_version=self.version - 1,
            version=self.version,
            seed=self.basis.seed,
            step=self.version - 1,
            kind=self.basis.kind,
            refresh=self.basis.refresh,
            rounding="stochastic",
            base_digest=model_digest(before),
            digest=model_digest(self.digests),
            digests={name: self.digests[name].word for name in factors},
            factors=factors,
        )


class Run(NamedTuple):
    """What a run of the trainer leaves behind."""

    first: dict[str, np.ndarray]
    blobs: list[bytes]
    last: dict[str, np.ndarray]
    digest: str


@pytest.fixture(scope="module")
def run() -> Run:
    trainer = Trainer()
    first = trainer.tensors()
    blobs = [encode(trainer.update()) for _ in range(MERGES)]
    digest = model_digest(tensor_digests(trainer.model))
    return Run(first, blobs, trainer.tensors(), digest)


def bits_of(tensor) -> np.ndarray:
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    array = np.asarray(tensor)
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


def in_library(library: str, tensors) -> dict:
    """The same bits in arrays of their own."""
    if library == "numpy":
        return {name: tensor.copy() for name, tensor in tensors.items()}
    dtype = {2: torch.bfloat16, 4: torch.float32}
    return {
        name: torch.tensor(bits_of(t).view(f"i{t.itemsize}")).view(dtype[t.itemsize])
        for name, t in tensors.items()
    }


def assert_same_bits(held, expected) -> None:
    assert held.keys() == expected.keys()
    for name in held:
        np.testing.assert_array_equal(bits_of(held[name]), bits_of(expected[name]))


def refused(replica: Replica, update) -> str:
    """The reason that ``update`` is refused for, after which nothing has changed."""
    state = (replica.version, replica.digest, replica.diverged)
    before = {name: bits_of(t).copy() for name, t in replica.tensors.items()}
    with pytest.raises(Refused) as caught:
        replica.apply(update)
    assert (replica.version, replica.digest, replica.diverged) == state
    assert_same_bits(replica.tensors, before)
    return caught.value.reason


# --- the ten-line reader: numpy alone, from the text of the format alone


def mix(x):
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def threefry(key, x, y):
    k = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = x + k[0] & 0xFFFFFFFF, y + k[1] & 0xFFFFFFFF
    for b in range(5):
        for t in ((13, 15, 26, 6), (17, 29, 16, 24))[b % 2]:
            x = x + y & 0xFFFFFFFF
            y = (y << t | y >> 32 - t) & 0xFFFFFFFF ^ x
        x, y = x + k[(b + 1) % 3], y + k[(b + 2) % 3] + b + 1
        x, y = x & 0xFFFFFFFF, y & 0xFFFFFFFF
    return x, y


def read(blob: bytes, weights: dict[str, np.ndarray]) -> None:
    """Move uint16 weights: signs, stochastic rounding."""
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    u = json.loads(header.pop("__metadata__")["logra"])
    for name, t in header.items():
        begin, end = (start + offset for offset in t["data_offsets"])
        F = np.frombuffer(blob[begin:end], "<i2").reshape(t["shape"])
        w, crc, r = weights[name], zlib.crc32(name.encode()), F.shape[1] - 1
        key = threefry(threefry((0, u["seed"]), 0, u["step"] * u["refresh"]), 0, crc)
        x, y = threefry(key, 0, np.arange(r * -(-w.shape[1] // 32)).reshape(r, -1))
        B = ((x ^ y)[..., None] >> np.arange(32) & 1).reshape(r, -1)[:, : w.shape[1]]
        C = np.float32(F[:, :-1] @ (2 * B - 1)) * np.float32(2) ** F[:, -1:]
        s = np.int64(((np.uint32(w) << 16).view("f4") + C).view("u4"))
        stream = mix((mix(mix(u["seed"]) + u["step"] & 0xFFFFFFFF) + crc) & 0xFFFFFFFF)
        noise = mix(mix(np.arange(w.size).reshape(w.shape)) ^ stream) >> 16
        w[:] = np.where(C, s + noise >> 16, w)


# --- a thousand merges


def test_ten_lines_of_numpy_repeat_every_merge_from_its_bytes(run):
    weights = {name: bits_of(t).copy() for name, t in run.first.items()}
    for blob in run.blobs:
        read(blob, weights)
    assert_same_bits(weights, run.last)


@pytest.mark.parametrize(
    "library", ["numpy", pytest.param("torch", marks=pytest.mark.slow)]
)
def test_a_replica_holds_the_trainers_weights_after_a_thousand_updates(run, library):
    replica = Replica(in_library(library, run.first), 0)
    assert replica.digest == decode(run.blobs[0]).base_digest
    for version, blob in enumerate(run.blobs, 1):
        assert replica.apply(blob) == version
    assert replica.digest == run.digest == decode(run.blobs[-1]).digest
    assert_same_bits(replica.tensors, run.last)
    changed = [n for n in DOWN if not np.array_equal(run.first[n], run.last[n])]
    assert changed == DOWN


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_update_that_is_missing_from_the_middle_is_noticed_at_the_next(run, library):
    replica = Replica(in_library(library, run.first), 0)
    for blob in run.blobs[:5]:
        replica.apply(blob)
    assert refused(replica, run.blobs[6]) == "base_version"
    damaged = bytearray(run.blobs[5])
    damaged[-1] ^= 1
    assert refused(replica, bytes(damaged)) == "corrupted"
    for blob in run.blobs[5:8]:
        replica.apply(blob)
    assert replica.digest == decode(run.blobs[7]).digest


def test_an_integer_changed_in_the_middle_behind_a_right_checksum_is_noticed(run):
    replica = Replica(in_library("numpy", run.first), 0)
    for blob in run.blobs[:5]:
        replica.apply(blob)
    update = decode(run.blobs[5])
    update.factors[DOWN[1]][7, 3] ^= 1 << 9
    with pytest.raises(Refused, match=DOWN[1]) as caught:
        replica.apply(encode(update))
    assert caught.value.reason == "digest"
    assert replica.diverged
    assert replica.version == 5
    assert refused(replica, run.blobs[5]) == "diverged"
    assert refused(replica, run.blobs[6]) == "diverged"
    replica.load(in_library("numpy", run.last), MERGES)
    assert (replica.version, replica.digest) == (MERGES, run.digest)
    assert not replica.diverged


# --- every case of the format, against its text


def random_words(u: Update, name: str, rows: int, columns: int) -> np.ndarray:
    key = threefry((0, u.seed), 0, u.step * u.refresh)
    key = threefry(key, 0, zlib.crc32(name.encode()))
    x, y = threefry(key, 0, np.arange(rows * columns).reshape(rows, columns, 1))
    return x ^ y


def written_out(u: Update, name: str, bits: np.ndarray) -> np.ndarray:
    """The bits of a matrix after an update, by the text of the format."""
    F, (d, k) = u.factors[name].astype(np.int64), bits.shape
    r = F.shape[1] - 1
    if u.kind == "rademacher":
        B = random_words(u, name, r, (k + 31) // 32) >> np.arange(32) & 1
        B = (2 * B - 1).reshape(r, -1)[:, :k]
    else:
        quantile = NormalDist().inv_cdf
        table = np.array([round(44 * quantile((b + 0.5) / 256)) for b in range(256)])
        B = table[random_words(u, name, r, (k + 3) // 4) >> 8 * np.arange(4) & 255]
        B = B.reshape(r, -1)[:, :k]
    C = np.ldexp(np.float32(F[:, :-1] @ B), F[:, -1:])
    narrow = bits.dtype == np.uint16
    w = bits.astype(np.uint32) << (16 if narrow else 0)
    w = np.where(w & 0x7F800000, w, 0).astype(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        s = np.int64((w.view(np.float32) + C).view(np.uint32))
    s = np.where(s & 0x7F800000, s, 0)
    if narrow:
        noise = 0x7FFF + (s >> 16 & 1)
        if u.rounding == "stochastic":
            seed, matrix = np.array([u.seed]), zlib.crc32(name.encode())
            stream = mix(mix(mix(seed) + u.step & 0xFFFFFFFF) + matrix & 0xFFFFFFFF)
            noise = mix(mix(np.arange(d * k).reshape(d, k)) ^ stream) >> 16
        magnitude = s & 0x7FFFFFFF
        s = np.where(magnitude < 0x7F800000, s + noise & 0xFFFFFFFF, s)
        s = np.where(magnitude > 0x7F800000, s | 0x00400000, s) >> 16
    return np.where(C == 0, bits, s).astype(bits.dtype)


def word_of(bits: np.ndarray) -> int:
    """The digest of a tensor, by the text of the format."""
    return int(mix(mix(np.arange(bits.size)) ^ bits.ravel().astype(np.int64)).sum()) % (
        1 << 32
    )


def digest_of(weights: dict[str, np.ndarray]) -> str:
    """The digest of a model, by the text of the format."""
    dtypes = {2: "bfloat16", 4: "float32"}
    lines = "".join(
        f"{name} {dtypes[w.itemsize]} {'x'.join(map(str, w.shape))} "
        f"{word_of(bits_of(w)):08x}\n"
        for name, w in sorted(weights.items())
    )
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def small_model(dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Two matrices, one with the numbers that are easily got wrong, and a vector."""
    random = np.random.default_rng(1)
    shapes = {FIRST: (9, 37), SECOND: (21, 6), NORM: (6,)}
    tensors = {name: random.normal(size=s).astype(dtype) for name, s in shapes.items()}
    bits = bits_of(tensors[FIRST])
    special = [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80]
    special += [0x7FC0, 0x7F81, 0xFFFF, 0x3F80, 0x3FFF]
    bits[:, : len(special)] = np.array(special, bits.dtype) << 8 * (bits.itemsize - 2)
    return tensors


def small_update(weights, version=0, bits=16, **changes) -> Update:
    """An update of a small model, its digests by the text of the format."""
    random, limit = np.random.default_rng(version), 2 ** (bits - 1)
    factors = {}
    for name in (FIRST, SECOND):
        factor = random.integers(-limit, limit, (len(weights[name]), 6))
        factor[:, -1] = random.integers(-12 - bits, 2 - bits, len(factor))
        factor[-1, :-1] = 0  # a row that nothing happens to
        if name == FIRST:
            factor[:3, -1] = (-111, 100, -60)  # below and far above the weights
        factors[name] = factor.astype(f"i{bits // 8}")
    fields = {
        "base_version": version,
        "version": version + 1,
        "seed": 2**32 - 5,
        "step": 2**31 + 9 - version,
        "kind": "rademacher",
        "refresh": True,
        "rounding": "stochastic",
        "base_digest": digest_of(weights),
        "digest": "0" * 16,
        "digests": dict.fromkeys(factors, 0),
        "factors": factors,
    }
    draft = Update(**fields | changes)
    after = moved(draft, weights)
    return dataclasses.replace(
        draft,
        digest=digest_of(after),
        digests={name: word_of(bits_of(after[name])) for name in factors},
    )


def moved(update: Update, weights) -> dict[str, np.ndarray]:
    return {
        name: written_out(update, name, bits_of(w)).view(w.dtype)
        if name in update.factors
        else w
        for name, w in weights.items()
    }


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [
        (ml_dtypes.bfloat16, "stochastic"),
        (ml_dtypes.bfloat16, "nearest"),
        (np.float32, "stochastic"),
    ],
)
def test_a_replica_does_what_the_format_says(
    library, bits, kind, refresh, dtype, rounding
):
    expected = small_model(dtype)
    replica = Replica(in_library(library, expected), 0)
    rule = {"kind": kind, "refresh": refresh, "rounding": rounding}
    for version in range(2):
        update = small_update(expected, version, bits, **rule)
        replica.apply(encode(update))
        expected = moved(update, expected)
        assert_same_bits(replica.tensors, expected)
        assert replica.digest == digest_of(expected)
    start = bits_of(small_model(dtype)[FIRST])
    ends = bits_of(expected[FIRST])
    np.testing.assert_array_equal(ends[-1], start[-1])
    assert np.mean(ends[3:-1] != start[3:-1]) > 0.5


def test_every_kind_of_array_that_is_held_is_moved_in_place():
    weights = small_model()
    update = small_update(weights)
    expected = moved(update, weights)

    def turned(array):
        return np.array(array.T, order="C").T if array.ndim > 1 else array.copy()

    as_torch = in_library("torch", weights)
    holdings = [
        {name: bits_of(w).copy() for name, w in weights.items()},
        {name: turned(w) for name, w in weights.items()},
        {name: w.T.contiguous().T if w.ndim > 1 else w for name, w in as_torch.items()},
        {name: torch.nn.Parameter(w.clone()) for name, w in as_torch.items()},
        in_library("torch", weights) | {FIRST: weights[FIRST].copy()},
    ]
    for tensors in holdings:
        Replica(tensors, 0).apply(update)
        held = {
            n: t.detach() if isinstance(t, torch.Tensor) else t
            for n, t in tensors.items()
        }
        assert_same_bits(held, expected)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@np.errstate(invalid="ignore", over="ignore")
def test_shards_move_as_the_whole_does_and_their_digests_add_up(
    library, rounding, kind
):
    weights = small_model()
    update = small_update(weights, kind=kind, rounding=rounding)
    whole = in_library(library, moved(update, weights))[FIRST]
    basis = logra.Basis(seed=update.seed, kind=kind)
    factor = update.factors[FIRST]
    if library == "torch":
        factor = torch.tensor(factor)
    d, k = weights[FIRST].shape
    for row_cuts, column_cuts in [
        ((0, 4, 5, d), (0, k)),
        ((0, d), (0, 1, 18, 32, k)),
        ((0, 2, d), (0, 33, k)),
    ]:
        total = 0
        for top, bottom in itertools.pairwise(row_cuts):
            for left, right in itertools.pairwise(column_cuts):
                part = in_library(
                    library, {"": weights[FIRST][top:bottom, left:right]}
                )[""]
                place = {"rows": top, "columns": left, "width": k}
                replay(
                    part,
                    factor[top:bottom, :-1],
                    factor[top:bottom, -1],
                    basis.address(FIRST, update.step),
                    basis,
                    rounding=rounding,
                    **place,
                )
                expected = bits_of(whole)[top:bottom, left:right]
                np.testing.assert_array_equal(bits_of(part), expected)
                total += digest_array(part, **place)
        assert total % 2**32 == update.digests[FIRST]


def test_memory_does_not_grow_with_the_matrix():
    def peak(rows: int) -> int:
        weights = {"w": np.zeros((rows, 1024), np.uint16)}
        replica = Replica(weights, 0)
        factor = np.full((rows, 5), -20, np.int16)
        update = Update(
            base_version=0,
            version=1,
            seed=0,
            step=0,
            kind="rademacher",
            refresh=True,
            rounding="nearest",
            base_digest=replica.digest,
            digest=model_digest({"w": TensorDigest("bfloat16", (rows, 1024), 0)}),
            digests={"w": 0},
            factors={"w": factor},
        )
        tracemalloc.start()
        with pytest.raises(Refused, match="load all weights"):
            replica.apply(update)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(8)  # what is allocated once
    assert peak(2048) < 1.02 * peak(512)


# --- what is refused, with nothing changed


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_flipped_bit_and_every_truncation_leaves_the_weights_alone(library):
    weights = small_model()
    replica = Replica(in_library(library, weights), 0)
    blob = encode(small_update(weights))
    for i in range(len(blob)):
        damaged = bytearray(blob)
        damaged[i] ^= 1 << i % 8
        for bad in (bytes(damaged), blob[:i]):
            with pytest.raises(Refused):
                replica.apply(bad)
    assert_same_bits(replica.tensors, weights)
    assert replica.apply(blob) == 1


def test_an_update_is_applied_once():
    weights = small_model()
    first = small_update(weights)
    second = small_update(moved(first, weights), 1)
    replica = Replica(in_library("numpy", weights), 0)
    assert refused(replica, second) == "base_version"
    replica.apply(first)
    assert refused(replica, first) == "repeated"
    replica.apply(second)
    assert refused(replica, first) == refused(replica, second) == "repeated"


def test_an_update_of_other_weights_is_refused():
    weights = small_model()
    update = small_update(weights)
    for name in weights:  # also one that the update does not touch
        other = in_library("numpy", weights)
        bits_of(other[name])[..., 2] ^= 1
        assert refused(Replica(other, 0), update) == "base_digest"
    renamed = {name.replace("norm", "scale"): w for name, w in weights.items()}
    assert refused(Replica(in_library("numpy", renamed), 0), update) == "base_digest"
    wide = {name: w.astype(np.float32) for name, w in weights.items()}
    assert refused(Replica(wide, 0), update) == "base_digest"


def test_a_factor_that_does_not_fit_is_refused():
    weights = small_model()
    update = small_update(weights)
    replica = Replica(in_library("torch", weights), 0)

    def sent(name, factor):
        factors = {**update.factors, name: factor}
        digests = {**update.digests, name: 0}
        return dataclasses.replace(update, factors=factors, digests=digests)

    factor = update.factors[FIRST]
    assert refused(replica, sent("c.weight", factor)) == "unknown_name"
    assert refused(replica, sent(SECOND, factor)) == "shape"
    assert refused(replica, sent(FIRST, factor[:-1])) == "shape"
    assert refused(replica, sent(NORM, factor[:6])) == "shape"
    lying = dataclasses.replace(update, digest="0" * 16)
    assert refused(replica, lying) == "metadata"
    assert replica.apply(update) == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_weights_that_changed_unseen_are_found_by_the_next_update(library):
    weights = small_model()
    update = small_update(weights)
    replica = Replica(in_library(library, weights), 0)
    bits_of(replica.tensors[SECOND])[3, 2] ^= 0x100
    with pytest.raises(Refused, match=f"{SECOND!r}.* 1 of 2 updated") as caught:
        replica.apply(update)
    assert caught.value.reason == "digest"
    assert replica.digest != update.digest
    assert refused(replica, update) == "diverged"
    replica.load(in_library(library, weights), 0)
    assert replica.apply(update) == 1
    assert replica.digest == update.digest


def test_an_update_that_was_interrupted_leaves_the_weights_refusing(monkeypatch):
    weights = small_model()
    update = small_update(weights)
    replica = Replica(in_library("numpy", weights), 0)

    def replay_one(*args, **kwargs):
        monkeypatch.setattr(replica_module, "replay", interrupt)
        replay(*args, **kwargs)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(replica_module, "replay", replay_one)
    with pytest.raises(KeyboardInterrupt):
        replica.apply(update)
    assert refused(replica, update) == "diverged"


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (jnp.ones((2, 2)), "numpy arrays or torch tensors, got ArrayImpl for 'w'"),
        ([1.0], "numpy arrays or torch tensors, got list for 'w'"),
        (np.ones((2, 2), np.float16), r"got float16 \(2, 2\) for 'w'"),
        (np.ones((2, 2), np.float64), r"got float64 \(2, 2\) for 'w'"),
        (torch.ones(3, dtype=torch.float16), r"got torch.float16 \(3,\) for 'w'"),
        (np.array(1, np.float32), r"not be empty or scalar, got float32 \(\) for"),
        (np.ones((2, 0), np.float32), r"got float32 \(2, 0\) for 'w'"),
        (np.asarray(jnp.ones(2)), "must be writable.* for 'w'; copy it first"),
    ],
)
def test_tensors_that_cannot_be_moved_in_place_are_refused(tensor, said):
    replica = Replica(small_model(), 3)
    digest = replica.digest
    with pytest.raises(ValueError, match=said):
        replica.load({"w": tensor}, 4)
    assert (replica.version, replica.digest) == (3, digest)

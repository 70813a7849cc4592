import base64
import hashlib
import itertools
import json
import pickle
import re
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from logra_jax.algorithm.basis import GAUSSIAN, KINDS
from logra_jax.algorithm.rounding import ROUNDINGS
from logra_jax.rollout import wire
from logra_jax.rollout.wire import REASONS, Refused, Update, decode, encode

NAME = "model.layers.0.mlp.down_proj.weight"
ROWS = np.array([[1, -2, 3, -20], [-32768, 32767, 0, 113]], np.int16)
FIELDS = {
    "base_version": 6,
    "version": 7,
    "seed": 2**32 - 1,
    "step": 6,
    "kind": "rademacher",
    "refresh": True,
    "rounding": "stochastic",
    "base_digest": "0123456789abcdef",
    "digest": "fedcba9876543210",
    "digests": {NAME: 2**32 - 1},
}
# The bytes of this update as version 1 was published: they never change.
GOLDEN = """
CAIAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJsb2dyYSI6IntcImJhc2VfZGlnZXN0XCI6XCIwMTIzNDU2Nzg5YWJj
ZGVmXCIsXCJiYXNlX3ZlcnNpb25cIjo2LFwiY2hlY2tzdW1cIjpcIjM0ZjJkMWFlNzExZDUxNzc4ODZhMWUzZmEw
ODI5YmNkYWEzMmExZjU0Mjg0NGJiOTY3Yjg1ZWU1MzNmN2QzNzZcIixcImRpZ2VzdFwiOlwiZmVkY2JhOTg3NjU0
MzIxMFwiLFwiZGlnZXN0c1wiOntcIm1vZGVsLmxheWVycy4wLm1scC5kb3duX3Byb2oud2VpZ2h0XCI6NDI5NDk2
NzI5NX0sXCJmb3JtYXRcIjpcImxvZ3JhLXVwZGF0ZVwiLFwiZm9ybWF0X3ZlcnNpb25cIjoxLFwia2luZFwiOlwi
cmFkZW1hY2hlclwiLFwicmVmcmVzaFwiOnRydWUsXCJyb3VuZGluZ1wiOlwic3RvY2hhc3RpY1wiLFwic2VlZFwi
OjQyOTQ5NjcyOTUsXCJzdGVwXCI6NixcInZlcnNpb25cIjo3fSJ9LCJtb2RlbC5sYXllcnMuMC5tbHAuZG93bl9w
cm9qLndlaWdodCI6eyJkdHlwZSI6IkkxNiIsInNoYXBlIjpbMiw0XSwiZGF0YV9vZmZzZXRzIjpbMCwxNl19fSAg
AQD+/wMA7P8AgP9/AABxAA==
"""


def update(factors=None, **changes) -> Update:
    factors = {NAME: ROWS} if factors is None else factors
    digests = dict.fromkeys(factors, 5)
    return Update(**{**FIELDS, "digests": digests, **changes}, factors=factors)


def equal(a: Update, b: Update) -> bool:
    fields, others = (dict(vars(u)) for u in (a, b))
    factors, their = fields.pop("factors"), others.pop("factors")
    return (
        fields == others
        and factors.keys() == their.keys()
        and all(factors[n].dtype == their[n].dtype for n in factors)
        and all(np.array_equal(factors[n], their[n]) for n in factors)
    )


def forge(metadata, tensors=None, sealed=True) -> bytes:
    """A blob with a right checksum and anything in it, written without our writer."""
    tensors = (
        {NAME: ("I16", ROWS.shape, ROWS.tobytes())} if tensors is None else tensors
    )
    header, data = {"__metadata__": {"logra": json.dumps(metadata)}}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        data += content
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blob = len(text).to_bytes(8, "little") + text + data
    if sealed:
        blob = blob.replace(b"0" * 64, hashlib.sha256(blob).hexdigest().encode(), 1)
    return blob


def metadata(**changes) -> dict:
    fixed = {"format": "logra-update", "format_version": 1, "checksum": "0" * 64}
    fields = {**fixed, **FIELDS, **changes}
    return {name: value for name, value in fields.items() if value is not None}


def refusal(blob: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        decode(blob)
    return caught.value


# --- what goes in comes out


@st.composite
def updates(draw) -> Update:
    word = st.integers(0, 2**32 - 1)
    digest = st.text("0123456789abcdef", min_size=16, max_size=16)
    names = st.text(min_size=1, max_size=40).filter(lambda n: n != "__metadata__")
    factors = {}
    for name in draw(st.sets(names, min_size=1, max_size=4)):
        dtype = draw(st.sampled_from([np.int16, np.int8]))
        shape = draw(st.tuples(st.integers(1, 9), st.integers(2, 40)))
        factor = draw(hnp.arrays(dtype, shape))
        factor[:, -1] = draw(
            hnp.arrays(dtype, shape[0], elements=st.integers(-111, 113))
        )
        factors[name] = factor
    base_version = draw(st.integers(0, 2**63 - 2))
    return Update(
        base_version=base_version,
        version=draw(st.integers(base_version + 1, 2**63 - 1)),
        seed=draw(word),
        step=draw(word),
        kind=draw(st.sampled_from(KINDS)),
        refresh=draw(st.booleans()),
        rounding=draw(st.sampled_from(ROUNDINGS)),
        base_digest=draw(digest),
        digest=draw(digest),
        digests={name: draw(word) for name in factors},
        factors=factors,
    )


@given(updates())
def test_every_update_survives_the_wire(sent):
    blob = encode(sent)
    assert equal(decode(blob), sent)
    assert encode(decode(blob)) == blob
    backwards = dict(reversed(sent.factors.items()))
    again = {**vars(sent), "factors": backwards, "digests": dict(sent.digests)}
    assert encode(Update(**again)) == blob


def test_an_array_travels_by_value_whatever_its_strides():
    strided = np.ascontiguousarray(ROWS.T).T
    assert not strided.flags.c_contiguous
    assert equal(decode(encode(update({NAME: strided}))), update())


def test_any_buffer_of_bytes_is_read():
    blob = encode(update())
    for buffer in (bytearray(blob), memoryview(blob)):
        assert equal(decode(buffer), update())


def test_the_bytes_are_those_of_the_published_version():
    golden = base64.b64decode(GOLDEN)
    expected = Update(**FIELDS, factors={NAME: ROWS})
    assert equal(decode(golden), expected)
    assert encode(expected) == golden


def test_a_blob_is_a_safetensors_file_with_tensors_under_their_names(tmp_path):
    from safetensors import safe_open

    (tmp_path / "update").write_bytes(encode(update()))
    with safe_open(tmp_path / "update", framework="numpy") as file:
        assert list(file.keys()) == [NAME]
        np.testing.assert_array_equal(file.get_tensor(NAME), ROWS)
        assert json.loads(file.metadata()["logra"])["version"] == 7


def test_a_blob_written_by_the_specification_alone_is_read():
    read = decode(forge(metadata()))
    assert equal(read, Update(**FIELDS, factors={NAME: ROWS}))


def test_the_specification_names_the_table_the_code_has_and_every_key():
    assert wire.__doc__ is not None
    table = zlib.crc32(np.array(GAUSSIAN, np.int8).tobytes())
    assert f"0x{table:08X}" in wire.__doc__
    assert all(f"``{key}``" in wire.__doc__ for key in metadata())


def test_reading_needs_neither_jax_nor_torch():
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"jax", "jaxlib", "flax", "jaxtyping", "torch"}}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
import numpy as np
from logra_jax.algorithm import replay
from logra_jax.algorithm.digest import model_digest
from logra_jax.rollout.replica import Replica
from logra_jax.rollout.wire import Update, decode, encode
name = {NAME!r}
def held():
    return Replica({{name: np.full((2, 5), 0x3F80, np.uint16)}}, 6)
factor = np.array({ROWS.tolist()}, np.int16)
factor[:, -1] = -20
oracle = held()
from logra_jax.algorithm.basis import Basis
basis = Basis(seed=3)
replay.replay(
    oracle.tensors[name], factor[:, :-1], factor[:, -1], basis.address(name, 6), basis
)
oracle.load(oracle.tensors, 7)
replica = held()
assert replica.digest != oracle.digest
replica.apply(encode(Update(
    base_version=6, version=7, seed=3, step=6, kind="rademacher", refresh=True,
    rounding="stochastic", base_digest=replica.digest, digest=oracle.digest,
    digests={{name: oracle.digests[name].word}}, factors={{name: factor}},
)))
assert replica.digest == oracle.digest and replica.version == 7
print("moved", sorted({{"jax", "torch"}} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert result.stdout == "moved []\n", result.stderr


# --- damaged bytes


def test_every_single_flipped_bit_is_refused():
    blob = encode(update())
    reasons = set()
    for byte, bit in itertools.product(range(len(blob)), range(8)):
        damaged = bytearray(blob)
        damaged[byte] ^= 1 << bit
        reasons.add(refusal(bytes(damaged)).reason)
    assert {"corrupted", "truncated", "not_safetensors"} <= reasons <= set(REASONS)


def test_every_truncation_is_refused_and_called_so():
    blob = encode(update())
    for length in range(len(blob)):
        error = refusal(blob[:length])
        assert error.reason == "truncated"
        assert f"{length}" in str(error)


@pytest.mark.parametrize("tail", [b" ", b"\0", b"\0" * 8])
def test_bytes_after_the_end_are_refused(tail):
    assert refusal(encode(update()) + tail).reason == "corrupted"


def test_two_exchanged_bytes_of_data_are_refused():
    blob = encode(update())
    assert refusal(blob[:-2] + blob[-1:] + blob[-2:-1]).reason == "corrupted"


@pytest.mark.parametrize(
    "blob", [b"<html>502 Bad Gateway</html>", b"PK\3\4" + bytes(40), b"\xff" * 100]
)
def test_something_else_is_refused_as_such(blob):
    error = refusal(blob)
    assert error.reason == "not_safetensors"
    assert f"got {len(blob)} bytes" in str(error)


def test_another_safetensors_file_is_refused_as_such():
    from safetensors.numpy import save

    for text in (
        None,
        {"format": "pt"},
        {"logra": "[]"},
        {"logra": "{"},
        {"logra": "{}"},
    ):
        assert refusal(save({NAME: ROWS}, text)).reason == "format"
    assert refusal(forge(metadata(format="logra-weights"))).reason == "format"


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_version_is_refused_and_the_supported_one_named(version):
    error = refusal(forge(metadata(format_version=version)))
    assert error.reason == "format_version"
    assert "must be 1, the only one" in str(error)
    assert repr(version) in str(error)


def test_tensors_that_overlap_or_leave_holes_are_refused():
    blob = forge(metadata(), sealed=False).replace(b"[0, 16]", b"[0, 12]")
    blob = blob.replace(b"0" * 64, hashlib.sha256(blob).hexdigest().encode(), 1)
    assert refusal(blob).reason == "not_safetensors"


# --- whole bytes with something wrong in them


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product([*FIELDS, "checksum"], [None]),
        *itertools.product(["base_version", "version"], [-1, 2**63, 1.0, "1", True]),
        *itertools.product(["seed", "step"], [-1, 2**32, 1.0, "1", False, [1]]),
        *itertools.product(["kind", "rounding"], ["", "Rademacher", 1, ["nearest"]]),
        *itertools.product(["refresh"], [0, 1, "true", {}]),
        *itertools.product(
            ["base_digest", "digest"], ["", "0" * 15, "0" * 17, "A" * 16, "g" * 16, 0]
        ),
        *itertools.product(["checksum"], ["", "0" * 63, "A" * 64, 0, "é" * 64]),
        ("digests", [1]),
        ("digests", {NAME: -1}),
        ("digests", {NAME: 2**32}),
        ("digests", {NAME: "1"}),
        ("digests", {}),
        ("digests", {NAME: 1, "other": 2}),
        ("version", 6),
        ("version", 5),
        ("unheard_of", 1),
    ],
)
def test_metadata_that_is_missing_or_out_of_range_is_refused(field, value):
    error = refusal(forge(metadata(**{field: value})))
    assert error.reason == "metadata"
    assert f"`{field}`" in str(error)


@pytest.mark.parametrize(
    ("reason", "dtype", "shape"),
    [
        ("factor", "F32", (2, 2)),
        ("factor", "U16", (2, 4)),
        ("factor", "BF16", (2, 4)),
        ("factor", "I32", (2, 2)),
        ("factor", "I16", (8,)),
        ("factor", "I16", (2, 2, 2)),
        ("factor", "I16", ()),
        ("factor", "I16", (0, 4)),
        ("rank", "I16", (8, 1)),
        ("rank", "I16", (8, 0)),
        ("rank", "I16", (1, 1026)),
        ("rank", "I8", (1, 1026)),
    ],
)
def test_a_factor_of_another_dtype_or_shape_is_refused(reason, dtype, shape):
    size = {"F32": 4, "I32": 4, "I8": 1}.get(dtype, 2)
    content = bytes(int(np.prod(shape)) * size)
    error = refusal(forge(metadata(), {NAME: (dtype, shape, content)}))
    assert error.reason == reason
    assert NAME in str(error)


def test_an_update_of_nothing_is_refused():
    assert refusal(forge(metadata(digests={}), {})).reason == "factor"
    nameless = forge(metadata(digests={"": 1}), {"": ("I16", (1, 2), bytes(4))})
    assert refusal(nameless).reason == "factor"


@pytest.mark.parametrize("dtype", [np.int16, np.int8])
def test_exponents_are_taken_to_their_limits_and_no_further(dtype):
    def factor(exponent):
        return np.array([[1, -111], [1, 113], [1, exponent]], dtype)

    for exponent in (-111, 113):
        assert decode(encode(update({NAME: factor(exponent)})))
    for exponent in (-112, 114, -128, 127):
        content = ("I16" if dtype == np.int16 else "I8", (3, 2))
        error = refusal(
            forge(metadata(), {NAME: (*content, factor(exponent).tobytes())})
        )
        assert error.reason == "exponent"
        assert re.search(r"must be in \[-111, 113\], got .* for ", str(error))


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("metadata", {"version": 6}),
        ("metadata", {"seed": 2**32}),
        ("metadata", {"kind": "normal"}),
        ("metadata", {"digests": {}}),
        ("factor", {"factors": {}}),
        ("factor", {"factors": {NAME: ROWS.astype(np.float32)}}),
        ("factor", {"factors": {"__metadata__": ROWS}}),
        ("exponent", {"factors": {NAME: ROWS * 0 + 114}}),
    ],
)
def test_what_would_be_refused_on_arrival_cannot_be_sent(reason, changes):
    with pytest.raises(Refused) as caught:
        update(**changes)
    assert caught.value.reason == reason


def test_a_refusal_is_a_value_error_that_travels_between_processes():
    error = pickle.loads(pickle.dumps(refusal(b"")))
    assert isinstance(error, ValueError)
    assert error.reason == "truncated"
    assert (
        str(error) == "The update ends within its header, after 0 bytes; send it again."
    )

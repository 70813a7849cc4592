"""What trainer and loader say, read by Python's own unpickler as SGLang's does."""

import base64
import io
import json
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logra_jax.rollout.protocol import (
    STATUS_PREFIX,
    Command,
    Status,
    read_statuses,
)
from logra_jax.rollout.wire import REASONS


class ByteTensor:
    """Stands in for torch's."""


class Restricted(pickle.Unpickler):
    """Knows one name."""

    def find_class(self, module, name):
        assert (module, name) == ("torch", "ByteTensor")
        return ByteTensor


def unpack(entry: str):
    """The name of the one tensor in an entry, which is empty."""
    raw = io.BytesIO(base64.b64decode(entry, validate=True))
    ((name, tensor),) = Restricted(raw).load()
    assert type(tensor) is ByteTensor
    assert raw.read() == b""
    return name


# --- commands


@pytest.mark.parametrize("length", [0, 1, 255, 256, 65535, 65536, 65537, 3_000_000])
def test_a_body_of_any_length_comes_through(length):
    body = (bytes(range(256)) * (length // 256 + 1))[:length]
    (entry,) = Command("update", "n", body=body).entries(1)
    text, read = unpack(entry)
    assert json.loads(text) == {"action": "update", "nonce": "n", "known": {}}
    assert read == body
    assert Command.read((text, read)) == Command("update", "n", body=body)


@given(
    st.sampled_from(["identify", "update"]),
    st.text(),
    st.dictionaries(st.text(), st.integers(0, 2**63 - 1)),
    st.binary(),
    st.integers(1, 8),
)
def test_every_command_reads_back_and_only_the_first_rank_has_the_body(
    action, nonce, known, body, ranks
):
    command = Command(action, nonce, known, body)
    entries = command.entries(ranks)
    assert len(entries) == ranks
    assert Command.read(unpack(entries[0])) == command
    for entry in entries[1:]:
        text, body = unpack(entry)
        assert (text, body) == (unpack(entries[0])[0], b"")


def test_other_ranks_cost_no_more_than_a_few_bytes():
    first, *others = Command("update", "n", body=bytes(10**6)).entries(4)
    assert len(first) > 10**6
    assert max(map(len, others)) < 200


def test_what_torch_reads_is_an_empty_tensor():
    import torch

    (entry,) = Command("update", "n", body=b"abc").entries(1)
    ((name, tensor),) = pickle.loads(base64.b64decode(entry))
    assert name[1] == b"abc"
    assert type(tensor) is torch.Tensor
    assert (tensor.dtype, tensor.numel()) == (torch.uint8, 0)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        None,
        7,
        (),
        ("{}",),
        ("{}", b""),
        ("{}", b"", b""),
        ["{}", b""],
        ("", b""),
        ("not JSON\n" * 50, b""),
        ("[]", b""),
        ("null", b""),
        (None, b""),
        ('{"action": "update"}', b""),
        ('{"action": "update", "nonce": "n", "more": 1}', b""),
        ('{"action": "update", "nonce": "n", "body": ""}', b""),
        ('{"action": "dance", "nonce": "n"}', b""),
        ('{"action": ["update"], "nonce": "n"}', b""),
        ('{"action": "update", "nonce": "n"}', None),
        ('{"action": "update", "nonce": "n"}', "text"),
    ],
)
def test_what_is_no_command_is_one_sentence(name):
    with pytest.raises(ValueError) as caught:
        Command.read(name)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 250


# --- statuses

AWKWARD = (
    "a.b..c \"quoted\" 'so' \\ back\\.slash \n\t\0 Grüße, 世界 \U0001f600 \ud800 {}"
)

fields = st.tuples(
    st.text(),
    st.none() | st.sampled_from(REASONS) | st.text(),
    st.text(),
    st.none() | st.integers(0, 2**63 - 1),
    st.none() | st.text("0123456789abcdef", min_size=16, max_size=16),
    st.none()
    | st.dictionaries(
        st.text(),
        st.tuples(
            st.sampled_from(["bfloat16", "float32"]),
            st.lists(st.integers(1, 2**31), max_size=3).map(tuple),
            st.integers(0, 2**32 - 1),
        ),
        max_size=3,
    ),
)


@given(fields)
@example((AWKWARD, AWKWARD, AWKWARD, 0, AWKWARD, {AWKWARD: (AWKWARD, (), 0)}))
@example(("", None, ".", None, None, None))
def test_a_status_is_a_buffers_name_and_reads_back(fields):
    status = Status(*fields)
    name = status.name()
    assert "." not in name  # torch would refuse it, and SGLang leave it out
    assert name.startswith(STATUS_PREFIX)
    assert name.isascii()
    assert Status.read(name) == status
    assert read_statuses(json.loads(json.dumps(reply([{name: "0" * 64}])))) == [status]


def reply(ranks: list[dict]) -> dict:
    """As SGLang answers `/weights_checker`."""
    return {
        "success": True,
        "message": "Success",
        "ranks": [{"tp_rank": i, "checksums": names} for i, names in enumerate(ranks)],
    }


def test_every_ranks_status_is_read_where_it_left_one():
    first, second = Status("a", version=1), Status("b", "failed", "x.y")
    names = [{first.name(): ""}, {}, {"rotary cache": "", second.name(): ""}]
    assert read_statuses(reply(names)) == [first, None, second]
    assert read_statuses(reply([])) == []


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        [],
        "text",
        7,
        {"ranks": None},
        {"ranks": 3},
        {"ranks": [None]},
        {"ranks": {"0": {}}},
        {"ranks": [{"checksums": None}]},
        {"ranks": [{"checksums": [1, 2]}]},
        {"ranks": [{"checksums": "logra {}"}]},
        {"success": False, "message": "no\nsuch action " * 50, "ranks": None},
        reply([{STATUS_PREFIX: ""}]),
        reply([{STATUS_PREFIX + "{}": ""}]),
        reply([{STATUS_PREFIX + "null": ""}]),
        reply([{STATUS_PREFIX + '{"tensors": null}': ""}]),
        reply([{STATUS_PREFIX + '{"nonce": "", "tensors": {"w": 3}}': ""}]),
        reply([{STATUS_PREFIX + '{"nonce": "", "tensors": null, "x": 1}': ""}]),
        reply([{Status("a").name()[:-1]: ""}]),
    ],
)
def test_an_answer_without_statuses_is_one_sentence(answer):
    with pytest.raises(ValueError) as caught:
        read_statuses(answer)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 250

from pathlib import Path

import numpy as np
import pytest

import logra_jax.rollout.history as history_module
from logra_jax.rollout.history import History
from logra_jax.rollout.wire import Refused, decode, encode


@pytest.fixture(scope="module")
def updates(make_update):
    """Eight updates, one after the other, to versions 1 to 8."""
    weights = {"a.weight": np.ones((4, 6), np.float32)}
    made = []
    for version in range(8):
        update, weights = make_update(weights, version)
        made.append(update)
    return made


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def files(*versions: int) -> list[str]:
    return [f"{version:06d}.safetensors" for version in versions]


def versions_of(paths: list[Path] | None) -> list[int] | None:
    return None if paths is None else [decode(p.read_bytes()).version for p in paths]


def test_an_update_is_a_file_of_the_bytes_that_are_sent(updates, tmp_path):
    history = History(tmp_path / "updates")
    assert not (tmp_path / "updates").exists()  # until there is one
    blob = history.write(updates[0])
    assert blob == encode(updates[0])
    assert (tmp_path / "updates" / "000001.safetensors").read_bytes() == blob
    assert names(tmp_path / "updates") == files(1)


def test_what_lies_between_two_versions_is_in_order(updates, tmp_path):
    history = History(tmp_path)
    for update in updates:
        history.write(update)
    assert versions_of(history.between(2, 6)) == [3, 4, 5, 6]
    assert versions_of(history.between(0, 8)) == list(range(1, 9))
    assert history.between(5, 5) == []
    assert history.between(6, 2) is None
    assert history.between(3, 9) is None


def test_each_digest_is_known_by_its_version(updates, tmp_path):
    history = History(tmp_path)
    assert history.versions == {}
    for update in updates:
        history.write(update)
    expected = {update.digest: update.version for update in updates}
    assert history.versions == {updates[0].base_digest: 0} | expected


def test_only_the_newest_are_kept(updates, tmp_path):
    history = History(tmp_path, keep=3)
    for update in updates:
        history.write(update)
        newest = range(max(1, update.version - 2), update.version + 1)
        assert names(tmp_path) == files(*newest)
    assert history.between(4, 8) is None
    assert versions_of(history.between(5, 8)) == [6, 7, 8]
    known = {update.digest: update.version for update in updates[4:]}
    assert history.versions == known


def test_a_run_that_goes_on_keeps_what_led_to_it(updates, tmp_path):
    first = History(tmp_path)
    for update in updates:
        first.write(update)
    again = History(tmp_path, version=5)
    assert names(tmp_path) == files(1, 2, 3, 4, 5)
    assert versions_of(again.between(2, 5)) == [3, 4, 5]
    assert updates[5].digest not in again.versions
    again.write(updates[5])
    assert versions_of(again.between(4, 6)) == [5, 6]
    assert names(tmp_path) == files(1, 2, 3, 4, 5, 6)
    fewer = History(tmp_path, keep=2, version=6)
    assert names(tmp_path) == files(5, 6)
    assert fewer.between(3, 6) is None
    assert History(tmp_path, version=0).versions == {}
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda blob: blob[:-1], "truncated"),
        (lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]), "corrupted"),
        (lambda blob: b"nothing", "not_safetensors"),
    ],
)
def test_a_damaged_file_is_named(updates, tmp_path, spoil, reason):
    history = History(tmp_path)
    for update in updates[:3]:
        history.write(update)
    path = tmp_path / "000002.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(Refused, match=r"000002\.safetensors must be an") as caught:
        History(tmp_path, version=3)
    assert caught.value.reason == reason


def test_a_write_that_fails_leaves_the_file_as_it_was(updates, tmp_path, monkeypatch):
    history = History(tmp_path)
    history.write(updates[0])
    before = (tmp_path / "000001.safetensors").read_bytes()

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(history_module.os, "replace", fail)
        for update in updates[:2]:
            with pytest.raises(OSError, match="disk full"):
                history.write(update)
    assert (tmp_path / "000001.safetensors").read_bytes() == before
    assert history.between(0, 2) is None
    again = History(tmp_path, version=1)
    assert versions_of(again.between(0, 1)) == [1]
    again.write(updates[0])
    again.write(updates[1])
    assert names(tmp_path) == files(1, 2)

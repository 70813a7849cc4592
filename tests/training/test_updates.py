"""What a run saves of its updates, replayed on the model that it began from."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from logra_jax.cli import main
from logra_jax.rollout.wire import decode


def test_saved_updates_make_the_exported_model_bit_for_bit(
    tiny_run, tiny_model_dir: Path, tmp_path: Path, capsys
):
    run = tiny_run("kept", "train.save_updates=true")
    files = sorted((run / "updates").iterdir())
    assert [f.name for f in files] == [f"{i:06d}.safetensors" for i in range(1, 5)]
    updates = [decode(f.read_bytes()) for f in files]
    for before, after in itertools.pairwise(updates):
        assert before.digest == after.base_digest
    out = tmp_path / "replayed"
    assert main(["replay", str(tiny_model_dir), str(run / "updates"), str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"version 4, digest {updates[-1].digest}" in printed
    trained, replayed, base = (
        load_file(d / "model.safetensors") for d in (run / "model", out, tiny_model_dir)
    )
    assert trained.keys() == replayed.keys()
    for name, tensor in trained.items():
        np.testing.assert_array_equal(replayed[name], tensor)
    assert any(np.any(base[name] != tensor) for name, tensor in trained.items())
    assert (out / "tokenizer.json").exists()


@pytest.mark.slow
def test_a_replay_that_does_not_follow_is_one_line(
    tiny_run, tiny_model_dir: Path, tmp_path: Path, capsys
):
    run = tiny_run("kept", "train.save_updates=true", "train.steps=3")
    updates, out = run / "updates", tmp_path / "out"
    capsys.readouterr()

    def refused(updates: Path) -> str:
        assert main(["replay", str(tiny_model_dir), str(updates), str(out)]) == 2
        assert not out.exists()
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("logra: ")
        return error

    second = updates / "000002.safetensors"
    whole = second.read_bytes()
    assert "000002.safetensors is refused" in refused(second)  # of another base
    second.write_bytes(whole[:-1])
    assert "000002.safetensors is refused" in refused(updates)
    second.unlink()
    assert "000003.safetensors is refused" in refused(updates)
    assert "`UPDATES` must hold update files" in refused(tmp_path / "nothing")

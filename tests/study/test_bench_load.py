import dataclasses
import json
from pathlib import Path

import pytest

from logra_jax.models.hf import load_decoder
from logra_jax.models.presets import preset
from logra_jax.models.weight_files import WeightFiles
from logra_jax.study import bench_load as module
from logra_jax.study.bench_load import bench_load

TINY = dataclasses.replace(
    preset("qwen2.5-1.5b"),
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    head_dim=16,
)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_SYNTHETIC", TINY)
    monkeypatch.setattr(module, "_SHARD_BYTES", 50_000)
    module.write_synthetic(tmp_path)
    return tmp_path


def test_the_synthetic_checkpoint_is_one_that_loads(tiny):
    config = load_decoder(tiny).config
    assert dataclasses.replace(config, rope_theta=TINY.rope_theta) == TINY
    with WeightFiles(tiny) as files:
        assert len({files.find(name).file for name in files.names()}) > 2


def test_two_gigabytes_without_a_checkpoint():
    size = sum(
        2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        for shape in module.synthetic_shapes().values()
    )
    assert 1.9e9 < size < 2.1e9


def test_load_and_read_are_measured_in_each_state_of_the_cache(tiny, capsys):
    assert bench_load(str(tiny), [], True, repetitions=1) == 0
    result = json.loads(capsys.readouterr().out)
    on_disk = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    assert result["file_bytes"] == on_disk
    assert result["model_bytes"] < on_disk  # a header each
    assert result["largest_tensor_bytes"] == 300 * 64 * 2
    for state in result["page_cache"].values():
        [plain], [load] = state["read_seconds"], state["loads"]
        assert state["ratio"] == pytest.approx(plain / load["seconds"])
        read, loaded = state["read_gb_per_second"], state["load_gb_per_second"]
        assert state["ratio"] == pytest.approx(loaded / read)
        [kept] = state["keep_seconds"]
        assert state["ratio_to_keep"] == pytest.approx(kept / load["seconds"])
        assert load["model_bytes"] == result["model_bytes"]
    module._print_table(result)
    assert "cached" in capsys.readouterr().out


def test_a_directory_that_does_not_load_is_one_sentence(tiny):
    next(tiny.glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"cannot be read"):
        bench_load(str(tiny), [], True, repetitions=1)


@pytest.mark.parametrize("target", [None, "."])
def test_overrides_without_a_config_are_refused(target):
    with pytest.raises(ValueError, match="`key=value` must change a config"):
        bench_load(target, ["seed=1"], True)


def test_both_reads_go_through_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BUFFER", 10)
    paths = [tmp_path / "a", tmp_path / "b"]
    taken = []
    for path, size in zip(paths, (25, 10), strict=True):
        path.write_bytes(bytes(size))
    real = module.Path.open

    class Counted:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def readinto(self, buffer):
            taken.append(self.file.readinto(buffer))
            return taken[-1]

    monkeypatch.setattr(
        module.Path, "open", lambda *a, **k: Counted(real(*a, **k)), raising=True
    )
    for read in (module._read, module._read_and_keep):
        taken.clear()
        read(paths)
        assert sum(taken) == 35


def test_no_repetition_is_refused():
    with pytest.raises(ValueError, match="`--repeat` must be at least 1, got 0"):
        bench_load(None, [], True, repetitions=0)

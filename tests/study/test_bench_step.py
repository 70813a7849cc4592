import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import cli
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.presets import PRESETS
from logra_jax.study import bench_step as bench_module
from logra_jax.study.bench_step import (
    METHODS,
    Share,
    _print_table,
    _ratio,
    bench_step,
)
from logra_jax.study.trial import KINDS, build_trial, on_devices, workload_of
from logra_jax.training.config import Config, load_config
from logra_jax.training.schema_update import OptimizerConfig

TINY = DecoderConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
)
TEXT = """
model: {preset: tiny-step, activations: float32}
sketch: {rank: 4}
kl: {share: 0.25}
rollout: {max_new_tokens: 16}
train: {steps: 3, batch: 8, microbatch: 8}
"""


@pytest.fixture(autouse=True, scope="module")
def tiny_preset() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(PRESETS, "tiny-step", TINY)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench_step") / "tiny.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def config(path: Path) -> Config:
    return load_config(path)


@pytest.fixture(scope="module")
def result(path: Path) -> dict:
    """What `--json` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        argv = ["bench", "step", str(path), "--tokens", "192", "--repeat", "2"]
        assert cli.main([*argv, "--json", "seed=1"]) == 0
    (line,) = out.getvalue().splitlines()
    return json.loads(line)


@pytest.mark.slow
def test_every_method_is_timed_as_often_and_compiled_apart(result):
    assert list(result["methods"]) == list(METHODS)
    assert result["in_turns"]
    for part in result["methods"].values():
        assert part["error"] is None
        assert len(part["seconds"]) == 2
        assert part["median_seconds"] == pytest.approx(np.median(part["seconds"]))
        assert part["tokens_per_second"] == pytest.approx(192 / part["median_seconds"])
        assert part["compile_seconds"] > 0
        assert part["planned_peak_gib"] > 0
    assert result["workload"]["tokens_per_device"] == 192
    assert {"jax", "optax"} <= set(result["versions"])


@pytest.mark.slow
def test_ratios_are_medians_over_rounds(result):
    ours = np.array(result["methods"]["logra"]["seconds"])
    for name in ("adamw", "lora", "galore"):
        theirs = np.array(result["methods"][name]["seconds"])
        ratio = result["ratios"][f"logra/{name}"]
        assert ratio == pytest.approx(np.median(ours / theirs))
    rest = np.array(result["methods"]["logra, no KL"]["seconds"])
    assert result["kl_share_of_step"] == pytest.approx(1 - np.median(rest / ours))


def test_one_after_the_other_ratios_are_of_medians():
    ours = {"seconds": [1.0, 2.0, 9.0], "median_seconds": 2.0}
    theirs = {"seconds": [4.0, 4.0, 1.0], "median_seconds": 4.0}
    assert _ratio(ours, theirs, in_turns=False) == 0.5
    assert _ratio(ours, theirs, in_turns=True) == 0.5
    failed = {"seconds": [], "median_seconds": None}
    assert _ratio(ours, failed, in_turns=True) is None


@pytest.mark.slow
def test_people_get_a_table(result, capsys):
    _print_table(result)
    out = " ".join(capsys.readouterr().out.split())
    assert "4 x (32 + 16) = 192 tokens an update" in out
    assert "of logra's step" in out
    assert "in turns" in out
    failed = result["methods"]["adamw"] | {
        "error": "first update: X: y",
        "median_seconds": None,
        "tokens_per_second": None,
    }
    _print_table(
        result
        | {"methods": result["methods"] | {"adamw": failed}, "in_turns": False}
        | {"ratios": {"logra/adamw": None}, "kl_share_of_step": None}
    )
    out = capsys.readouterr().out
    assert "adamw failed; first update: X: y" in out
    assert "one after the other" in out


def test_what_does_not_fit_says_phase_and_message_and_the_rest_goes_on(
    config, monkeypatch, capsys
):
    """And large states are held one after the other."""
    alive = []

    class Fake(bench_module._Run):
        def __init__(self, name, build):
            self.name, self.bytes = name, (1, 1)
            self.result = {"seconds": [], "error": None}

        def compile(self):
            if self.name == "galore":
                raise RuntimeError("no\nroom")

        def start(self):
            if self.name == "adamw":
                raise RuntimeError("RESOURCE_EXHAUSTED")
            alive.append(self.name)
            assert len(alive) == 1

        def update(self):
            self.result["seconds"].append(2.0 if self.name == "logra" else 1.0)

        def stop(self):
            if self.name in alive:
                alive.remove(self.name)

    monkeypatch.setattr(bench_module, "_Run", Fake)
    monkeypatch.setattr(bench_module, "_share", lambda runs: Share(False, 2, 1))
    options = {"repeat": 3, "as_json": True, "beside": "smollm2-135m"}
    assert bench_step(config, tokens=192, **options) == 0
    result = json.loads(capsys.readouterr().out)
    methods = result["methods"]
    assert methods["galore"]["error"] == "compiling: RuntimeError: no room"
    assert methods["adamw"]["error"] == "first update: RuntimeError: RESOURCE_EXHAUSTED"
    assert not result["in_turns"]
    assert result["ratios"] == {
        "logra/adamw": None,
        "logra/lora": 2.0,
        "logra/galore": None,
        "logra/smollm2-135m": 2.0,
    }
    assert result["kl_share_of_step"] == 0.5


def test_baselines_predict_no_kl(config):
    work = workload_of(config, 192, one_microbatch=True)
    trials = {
        predicts: build_trial(
            config, "logra", work, is_abstract=True, predicts_kl=predicts
        )
        for predicts in (True, False)
    }
    metrics = {
        predicts: jax.eval_shape(trial.step, trial.state, trial.batch)[1]
        for predicts, trial in trials.items()
    }
    assert "kl/q" in metrics[True]
    assert "kl/q" not in metrics[False]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("kind", [*KINDS, "galore"])
def test_arrays_lie_as_their_shapes_say(config, kind, devices):
    """So that a step compiled for shapes runs on them."""
    config = on_devices(config, devices)
    work = workload_of(config, 192)
    abstract, real = (
        build_trial(config, kind, work, is_abstract=is_abstract)
        for is_abstract in (True, False)
    )
    for tree in ("state", "batch"):
        shapes, arrays = getattr(abstract, tree), getattr(real, tree)
        assert jax.tree.structure(shapes) == jax.tree.structure(arrays)
        leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(arrays), strict=True)
        for shape, array in leaves:
            assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
            if devices > 1:
                assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)
    weights = real.state.weights
    for noise in (
        weights["embed_tokens"]["embedding"],
        weights["layers"]["mlp"]["up_proj"]["kernel"],
    ):
        deviation = float(jnp.std(noise[...].astype(jnp.float32)))
        assert deviation == pytest.approx(0.02, rel=0.1)
    np.testing.assert_array_equal(weights["norm"]["scale"][...], 1)


def test_galore_is_timed_between_two_svds_whatever_a_run_of_it_does(config):
    work = workload_of(config, 192, one_microbatch=True)
    often = OptimizerConfig(kind="galore", projection_gap=1)
    tx = bench_module._galore(dataclasses.replace(config, optimizer=often), work)
    kernels = {"up": {"kernel": jnp.ones((2, 8, 6))}}
    state = tx.init(kernels)
    for _ in range(2):
        _, state = tx.update(kernels, state, kernels)
        assert not state[1].stacks[0][0].projector.any()  # as no SVD was computed


def test_an_unknown_model_beside_is_one_sentence(config):
    with pytest.raises(ValueError, match=r"`model.path` must be .* got 'nowhere'"):
        bench_step(config, tokens=192, repeat=1, as_json=True, beside="nowhere")


def test_no_repetition_is_refused(config):
    with pytest.raises(ValueError, match="`--repeat` must be at least 1, got 0"):
        bench_step(config, tokens=192, repeat=0, as_json=True)

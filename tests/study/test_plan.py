import json
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies

from logra_jax import cli
from logra_jax.algorithm.target import platform, tracing_for
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.presets import PRESETS
from logra_jax.study import plan as plan_module
from logra_jax.study import trial as trial_module
from logra_jax.study.gpu_target import GPUS
from logra_jax.study.plan import (
    CARDS,
    GIB,
    find_cards,
    find_gpu,
    make_plan,
    plan_command,
)
from logra_jax.study.plan_table import print_plan
from logra_jax.study.trial import (
    KINDS,
    build_trial,
    on_devices,
    workload_of,
)
from logra_jax.training.config import Config, load_config
from logra_jax.training.memory import device_bytes

TINY = DecoderConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
)
KERNELS = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
ROWS = 3 * (3 * 32 + 2 * 16 + 2 * 48)  # of all sketches: outputs of the kernels
TEXT = """
model: {preset: tiny, remat: layer}
sketch: {rank: 4}
rollout: {max_new_tokens: 16}
train: {steps: 3, batch: 8, microbatch: 8}
"""


@pytest.fixture(autouse=True, scope="module")
def tiny_preset() -> Iterator[None]:
    jax.devices()  # four, before a plan asks for others
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(PRESETS, "tiny", TINY)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "tiny.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def config(path: Path) -> Config:
    return load_config(path)


@pytest.fixture(scope="module")
def planned(config: Config) -> dict:
    return make_plan(config, tokens=192)


@pytest.fixture
def logra_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile no baselines: they were, once, for ``planned``."""
    monkeypatch.setattr(plan_module, "KINDS", ("logra",))


# --- batches


def test_a_microbatch_has_exactly_the_tokens_asked_for(config):
    work = workload_of(config, 192)
    assert (work.rows, work.prompt, work.new, work.batch) == (4, 32, 16, 8)
    assert work.tokens == 192
    # 1000 = 20 * 50: two tokens more of prompt
    work = workload_of(config, 1000)
    assert (work.rows, work.prompt, work.tokens, work.batch) == (20, 34, 1000, 20)


def test_an_update_is_whole_microbatches_and_groups(path):
    config = load_config(path, ["rl.responses_per_prompt=8", "train.batch=16"])
    assert workload_of(config, 192 * 3).batch == 24  # 12 rows, groups of 8
    assert workload_of(config, 192, one_microbatch=True).batch == 8


def test_too_few_tokens_are_refused(config):
    with pytest.raises(
        ValueError, match=r"`--tokens` must hold a prompt of 32.*got 47"
    ):
        workload_of(config, 47)


def test_packed_rows_hold_as_many_tokens(path):
    config = load_config(path, ["train.microbatch_tokens=64"])
    trial = build_trial(config, "logra", workload_of(config, 192), is_abstract=True)
    assert trial.batch.packed is not None
    assert trial.batch.packed.rows.tokens.shape == (1, 2, 192)


# --- flash attention, which is a GPU's


def test_a_plan_counts_flash_attention_as_chunks(path):
    config = load_config(path, ["model.attention=flash"])
    work = workload_of(config, 192)
    step, state, batch, *_ = build_trial(config, "logra", work, is_abstract=True)
    assert step.lower(state, batch)  # without cuDNN, which is not here
    with pytest.raises(
        ValueError, match=r"`model.attention` must be .* \(cpu\), got 'flash'; use auto"
    ):
        build_trial(config, "logra", work, is_abstract=False)


@pytest.mark.slow
def test_a_step_by_flash_attention_is_one_by_full_attention(path, monkeypatch):
    """The kernel's part played by XLA; the KL is measured without it, in float32."""
    seen, original = [], jax.nn.dot_product_attention

    def instead(q, k, v, *, mask, implementation):
        seen.append((q.dtype, implementation))
        return original(q, k, v, mask=mask, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    monkeypatch.setattr(trial_module, "check_attention_runs", lambda config: None)
    metrics = {}
    for kind in ("flash", "full"):
        config = load_config(path, [f"model.attention={kind}"])
        work = workload_of(config, 192)
        step, state, batch, *_ = build_trial(config, "logra", work, is_abstract=False)
        _, metrics[kind], _ = step(state, batch)
    assert set(seen) == {(jnp.dtype("bfloat16"), "cudnn")}
    for name in ("loss", "update/sketch_norm", "kl/q", "kl/realised"):
        got, expected = metrics["flash"][name], metrics["full"][name]
        assert got == pytest.approx(float(expected), rel=0.05, abs=1e-4), name


# --- memory


def test_nothing_is_allocated(config):
    before = len(jax.live_arrays())
    trial = build_trial(config, "adamw", workload_of(config, 192), is_abstract=True)
    leaves = jax.tree.leaves((trial.state, trial.batch))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert len(jax.live_arrays()) == before


def test_parts_are_as_large_as_theory_says_and_add_up(planned):
    gib = {kind: part["gib"] for kind, part in planned["kinds"].items()}
    weights = 2 * (128 * 32 + 3 * 2 * 32 + 32 + KERNELS)
    for kind in KINDS:
        parts = gib[kind]
        names = ("weights", "sketches", "optimizer", "activations", "other")
        assert parts["peak"] == pytest.approx(sum(parts[n] for n in names))
        assert all(parts[n] >= 0 for n in names)
        assert parts["rollout"] == pytest.approx(
            parts["weights"] + parts["optimizer"] + parts["kv_cache"]
        )
    # addresses of the matrices: three words each
    assert gib["logra"]["weights"] * GIB == weights + 3 * 7 * 3 * 4
    assert gib["logra"]["sketches"] * GIB == 4 * 4 * ROWS
    assert gib["logra"]["optimizer"] * GIB == pytest.approx(4 * ROWS, abs=16)
    assert gib["adamw"]["sketches"] * GIB == 4 * KERNELS
    assert gib["adamw"]["optimizer"] * GIB == pytest.approx(8 * KERNELS, abs=16)
    assert gib["lora"]["optimizer"] == pytest.approx(
        2 * gib["lora"]["sketches"], rel=1e-3
    )
    rows, length, kv_heads, head_dim = 8, 48, 2, 8
    cells = 3 * rows * length * kv_heads * head_dim
    assert gib["logra"]["kv_cache"] * GIB == 2 * 2 * cells
    assert planned["peak_gib"] == gib["logra"]["peak"]


@pytest.mark.usefixtures("logra_alone")
@pytest.mark.slow
def test_a_reference_is_a_second_copy_of_the_trained_kernels(path, planned):
    config = load_config(path, ["reference.policy=base"])
    gib = make_plan(config, tokens=192)["kinds"]["logra"]["gib"]
    without = planned["kinds"]["logra"]["gib"]
    assert gib["reference"] * GIB == 2 * KERNELS
    assert without["reference"] == 0
    assert gib["rollout"] == pytest.approx(without["rollout"] + gib["reference"])
    assert gib["peak"] >= without["peak"] + gib["reference"]


@pytest.mark.slow
@pytest.mark.usefixtures("logra_alone")
def test_a_mesh_cuts_the_weights_and_its_program_is_of_one_device(config, planned):
    whole = planned["kinds"]["logra"]["gib"]
    cut = make_plan(config, devices=4, tokens=192)
    part = cut["kinds"]["logra"]["gib"]
    assert cut["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1}
    assert cut["workload"]["batch"] == 16  # a microbatch of 4 on each of 4 devices
    norms = 2 * (3 * 2 * 32 + 32) / GIB  # whole on each device
    assert part["weights"] < whole["weights"] / 4 + norms + 1e-6
    assert abs(part["other"]) < 0.2 * whole["weights"]


def test_the_mesh_of_the_config_is_kept_where_it_has_as_many_devices(path):
    config = load_config(path, ["mesh.fsdp=2", "mesh.tensor=2"])
    assert on_devices(config, 4) == on_devices(config, None) == config
    assert on_devices(config, 2).mesh.fsdp == 2
    assert on_devices(config, 2).mesh.tensor == 1
    assert on_devices(load_config(path), None).mesh.devices == 1


def test_too_many_devices_for_this_process_are_refused(config):
    with pytest.raises(ValueError, match="`--devices` must be at most"):
        make_plan(config, devices=64, tokens=192)
    with pytest.raises(ValueError, match="`--devices` must be at least 1, got 0"):
        make_plan(config, devices=0, tokens=192)


def test_an_arrays_bytes_are_those_of_one_device(config):
    mesh = jax.make_mesh((4,), ("x",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.ShapeDtypeStruct((8, 3), "float32", sharding=spec)
    assert device_bytes(nnx.State({"a": nnx.Param(array)})) == 2 * 3 * 4


# --- cards and failures


def test_cards_are_found_by_name_beginning_or_size():
    assert find_cards("h200-141gb") == {"H200-141GB": CARDS["H200-141GB"]}
    assert find_cards("t4") == {"T4-16GB": 15.0}
    assert find_cards("24") == find_cards("24GiB") == {"24 GiB": 24.0}
    assert find_cards(None) == CARDS
    for bad in ("H300", "A100", "-3", "nan"):
        with pytest.raises(ValueError, match=rf"`--card` must be .*got '{bad}'"):
            find_cards(bad)


# --- GPUs that are not here


def test_gpus_are_cards_found_by_name_or_beginning(config):
    assert find_gpu("h100") == find_gpu("H100-80GB") == "H100-80GB"
    assert find_gpu("l4") == "L4-24GB"
    for bad in ("A100", "TPU-v5e", "24", ""):
        with pytest.raises(ValueError, match=rf"`--gpu` must be .*got '{bad}'"):
            find_gpu(bad)
    with pytest.raises(ValueError, match=r"`--gpu` must be .*got ''"):
        plan_command(config, devices=1, tokens=64, card=None, gpu="", as_json=True)
    assert set(CARDS) - set(GPUS) == {name for name in CARDS if name.startswith("TPU")}
    assert all(abs(GPUS[name].memory - CARDS[name]) < 0.1 for name in GPUS)


def test_without_a_plugin_the_sentence_says_which_to_install(config, monkeypatch):
    def refuse(*args, **options):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    version = metadata.version("jaxlib")
    with pytest.raises(ValueError, match=f"`pip install jax-cuda12-plugin=={version}`"):
        make_plan(config, tokens=192, gpu="H100-80GB")


def test_without_an_assembler_the_sentence_says_what_to_install(config, monkeypatch):
    def describe(*args, **options):
        return types.SimpleNamespace(devices=jax.devices())

    def refuse(*args, **options):
        raise RuntimeError("UNAVAILABLE: No PTX\ncompilation provider is available.")

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(
        ValueError, match=r"`pip install nvidia-cuda-nvcc-cu12`; .* No PTX compilation"
    ):
        make_plan(config, tokens=192, gpu="H100-80GB")


def test_flash_attention_for_a_gpu_takes_cudnn(path, monkeypatch):
    def refuse(*args, **options):
        assert options["implementation"] == "cudnn"
        raise RuntimeError("cuDNN not found.")

    config = load_config(path, ["model.attention=flash"])
    monkeypatch.setattr(
        plan_module, "compile_only_devices", lambda gpu, count: jax.devices()
    )
    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    with pytest.raises(ValueError, match=r"`model.attention` must .* got 'flash'; use"):
        make_plan(config, tokens=192, gpu="H100-80GB")


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_step_is_traced_for_the_gpus_and_placed_on_them(
    devices, config, monkeypatch
):
    """With CPUs in the GPUs' place, for which only `-m gpu_plan` compiles."""
    there, seen = jax.devices()[4 - devices :], []

    def build(*args, **options):
        seen.append((platform(), options["devices"]))
        return build_trial(*args, **options)

    def of(gpu, count):
        return there[:count] if gpu == GPUS["L4-24GB"] else []

    monkeypatch.setattr(plan_module, "compile_only_devices", of)
    monkeypatch.setattr(plan_module, "COMPILER_OPTIONS", {})
    monkeypatch.setattr(plan_module, "KINDS", ("logra",))
    monkeypatch.setattr(plan_module, "build_trial", build)
    options = {"devices": devices, "tokens": 192, "gpu": "L4-24GB"}
    result = make_plan(config, **options)
    assert result["kinds"]["logra"]["error"] is None
    assert result["compiled_for"] == there[0].device_kind
    assert seen == [("gpu", there)]
    assert platform() == "cpu"
    with tracing_for("gpu"):
        trial = build_trial(
            on_devices(config, devices),
            "logra",
            workload_of(config, 192),
            is_abstract=True,
            devices=there,
        )
    for array in jax.tree.leaves((trial.state, trial.batch)):
        assert array.sharding.device_set == set(there)


def test_a_gpu_is_the_card_that_it_should_fit(path, planned, monkeypatch, capsys):
    monkeypatch.setattr(plan_module, "make_plan", lambda *args, **options: planned)
    for argv, card in (([], "L4-24GB"), (["--card", "t4"], "T4-16GB")):
        assert cli.main(["plan", str(path), "--json", "--gpu", "l4", *argv]) == 0
        assert set(json.loads(capsys.readouterr().out)["cards"]) == {card}


def test_a_kind_that_does_not_compile_says_phase_and_message(config, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(plan_module, "build_trial", fail)
    options = {"devices": None, "tokens": 192, "card": None, "as_json": True}
    assert plan_command(config, **options) == 1
    result = make_plan(config, tokens=192)
    assert result["peak_gib"] is None
    for part in result["kinds"].values():
        assert part["error"] == "tracing: RuntimeError: out of memory"
        assert part["gib"] == {}


def test_the_command_prints_one_json_object(path, planned, monkeypatch, capsys):
    def plan(config, **options):
        assert options == {"devices": None, "tokens": 192, "gpu": None}
        return planned | {"rank": config.sketch.rank}

    monkeypatch.setattr(plan_module, "make_plan", plan)
    argv = ["plan", str(path), "--json", "--tokens", "192", "--card", "t4"]
    assert cli.main([*argv, "sketch.rank=2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["rank"] == 2
    assert result["peak_gib"] == result["kinds"]["logra"]["gib"]["peak"]
    assert result["fits"]["logra"] == {"T4-16GB": True}
    assert result["shapes"]["hidden_size"] == 32
    assert {"jax", "logra-jax"} <= set(result["versions"])
    assert all(part["compile_seconds"] > 0 for part in result["kinds"].values())


def test_people_get_a_table(config, planned, capsys):
    cards = {"small": 1e-6, "large": 1.0}
    fits = {kind: {"small": False, "large": True} for kind in KINDS}
    print_plan(planned | {"cards": cards, "fits": fits})
    text = capsys.readouterr().out
    assert "4 x (32 + 16) = 192 tokens a device" in " ".join(text.split())
    assert "large" in text
    failed = planned["kinds"]["lora"] | {"gib": {}, "error": "compiling: X: y"}
    kinds = planned["kinds"] | {"lora": failed}
    one = {kind: {"small": False} for kind in KINDS}
    print_plan(planned | {"kinds": kinds, "cards": {"small": 1e-6}, "fits": one})
    text = capsys.readouterr().out
    assert "LoRA does not compile; compiling: X: y" in text
    assert "fits small" in text


def test_plan_and_bench_plan_are_the_same(path, monkeypatch, capsys):
    argv = [str(path), "--json", "seed=1", "--devices", "2", "kl.share=0.5"]
    calls = []
    monkeypatch.setattr(
        plan_module, "plan_command", lambda *args, **options: calls.append(options) or 0
    )
    for command in (["plan"], ["bench", "plan"]):
        assert cli.main([*command, *argv]) == 0
    chosen = {"devices": 2, "tokens": 4096, "card": None, "gpu": None}
    assert calls == [chosen | {"as_json": True}] * 2

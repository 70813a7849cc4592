import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import cast

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.algorithm.predicted_kl import PredictedKLState
from logra_jax.training.assemble import build_controller, loss_options_of
from logra_jax.training.checkpoint import check_resumable
from logra_jax.training.config import (
    ColumnsConfig,
    Config,
    EvalSetConfig,
    FamilyConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
    load_config,
    to_yaml,
)
from logra_jax.training.paths import default_cache_dir, default_run_dir
from logra_jax.training.policy import model_directory

REPOSITORY = Path(__file__).parents[2]
EVAL_KEYS = (
    "samples, samples_per_question, pass_at, temperature, top_p, max_new_tokens, "
    "greedy, batch, keep_samples, show_samples, best, keep_best, export, sets."
)
MINIMAL = "model:\n  path: some-model\ntrain:\n  steps: 3\n"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Config]:
    """Load a minimal config file with overrides."""
    path = tmp_path / "tiny.yaml"
    path.write_text(MINIMAL)
    return lambda *overrides: load_config(path, overrides)


def test_the_best_weights_are_those_of_the_first_set_that_is_measured(load):
    assert load().best_metric == "heldout/sampled"
    sets = ["eval.sets.one.seed=1", "eval.sets.two.seed=2"]
    assert load(*sets).best_metric == "heldout/sampled"
    assert load(*sets, "task.held_out=0").best_metric == "one/sampled"
    chosen = load(*sets, "task.held_out=0", "eval.best=two/greedy")
    assert chosen.best_metric == "two/greedy"


def test_a_minimal_file_gets_every_default(load):
    assert load() == Config(
        name="tiny", model=ModelConfig(path="some-model"), train=TrainConfig(steps=3)
    )


def test_overrides_are_typed_and_the_last_one_wins(load):
    config = load(
        "train.steps=5", "train.steps=4", "optimizer.clip_norm=null", "seed=9"
    )
    assert (config.train.steps, config.optimizer.clip_norm, config.seed) == (4, None, 9)
    config = load("task.options.min_terms=2", "task.options.max_terms=3", "kl.start=1")
    assert config.task.options == {"min_terms": 2, "max_terms": 3}
    assert isinstance(config.kl.start, float)


@pytest.mark.parametrize(
    "text", ["1e5", "007", "12", "true", "a: b", "two\nlines: 2", "{", "[1]", "x=y"]
)
def test_a_text_field_takes_its_text_as_it_stands(load, text):
    assert load(f"run_dir={text}").run_dir == text


def test_a_model_named_by_an_override_replaces_the_one_before(load, tmp_path):
    config = load("model.preset=qwen2.5-7b")
    assert (config.model.path, config.model.preset) == (None, "qwen2.5-7b")
    config = load("model.preset=qwen2.5-7b", "model.path=mine")
    assert (config.model.path, config.model.preset) == ("mine", None)
    assert load("model.preset=null").model.path == "some-model"
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(load("model.preset=qwen2.5-7b")))
    assert load_config(again).model == load("model.preset=qwen2.5-7b").model


def test_a_preset_has_no_weights_to_train(load):
    with pytest.raises(ValueError, match=r"got the preset 'qwen2\.5-7b', .*logra plan"):
        model_directory(load("model.preset=qwen2.5-7b"))


def test_sections_by_name_are_made_by_overrides_typed_and_written_whole(load, tmp_path):
    config = load(
        "task.mix={gcd: {weight: 2}}",
        "task.mix.lcm.level=1",
        "eval.sets.aime.source=aime",
        "eval.sets.aime.name=2024",  # text, as a name is
        "eval.sets.aime.columns.keep=[a]",
    )
    assert config.task.mix == {
        "gcd": FamilyConfig(weight=2.0),
        "lcm": FamilyConfig(level=1),
    }
    columns = ColumnsConfig(keep=["a"])
    aime = EvalSetConfig(source="aime", name="2024", columns=columns)
    assert config.eval.sets == {"aime": aime}
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["task.level=1"], "`task.level` must be null beside `task.mix`"),
        (["task.options.a=1"], "`task.options` must be empty beside `task.mix`"),
        (
            ["task.source=hub"],
            "`task.mix` must be empty when `task.source` is hub, got ",
        ),
    ],
)
def test_a_mix_takes_the_place_of_one_data_set(load, overrides, rule):
    assert sentence(lambda: load("task.mix.gcd.weight=1", *overrides)).startswith(rule)


def test_null_and_quotes_in_a_text_field_mean_what_yaml_says(load):
    assert load("run_dir=null").run_dir is None
    assert load("run_dir='null'").run_dir == "null"


def test_a_batch_below_the_usual_microbatch_needs_no_other(load):
    config = load("train.batch=8")
    assert config.train.microbatch > config.train.batch == 8


@pytest.mark.parametrize("prompt", [r"\${a}", r"\\\${a}", r"\\${seed}", r"a\$\b"])
def test_a_text_that_looks_like_a_reference_is_read_back(load, tmp_path, prompt):
    config = load(f"task.system_prompt={prompt}", "task.options.a.b=[\\${c}]")
    path = tmp_path / "stored.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config


def test_every_config_file_of_the_repository_loads():
    for path in (REPOSITORY / "configs").glob("*.yaml"):
        assert load_config(path).name == path.stem


@given(
    steps=st.integers(1, 10**6),
    eps=st.floats(1e-300, 1e300),
    clip=st.none() | st.floats(1e-9, 1e9),
    prompt=st.none() | st.text(st.characters(exclude_characters="$", codec="utf-8")),
)
def test_yaml_round_trip_is_exact(tmp_path_factory, steps, eps, clip, prompt):
    config = Config(
        name="round",
        model=ModelConfig(path="1e5"),
        train=TrainConfig(steps=steps),
        task=TaskConfig(system_prompt=prompt, options={"a": [1, 2.5, "1e5", None]}),
    )
    optimizer = dataclasses.replace(config.optimizer, eps=eps, clip_norm=clip)
    config = dataclasses.replace(config, optimizer=optimizer)
    path = tmp_path_factory.mktemp("round") / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.temprature=1",
            "`rollout.temprature` is not a config key; did you mean "
            "`rollout.temperature`?",
        ),
        (
            "learning_rate=1",
            "`learning_rate` is not a config key; did you mean "
            "`optimizer.learning_rate`?",
        ),
        (
            "kl.budgte=none",
            "`kl.budgte` is not a config key; did you mean `kl.budget`?",
        ),
        (
            "eval.zzz=1",
            "`eval.zzz` is not a config key; the keys of `eval` are " + EVAL_KEYS,
        ),
        ("train.steps=many", "`train.steps` must be an integer, got 'many'."),
        ("train.steps=1.5", "`train.steps` must be an integer, got 1.5."),
        ("train.steps=null", "`train.steps` must be an integer, got null."),
        (
            "sketch.refresh=maybe",
            "`sketch.refresh` must be true or false, got 'maybe'.",
        ),
        (
            "model.dtype=fp8",
            "`model.dtype` must be one of bfloat16, float32, got 'fp8'.",
        ),
        (
            "kl.estimator=fd",
            "`kl.estimator` must be one of jvp, difference, engine, got 'fd'.",
        ),
        (
            "rl.correction=tokens",
            "`rl.correction` must be one of none, token, sequence or null, got "
            "'tokens'.",
        ),
        (
            "rl.correction_mask=2",
            "`rl.correction_mask` must be a list of numbers or null, got 2.",
        ),
        (
            "rl.correction_mask=[low, 2]",
            "`rl.correction_mask` must be a list of numbers or null, got ['low', 2].",
        ),
        (
            "rollout.engine=vllm",
            "`rollout.engine` must be one of local, sglang, got 'vllm'.",
        ),
        (
            "rollout.urls=http://127.0.0.1:30000",
            "`rollout.urls` must be a list of texts, got 'http://127.0.0.1:30000'.",
        ),
        ("rollout.urls=[3]", "`rollout.urls` must be a list of texts, got [3]."),
        ("rollout.urls=null", "`rollout.urls` must be a list of texts, got null."),
        (
            "model.activations=fp8",
            "`model.activations` must be one of bfloat16, float32 or null, got 'fp8'.",
        ),
        (
            "rollout.pause=hold",
            "`rollout.pause` must be one of retract, in_place, abort, got 'hold'.",
        ),
        ("kl.schedule=3", "`kl.schedule` must be a mapping, got 3."),
        ("optimizer.clip_norm=x", "`optimizer.clip_norm` must be a number or null, "),
        ("task.options=3", "`task.options` must be a mapping, got 3."),
        ("task.options=[3]", "`task.options` must be a mapping, got [3]."),
        ("eval=3", "`eval` must be a section, got 3; its keys are " + EVAL_KEYS),
        ("task.mix=3", "`task.mix` must be a mapping, got 3."),
        (
            "task.mix.gcd=3",
            "`task.mix.gcd` must be a section, got 3; its keys are weight, level, opt",
        ),
        (
            "task.mix.gcd.wieght=3",
            "`task.mix.gcd.wieght` is not a config key; did you mean "
            "`task.mix.gcd.weight`?",
        ),
        ("task.mix.gcd.weight=x", "`task.mix.gcd.weight` must be a number, got 'x'."),
        ("eval.sets=3", "`eval.sets` must be a mapping, got 3."),
        (
            "eval.sets.aime.nmae=3",
            "`eval.sets.aime.nmae` is not a config key; did you mean "
            "`eval.sets.aime.name`?",
        ),
        (
            "eval.sets.aime.held_out=0.1",
            "`eval.sets.aime.held_out` is not a config key; did you mean "
            "`task.held_out`?",
        ),
        (
            "eval.sets.aime.reward=maths",
            "`eval.sets.aime.reward` must be one of reasoning_gym, math, exact, python "
            "or null, got 'maths'.",
        ),
        (
            "eval.sets.heldout.size=3",
            "`eval.sets.heldout` must be called by letters, digits, - and _, and not "
            "heldout, got 'heldout'; metrics go by that name.",
        ),
        (
            "eval.sets.a b.size=3",
            "`eval.sets.a b` must be called by letters, digits, - and _, and not held",
        ),
        (
            "task.columns.keep=a",
            "`task.columns.keep` must be a list of texts, got 'a'.",
        ),
        (
            "train.steps",
            "An override must look like `train.steps=2`, got 'train.steps'.",
        ),
        (
            "seed=${nope}",
            "The config cannot be read: Interpolation key 'nope' not found",
        ),
    ],
)
def test_an_override_that_does_not_fit_is_one_sentence(load, override, message):
    assert sentence(lambda: load(override)).startswith(message)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("seed=-1", "lie in [0, 2**32)"),
        ("model.path=''", "name a model"),
        ("sketch.rank=0", "be at least 1"),
        ("sketch.match=(", "be a regular expression"),
        ("optimizer.learning_rate=0", "be positive and finite"),
        ("optimizer.b2=1", "lie in [0, 1)"),
        ("optimizer.eps=nan", "be positive and finite"),
        ("optimizer.clip_norm=0", "be positive and finite"),
        ("kl.start=0", "be positive and finite"),
        ("kl.end=-1", "be positive and finite"),
        ("kl.alpha_max=inf", "be positive and finite"),
        ("kl.share=0", "lie in (0, 1]"),
        ("kl.share=1.1", "lie in (0, 1]"),
        ("kl.schedule.value=1", "be empty when `kl.budget` is cosine"),
        ("task.size=1", "be at least 2"),
        ("task.held_out=1", "lie in [0, 1)"),
        ("task.held_out=0", "be above 0 without `eval.sets`"),
        ("task.seed=4294967296", "lie in [0, 2**32)"),
        ("task.limit=3", "be null when `task.source` is reasoning_gym"),
        ("task.subset=en", "be null when `task.source` is reasoning_gym"),
        ("task.level=-1", "be at least 0"),
        ("task.name=''", "name a data set"),
        ("task.mix.gcd.weight=0", "be positive and finite"),
        ("task.mix.gcd.level=-1", "be at least 0"),
        ("task.prompt=Why?", "hold {question} once, got 'Why?'"),
        ("task.prompt={question}{question}", "hold {question} once"),
        ("eval.sets.a.size=0", "be at least 1"),
        ("eval.sets.a.limit=1", "be null when `eval.sets.a.source` is reasoning_gym"),
        ("reward.workers=0", "be at least 1"),
        ("reward.timeout=0", "be positive and finite"),
        ("rollout.temperature=0", "be positive and finite"),
        ("rollout.top_p=0", "lie in (0, 1]"),
        ("rollout.top_k=-1", "be at least 0"),
        ("rollout.max_new_tokens=0", "be at least 1"),
        ("rollout.prompt_bucket=0", "be at least 1"),
        ("rl.responses_per_prompt=3", "divide `train.batch` (64), got 3; 2 does"),
        ("rl.baseline_decay=1", "lie in [0, 1)"),
        ("rl.clip_low=1", "lie in (0, 1)"),
        ("rl.clip_high=0", "be positive and finite"),
        ("rl.correction_cap=0.5", "be at least 1 and finite"),
        ("rl.correction_cap=.inf", "be at least 1 and finite"),
        ("rl.correction_mask=[]", "be [low, high] with 0 <= low <= 1 <= high"),
        ("rl.correction_mask=[2, 0.5]", "be [low, high] with 0 <= low <= 1 <= high"),
        ("rl.correction_mask=[2, 5]", "be [low, high] with 0 <= low <= 1 <= high"),
        ("rl.correction_mask=[0, 1, 2]", "be [low, high] with 0 <= low <= 1 <= high"),
        ("rl.correction_mask=[0, .nan]", "be [low, high] with 0 <= low <= 1 <= high"),
        ("rl.correction_mask=[0.5, 5]", "be null without a correction"),
        ("rollout.urls=[http://a]", "be [] when `rollout.engine` is local"),
        ("rollout.router=http://a", "be null when `rollout.engine` is local"),
        ("rollout.staleness=1", "be 0 when `rollout.engine` is local"),
        ("rollout.api_key_env=''", "name an environment variable"),
        ("rollout.request_deadline=0", "be positive and finite"),
        ("rollout.batch_deadline=.inf", "be positive and finite"),
        (
            "rollout.batch_deadline=60",
            "be at least `rollout.request_deadline` (600.0), got 60.0.",
        ),
        ("rollout.concurrency=0", "be at least 1"),
        ("rollout.keep_updates=0", "be at least 1"),
        ("train.steps=0", "be at least 1"),
        ("train.microbatch=24", "divide `train.batch` (64), got 24; 16 does"),
        ("task.columns.answer=null", "name a column when the reward is auto, got null"),
        ("train.microbatch_tokens=0", "be at least 1, got 0; null packs nothing"),
        ("train.eval_every=0", "be at least 1"),
        ("train.checkpoint_every=0", "be at least 1"),
        ("train.target_accuracy=1.5", "lie in (0, 1]"),
        ("train.keep_checkpoints=0", "be at least 1"),
        ("eval.samples=0", "be at least 1"),
        ("eval.batch=0", "be at least 1"),
    ],
)
def test_a_value_out_of_range_names_its_field_and_the_rule(load, override, rule):
    name = override.partition("=")[0].removesuffix(".value")
    assert sentence(lambda: load(override)).startswith(f"`{name}` must {rule}")


def test_grpo_needs_a_group(load):
    message = sentence(lambda: load("rl.advantage=grpo"))
    assert message.startswith(
        "`rl.responses_per_prompt` must be at least 2 when `rl.advantage` is grpo, got"
    )
    assert load("rl.advantage=grpo", "rl.responses_per_prompt=8")


SGLANG = ("rollout.engine=sglang", "rollout.urls=[http://127.0.0.1:30000,https://b]")


def test_the_correction_is_by_token_for_servers_and_none_for_the_local_engine(load):
    assert load().correction == "none"
    assert load("rl.correction=sequence").correction == "sequence"
    config = load(*SGLANG)
    assert config.rollout.urls == ["http://127.0.0.1:30000", "https://b"]
    assert config.correction == "token"
    assert load(*SGLANG, "rl.correction=none").correction == "none"
    options = loss_options_of(load(*SGLANG, "rl.correction_mask=[0.5, 5]"))
    assert options.correction_mask == (0.5, 5.0)
    assert (options.correction, options.correction_cap) == ("token", 2.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.engine=sglang"],
            "`rollout.urls` must name a server when `rollout.engine` is sglang, got "
            "[]; `logra serve` starts one and prints its URL.",
        ),
        (
            [*SGLANG, "rollout.urls=[http://a, http://a/]"],
            "`rollout.urls` must name each server once, got ['http://a', 'http://a/'].",
        ),
        ([*SGLANG, "rollout.staleness=-1"], "`rollout.staleness` must be at least 0"),
        (
            [*SGLANG, "rl.correction=none", "rl.correction_mask=[0.5, 5]"],
            "`rl.correction_mask` must be null without a correction, got [0.5, 5.0]; "
            "set rl.correction=token.",
        ),
    ],
)
def test_servers_that_do_not_fit_are_one_sentence(load, overrides, message):
    assert sentence(lambda: load(*overrides)).startswith(message)


def test_a_config_of_servers_survives_the_round_trip(load, tmp_path):
    config = load(*SGLANG, "rollout.router=http://r", "rl.correction_mask=[0.5, 5]")
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config


def test_a_resumed_run_may_move_to_other_servers_but_not_change_its_loss(load):
    config = load(*SGLANG)
    check_resumable(load(*SGLANG, "rollout.urls=[http://other:1]"), config)
    with pytest.raises(ValueError, match=r"`rl.correction` must stay None"):
        check_resumable(load(*SGLANG, "rl.correction=sequence"), config)


def test_flash_attention_of_float32_is_refused(load):
    assert load("model.activations=null", "model.attention=flash")
    for wide in ("model.activations=float32", "model.dtype=float32"):
        with pytest.raises(
            ValueError, match=r"`model.attention` must be auto, .*got 'flash'; use auto"
        ):
            load("model.activations=null", wide, "model.attention=flash")


def test_activations_narrower_than_the_weights_are_refused(load):
    with pytest.raises(ValueError, match=r"`model.activations` must be at least as"):
        load("model.dtype=float32", "model.activations=bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "`model` is missing: it has no default"),
        ("model: {}\ntrain: {steps: 1}\n", "`model.path` must name a model, got null"),
        ("train: {steps: 1}\n", "`model` is missing"),
        ("model: {path: a}\n", "`train.steps` is missing: it has no default"),
        (
            "model: {path: a, preset: qwen2.5-7b}\ntrain: {steps: 1}\n",
            "`model.preset` must be null beside `model.path` ('a'), got 'qwen2.5-7b'",
        ),
        (
            "model: {preset: qwen2.5-7}\ntrain: {steps: 1}\n",
            "`model.preset` must be one of qwen2.5-0.5b, ",
        ),
        ("model: {path: 3}\n", "`model.path` must be text, got 3; put it in quotes."),
        ("- 3\n", "`{path}` must hold `key: value` lines, got a list."),
        ("3\n", "Cannot read the config file `{path}`"),
        ("a: [\n", "`{path}` is not valid YAML"),
        ("seed: 1\nseed: 2\n", "`{path}` is not valid YAML"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    expected = message.replace("{path}", str(path))
    assert sentence(lambda: load_config(path)).startswith(expected)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    path = tmp_path / "none.yaml"
    assert sentence(lambda: load_config(path)) == (
        f"Cannot read the config file `{path}`: No such file or directory."
    )


def test_default_directories(load, monkeypatch):
    now = datetime(2026, 1, 2, 3, 4, 5)
    assert default_run_dir(load(), now) == Path("runs/tiny-20260102-030405")
    assert default_run_dir(load("run_dir=here"), now) == Path("here")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_cache_dir(load()) == Path("/caches/logra_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir(load()) == Path.home() / ".cache" / "logra_jax"
    assert default_cache_dir(load("cache_dir=there")) == Path("there")


# --- the KL budget


def budgets(config: Config) -> list[float]:
    """What the config's controller allows each update of a run, nats per token."""
    controller = build_controller(config)
    updates = {"w": jnp.ones(2)}
    state = controller.init(updates)
    allowed = []
    for _ in range(config.train.steps):
        _, state = controller.update(updates, state, predicted_kl=1.0)
        allowed.append(float(cast(PredictedKLState, state).budget))
    return allowed


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["kl.start=3e-2"], [3e-2, 1.55e-2, 1e-3]),
        (["train.steps=1", "kl.start=3e-2"], [3e-2]),
        (["kl.budget=constant", "kl.start=3e-2"], [3e-2] * 3),
        (["kl.budget=none"], [math.inf] * 3),
        (
            [
                "kl.budget=exponential_decay",
                "kl.schedule={init_value: 1e-2, transition_steps: 1, decay_rate: 0.5}",
            ],
            [1e-2, 5e-3, 2.5e-3],
        ),
        (
            [
                "kl.budget=warmup_cosine_decay_schedule",
                "kl.schedule.init_value=0.0",
                "kl.schedule.peak_value=2e-2",
                "kl.schedule.warmup_steps=1",
                "kl.schedule.decay_steps=3",
            ],
            [0.0, 2e-2, 1e-2],
        ),
        (
            [
                "kl.budget=piecewise_constant_schedule",
                "kl.schedule={init_value: 1.0, boundaries_and_scales: {2: 0.1}}",
            ],
            [1.0, 1.0, 0.1],
        ),
        (["kl.budget=constant_schedule", "kl.schedule={value: 1e-2}"], [1e-2] * 3),
    ],
)
def test_the_controller_follows_the_configured_budget(
    load, tmp_path, overrides, expected
):
    config = load(*overrides)
    assert budgets(config) == pytest.approx(expected, rel=1e-6)
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config


EXPONENTIAL = "kl.budget=exponential_decay"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["kl.budget=cosin"],
            "`kl.budget` must be cosine, constant, none or the name of an optax "
            "schedule, got 'cosin'; did you mean `cosine`?",
        ),
        (
            ["kl.budget=exponential_deacy"],
            "`kl.budget` must be cosine, constant, none or the name of an optax "
            "schedule, got 'exponential_deacy'; did you mean `exponential_decay`?",
        ),
        (
            ["kl.budget=sgd"],
            "`kl.budget` must be cosine, constant, none or the name of an optax "
            "schedule, got 'sgd'; the choice is cosine, constant, none, constant_sch",
        ),
        (
            ["kl.budget=join_schedules"],  # of schedules, not of plain values
            "`kl.budget` must be cosine, constant, none or the name of an optax "
            "schedule, got 'join_schedules'; ",
        ),
        (
            [EXPONENTIAL],
            "`kl.schedule` must hold `init_value`, which optax.exponential_decay "
            "needs, got {}.",
        ),
        (
            [EXPONENTIAL, "kl.schedule.decay_rat=1"],
            "`kl.schedule` must hold arguments of optax.exponential_decay, got "
            "'decay_rat'; did you mean `decay_rate`?",
        ),
        (
            [EXPONENTIAL, "kl.schedule.zzz=1"],
            "`kl.schedule` must hold arguments of optax.exponential_decay, got "
            "'zzz'; the choice is init_value, transition_steps, decay_rate, ",
        ),
        (
            [
                EXPONENTIAL,
                "kl.schedule={init_value: 1, transition_steps: 0, decay_rate: 1}",
            ],
            "`kl.schedule.transition_steps` must be at least 1, got 0; optax would "
            "make the schedule a constant.",
        ),
    ],
)
def test_a_budget_that_is_no_optax_schedule_is_refused_when_the_config_loads(
    load, overrides, message
):
    assert sentence(lambda: load(*overrides)).startswith(message)


@pytest.mark.parametrize(
    ("budget", "schedule", "message"),
    [
        (
            "cosine_decay_schedule",
            "{init_value: 1e-2, decay_steps: 0}",
            "`kl.schedule` must hold values that optax.cosine_decay_schedule takes, "
            "got {'init_value': 0.01, 'decay_steps': 0}; it says: ",
        ),
        (
            "cosine_decay_schedule",
            "{init_value: much, decay_steps: 3}",
            "`kl.schedule` must hold values that optax.cosine_decay_schedule takes, ",
        ),
        (
            "constant_schedule",
            "{value: [1, 2, 3]}",
            "`kl.schedule` must hold values that optax.constant_schedule takes, ",
        ),
        (
            "linear_schedule",
            "{init_value: 1e-2, end_value: -1e-2, transition_steps: 2}",
            "`kl.schedule` must give finite budgets, none of them negative, got -0.01 "
            "nats per token at update 3.",
        ),
        (
            "constant_schedule",
            "{value: .nan}",
            "`kl.schedule` must give finite budgets, none of them negative, got nan ",
        ),
        (
            "constant_schedule",
            "{value: 0}",
            "`kl.schedule` must give a positive budget at some update, got 0 ",
        ),
    ],
)
def test_a_schedule_that_gives_no_budgets_is_refused_before_training(
    load, budget, schedule, message
):
    config = load(f"kl.budget={budget}", f"kl.schedule={schedule}")
    assert sentence(lambda: build_controller(config)).startswith(message)


def test_a_config_without_an_optax_schedule_loads_without_jax(load, tmp_path):
    load()  # writes the file
    code = f"""
import sys
from logra_jax.training.config import load_config
load_config({str(tmp_path / "tiny.yaml")!r})
print(sorted({{"jax", "optax"}} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "[]\n"


def sentence(call: Callable[[], object]) -> str:
    """The message of the ValueError that `call` raises, checked to be one sentence."""
    with pytest.raises(ValueError) as info:
        call()
    message = str(info.value)
    assert "\n" not in message
    assert message[-1] in ".?"
    return message

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from logra_jax.training.config import load_config
from logra_jax.training.schema_serve import ServeConfig
from logra_jax.training.serve import serve_options, train_command


def test_the_server_holds_the_weights_as_the_trainer_does(tiny_config: Path):
    overrides = ["serve.port=0", "serve.args=[--log-level, debug]"]
    options = serve_options(load_config(tiny_config, overrides))
    assert options.dtype == "bfloat16"
    assert options.model_dir.is_dir()
    assert (options.python, options.port) == (sys.executable, 0)
    assert options.args == ("--log-level", "debug")


def test_more_ranks_than_the_heads_divide_into_are_refused(tiny_config: Path):
    with pytest.raises(ValueError, match=r"`serve\.tp` must divide .* \(4\), got 3"):
        serve_options(load_config(tiny_config, ["serve.tp=3"]))


def test_the_api_key_comes_from_the_variable_that_the_trainer_reads(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OUR_KEY", "secret")
    config = load_config(tiny_config, ["rollout.api_key_env=OUR_KEY"])
    assert serve_options(config).api_key == "secret"
    monkeypatch.delenv("OUR_KEY")
    assert serve_options(config).api_key is None


def test_the_command_that_is_shown_trains_the_same_model_with_this_server(
    tiny_config: Path,
):
    overrides = ["serve.tp=2", "name=a b"]
    command = train_command("http://127.0.0.1:30001", str(tiny_config), overrides)
    program, verb, path, *rest = shlex.split(command)
    assert (program, verb) == ("logra", "train")
    config = load_config(path, rest)
    assert config.name == "a b"
    assert config.rollout.engine == "sglang"
    assert config.rollout.urls == ["http://127.0.0.1:30001"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host", ""),
        ("port", 70000),
        ("tp", 0),
        ("memory", 1.0),
        ("max_tokens", 0),
        ("max_running", 0),
        ("threads", 0),
        ("start_timeout", 0.0),
    ],
)
def test_a_bad_value_is_refused_by_its_name(key: str, value: Any):
    with pytest.raises(ValueError, match=rf"`serve\.{key}` must"):
        ServeConfig(**{key: value})

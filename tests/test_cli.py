import errno
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from logra_jax import cli

CONFIG = "model:\n  path: some-model\ntrain:\n  steps: 3\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Stand-ins for what the commands call; each notes its arguments and returns 7."""
    calls: list[tuple] = []

    def stand_in(module: str, name: str, **constants: object) -> None:
        def function(*args: object, **options: object) -> int:
            given = [(k, v) for k, v in options.items() if v not in (None, False)]
            calls.append((name, *args, *given))
            return 7

        monkeypatch.setitem(
            sys.modules, module, types.SimpleNamespace(**{name: function}, **constants)
        )

    stand_in("logra_jax.training.loop", "train")
    stand_in("logra_jax.training.eval_command", "evaluate_command")
    stand_in("logra_jax.training.export", "export_command")
    stand_in("logra_jax.study.bench", "bench_rollout")
    stand_in("logra_jax.study.report", "report")
    stand_in("logra_jax.study.fidelity", "fidelity", RANKS=(4, 16))
    stand_in("logra_jax.study.spectrum", "spectrum", ENERGIES=(0.5, 0.9))
    return calls


def test_train_gets_the_config_with_its_overrides(config, calls):
    assert cli.main(["train", config, "train.steps=2", "sketch.rank=8"]) == 7
    [(name, given)] = calls
    assert (name, given.train.steps, given.sketch.rank) == ("train", 2, 8)


def test_bench_takes_its_flag_on_either_side_of_the_overrides(config, calls):
    cli.main(["bench", "rollout", config, "seed=1", "--json"])
    cli.main(["bench", "rollout", "--json", config, "seed=1"])
    assert [(name, c.seed, json) for name, c, json in calls] == [
        ("bench_rollout", 1, True)
    ] * 2


def test_overrides_may_stand_on_both_sides_of_an_option(config, calls, capsys):
    cli.main(["bench", "rollout", config, "seed=1", "--json", "kl.share=0.5"])
    cli.main(["bench", "rollout", config, "--json", "seed=1", "kl.share=0.5"])
    assert [(c.seed, c.kl.share, json) for _, c, json in calls] == [(1, 0.5, True)] * 2
    for rest in (["word"], ["--colour=red"]):
        with pytest.raises(SystemExit):
            cli.main(["bench", "rollout", config, "--json", *rest])
        assert f"unrecognized arguments: {rest[0]}" in capsys.readouterr().err


def test_eval_and_export_pass_their_arguments_on(calls):
    assert cli.main(["eval", "runs/a", "eval.samples=9"]) == 7
    assert cli.main(["export", "runs/a", "out"]) == 7
    assert calls == [
        ("evaluate_command", "runs/a", ["eval.samples=9"]),
        ("export_command", "runs/a", "out"),
    ]


def test_report_takes_one_run_or_several(calls):
    cli.main(["report", "runs/a"])
    cli.main(["report", "runs/a", "runs/b", "--out", "both.html"])
    assert calls == [
        ("report", ["runs/a"], None),
        ("report", ["runs/a", "runs/b"], "both.html"),
    ]


def test_eval_takes_a_model_with_a_config_and_export_the_best(calls):
    cli.main(["eval", "dir", "--config", "a.yaml", "seed=1", "--json", "seed=2"])
    cli.main(["eval", "runs/a", "--best", "--samples", "a.jsonl"])
    cli.main(["export", "runs/a", "out", "--best"])
    assert calls == [
        (
            *("evaluate_command", "dir", ["seed=1", "seed=2"]),
            *(("config", "a.yaml"), ("as_json", True)),
        ),
        ("evaluate_command", "runs/a", [], ("best", True), ("samples", "a.jsonl")),
        ("export_command", "runs/a", "out", ("best", True)),
    ]


def test_fidelity_and_spectrum_pass_their_options_on(config, calls):
    cli.main(["fidelity"])
    cli.main(["fidelity", "--rank", "2", "8", "--seeds", "1", "--plot", "a.png"])
    assert calls == [
        ("fidelity", (4, 16), 3, False, None),
        ("fidelity", [2, 8], 1, False, "a.png"),
    ]
    calls.clear()
    cli.main(["spectrum", config, "seed=1"])
    cli.main(["spectrum", config, "seed=1", "--energy", "0.8", "0.99", "--json"])
    cli.main(["spectrum", "--json", "--responses", "4", config, "seed=1"])
    assert [(name, c.seed, *rest) for name, c, *rest in calls] == [
        ("spectrum", 1, (0.5, 0.9), 32, False),
        ("spectrum", 1, [0.8, 0.99], 32, True),
        ("spectrum", 1, (0.5, 0.9), 4, True),
    ]


def test_bad_input_is_one_line_and_exit_code_2(config, calls, capsys):
    assert cli.main(["train", config, "rollout.temprature=1"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        "logra: `rollout.temprature` is not a config key; did you mean "
        "`rollout.temperature`?\n"
    )
    assert calls == []


def test_traceback_flag_lets_the_error_through(config, calls):
    with pytest.raises(ValueError, match="not a config key"):
        cli.main(["train", "--traceback", config, "foo=1"])


def test_missing_extra_is_named_with_the_command_that_installs_it(
    config, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert cli.main(["train", config]) == 2
    assert capsys.readouterr().err == (
        "logra: omegaconf is not installed; run `pip install 'logra-jax[train]'`.\n"
    )


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "No space left on device for 'a/b'; free some space and run"),
        (errno.EROFS, "Read-only file system for 'a/b'; choose a place that can be"),
    ],
)
def test_a_full_disk_is_one_line_too(config, monkeypatch, capsys, number, said):
    def train(config):
        raise OSError(number, os.strerror(number), "a/b")

    monkeypatch.setattr("logra_jax.training.loop.train", train)
    assert cli.main(["train", config]) == 2
    assert capsys.readouterr().err.startswith(f"logra: The system says: {said}")


def test_other_errors_of_the_system_keep_their_traceback(config, monkeypatch):
    def train(config):
        raise ChildProcessError(errno.ECHILD, "No child processes")

    monkeypatch.setattr("logra_jax.training.loop.train", train)
    with pytest.raises(ChildProcessError):
        cli.main(["train", config])


def test_a_missing_module_of_our_own_is_not_blamed_on_the_user(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "logra_jax.training.loop", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["train", config])


@pytest.mark.parametrize(
    "argv", [[], ["train"], ["fly"], ["bench"], ["export", "runs/a"]], ids=" ".join
)
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert "usage: logra" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "eval",
        "export",
        "report",
        "plan",
        "fidelity",
        "spectrum",
        "bench rollout",
        "bench step",
        "bench plan",
    ],
)
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command.split(), "--help"])
    assert exit_info.value.code == 0
    assert f"  logra {command} " in capsys.readouterr().out


def test_module_and_console_script_are_the_same_command(tmp_path):
    script = Path(sys.executable).with_name("logra")
    for command in ([sys.executable, "-m", "logra_jax"], [str(script)]):
        result = subprocess.run(
            [*command, "train", str(tmp_path / "none.yaml")],
            capture_output=True,
            text=True,
            env=os.environ,
        )
        assert result.returncode == 2
        assert result.stderr.startswith("logra: Cannot read the config file")
        assert result.stderr.count("\n") == 1

import doctest
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest

import logra_jax

ROOT = Path(__file__).parents[1]
README, NOTEBOOK = ROOT / "README.md", ROOT / "notebooks" / "06_your_own_task.ipynb"
# Imported by an SGLang server only; tests/sglang runs it.
IN_SERVERS = {"logra_jax.rollout.sglang_cpu"}
MODULES = [
    module.name
    for module in pkgutil.walk_packages(logra_jax.__path__, "logra_jax.")
    if not module.name.endswith("__main__") and module.name not in IN_SERVERS
]
WITH_EXAMPLES = {
    "logra_jax.algorithm.alignment",
    "logra_jax.algorithm.basis",
    "logra_jax.algorithm.low_rank",
    "logra_jax.algorithm.factor",
    "logra_jax.algorithm.galore",
    "logra_jax.algorithm.kl_prediction",
    "logra_jax.algorithm.merge",
    "logra_jax.algorithm.predicted_kl",
    "logra_jax.algorithm.row_adam",
    "logra_jax.algorithm.sketch",
    "logra_jax.rollout.replica",
    "logra_jax.rollout.servers",
    "logra_jax.rollout.wire",
}
# Names that users import from their rooms, beside those of `logra_jax` itself.
FROM_ROOMS = (
    "logra_jax.rl.rewards.math",
    "logra_jax.rl.rewards.MathReward",
    *(
        f"logra_jax.rl.advantages.{name}"
        for name in (
            "RunningMean",
            "running_mean",
            "batch_mean",
            "grpo",
            "dr_grpo",
            "rloo",
            "reinforce_pp",
            "whiten",
        )
    ),
    *(
        f"logra_jax.rl.losses.{name}"
        for name in (
            "ppo_clip",
            "correct_mismatch",
            "policy_loss",
            "reinforce",
            "cispo",
            "gspo",
            "token_scale",
            "reference_kl",
        )
    ),
    "logra_jax.training.config.load_config",
    "logra_jax.training.journal.read_metrics",
)
PUBLIC = (*(f"logra_jax.{name}" for name in logra_jax.__all__), *FROM_ROOMS)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_shows_how_it_is_called(name: str):
    """By an example in its own docstring, which `testmod` finds and so runs below.

    It prints something, or is refused: an example without either shows nothing.
    """
    where, _, short = name.rpartition(".")
    thing = getattr(importlib.import_module(where), short)
    module = importlib.import_module(thing.__module__)
    found = {test.name: test for test in doctest.DocTestFinder().find(module)}
    steps = found[f"{thing.__module__}.{short}"].examples
    assert any(step.want for step in steps)
    assert thing.__module__ in MODULES


def test_every_function_of_a_loss_or_of_advantages_is_among_the_public_names():
    for room in ("logra_jax.rl.advantages", "logra_jax.rl.losses"):
        module = importlib.import_module(room)
        for name, thing in vars(module).items():
            is_own = getattr(thing, "__module__", "") == room
            if is_own and inspect.isfunction(thing) and not name.startswith("_"):
                assert f"{room}.{name}" in PUBLIC


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_hold(name: str):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert (result.attempted > 0) or (name not in WITH_EXAMPLES)


def test_the_snippet_in_the_readme_trains():
    snippet, _ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope: dict = {}
    exec(snippet, scope)
    before = scope["nnx"].split(scope["model"], scope["logra"].Probe, ...)[2]
    loss = [
        scope["loss"](scope["probes"], w, scope["x"], scope["y"])
        for w in (before, scope["weights"])
    ]
    assert loss[1] < loss[0]


def test_the_files_of_a_task_of_ones_own_in_the_readme_load_and_score(tmp_path: Path):
    from logra_jax.rl.tasks import Question
    from logra_jax.training.config import load_config

    text = README.read_text()
    (least,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "my_task.yaml"
    path.write_text(least)
    assert load_config(path).reward.function == "my_rewards:score"
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    (more,) = re.findall(r"```yaml\n(.*?)```", "".join(cells[-1]["source"]), re.DOTALL)
    path.write_text("model: {path: a-model}\n" + more)
    assert load_config(path).best_metric == "heldout/sampled"

    _, reward = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict = {}
    exec(reward, scope)
    (line,) = re.findall(r"`({\"question\".*?})`", text)
    row = json.loads(line)
    question = Question(row["question"], str(row["answer"]), {})
    answers = ("47, of course, not 12", "47", "12 or 47", "")
    assert [scope["score"](one, question) for one in answers] == [1, 1, 0, 0]

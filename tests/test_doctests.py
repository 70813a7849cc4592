import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import logra_jax

README = Path(__file__).parents[1] / "README.md"
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
    "logra_jax.algorithm.merge",
    "logra_jax.algorithm.predicted_kl",
    "logra_jax.algorithm.row_adam",
    "logra_jax.algorithm.sketch",
    "logra_jax.rollout.replica",
    "logra_jax.rollout.servers",
    "logra_jax.rollout.wire",
}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_hold(name: str):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert (result.attempted > 0) or (name not in WITH_EXAMPLES)


def test_the_snippet_in_the_readme_trains():
    (snippet,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope: dict = {}
    exec(snippet, scope)
    before = scope["nnx"].split(scope["model"], scope["logra"].Probe, ...)[2]
    loss = [
        scope["loss"](scope["probes"], w, scope["x"], scope["y"])
        for w in (before, scope["weights"])
    ]
    assert loss[1] < loss[0]


def test_the_sections_of_a_config_in_the_readme_are_taken(tmp_path: Path):
    from logra_jax.training.config import load_config

    (sections,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    rest = """
model: {path: a-model}
train: {steps: 8, eval_every: 8, checkpoint_every: 8}
rollout: {max_new_tokens: 512}
"""
    path = tmp_path / "readme.yaml"
    path.write_text(sections + rest)
    assert load_config(path).best_metric == "heldout/sampled"

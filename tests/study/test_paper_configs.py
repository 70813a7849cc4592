"""The configs of the paper's runs: their updates compiled for shapes alone."""

from pathlib import Path

import pytest

from logra_jax.study import plan as plan_module
from logra_jax.study.plan import make_plan
from logra_jax.training.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
# GiB of a training GPU in the paper: means, over its updates.
PAPER = {"qwen2.5-math-1.5b": 7.18, "qwen2.5-math-7b": 17.29, "qwen3.8-27b": 51.54}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("rank", [64, 256])
def test_an_update_of_the_paper_fits_far_within_its_memory(name, rank, monkeypatch):
    monkeypatch.setattr(plan_module, "KINDS", ("logra",))
    overrides = [f"model.preset={name}", f"sketch.rank={rank}"]
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    plan = make_plan(config)
    assert plan["kinds"]["logra"]["error"] is None
    assert plan["devices"] == 4
    assert plan["workload"]["tokens_per_device"] == 4096
    assert plan["workload"]["is_packed"]
    assert plan["peak_gib"] < {64: 0.6, 256: 0.8}[rank] * PAPER[name]

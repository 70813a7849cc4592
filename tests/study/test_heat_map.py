"""Cosines of a real gradient and its sketches, by layer and rank."""

from pathlib import Path

import numpy as np
import pytest

from logra_jax.algorithm.alignment import expected_cosine
from logra_jax.study.heat_map import measure_heat_map
from logra_jax.training.config import load_config


@pytest.fixture
def result(tiny_config: Path) -> dict:
    return measure_heat_map(load_config(tiny_config), ranks=[2, 32], responses=8)


@pytest.mark.slow
def test_wider_sketches_reconstruct_more_and_as_much_as_the_law_says(result: dict):
    assert set(result["cosines"]) == {"rademacher", "gaussian"}
    for found in result["cosines"].values():
        assert len(found) == 7  # projections
        for cosines in found.values():
            values = np.array(cosines)
            assert values.shape == (2, 2)  # layers, ranks
            assert (values[:, 0] > 0).all()
            assert (values[:, 0] < values[:, 1]).all()
            assert (values < 1).all()
    for row in result["means"]:
        assert row["low"] <= row["mean"] <= row["high"]
        # 14 gradients, one draw each: the law is of many draws.
        assert row["mean"] == pytest.approx(row["theory"], rel=0.15)


@pytest.mark.slow
def test_a_layer_without_room_for_a_rank_has_the_widest_sketch_that_it_has(result):
    # Keys and values have 16 rows: the law is of 16 there, and of 32 elsewhere.
    wide = [row for row in result["means"] if row["rank"] == 32]
    for row in wide:
        kind = row["basis"]
        laws = [
            expected_cosine(48 if "down" in path else 32, rank, kind)
            for path in result["cosines"][kind]
            for rank in [16 if "k_proj" in path or "v_proj" in path else 32]
        ]
        assert row["theory"] == pytest.approx(np.mean(laws))


def test_ranks_must_rise(tiny_config: Path):
    with pytest.raises(ValueError, match=r"`reconstruction.ranks` must be a rising"):
        measure_heat_map(load_config(tiny_config), ranks=[4, 2])

import math

import numpy as np
import pytest

from logra_jax.training.figure_style import moving_average
from logra_jax.training.journal import Journal, read_metrics
from logra_jax.training.plots import _accuracies, write_plots

NAMES = ["accuracy.png", "kl.png", "length.png", "cost.png"]


def write_run(run_dir, steps, *, evaluate=True, **extra):
    """A made-up run: an evaluation before the first step, then `steps` updates."""
    evaluation = {
        "heldout/greedy": 0.4,
        "heldout/greedy_se": 0.06,
        "heldout/sampled": 0.2,
        "heldout/sampled_se": 0.03,
        "seconds/eval": 4.0,
    }
    update = {
        "reward": 0.5,
        "kl/budget": 1e-2,
        "kl/predicted": 1e-2,
        "kl/realised": 9e-3,
        "alpha": 20.0,
        "length/mean": 8.0,
        "length/truncated": 0.1,
        "seconds/rollout": 2.0,
        "seconds/reward": 0.1,
        "seconds/step": 6.0,
        "memory/peak_rss_gib": 3.5,
    }
    with Journal(run_dir, resume_step=None) as journal:
        if evaluate:
            journal.write(0, evaluation)
        for step in range(1, steps + 1):
            journal.write(step, update | extra)


def assert_pictures(run_dir):
    paths = write_plots(run_dir)
    assert paths == [run_dir / name for name in NAMES]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 1000])
def test_any_length_of_run_is_drawn_without_a_warning(tmp_path, steps, evaluate):
    write_run(tmp_path, steps, evaluate=evaluate)
    assert_pictures(tmp_path)


def test_a_run_that_has_only_been_evaluated_is_drawn(tmp_path):
    write_run(tmp_path, 0)
    assert_pictures(tmp_path)


def test_every_evaluation_set_is_drawn(tmp_path):
    others = {f"set{i}/{name}": 0.2 for i in range(5) for name in ("sampled", "greedy")}
    write_run(tmp_path, 3, **others, **{"set0/sampled_se": math.nan})
    assert_pictures(tmp_path)
    drawn = [key for key, *_ in _accuracies(read_metrics(tmp_path))]
    assert drawn == [
        *("heldout/greedy", "heldout/sampled"),
        *(f"set{i}/sampled" for i in range(5)),
    ]


def test_a_run_without_a_line_is_drawn(tmp_path):
    write_run(tmp_path, 0, evaluate=False)
    assert_pictures(tmp_path)


def test_numbers_that_a_log_axis_cannot_show_are_drawn_without_a_warning(tmp_path):
    zeros = dict.fromkeys(["kl/budget", "kl/predicted", "kl/realised", "alpha"], 0.0)
    write_run(tmp_path / "zeros", 3, **zeros)
    assert_pictures(tmp_path / "zeros")
    write_run(tmp_path / "nan", 3, **dict.fromkeys(zeros, math.nan))
    assert_pictures(tmp_path / "nan")


def test_drawing_leaves_matplotlibs_settings_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    write_run(tmp_path, 2)
    write_plots(tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_moving_average_is_the_mean_of_the_last_values():
    averages = moving_average(np.array([1.0, 2.0, 6.0, 4.0]), 3)
    np.testing.assert_allclose(averages, [1.0, 1.5, 3.0, 4.0])

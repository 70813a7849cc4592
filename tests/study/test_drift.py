import numpy as np
import pytest
from rich.console import Console

from logra_jax.study import drift
from logra_jax.study.drift import SHAPE, merge_drift


@pytest.mark.parametrize("update_rms", [1e-6, 1e-4])
def test_stochastic_drift_grows_as_its_rounding_noise_and_no_faster(update_rms):
    found = merge_drift((1, 10, 100, 1000), "stochastic", update_rms=update_rms)
    ratio = np.divide(found.drift, found.bound)
    # 65,536 weights: the rms is known to about a percent; the tail of one cycle to less
    assert np.all(ratio < 1.05)
    assert np.all(ratio > 0.95)
    np.testing.assert_allclose(
        found.bound, found.bound[0] * np.sqrt([1, 10, 100, 1000]), rtol=1e-6
    )


def test_nearest_rounding_comes_back_because_little_went_out():
    """A small drift is no merit: what did not land need not be undone."""
    nearest = merge_drift((1, 50), "nearest", update_rms=1e-6)
    stochastic = merge_drift((1, 50), "stochastic", update_rms=1e-6)
    assert nearest.drift[1] < 0.1 * stochastic.drift[1]
    assert nearest.landed < 0.1
    # 65,536 weights that move by a whole step or not at all
    spread = stochastic.bound[0] / np.sqrt(2) / 1e-6 / np.sqrt(np.prod(SHAPE))
    assert stochastic.landed == pytest.approx(1, abs=4 * spread)


def test_the_table_shows_drift_against_law_and_what_landed(monkeypatch):
    monkeypatch.setattr(drift, "UPDATES", (1e-5,))
    ticks = []
    found = drift.measure_drifts(lambda: ticks.append(1))
    assert len(ticks) == 2
    console = Console(record=True, width=200)
    drift.show_drifts(found, console)
    text = console.export_text()
    assert f"{found[0]['drift'][-1] / found[0]['bound'][-1]:.2f}" in text
    assert f"{found[1]['landed']:.2f}" in text

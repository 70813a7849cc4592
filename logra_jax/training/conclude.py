"""What a run came to: plots, a table, answers to read, and where everything is."""

from collections.abc import Sequence
from pathlib import Path

from logra_jax.training.display import Display
from logra_jax.training.evaluator import is_evaluated
from logra_jax.training.journal import read_metrics
from logra_jax.training.paths import MODEL_DIRECTORY
from logra_jax.training.plots import write_plots
from logra_jax.training.rollout_metrics import responses_per_second
from logra_jax.training.samples import Sample


def show_outcome(
    run_dir: Path, display: Display, shown: Sequence[Sample], step: int
) -> None:
    """Draw the plots and show the rest.

    Args:
        run_dir: of the run.
        display: shows it.
        shown: responses of the last evaluation, to read.
        step: of the exported model.
    """
    with display.phase("drawing plots"):
        write_plots(run_dir)
    metrics = read_metrics(run_dir)
    rows = [row for row in metrics if is_evaluated(row)]
    if len(rows) > 1:
        exported = [row for row in rows if row["step"] == step]
        display.before_after(rows[0], [rows[-1], *exported][-1])
    display.samples(shown)
    rate = responses_per_second(metrics)
    decimals = 0 if rate >= 10 else 2
    display.note(f"rewards: {rate:,.{decimals}f} responses scored a second")
    model = run_dir / MODEL_DIRECTORY
    display.note(f"trained model, of step {step}: {model}")
    display.note(f"metrics, samples, plots, checkpoints: {run_dir}")

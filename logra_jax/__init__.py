"""RL post-training of full LLM weights at close to the memory of inference.

Public names are imported on first use (PEP 562), so that `import logra_jax` costs
next to nothing and needs neither JAX nor an accelerator:

    import logra_jax as logra

    model = logra.sketch(model, rank=64)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logra_jax.algorithm.basis import Basis, basis_matrix
    from logra_jax.algorithm.divergence import realised_kl, sampled_kl
    from logra_jax.algorithm.factor import quantise
    from logra_jax.algorithm.kl_prediction import predict_kl, predict_kl_by_difference
    from logra_jax.algorithm.low_rank import check_moments, low_rank
    from logra_jax.algorithm.merge import merge, merge_measured
    from logra_jax.algorithm.predicted_kl import kl_step_size, scale_by_predicted_kl
    from logra_jax.algorithm.row_adam import scale_by_row_adam
    from logra_jax.algorithm.sketch import (
        Probe,
        SketchedLinear,
        perturbed,
        perturbed_matmul,
        sketch,
        sketched_matmul,
    )
    from logra_jax.algorithm.table import sketch_table

__version__ = "0.1.0"

__all__ = [
    "Basis",
    "Probe",
    "SketchedLinear",
    "basis_matrix",
    "check_moments",
    "kl_step_size",
    "low_rank",
    "merge",
    "merge_measured",
    "perturbed",
    "perturbed_matmul",
    "predict_kl",
    "predict_kl_by_difference",
    "quantise",
    "realised_kl",
    "sampled_kl",
    "scale_by_predicted_kl",
    "scale_by_row_adam",
    "sketch",
    "sketch_table",
    "sketched_matmul",
]

# One line per module that produces public names.
_PRODUCERS = {
    "basis": ("Basis", "basis_matrix"),
    "divergence": ("realised_kl", "sampled_kl"),
    "factor": ("quantise",),
    "kl_prediction": ("predict_kl", "predict_kl_by_difference"),
    "low_rank": ("check_moments", "low_rank"),
    "merge": ("merge", "merge_measured"),
    "predicted_kl": ("kl_step_size", "scale_by_predicted_kl"),
    "row_adam": ("scale_by_row_adam",),
    "sketch": (
        "Probe",
        "SketchedLinear",
        "perturbed",
        "perturbed_matmul",
        "sketch",
        "sketched_matmul",
    ),
    "table": ("sketch_table",),
}
_MODULE_OF = {name: module for module, names in _PRODUCERS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.algorithm.{_MODULE_OF[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

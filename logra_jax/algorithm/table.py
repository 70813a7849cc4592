"""What was chosen of a model, as a table to print."""

import math
from collections.abc import Iterator, Sequence

import jax
from flax import nnx

from logra_jax.algorithm.sketch import SketchedLinear

_TITLES = ("layer", "stack", "k", "d", "rank", "parameters", "share")


def sketch_table(model: nnx.Module) -> str:
    """The sketched layers of a model, a line each, and their total.

    Columns: dotted path, how many matrices its kernel holds, their inputs ``k`` and
    outputs ``d``, the rank of their sketches, the kernel's weights, and which share
    they are of all the model's parameters (``nnx.Param``).

    Args:
        model: from :func:`logra_jax.sketch`; its arrays may be shapes only.

    Example:
        >>> import logra_jax as logra
        >>> from flax import nnx
        >>> model = nnx.Sequential(
        ...     nnx.Linear(8, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 4, rngs=nnx.Rngs(1))
        ... )
        >>> print(logra.sketch_table(logra.sketch(model, rank=2)))
        layer     stack   k   d  rank  parameters  share
        layers.0      1   8  32     2         256  61.0%
        layers.1      1  32   4     2         128  30.5%
        total         2                       384  91.4%
    """
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    whole = sum(math.prod(p.shape) for p in params)
    layers = list(_rows(model))
    rows: list[tuple] = [(*row, _share(row[-1], whole)) for row in layers]
    matrices, weights = (sum(int(row[i]) for row in layers) for i in (1, 5))
    rows.append(("total", matrices, "", "", "", weights, _share(weights, whole)))
    return "\n".join(_aligned([_TITLES, *rows]))


def _rows(model: nnx.Module) -> Iterator[tuple[str, int, int, int, int, int]]:
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, SketchedLinear):
            *stack, k, d = layer.contraction.matrix().shape(layer.kernel.shape)
            n, rank = math.prod(stack), layer.probe.shape[-1]
            name = ".".join(map(str, path)) or "(the model)"
            yield name, n, k, d, rank, n * k * d


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _aligned(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Names to the left, numbers to the right."""
    texts = [
        [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for name, *numbers in texts:
        cells = (n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *cells))

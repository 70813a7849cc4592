"""What a linear layer contracts, and its kernel seen as a matrix (k, d).

``nnx.Linear``, ``nnx.LinearGeneral`` and ``nnx.Einsum`` are matrix products once axes
are moved and merged: the kernel's axes that are summed with the input's make up ``k``,
those that the output has from the kernel alone make up ``d``. Axes that input, kernel
and output share count matrices, as a stack of layers does.

The kernel keeps its own shape in the model's state, so that checkpoints and sharding of
the model stay those of the original; :class:`Matrix` says how to read it.
"""

import math
from collections.abc import Sequence
from string import ascii_letters
from typing import NamedTuple

from flax import nnx
from jaxtyping import Array

Linear = nnx.Linear | nnx.LinearGeneral | nnx.Einsum
KINDS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)

_ELLIPSIS = "..."


class Matrix(NamedTuple):
    """How the axes of a kernel make up matrices (k, d); static.

    A kernel is (*stack, *batch, *own): the layers stacked along it, the matrices of one
    layer, and what ``inputs`` and ``outputs`` count.

    Attributes:
        batch: number of axes that count the matrices of one layer.
        inputs: of the ``own`` axes, those that make up k.
        outputs: those that make up d.
    """

    batch: int = 0
    inputs: tuple[int, ...] = (0,)
    outputs: tuple[int, ...] = (1,)

    @property
    def axes(self) -> int:
        """Number of axes of one matrix in the kernel."""
        return len(self.inputs) + len(self.outputs)

    def shape(self, kernel: Sequence[int]) -> tuple[int, ...]:
        """``(*stack, *batch, k, d)`` of a kernel's shape."""
        own = kernel[len(kernel) - self.axes :]
        k, d = (math.prod(own[i] for i in n) for n in (self.inputs, self.outputs))
        return (*kernel[: len(kernel) - self.axes], k, d)

    def flatten(self, kernel: Array) -> Array:
        """One matrix of a kernel, (*own) -> (k, d)."""
        return kernel.transpose(self._order).reshape(self.shape(kernel.shape))

    def restore(self, matrix: Array, own: Sequence[int]) -> Array:
        """:meth:`flatten`'s inverse, for a kernel of shape ``own``."""
        moved = matrix.reshape([own[i] for i in self._order])
        return moved.transpose([self._order.index(i) for i in range(len(own))])

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.inputs, *self.outputs)


PLAIN = Matrix()  # a kernel (..., k, d)


class Subscripts(NamedTuple):
    """A letter for each axis of input, kernel and output, for one rank of input."""

    x: str
    w: str
    y: str

    @property
    def batch(self) -> str:
        """Axes that count matrices."""
        return "".join(c for c in self.w if c in self.x and c in self.y)

    @property
    def inputs(self) -> str:
        """Axes that are summed."""
        return "".join(c for c in self.w if c in self.x and c not in self.y)

    @property
    def outputs(self) -> str:
        """Axes that the output has from the kernel."""
        return "".join(c for c in self.w if c not in self.x)

    @property
    def rest(self) -> str:
        """Axes that the output has from the input."""
        return "".join(c for c in self.x if c not in self.w)

    def matrix(self) -> Matrix:
        """The kernel's matrix; batch axes must come first."""
        own = self.w[len(self.batch) :]
        inputs, outputs = (
            tuple(own.index(c) for c in letters)
            for letters in (self.inputs, self.outputs)
        )
        return Matrix(len(self.batch), inputs, outputs)

    def flatten(self, x: Array) -> Array:
        """The input as ``(*batch, *rest, k)``."""
        order = self.batch + self.rest + self.inputs
        x = x.transpose([self.x.index(c) for c in order])
        kept = x.shape[: x.ndim - len(self.inputs)]
        return x.reshape(*kept, math.prod(x.shape[len(kept) :]))

    def restore(self, y: Array, kernel: Sequence[int]) -> Array:
        """The output from ``(*batch, *rest, d)``, for a kernel of that shape."""
        if len(self.outputs) > 1:
            sizes = (kernel[self.w.index(c)] for c in self.outputs)
            y = y.reshape(*y.shape[:-1], *sizes)
        made = self.batch + self.rest + self.outputs
        return y.transpose([made.index(c) for c in self.y])

    def check(self, x: Sequence[int], kernel: Sequence[int]) -> None:
        """Refuse an input that does not fit: merged, wrong axes could pass."""
        for letter in self.batch + self.inputs:
            needed, got = kernel[self.w.index(letter)], x[self.x.index(letter)]
            if needed != got:
                raise ValueError(
                    f"`x` must have the kernel's size {needed} along axis "
                    f"{self.x.index(letter)}, got shape {tuple(x)} for a kernel "
                    f"{tuple(kernel)}."
                )


class Axes(NamedTuple):
    """The contraction of ``nnx.Linear`` and ``nnx.LinearGeneral``; static.

    Attributes:
        axis: of the input, summed; may be negative.
        batch: number of leading axes that input and kernel share.
        outputs: number of axes that the kernel adds.
    """

    axis: tuple[int, ...] = (-1,)
    batch: int = 0
    outputs: int = 1

    def subscripts(self, ndim: int) -> Subscripts:
        """Letters for an input of ``ndim`` axes."""
        x = ascii_letters[:ndim]
        # Flax pairs the axes with the kernel's in the input's order, not as given.
        inputs = [x[i] for i in sorted(a % ndim for a in self.axis)]
        outputs = ascii_letters[ndim : ndim + self.outputs]
        w = "".join((x[: self.batch], *inputs, outputs))
        return Subscripts(x, w, "".join(c for c in x if c not in inputs) + outputs)

    def matrix(self) -> Matrix:
        """How the kernel is a matrix."""
        n = len(self.axis)
        outputs = tuple(range(n, n + self.outputs))
        return Matrix(self.batch, tuple(range(n)), outputs)


class Equation(NamedTuple):
    """The contraction of ``nnx.Einsum``; static. An ellipsis stands for any axes."""

    x: str
    w: str
    y: str

    def subscripts(self, ndim: int) -> Subscripts:
        """Letters for an input of ``ndim`` axes."""
        named = len(self.x.replace(_ELLIPSIS, ""))
        if ndim != named and (ndim < named or _ELLIPSIS not in self.x):
            raise ValueError(
                f"`x` must have the axes {self.x!r} of the layer's einsum, got an "
                f"input of {ndim} axes."
            )
        unused = [c for c in ascii_letters if c not in self.x + self.w + self.y]
        more = "".join(unused[: ndim - named])
        x, y = (letters.replace(_ELLIPSIS, more) for letters in (self.x, self.y))
        return Subscripts(x, self.w, y)

    def matrix(self) -> Matrix:
        """How the kernel is a matrix."""
        return Subscripts(self.x, self.w, self.y).matrix()

    def fault(self) -> str | None:
        """Why this is no matrix product that a sketch knows, or None."""
        x, y = (s.replace(_ELLIPSIS, "") for s in (self.x, self.y))
        at = Subscripts(x, self.w, y)
        if any(len(set(s)) < len(s) for s in at):
            return "an axis occurs twice in one operand"
        if _ELLIPSIS in self.w or (_ELLIPSIS in self.x) != (_ELLIPSIS in self.y):
            return "`...` must be in the input and the output, and there only"
        if not set(self.w) <= set(x + y) or not set(x) <= set(self.w + y):
            return "an axis of one operand is summed by itself"
        if not at.inputs or not at.outputs:
            return "the kernel has no axis that is summed, or none that it adds"
        if not self.w.startswith(at.batch):
            return (
                "the axes that input, kernel and output share must be the kernel's "
                "first"
            )
        return None


Contraction = Axes | Equation


def contraction_of(layer: Linear) -> Contraction:
    """What a layer contracts."""
    if isinstance(layer, nnx.Linear):
        return Axes()
    if isinstance(layer, nnx.LinearGeneral):
        return Axes(
            tuple(layer.axis), len(layer.batch_axis), len(tuple(layer.out_features))
        )
    operands, y = layer.einsum_str.replace(" ", "").split("->")
    x, w = operands.split(",")
    return Equation(x, w, y)


def declared_shape(layer: Linear) -> tuple[int, ...]:
    """The shape of a layer's kernel where it is not stacked."""
    if isinstance(layer, nnx.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nnx.LinearGeneral):
        batch = tuple(layer.batch_axis.values())
        return (*batch, *layer.in_features, *layer.out_features)
    return tuple(layer.kernel_shape)

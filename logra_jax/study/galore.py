"""`optax.contrib.galore` on stacked kernels, as a baseline: gradients are whole.

GaLore projects a matrix's gradient to a low-rank space that an SVD of a former gradient
spans, and keeps Adam's moments there. Reference: GaLore, arXiv:2403.03507.
"""

from typing import Any, NamedTuple, cast

import jax
import optax
from jaxtyping import Array, PyTree

# Updates between two SVDs, optax's default.
GAP = 200


class StackedGaLoreState(NamedTuple):
    """One state of ``optax.contrib.galore`` for each stack, its arrays stacked."""

    stacks: tuple[optax.OptState, ...]


def stacked_galore(
    learning_rate: float, rank: int, *, first_count: int = 0
) -> optax.GradientTransformation:
    """GaLore for kernels (..., k, d), each matrix of a stack on its own.

    The optimizer itself takes matrices only. Here it is mapped over the leading axes;
    its counts are not, so that the SVD stays in a branch that most updates skip.

    Args:
        learning_rate: of the updates, in the space of weights.
        rank: of the projection, cut to what a matrix has room for.
        first_count: updates that are taken for done already; a multiple of ``GAP``
            (0 is one) makes the first update compute SVDs.
    """
    inner = optax.contrib.galore(learning_rate, rank=rank, update_proj_gap=GAP)

    def axes(matrix: Any) -> PyTree:
        state = jax.eval_shape(inner.init, matrix)
        return jax.tree.map(lambda x: 0 if x.ndim else None, state)

    def one(stack: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(stack.shape[-2:], stack.dtype)

    def flat(stack: Array) -> Array:
        return stack.reshape(-1, *stack.shape[-2:])

    def init(params: PyTree) -> StackedGaLoreState:
        def init_stack(stack: Array) -> optax.OptState:
            state = jax.vmap(inner.init, out_axes=axes(one(stack)))(flat(stack))
            return jax.tree.map(lambda x: x if x.ndim else x + first_count, state)

        return StackedGaLoreState(tuple(map(init_stack, jax.tree.leaves(params))))

    def update(updates: PyTree, state: Any, params: PyTree | None = None):
        def update_stack(stack: Array, state: optax.OptState, weights: Array):
            spec = axes(one(stack))
            run = jax.vmap(inner.update, in_axes=(0, spec, 0), out_axes=(0, spec))
            changes, state = run(flat(stack), state, flat(weights))
            return cast(Array, changes).reshape(stack.shape), state

        leaves, tree = jax.tree.flatten(updates)
        if params is None:
            raise ValueError(
                "`params` must be given to `update`, got None; GaLore's weight decay "
                "is a function of them."
            )
        weights = jax.tree.leaves(params)
        each = list(map(update_stack, leaves, state.stacks, weights))
        changes = tree.unflatten([c for c, _ in each])
        return changes, StackedGaLoreState(tuple(s for _, s in each))

    return optax.GradientTransformation(init, update)

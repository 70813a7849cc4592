"""GaLore on stacked kernels, as a baseline: gradients are whole, moments are not.

``optax.contrib.galore`` projects a matrix's gradient ``G`` (k, d) to the space of the
leading ``r`` singular vectors ``P`` of an earlier one, runs Adam there, and lifts:

    R = Pᵀ G          for k >= d, where P is (k, r); otherwise R = G P with P (d, r)
    update = -eta (P adam(R) + decay W)

``P`` is drawn anew from an SVD of the gradient at every ``gap``-th update, the first
among them. Where that gradient is zero, as of a batch of equal rewards, its singular
vectors are axes that mean nothing, and serve until the next SVD. The SVDs of a stack
are computed at once, so that an update which has them holds two more arrays as large as
its gradients. Reference: GaLore, arXiv:2403.03507.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from logra_jax.algorithm.layers import rank_of

# Updates between two SVDs, optax's default.
GAP = 200
# What a layer calls its kernel, which is no part of the layer's name.
_KERNELS = ("kernel", "wide")


class StackedGaLoreState(NamedTuple):
    """State of :func:`stacked_galore`."""

    # One state of optax.contrib.galore for each stack. Arrays have the stack's axis in
    # front, float32 as the gradients: P (layers, k or d, r), moments (layers, r, d) or
    # (layers, k, r); counts have no such axis.
    stacks: tuple[optax.OptState, ...]


def stacked_galore(
    learning_rate: float,
    rank: int | Mapping[str, int],
    *,
    gap: int = GAP,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    first_count: int = 0,
) -> optax.GradientTransformation:
    """GaLore for kernels (..., k, d), each matrix of a stack on its own.

    The optimizer itself takes matrices only. Here it is mapped over the leading axes;
    its counts are not, so that the SVD stays in a branch that most updates skip.

    Args:
        learning_rate: of the updates, in the space of weights.
        rank: of the projection, or a mapping from regular expressions to ranks: the
            first that is found in a layer's dotted path wins.
        gap: updates from one SVD to the next.
        b1: decay of Adam's first moment.
        b2: decay of Adam's second moment.
        eps: added to the root.
        weight_decay: share of the weights that an update takes off them, times
            ``learning_rate``.
        first_count: updates that are taken for done already; a multiple of ``gap``
            (0 is one) makes the first update compute SVDs.

    Returns:
        A transformation of pytrees of kernels, whose ``init`` takes their shapes too,
        and raises ValueError for a rank outside ``[1, min(k, d)]``.

    Example:
        >>> stacks = {"up": {"kernel": jnp.ones((2, 6, 4))}}  # of two layers
        >>> tx = stacked_galore(0.1, rank=1)
        >>> updates, state = tx.update(stacks, tx.init(stacks), stacks)
        >>> updates["up"]["kernel"].shape
        (2, 6, 4)
        >>> state.stacks[0][0].projector.shape
        (2, 6, 1)
    """
    adam = optax.scale_by_adam(b1, b2, eps)

    def inner_of(path: tuple[Any, ...], stack: Any) -> optax.GradientTransformation:
        limit, name = min(stack.shape[-2:]), _layer_of(path)
        return optax.contrib.galore(
            learning_rate,
            rank_of(name, rank, limit, "narrow the layers that are trained"),
            update_proj_gap=gap,
            base_optimizer=adam,
            weight_decay=weight_decay,
        )

    def axes(inner: optax.GradientTransformation, stack: Array) -> PyTree:
        one = jax.ShapeDtypeStruct(stack.shape[-2:], stack.dtype)
        state = jax.eval_shape(inner.init, one)
        return jax.tree.map(lambda x: 0 if x.ndim else None, state)

    def flat(stack: Array) -> Array:
        return stack.reshape(-1, *stack.shape[-2:])

    def init_stack(path: tuple[Any, ...], stack: Any) -> optax.OptState:
        state = inner_of(path, stack).init(jnp.zeros(stack.shape[-2:], stack.dtype))
        count = math.prod(stack.shape[:-2])
        return jax.tree.map(
            lambda x: (
                jnp.broadcast_to(x, (count, *x.shape)) if x.ndim else x + first_count
            ),
            state,
        )

    def init(params: PyTree) -> StackedGaLoreState:
        leaves = jax.tree.leaves_with_path(params)
        return StackedGaLoreState(tuple(init_stack(*leaf) for leaf in leaves))

    def update_stack(
        path: tuple[Any, ...], stack: Array, state: optax.OptState, weights: Array
    ) -> tuple[Array, optax.OptState]:
        inner = inner_of(path, stack)
        spec = axes(inner, stack)
        run = jax.vmap(inner.update, in_axes=(0, spec, 0), out_axes=(0, spec))
        changes, state = run(flat(stack), state, flat(weights))
        return cast(Array, changes).reshape(stack.shape), state

    def update(updates: PyTree, state: Any, params: PyTree | None = None):
        if params is None:
            raise ValueError(
                "`params` must be given to `update`, got None; GaLore's weight decay "
                "is a function of them."
            )
        leaves, tree = jax.tree.flatten_with_path(updates)
        each = zip(leaves, state.stacks, jax.tree.leaves(params), strict=True)
        done = [update_stack(*leaf, kept, weights) for leaf, kept, weights in each]
        changes = tree.unflatten([change for change, _ in done])
        return changes, StackedGaLoreState(tuple(kept for _, kept in done))

    return optax.GradientTransformation(init, update)


def _layer_of(path: tuple[Any, ...]) -> str:
    """The dotted path of the layer whose kernel lies at ``path``."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]  # of an nnx.Variable
    words = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return ".".join(words[:-1] if words and words[-1] in _KERNELS else words)

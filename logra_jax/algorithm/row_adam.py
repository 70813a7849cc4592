"""RowAdam: an optax transform that scales each row of a sketch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32, PyTree


class RowAdamState(NamedTuple):
    """State of :func:`scale_by_row_adam`."""

    count: Int32[Array, ""]  # pyright: ignore  updates seen
    row_square: PyTree  # float32 (..., d): moving mean square of each row


def scale_by_row_adam(
    b2: float | Array = 0.95, eps: float | Array = 1e-12
) -> optax.GradientTransformation:
    r"""Scale each row of a sketch by a moving average of its squared magnitude.

    For a sketch :math:`S` (..., d, r), row :math:`i`, update :math:`t`:

    .. math::
        v_i \leftarrow b_2 v_i + (1 - b_2) \tfrac1r \textstyle\sum_j S_{ij}^2, \qquad
        U_{ij} = S_{ij} \big/ \big(\sqrt{v_i / (1 - b_2^t)} + \epsilon\big)

    One number per row: no per-parameter moment, and no first moment, so that a basis
    drawn anew at each step needs nothing carried over.

    Args:
        b2: decay of the squared row magnitude, in ``[0, 1)``.
        eps: added to the root; tiny, because squared rows of a sketch are.
            With 0 a row that was always zero stays zero.

    Returns:
        A transform whose updates keep the sketches' shapes and dtypes.

    Example:
        >>> import jax.numpy as jnp, logra_jax as logra
        >>> tx = logra.scale_by_row_adam()
        >>> sketch = {"w": jnp.array([[3.0, 4.0], [0.0, 0.0]])}
        >>> updates, state = tx.update(sketch, tx.init(sketch))
        >>> bool(jnp.allclose((updates["w"] ** 2).mean(-1), jnp.array([1.0, 0.0])))
        True

    Reference: LoGRA, arXiv:2610.06647 (RowAdam).
    """
    # Arrays are values of the running program (optax.inject_hyperparams): unchecked.
    if not isinstance(b2, Array) and not 0.0 <= b2 < 1.0:
        raise ValueError(f"`b2` must be in [0, 1), got {b2}.")
    if not isinstance(eps, Array) and not eps >= 0.0:
        raise ValueError(f"`eps` must not be negative, got {eps}.")

    def init(params: PyTree) -> RowAdamState:
        rows = jax.tree.map(lambda p: jnp.zeros(p.shape[:-1], jnp.float32), params)
        return RowAdamState(jnp.zeros((), jnp.int32), rows)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None):
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        row_square = jax.tree.map(
            lambda s, v: b2 * v + (1 - b2) * jnp.mean(jnp.square(_float32(s)), -1),
            updates,
            state.row_square,
        )
        correction = 1 - jnp.float32(b2) ** count

        def scale(s: Array, v: Array) -> Array:
            root = jnp.sqrt(v / correction) + eps
            return (_float32(s) / jnp.where(root > 0, root, 1.0)[..., None]).astype(
                s.dtype
            )

        scaled = jax.tree.map(scale, updates, row_square)
        return scaled, RowAdamState(count, row_square)

    return optax.GradientTransformation(init, update)


def _float32(x: Array) -> Array:
    return x.astype(jnp.float32)

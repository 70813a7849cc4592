"""The method over dense gradients: project, let optax work on sketches, lift.

For models whose layers cannot be changed, and the oracle of those that can: apart from
where ``S`` is formed, :func:`low_rank` takes the steps of :func:`logra_jax.sketch`.
"""

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, PyTree, UInt32

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.layers import dotted_name, rank_of

Names = Callable[[str, tuple[int, ...]], str]

# What Flax calls its vectors. Layers stacked for a scan give them a second axis.
_VECTORS = ("bias", "scale")

_FIXED = optax.MaskedNode()  # in a tree of sketches, where a leaf stays fixed


class LowRankState(NamedTuple):
    """State of :func:`low_rank`; no leaf has the shape of a gradient."""

    count: Int32[Array, ""]  # pyright: ignore  updates seen, the step of each address
    inner: PyTree  # state of the inner transform, over float32 sketches (..., d, r)


def low_rank(
    inner: optax.GradientTransformation,
    rank: int | Mapping[str, int],
    *,
    seed: int = 0,
    refresh: bool = True,
    kind: str = "rademacher",
    names: Names | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` on sketches of dense gradients, and lift what it returns.

    For each matrix of a gradient :math:`g` (..., k, d), in JAX's (in, out) order, with
    its own basis :math:`A` (r, k):

    .. math::
        S = (A g)^T, \qquad U = \mathrm{inner}(S), \qquad
        \text{update} = (U A)^T

    in float32, one matrix of a stack at a time; the update has the gradient's dtype.

    The dense gradient does exist here: gradients take the memory of dense training, and
    only the optimizer's state is as small as the sketches. Where layers can be
    replaced, :func:`logra_jax.sketch` takes the same steps without it.

    Trained are the leaves of two or more axes, embeddings included. Vectors stay fixed,
    their update is zero: leaves of fewer axes, and those called ``bias`` or ``scale``,
    which a stack of layers gives an axis more. What is to be trained otherwise, or not
    at all, is kept out by ``optax.multi_transform``, as in the example.

    ``inner`` sees sketches only. The ``params`` it gets are the point that they are
    gradients at, a probe of zeros: weight decay in ``inner`` does nothing, so chain
    ``optax.add_decayed_weights`` after this transform. Extra arguments are handed on:
    a ``predicted_kl`` function gets ``U`` inside, and the dense update when
    :func:`logra_jax.scale_by_predicted_kl` is chained after instead, as suits a model
    without a perturbed twin. Keep weights in float32: ``optax.apply_updates`` rounds
    bfloat16 to nearest, which loses most of a small update.

    Args:
        inner: a transform of float32 sketches (..., d, r), such as a chain that ends
            in ``optax.scale_by_learning_rate``. Entrywise moments need
            ``refresh=False``, see :func:`check_moments`.
        rank: ``r``, or a mapping from regular expressions to ranks: the first that is
            found in a leaf's dotted path wins; a matrix without any is an error.
        seed: of the bases, in ``[0, 2**32)``.
        refresh: draw new bases after each update.
        kind: of the bases, ``"rademacher"`` or ``"gaussian"``.
        names: ``(dotted path, layer index) -> name`` of a matrix, from which its basis
            is drawn, such as a decoder's ``tensor_name``. The path lacks a trailing
            ``kernel``. By default the path and the index, joined by dots: the names
            that :func:`logra_jax.sketch` gives.

    Returns:
        A transform whose updates have the gradients' shapes and dtypes. Its ``init``
        raises ValueError for a rank outside ``[1, min(k, d)]``.

    Example:
        >>> import jax, jax.numpy as jnp, logra_jax as logra, optax
        >>> on_sketches = optax.chain(logra.scale_by_row_adam(), optax.scale(-1e-3))
        >>> tx = optax.multi_transform(
        ...     {
        ...         "projections": logra.low_rank(on_sketches, rank=2),
        ...         "rest": optax.adam(1e-3),
        ...     },
        ...     lambda params: jax.tree.map(
        ...         lambda p: "projections" if p.ndim > 1 else "rest", params
        ...     ),
        ... )
        >>> params = {"up": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}}
        >>> updates, state = tx.update(params, tx.init(params))
        >>> int(jnp.linalg.matrix_rank(updates["up"]["kernel"]))
        1

    Reference: LoGRA, arXiv:2610.06647.
    """
    basis = Basis(seed, refresh, kind)
    _check_ranks(rank)
    name_of = names or dotted_name
    transform = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> LowRankState:
        leaves, tree = jax.tree.flatten_with_path(params)
        sketches = tree.unflatten(
            [
                jnp.zeros(stack.sketch_shape, jnp.float32) if stack else _FIXED
                for stack in (_stack_of(*leaf, rank, name_of, basis) for leaf in leaves)
            ]
        )
        state = transform.init(sketches)
        check_moments(state, sketches, basis)
        return LowRankState(jnp.zeros((), jnp.int32), state)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args
    ):
        del params  # of the dense model: not what the sketches are gradients of
        leaves, tree = jax.tree.flatten_with_path(updates)
        stacks = [_stack_of(*leaf, rank, name_of, basis) for leaf in leaves]
        gradients = [leaf for _, leaf in leaves]
        sketches = tree.unflatten(
            [
                stack.project(gradient, state.count) if stack else _FIXED
                for stack, gradient in zip(stacks, gradients, strict=True)
            ]
        )
        probes = jax.tree.map(jnp.zeros_like, sketches)
        proposal, inner_state = transform.update(
            sketches, state.inner, probes, **extra_args
        )
        lifted = tree.unflatten(
            [
                stack.lift(u, state.count, gradient.dtype)
                if stack
                else jnp.zeros_like(gradient)
                for stack, gradient, u in zip(
                    stacks, gradients, tree.flatten_up_to(proposal), strict=True
                )
            ]
        )
        count = jnp.asarray(optax.safe_increment(state.count))
        return lifted, LowRankState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def check_moments(state: PyTree, probes: PyTree, basis: Basis) -> None:
    """Refuse an optimizer state that would mix the entries of different bases.

    Entry ``(i, j)`` of a sketch is measured against row ``j`` of ``A``. After ``A`` is
    drawn anew, an average over entries of earlier sketches (Adam, Lion, momentum, any
    optimizer with moments of each entry) means nothing. A number per row, which
    ``scale_by_row_adam`` keeps, does not depend on ``A``.

    The accumulator of ``optax.MultiSteps`` is refused too, because merging its zero
    updates between two microbatches moves the basis on. It is sound around a chain on
    sketches if weights are merged only where it emits an update; then check
    ``state.inner_opt_state`` in place of ``state``::

        merged = lambda: logra.merge(weights, updates, basis)
        weights = jax.lax.cond(tx.has_updated(state), merged, lambda: weights)

    A moment is known by the path and shape of its probe, which ``optax.flatten`` hides.

    Args:
        state: of an optax transform, as ``init(probes)`` returns it.
        probes: the tree of sketch-shaped arrays that the transform works on.
        basis: the rule given to :func:`logra_jax.sketch`, whose default refreshes.

    Raises:
        ValueError: ``basis`` is drawn anew at each update, and ``state`` holds an array
            with the path and shape of a probe.

    Example:
        >>> import jax.numpy as jnp, logra_jax as logra, optax
        >>> probes = {"w": jnp.zeros((4, 2))}
        >>> adam = optax.adam(1e-3).init(probes)
        >>> logra.check_moments(adam, probes, logra.Basis(refresh=False))
        >>> logra.check_moments(optax.sgd(1e-3).init(probes), probes, logra.Basis())
        >>> logra.check_moments(adam, probes, logra.Basis())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: `state` must hold no moments of single sketch entries while ...
    """
    if not basis.refresh:
        return
    leaves = jax.tree.leaves_with_path(probes)
    shapes = {path: p.shape for path, p in leaves if p.ndim >= 2}
    # By the end of the path, since optax.masked and multi_transform prune the tree.
    lengths = {len(path) for path in shapes}
    for path, leaf in jax.tree.leaves_with_path(state):
        shape = getattr(leaf, "shape", ())
        if any(shapes.get(path[len(path) - n :]) == shape for n in lengths):
            raise ValueError(
                "`state` must hold no moments of single sketch entries while each "
                f"update draws a new basis, got {_dotted(path)!r} of shape {shape}; "
                "keep one basis (`refresh=False`) or use an optimizer without them, "
                "such as `logra.scale_by_row_adam`."
            )


class _Stack(NamedTuple):
    """Matrices (n, k, d) that one leaf (..., k, d) holds, each with its basis."""

    shape: tuple[int, ...]  # of the leaf
    rank: int
    basis: Basis
    words: np.ndarray  # (n, 3) uint32: addresses at step 0

    @property
    def sketch_shape(self) -> tuple[int, ...]:
        *stack, _, d = self.shape
        return (*stack, d, self.rank)

    def project(
        self, gradient: Float[Array, "..."], step: Int32[Array, ""]
    ) -> Float32[Array, "..."]:
        """``(A g)ᵀ`` of each matrix, in the leaf's stack."""
        k, d = self.shape[-2:]

        def one(inputs: tuple[Array, Array]) -> Float32[Array, "d r"]:
            g, address = inputs
            A = self.basis.matrix(address, self.rank, k)
            g = g.astype(jnp.float32)
            return jnp.einsum("kd,rk->dr", g, A, precision=lax.Precision.HIGHEST)

        sketches = lax.map(one, (gradient.reshape(-1, k, d), self._addresses(step)))
        return sketches.reshape(self.sketch_shape)

    def lift(
        self,
        update: Float[Array, "..."],
        step: Int32[Array, ""],
        dtype: jnp.dtype,
    ) -> Float[Array, "..."]:
        """``(U A)ᵀ`` of each matrix, in the leaf's shape."""
        k, d = self.shape[-2:]

        def one(inputs: tuple[Array, Array]) -> Float[Array, "k d"]:
            u, address = inputs
            A = self.basis.matrix(address, self.rank, k)
            u = u.astype(jnp.float32)
            lifted = jnp.einsum("dr,rk->kd", u, A, precision=lax.Precision.HIGHEST)
            return lifted.astype(dtype)

        update = update.reshape(-1, d, self.rank)
        return lax.map(one, (update, self._addresses(step))).reshape(self.shape)

    def _addresses(self, step: Int32[Array, ""]) -> UInt32[Array, "n 3"]:
        return jnp.asarray(self.words).at[:, 1].set(step.astype(jnp.uint32))


def _stack_of(
    path: tuple[Any, ...],
    leaf: Array | jax.ShapeDtypeStruct,
    rank: int | Mapping[str, int],
    name_of: Names,
    basis: Basis,
) -> _Stack | None:
    """The matrices of a leaf, or None if it is one that stays fixed."""
    # The value of an nnx.Variable. Of keys only kernel: "value" may be a projection.
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    if leaf.ndim < 2 or _dotted(path[-1:]) in _VECTORS:
        return None
    if _dotted(path[-1:]) == "kernel":
        path = path[:-1]
    *stack, k, d = leaf.shape
    dotted = _dotted(path)
    words = [basis.address(name_of(dotted, index)) for index in np.ndindex(*stack)]
    return _Stack(
        leaf.shape,
        rank_of(dotted, rank, min(k, d), "keep it out with optax.multi_transform"),
        basis,
        np.array(words, np.uint32).reshape(-1, 3),
    )


def _check_ranks(rank: Any) -> None:
    for r in rank.values() if isinstance(rank, Mapping) else [rank]:
        if not isinstance(r, Integral) or r < 1:
            raise ValueError(
                f"`rank` must be a positive int or a mapping to such, got {rank!r}; it "
                "shapes the state, so optax.inject_hyperparams needs it in "
                "`static_args`."
            )


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")

"""How a run's state and batches lie on a device mesh, and running code on its parts."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from logra_jax.algorithm.parallel import AXES, ROWS, parts
from logra_jax.models.sharding import (
    put_everywhere,
    specs_of,
    split_at,
    summed_over,
)
from logra_jax.training.methods import Method, Splits
from logra_jax.training.state import Batch, TrainState, initial_state

Item = TypeVar("Item")
REPLICATED = PartitionSpec()
BY_ROWS = PartitionSpec(ROWS)


class Cut(NamedTuple):
    """How one trained array lies on the mesh.

    Attributes:
        used: by the layers; those of LoRA and AdamW hold all that they compute with,
            sketched ones gather it where they run.
        kept: in between, as gradient, update and optimizer state: cut over ``fsdp`` too
            where that goes evenly.
        partial: mesh axes over which a device's gradient is a summand.
    """

    used: PartitionSpec
    kept: PartitionSpec
    partial: tuple[str, ...]

    def reduce(self, gradient: Array) -> Array:
        """The sum over devices, each with the part that it keeps."""
        partial = [name for name in self.partial if parts((name,)) > 1]
        for axis, names in enumerate(self.kept):
            used = self.used[axis] if axis < len(self.used) else None
            for name in _names(names):
                if name in partial and name not in _names(used):
                    gradient = lax.psum_scatter(
                        gradient, name, scatter_dimension=axis, tiled=True
                    )
                    partial.remove(name)
        return lax.psum(gradient, tuple(partial)) if partial else gradient


class Layout(NamedTuple):
    """Where everything lies.

    Attributes:
        mesh: with axes ``data``, ``fsdp`` and ``tensor``.
        weights: a PartitionSpec for each of the weights.
        trained: a :class:`Cut` for each trained array.
        splits: of each kernel that updates land on, by dotted path of its layer.
        landing: a PartitionSpec for each update as ``Method.land`` takes it.
    """

    mesh: Mesh
    weights: nnx.State
    trained: nnx.State
    splits: Splits
    landing: nnx.State

    @property
    def used(self) -> nnx.State:
        """Specs of the trained arrays inside layers."""
        return jax.tree.map(lambda cut: cut.used, self.trained, is_leaf=_is_cut)

    @property
    def kept(self) -> nnx.State:
        """Specs of gradients and updates between layers."""
        return jax.tree.map(lambda cut: cut.kept, self.trained, is_leaf=_is_cut)

    @property
    def row_parts(self) -> int:
        """Number of parts that the batch is cut into."""
        return self.mesh.shape[ROWS[0]] * self.mesh.shape[ROWS[1]]

    def reduce(self, gradients: nnx.State) -> nnx.State:
        """Inside :func:`on_parts`: gradients summed over devices."""
        return jax.tree.map(
            lambda cut, g: cut.reduce(g), self.trained, gradients, is_leaf=_is_cut
        )

    def shardings(self, specs: PyTree) -> PyTree:
        """NamedShardings of a tree of PartitionSpecs."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec
        )

    def state_shardings(
        self,
        optimizer: optax.GradientTransformation,
        controller: optax.GradientTransformation,
        trained: nnx.State,
    ) -> TrainState:
        """Of a whole state; ``trained`` may be shapes."""
        state = jax.eval_shape(
            lambda t: initial_state(nnx.State({}), t, optimizer, controller), trained
        )
        rest = state._replace(weights=None, optimizer=None)
        specs = jax.tree.map(lambda _: REPLICATED, rest)
        optimizer_specs = self._optimizer_specs(state.optimizer)
        return self.shardings(
            specs._replace(weights=self.weights, optimizer=optimizer_specs)
        )

    def _optimizer_specs(self, state: PyTree) -> PyTree:
        """Arrays that lie under a trained array's path are cut as it is, where cut."""
        cuts = {
            tuple(map(str, path)): cut.kept
            for path, cut in jax.tree_util.tree_leaves_with_path(
                self.trained, is_leaf=_is_cut
            )
        }

        def spec(path: tuple, leaf: Any) -> PartitionSpec:
            words = tuple(map(str, path))
            for i in range(len(words)):
                kept = cuts.get(words[i:])
                if kept is not None:
                    return _fitting(kept, leaf.shape, self.mesh)
            return REPLICATED

        return jax.tree_util.tree_map_with_path(spec, state)

    def put_weights(self, weights: nnx.State) -> nnx.State:
        """Weights that were read onto the mesh, and others that every process holds."""

        def put(value: Array, sharding: NamedSharding) -> Array:
            is_there = value.sharding == sharding
            return value if is_there else put_everywhere(value, sharding)

        return jax.tree.map(put, weights, self.shardings(self.weights))

    def put_batch(self, batch: Batch) -> Batch:
        """A batch that every process holds on the mesh, its rows cut over devices."""
        return jax.tree.map(put_everywhere, batch, self.shardings(batch_specs(batch)))


def build_layout(mesh: Mesh, method: Method, weights: nnx.State) -> Layout:
    """Where a placed decoder's weights, and what is trained of it, lie on ``mesh``.

    Args:
        mesh: with axes ``data``, ``fsdp`` and ``tensor``.
        method: of a placed decoder, see :func:`logra_jax.models.sharding.place`.
        weights: or their shapes.
    """
    specs = dict(nnx.to_flat_state(specs_of(method.trained)))
    cuts, splits, landing = [], {}, []
    for path, variable in nnx.to_flat_state(method.trained):
        spec = specs[path].get_value()
        kept = _cut_further(spec, str(path[-1]), variable.shape, mesh)
        used, partial = spec, summed_over(path)
        if path[-1] == "probe" and kept != spec:
            used, partial = kept, tuple(name for name in partial if name != "fsdp")
        cuts.append((path, variable.replace(Cut(used, kept, partial))))
        layer = ".".join(map(str, path[:-1]))
        splits[layer] = split_at(layer)
        # A merge takes whole factors, of which each device lifts its part.
        lands = REPLICATED if path[-1] == "probe" else spec
        landing.append((path, variable.replace(lands)))
    return Layout(
        mesh,
        specs_of(weights),
        nnx.from_flat_state(cuts),
        splits,
        nnx.from_flat_state(landing),
    )


def _cut_further(
    spec: PartitionSpec, name: str, shape: tuple[int, ...], mesh: Mesh
) -> PartitionSpec:
    """``spec`` cut over ``fsdp`` too, along features, where that goes evenly."""
    axis = {"probe": -2, "lora_b": -2, "lora_a": -1}.get(name)
    if axis is None:
        return spec
    entries: list[Any] = list((*spec, *(None for _ in shape))[: len(shape)])
    names = (*_names(entries[axis]), "fsdp")
    if shape[axis] % _count(names, mesh) == 0:
        entries[axis] = names
    return PartitionSpec(*entries)


def batch_specs(batch: Batch) -> Batch:
    """PartitionSpecs of a batch: rows are cut, the common prefix is not."""
    rows = jax.tree.map(lambda _: BY_ROWS, batch)
    packed = rows.packed and rows.packed._replace(count=REPLICATED)
    return rows._replace(prefix=REPLICATED, packed=packed)


def first_state(
    weights: nnx.State,
    trained: nnx.State,
    optimizer: optax.GradientTransformation,
    controller: optax.GradientTransformation,
    layout: Layout | None = None,
) -> TrainState:
    """:func:`initial_state`, on the mesh from the start; ``weights`` are taken over."""

    def init(weights: nnx.State) -> TrainState:
        return initial_state(weights, trained, optimizer, controller)

    if layout is None:
        return init(weights)
    where = layout.state_shardings(optimizer, controller, trained)
    return jax.jit(init, donate_argnums=0, out_shardings=where)(weights)


def gradient_shapes(trained: nnx.State, layout: Layout | None) -> nnx.State:
    """Shapes of the gradients of what is trained, with their places on the mesh."""
    if layout is None:
        return trained
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        trained,
        layout.shardings(layout.kept),
    )


def put_whole(value: Any, layout: Layout | None) -> Array:
    """An array that every process holds on every device of the mesh."""
    if layout is None:
        return jax.device_put(value)
    return put_everywhere(value, NamedSharding(layout.mesh, REPLICATED))


def on_parts(
    layout: Layout | None, f: Callable, in_specs: tuple, out_specs: Any
) -> Callable:
    """``f`` on each device's parts by ``jax.shard_map``; without a mesh, ``f``."""
    if layout is None:
        return f
    return jax.shard_map(
        f,
        mesh=layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(AXES),
        # Gradients of parts are summed by hand: sketches over fsdp layer by layer, so
        # that no device holds all rows of all layers, and the rest once a step.
        check_vma=False,
    )


def _fitting(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """``spec`` where it cuts an array of this shape evenly, else without that cut."""
    names = (*spec, *(None for _ in shape))[: len(shape)]
    return PartitionSpec(
        *(n if shape[i] % _count(n, mesh) == 0 else None for i, n in enumerate(names))
    )


def _count(names: Any, mesh: Mesh) -> int:
    count = 1
    for name in _names(names):
        count *= mesh.shape[name]
    return count


def _names(entry: Any) -> tuple[str, ...]:
    """Mesh axes in one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _is_cut(x: Any) -> bool:
    return isinstance(x, Cut)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)

"""A decoder on a device mesh: which axis cuts what, and layers that know of it.

Megatron's division over ``tensor``: query, key, value, gate and up projections by
outputs (heads, features), output and down projections by inputs, the vocabulary of
embedding and head. ``fsdp`` cuts the other axis of each kernel, and the vocabulary.
The projections of a Gated DeltaNet are cut over both and run whole: queries, keys and
values are one matrix, which heads do not divide. Norms and biases are small and lie
everywhere.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from logra_jax.algorithm.parallel import AXES, ROWS, Split, matmul, whole
from logra_jax.algorithm.sketch import TrainedLinear, replace_layers
from logra_jax.models.decoder import Decoder
from logra_jax.models.layers import DecoderConfig

_VOCABULARY = ("tensor", "fsdp")
_SPLITS = {
    r"(q|k|v|gate|up)_proj$": Split(("fsdp",), ("tensor",), "outputs"),
    r"(o|down)_proj$": Split(("tensor",), ("fsdp",), "inputs"),
    r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$": Split(("fsdp",), ("tensor",)),
    r"lm_head$": Split((), _VOCABULARY),
}


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _frozen(x: Array, w: Array, split: Split | None) -> Array:
    return matmul(x, w, split)


def _frozen_fwd(x, w, split):
    return _frozen(x, w, split), w


def _frozen_bwd(split, w, g):
    # Gathered once more: kept, the kernels of all layers would add up to the model.
    return g @ whole(w, split).astype(g.dtype).T, jnp.zeros_like(w)


_frozen.defvjp(_frozen_fwd, _frozen_bwd)


class FrozenLinear(TrainedLinear):
    """A linear layer of a mesh that no update lands on."""

    def multiply(self, x: Array, kernel: Array) -> Array:
        """``x @ kernel``."""
        multiply = matmul if self.plain else _frozen
        return multiply(x, jax.lax.stop_gradient(kernel), self.split)


def place(model: Decoder) -> Decoder:
    """A copy, the same buffers, whose layers compute on a device's part of the weights.

    For use inside ``jax.shard_map`` only. What was sketched, or is trained otherwise,
    stays so; other linear layers become :class:`FrozenLinear`.

    Args:
        model: the decoder; its arrays may be shapes only.
    """
    model = nnx.clone(model)
    frozen: dict[int, FrozenLinear] = {}
    for path, module in nnx.iter_modules(model):
        # `Decoder.head` gathers the head by itself, once for all chunks of tokens.
        if type(module) is nnx.Linear and path != ("lm_head",):
            frozen[id(module)] = FrozenLinear(module)
    replace_layers(model, frozen)
    for path, module in nnx.iter_modules(model):
        if isinstance(module, TrainedLinear):
            module.split = split_at(".".join(map(str, path)))
    model.vocab_axes = _VOCABULARY
    return model


def split_at(path: str) -> Split:
    """How the kernel of the layer at ``path`` is cut."""
    return next(
        (split for pattern, split in _SPLITS.items() if re.search(pattern, path)),
        Split(),
    )


def specs_of(state: nnx.State) -> nnx.State:
    """A PartitionSpec for each variable of a decoder, placed or not, trained or not.

    Leading axes of stacked layers are whole.
    """
    flat = [
        (path, variable.replace(_spec(path, variable)))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(flat)


def _spec(path: tuple, variable: nnx.Variable) -> PartitionSpec:
    name, split = path[-1], split_at(".".join(map(str, path[:-1])))
    by_output = split.outputs if split.parallel == "outputs" else ()
    by_input = split.inputs if split.parallel == "inputs" else ()
    parts = {
        "kernel": (split.inputs, split.outputs),
        "wide": (split.inputs, split.outputs),
        "bias": (by_output,),
        "probe": (by_output, ()),
        "lora_a": ((), by_input),
        "lora_b": (by_output, ()),
        "embedding": (_VOCABULARY, ()),
    }.get(name, ())
    if not any(parts):
        return PartitionSpec()
    leading = (None,) * (variable.ndim - len(parts))
    return PartitionSpec(*leading, *(axes or None for axes in parts))


def summed_over(path: tuple) -> tuple[str, ...]:
    """Mesh axes over which a device's gradient of a trained variable is a summand."""
    name, split = path[-1], split_at(".".join(map(str, path[:-1])))
    if name == "wide":  # summed over what cuts the kernel as it is formed
        return tuple(a for a in ROWS if a not in (*split.inputs, *split.outputs))
    cut = {"probe": "inputs", "lora_b": "inputs", "lora_a": "outputs"}[name]
    return (*ROWS, "tensor") if split.parallel == cut else ROWS


def check_fits(config: DecoderConfig, mesh: Mesh) -> None:
    """Refuse a mesh whose axes do not divide the model evenly.

    Raises:
        ValueError: the first axis that does not, with what it should divide.
    """
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    rules = [
        ("fsdp", fsdp, "hidden_size", config.hidden_size),
        ("tensor", tensor, "num_attention_heads", config.num_heads),
        ("tensor", tensor, "num_key_value_heads", config.num_kv_heads),
        ("tensor", tensor, "intermediate_size", config.intermediate_size),
    ]
    if config.delta is not None:
        channels, values = "linear attention channels", "linear attention values"
        rules += [
            ("tensor", tensor, channels, config.delta.channels),
            ("tensor", tensor, values, config.delta.values),
            ("tensor", tensor, "hidden_size", config.hidden_size),
            ("fsdp", fsdp, values, config.delta.values),
        ]
    for axis, size, name, value in rules:
        if value % size:
            raise ValueError(
                f"`mesh.{axis}` must divide the model's {name} ({value}), got {size}."
            )
    if config.vocab_size % (fsdp * tensor):
        raise ValueError(
            "`mesh.fsdp` times `mesh.tensor` must divide the model's vocab_size "
            f"({config.vocab_size}), got {fsdp} * {tensor}."
        )


def make_mesh(
    data: int, fsdp: int, tensor: int, devices: Sequence[Any] | None = None
) -> Mesh:
    """The mesh of the first devices (of ``devices``), neighbours along ``tensor``.

    Raises:
        ValueError: fewer devices than the mesh needs.
    """
    devices = jax.devices() if devices is None else devices
    count = data * fsdp * tensor
    if count > len(devices):
        raise ValueError(
            f"`mesh` must not need more devices than there are ({len(devices)}), got "
            f"data {data} * fsdp {fsdp} * tensor {tensor} = {count}."
        )
    return jax.make_mesh(
        (data, fsdp, tensor),
        AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
        devices=devices[:count],
    )


def put_everywhere(value: ArrayLike, sharding: NamedSharding) -> Array:
    """A value that every process holds, each of their devices with its part."""
    value = np.asarray(value)
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def on_host(array: Array) -> np.ndarray:
    """All of an array; of one that other processes hold parts of, asked by all."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))

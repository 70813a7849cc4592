"""Where the weights of a Hugging Face model lie in an SGLang model's parameters.

SGLang fuses projections that read the same input (their rows lie one after another) and
splits matrices over tensor-parallel ranks, by rows or by columns. What a Gated DeltaNet
fuses is cut in parts, query, key, value and gate: of a weight that is several of them a
rank has that many pieces. Runs inside the server: imports torch and SGLang when called.
"""

import re
from collections.abc import Iterator
from typing import Any

from logra_jax.rollout.replica import Shard, all_of

# Of a fused layer: which weight each of its parts belongs to, in order.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv",) * 3 + ("in_proj_z",),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_HEADS = ("A_log", "dt_bias")  # of a Gated DeltaNet: a number for each value head
_NOT_TEXT = ("visual.", "mtp.")  # of a model that also sees; the trainer's has none
# Qwen3.5's attention, which SGLang has no module of its own for.
_BARE = re.compile(r"(\.layers\.\d+)\.(qkv_proj|o_proj|q_norm|k_norm)$")


def shards_of(model: Any) -> dict[str, tuple[Shard, ...]]:
    """This rank's parts of every weight, by Hugging Face name; views, no copies.

    Args:
        model: a ``torch.nn.Module`` as SGLang builds it. Layers that are none of
            SGLang's parallel ones count as held whole by every rank.

    Raises:
        ValueError: a fused layer whose parts' names are not known.
    """
    shards: dict[str, tuple[Shard, ...]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if prefix.startswith(_NOT_TEXT):
            continue
        above = model.get_submodule(prefix.rpartition(".")[0])
        prefix = _BARE.sub(r"\1.self_attn.\2", prefix)
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{leaf}" if prefix else leaf
            for part, shard in _parts(name, module, above, parameter.data):
                shards[part] = (*shards.get(part, ()), shard)
    return shards


def _parts(
    name: str, module: Any, above: Any, tensor: Any
) -> Iterator[tuple[str, Shard]]:
    """The weights in one parameter of ``module``, which is in the module ``above``."""
    from sglang.srt.distributed.utils import get_group_rank_size  # pyright: ignore[reportMissingImports]
    from sglang.srt.layers.linear import (  # pyright: ignore[reportMissingImports]
        ColumnParallelLinear,
        RowParallelLinear,
    )
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding  # pyright: ignore[reportMissingImports]

    if isinstance(module, VocabParallelEmbedding):
        part = module.shard_indices
        held = tensor[: part.num_org_elements]  # what follows is padding
        whole = (module.org_vocab_size, *tensor.shape[1:])
        yield name, _at_row(held, whole, part.org_vocab_start_index)
    elif isinstance(module, RowParallelLinear) and tensor.ndim == 2:
        rank, _ = get_group_rank_size(module.tp_group)
        whole = (tensor.shape[0], module.input_size)
        yield name, Shard(tensor, whole, column=rank * tensor.shape[1])
    elif isinstance(module, ColumnParallelLinear):
        yield from _column_parts(name, module, above, tensor)
    elif name.endswith(_HEADS):
        size = tensor.shape[0]
        whole = (size * module.attn_tp_size,)
        yield name, _at_row(tensor, whole, module.attn_tp_rank * size)
    else:
        yield name, all_of(tensor)


def _column_parts(
    name: str, module: Any, above: Any, tensor: Any
) -> Iterator[tuple[str, Shard]]:
    """The weights whose rows lie one after another in a parameter, some on each rank.

    Of the channels of a convolution, those of queries, keys and values are cut each.
    """
    from sglang.srt.distributed.utils import get_group_rank_size  # pyright: ignore[reportMissingImports]
    from sglang.srt.layers.linear import QKVParallelLinear  # pyright: ignore[reportMissingImports]

    rank, ranks = get_group_rank_size(module.tp_group)
    sizes = list(module.output_partition_sizes)
    if name.endswith(".conv1d.weight"):
        sizes = list(above.in_proj_qkvz.output_partition_sizes[:3])
        names = [name] * 3
    else:
        names = _part_names(name, module, len(sizes))
    wholes = [size * ranks for size in sizes]
    places = [rank] * len(sizes)
    if isinstance(module, QKVParallelLinear):
        # With more ranks than key-value heads several ranks hold the same head.
        kv_rank, _ = get_group_rank_size(module.kv_tp_group)
        copies = module.num_kv_head_replicas
        places[1:] = [kv_rank // copies] * 2
        wholes[1:] = [whole // copies for whole in wholes[1:]]
    rows: dict[str, int] = {}  # of each weight
    for part, whole in zip(names, wholes, strict=True):
        rows[part] = rows.get(part, 0) + whole
    before = dict.fromkeys(names, 0)
    first = 0
    for part, size, whole, place in zip(names, sizes, wholes, places, strict=True):
        held = tensor[first : first + size]
        row = before[part] + place * size
        yield part, _at_row(held, (rows[part], *tensor.shape[1:]), row)
        before[part] += whole
        first += size


def _at_row(held: Any, whole: tuple[int, ...], row: int) -> Shard:
    """Rows of a matrix, or entries of a vector, which counts as one row."""
    if len(whole) == 1:
        return Shard(held, whole, column=row)
    return Shard(held, whole, row=row)


def _part_names(name: str, module: Any, number: int) -> list[str]:
    if number == 1:
        return [name]
    prefix, layer, leaf = name.rsplit(".", 2)
    parts = _FUSED.get(layer, ())
    if len(parts) != number:
        raise ValueError(
            f"A fused layer must be one of {tuple(_FUSED)}, got {name!r} "
            f"({type(module).__name__}) of {number} parts; this model is not supported."
        )
    return [f"{prefix}.{part}.{leaf}" for part in parts]

"""Where the weights of a Hugging Face model lie in an SGLang model's parameters.

SGLang fuses projections that read the same input (their rows lie one after another) and
splits matrices over tensor-parallel ranks, by rows or by columns. Runs inside the
server: imports torch and SGLang when called.
"""

from collections.abc import Iterator
from typing import Any

from logra_jax.rollout.replica import Shard

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def shards_of(model: Any) -> dict[str, Shard]:
    """This rank's part of every weight, by Hugging Face name; views, no copies.

    Args:
        model: a ``torch.nn.Module`` as SGLang builds it. Layers that are none of
            SGLang's parallel ones count as held whole by every rank.

    Raises:
        ValueError: a fused layer whose parts' names are not known.
    """
    shards: dict[str, Shard] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied
                continue
            seen.add(id(parameter))
            for name, shard in _parts(prefix, module, leaf, parameter.data):
                shards[name] = shard
    return shards


def _parts(
    prefix: str, module: Any, leaf: str, tensor: Any
) -> Iterator[tuple[str, Shard]]:
    """The weights in one parameter."""
    from sglang.srt.distributed.utils import get_group_rank_size  # pyright: ignore[reportMissingImports]
    from sglang.srt.layers.linear import (  # pyright: ignore[reportMissingImports]
        ColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding  # pyright: ignore[reportMissingImports]

    name = f"{prefix}.{leaf}" if prefix else leaf
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
        rank, ranks = get_group_rank_size(module.tp_group)
        sizes = list(module.output_partition_sizes)
        wholes = [size * ranks for size in sizes]
        places = [rank] * len(sizes)
        if isinstance(module, QKVParallelLinear):
            # With more ranks than key-value heads several ranks hold the same head.
            kv_rank, _ = get_group_rank_size(module.kv_tp_group)
            copies = module.num_kv_head_replicas
            places[1:] = [kv_rank // copies] * 2
            wholes[1:] = [whole // copies for whole in wholes[1:]]
        first = 0
        for part_name, size, whole, place in zip(
            _part_names(name, module, len(sizes)), sizes, wholes, places, strict=True
        ):
            held = tensor[first : first + size]
            yield part_name, _at_row(held, (whole, *tensor.shape[1:]), place * size)
            first += size
    else:
        yield name, Shard(tensor, tuple(tensor.shape))


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

"""Hugging Face directories in and out: names, weights, and what lies beside them."""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)
from jax.typing import DTypeLike
from jaxtyping import Array

from logra_jax.algorithm.digest import TensorDigest, digest_stack
from logra_jax.models.decoder import STACKS, Decoder
from logra_jax.models.hf_config import read_config, text_config
from logra_jax.models.sharding import check_fits, on_host, specs_of
from logra_jax.models.streaming import Wanted, load_arrays
from logra_jax.models.weight_files import (
    SHARD_BYTES,
    WeightFiles,
    read_json,
    write_weights,
)

_LEAF = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "bias": "bias",
    "weight": "weight",  # of a convolution
    "A_log": "A_log",
    "dt_bias": "dt_bias",
}
_IN_FLOAT32 = ".A_log"  # as models hold it, and servers, whatever the others are in


def load_decoder(
    directory: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    activations: DTypeLike | None = None,
    remat: str = "none",
    mesh: Mesh | None = None,
) -> Decoder:
    """The model in a Hugging Face directory, its layers stacked.

    Blocks of each tensor's rows are read, cast, and written in place into the stacks on
    the device: the host holds a few blocks, never a tensor. On a mesh each device holds
    its part from the beginning, and each process reads what its devices need.

    Args:
        directory: holds config.json and model.safetensors, or its shards and index.
        dtype: that weights are cast to; ``A_log`` of a Gated DeltaNet stays in float32.
        activations: see :class:`Decoder`.
        remat: see :class:`Decoder`.
        mesh: with axes ``data``, ``fsdp`` and ``tensor``, that weights are cut over.

    Raises:
        ValueError: unsupported config, missing or misshapen tensor, a mesh that does
            not divide the model evenly.
    """
    directory = Path(directory)
    config = read_config(directory)
    abstract = nnx.eval_shape(
        lambda: Decoder(
            config,
            dtype=dtype,
            activations=activations,
            remat=remat,
            rngs=nnx.Rngs(0),
        )
    )
    graph, state = nnx.split(abstract)
    where: dict[tuple, Sharding | None] = dict.fromkeys(
        path for path, _ in nnx.to_flat_state(state)
    )
    if mesh is not None:
        check_fits(config, mesh)
        for path, spec in nnx.to_flat_state(specs_of(state)):
            where[path] = NamedSharding(mesh, spec.get_value())
    wanted = {
        path: _wanted(abstract, path, variable, where[path])
        for path, variable in nnx.to_flat_state(state)
    }
    with WeightFiles(directory) as files:
        arrays = load_arrays(files, wanted)
    flat = [
        (path, variable.replace(arrays[path]))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def save_decoder(
    model: Decoder,
    directory: str | Path,
    *,
    source: str | Path,
    dtype: DTypeLike = jnp.bfloat16,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write ``model`` as a Hugging Face directory that ``transformers`` loads.

    Written aside and renamed: a directory is whole or not there. What ``source`` holds
    besides weights (config.json, tokenizer, generation config, licence) is carried
    over, with the dtype in config.json brought up to date; of a model that also sees,
    the text model.

    Args:
        model: the decoder; sketched layers are ordinary matrices here.
        directory: to write; must not exist.
        source: the Hugging Face directory that the model came from.
        dtype: of the written tensors, but for ``A_log`` (float32).
        shard_bytes: of tensors in one file, at most; what is more goes into shards
            with an index.

    Raises:
        ValueError: ``directory`` exists already, or ``source`` has no config.json.
    """
    return save_tensors(
        named_tensors(model),
        directory,
        source=source,
        dtype=dtype,
        shard_bytes=shard_bytes,
    )


def save_tensors(
    tensors: Iterable[tuple[str, np.ndarray]],
    directory: str | Path,
    *,
    source: str | Path,
    dtype: DTypeLike = jnp.bfloat16,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
) -> Path:
    """:func:`save_decoder` of tensors by their Hugging Face names.

    With ``replace``, an earlier directory stays until the new one is whole.
    """
    directory, source = Path(directory), Path(source)
    if directory.exists() and not replace:
        raise ValueError(
            f"`directory` must not exist yet, got {str(directory)!r}; remove it or "
            "choose another."
        )
    whole = read_json(source / "config.json")
    config = dict(text_config(whole))
    if config != whole:
        config["architectures"] = ["Qwen3_5ForCausalLM"]
    config.pop("torch_dtype", None)
    config["dtype"] = jnp.dtype(dtype).name
    aside = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}")
    aside.mkdir(parents=True)
    try:
        _copy_companions(source, aside)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        cast = ((name, _cast(name, value, dtype)) for name, value in tensors)
        write_weights(cast, aside, shard_bytes=shard_bytes)
        _put_in_place(aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return directory


def _put_in_place(aside: Path, directory: Path) -> None:
    """Rename a whole directory to where another may be; that one goes only then."""
    if not directory.exists():
        os.replace(aside, directory)
        return
    earlier = aside.with_name(f"{aside.name}.earlier")
    os.replace(directory, earlier)
    try:
        os.replace(aside, directory)
    except BaseException:
        os.replace(earlier, directory)
        raise
    shutil.rmtree(earlier)


def named_tensors(model: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """Every weight under its Hugging Face name, in (out, in) order, on the host."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if path[-1] not in _LEAF:
            continue  # probes and addresses are not weights
        value = on_host(variable[...])
        for layer in _layers(path, value.shape):
            part = value[layer]
            yield _name(model, path, layer), part.T if path[-1] == "kernel" else part


def tensor_digests(model: Decoder) -> dict[str, TensorDigest]:
    """The digest of every weight, by Hugging Face name; computed on the device."""
    flat = {
        path: variable[...]
        for path, variable in nnx.to_flat_state(nnx.state(model))
        if path[-1] in _LEAF
    }
    digests = {}
    for path, words in _digest_all(flat, _everywhere(flat)).items():
        value, words = flat[path], np.asarray(words)
        shape = value.shape[words.ndim :]
        shape = shape[::-1] if path[-1] == "kernel" else shape
        for layer in np.ndindex(words.shape):
            digest = TensorDigest(value.dtype.name, shape, int(words[layer]))
            digests[_name(model, path, layer)] = digest
    return digests


def _everywhere(flat: Mapping[tuple, Array]) -> Sharding | None:
    """Where results go that every process reads; None for arrays on no mesh."""
    shardings = (value.sharding for value in flat.values())
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    return NamedSharding(meshes[0], PartitionSpec()) if meshes else None


@partial(jax.jit, static_argnames="where")
def _digest_all(flat: dict[tuple, Array], where: Sharding | None) -> dict[tuple, Array]:
    digests = {
        path: digest_stack(
            value, int(path[0] in STACKS), transposed=path[-1] == "kernel"
        )
        for path, value in flat.items()
    }
    if where is None:
        return digests
    return jax.lax.with_sharding_constraint(digests, where)


def named_factors(
    model: Decoder, factors: nnx.State
) -> Iterator[tuple[str, np.ndarray]]:
    """The factor of each matrix under its Hugging Face name, as it is sent.

    Args:
        model: gives the names.
        factors: of :func:`logra_jax.quantise`.

    Yields:
        The name, and (out, r + 1) int16 or int8 on the host: the factor's integers,
        with the exponent of each row as its last column.
    """
    flat = jax.device_get(dict(nnx.to_flat_state(factors)))
    for path in flat:
        if path[-1] != "integers":
            continue
        integers = np.asarray(flat[path][...])
        exponents = np.asarray(flat[*path[:-1], "exponents"][...])[..., None]
        packed = np.concatenate([integers, exponents.astype(integers.dtype)], -1)
        for layer in np.ndindex(packed.shape[:-2]):
            yield _name(model, (*path[:-1], "kernel"), layer), packed[layer]


def _layers(path: tuple, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(i,) for i in range(shape[0])] if path[0] in STACKS else [()]


def _name(model: Decoder, path: tuple, layer: tuple[int, ...]) -> str:
    name = model.tensor_name(".".join(path[:-1]), layer)
    return name.removesuffix("weight") + _LEAF[path[-1]]


def _wanted(
    model: Decoder, path: tuple, variable: nnx.Variable, sharding: Sharding | None
) -> Wanted:
    """The tensors that a variable is made of, and how they lie in it."""
    layers = _layers(path, variable.shape)
    return Wanted(
        names=[_name(model, path, layer) for layer in layers],
        stacked=layers != [()],
        turned=path[-1] == "kernel",
        shape=variable.shape,
        dtype=jnp.dtype(variable.dtype),
        sharding=sharding,
    )


def load_tensors(directory: str | Path) -> dict[str, np.ndarray]:
    """Every tensor of a Hugging Face directory, on the host, writable.

    In the dtype of its file, but for those that a model always holds in float32.

    Raises:
        ValueError: no weights there, or damaged ones.
    """
    with WeightFiles(Path(directory)) as reader:
        read = ((name, reader.read(name)) for name in reader.names())
        return {name: _cast(name, value, value.dtype) for name, value in read}


def _cast(name: str, value: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    dtype = jnp.float32 if name.endswith(_IN_FLOAT32) else dtype
    return value.astype(jnp.dtype(dtype), copy=False)


def _copy_companions(source: Path, target: Path) -> None:
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name, copy_function=_copy)
    for file in source.iterdir():
        is_weights = file.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth")
        if file.is_file() and not is_weights and "index.json" not in file.name:
            _copy(file, target / file.name)


def _copy(source: str | Path, target: str | Path) -> None:
    shutil.copyfile(source, target)  # with the user's own permissions

"""The training step on any shapes, without a task or weights: for plan and bench.

A model comes from a directory's config.json or from a preset; a batch is as many rows
of one length as make an exact number of tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Key

from logra_jax.algorithm.target import platform
from logra_jax.models.decoder import Decoder
from logra_jax.models.hf_config import read_config
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.presets import preset
from logra_jax.models.sharding import check_fits, place
from logra_jax.training.assemble import (
    build_controller,
    build_optimizer,
    loss_options_of,
)
from logra_jax.training.layout import (
    Layout,
    batch_specs,
    build_layout,
    gradient_shapes,
)
from logra_jax.training.memory import device_bytes
from logra_jax.training.methods import Method, weights_of
from logra_jax.training.packing import Fields, pack
from logra_jax.training.parts import StepOptions
from logra_jax.training.policy import (
    check_attention_runs,
    mesh_of,
    method_of,
    model_directory,
    trainable,
)
from logra_jax.training.prepare import trained_weights
from logra_jax.training.schema import Config
from logra_jax.training.schema_mesh import MeshConfig
from logra_jax.training.schema_update import OptimizerConfig
from logra_jax.training.schema_watch import MonitorConfig
from logra_jax.training.state import Batch, TrainState, initial_state
from logra_jax.training.step import build_step

PROMPT = 32  # tokens that a prompt has at least
Kind = Literal["logra", "adamw", "lora", "galore"]
# Of a plan. GaLore's SVDs work in memory that their library asks for while it runs,
# which the compiler does not count: a figure without it would promise too much.
KINDS: tuple[Kind, ...] = ("logra", "adamw", "lora")


class Workload(NamedTuple):
    """Sizes of a batch: rows, and tokens in each."""

    parts: int  # that the batch is cut into, one for each device of `data` and `fsdp`
    rows: int  # of a microbatch, in each part
    prompt: int  # tokens
    new: int  # tokens
    batch: int  # rows of an update, in all
    is_packed: bool  # into rows of a whole microbatch

    @property
    def tokens(self) -> int:
        """Of a microbatch, in each part."""
        return self.rows * (self.prompt + self.new)

    def describe(self) -> dict[str, int]:
        """For a JSON object."""
        return self._asdict() | {"tokens_per_device": self.tokens}


def workload_of(
    config: Config, tokens: int, *, one_microbatch: bool = False
) -> Workload:
    """Rows of one length whose microbatch has exactly ``tokens`` tokens a device.

    Rows hold `rollout.max_new_tokens` after a prompt of ``PROMPT`` tokens, or of as few
    more as make the length divide ``tokens``. An update has `train.batch` rows, rounded
    up to whole microbatches and groups.

    Args:
        config: gives the lengths, the batch and the mesh.
        tokens: of a microbatch, on each device.
        one_microbatch: no more rows than that, whatever `train.batch` says.

    Raises:
        ValueError: no row fits.
    """
    new = config.rollout.max_new_tokens
    if tokens < PROMPT + new:
        raise ValueError(
            f"`--tokens` must hold a prompt of {PROMPT} tokens and "
            f"`rollout.max_new_tokens` ({new}), got {tokens}."
        )
    length = next(n for n in range(PROMPT + new, tokens + 1) if tokens % n == 0)
    rows, parts = tokens // length, config.mesh.row_parts
    step = math.lcm(rows * parts, config.rl.responses_per_prompt)
    batch = -(-(1 if one_microbatch else config.train.batch) // step) * step
    is_packed = config.train.microbatch_tokens is not None
    return Workload(parts, rows, length - new, new, batch, is_packed)


def on_devices(config: Config, devices: int | None) -> Config:
    """``config`` on a mesh of so many devices: its own, or all of them ``fsdp``.

    Raises:
        ValueError: no device.
    """
    if devices is not None and devices < 1:
        raise ValueError(f"`--devices` must be at least 1, got {devices}.")
    if devices is not None and devices != config.mesh.devices:
        step = math.lcm(devices, config.rl.responses_per_prompt)
        batch = -(-config.train.batch // step) * step
        config = _replace(config, mesh=MeshConfig(fsdp=devices), batch=batch)
    return config


def configure(config: Config, kind: Kind, work: Workload) -> Config:
    """``config`` that trains by ``kind`` on the workload's batch.

    Another kind than the config's own has its usual settings.
    """
    optimizer = config.optimizer
    if optimizer.kind != kind:
        optimizer = OptimizerConfig(kind=kind, clip_norm=optimizer.clip_norm)
    return _replace(config, optimizer=optimizer, batch=work.batch, microbatch=work.rows)


def _replace(config: Config, *, batch: int, microbatch: int = 1, **parts) -> Config:
    """Another batch and other parts; nothing of a run that a trial does not have."""
    train = dataclasses.replace(
        config.train, batch=batch, microbatch=microbatch, save_updates=False
    )
    rollout = dataclasses.replace(
        config.rollout, engine="local", urls=[], router=None, staleness=0
    )
    rl = dataclasses.replace(config.rl, correction=config.correction)
    return dataclasses.replace(
        config, train=train, rollout=rollout, rl=rl, monitor=MonitorConfig(), **parts
    )


def model_name(config: Config) -> str:
    """The preset, or the name of the directory, file or model of the Hub."""
    path = config.model.path or ""
    return config.model.preset or Path(path).resolve().name


def shapes_of(config: Config) -> DecoderConfig:
    """The model's shapes.

    Raises:
        ValueError: no such preset or directory, an architecture that is not supported.
    """
    if config.model.preset is not None:
        return preset(config.model.preset)
    return read_config(model_directory(config, shapes_only=True))


def virtual_devices(count: int) -> None:
    """Let the CPU be at least ``count`` devices.

    Raises:
        ValueError: JAX has started already, with fewer.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        if count > 1:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the devices are what they are
        pass
    have = len(jax.devices("cpu"))
    if have < count:
        raise ValueError(
            f"`--devices` must be at most {have} in this process, got {count}: JAX has "
            "started already; unset XLA_FLAGS and start a new one."
        )


class Trial(NamedTuple):
    """A step and what it is called with: arrays, or their shapes."""

    step: Any  # a Step that is jitted, and so can be lowered
    state: TrainState
    batch: Batch
    gradient_bytes: int  # of the float32 sum of gradients, on one device
    reference_bytes: int  # of the reference's weights, on one device


def build_trial(
    config: Config,
    kind: Kind,
    work: Workload,
    *,
    is_abstract: bool,
    predicts_kl: bool = True,
    optimizer: optax.GradientTransformation | None = None,
    devices: Sequence[Any] | None = None,
) -> Trial:
    """The step of one kind of training.

    Args:
        config: a run's.
        kind: how it trains.
        work: sizes of the batch.
        is_abstract: shapes in place of arrays: nothing is allocated.
        predicts_kl: otherwise the optimizer's step is taken as it is.
        optimizer: in place of the kind's own.
        devices: to compile for, where they are not this process's; then abstract, and
            within :func:`~logra_jax.algorithm.target.tracing_for` their platform.

    Raises:
        ValueError: a mesh of more devices than there are, or that does not divide the
            model; a bad rank or match; a kernel of attention that is not here.
    """
    config = configure(config, kind, work)
    shapes, attention = shapes_of(config), config.model.attention
    if not is_abstract:
        check_attention_runs(config)
    elif attention == "flash" and platform() != "gpu":
        attention = "chunked"  # which compiles for CPUs, and holds no less

    def make() -> Decoder:
        model = Decoder(
            shapes,
            dtype=config.model.dtype,
            activations=config.model.activations,
            attention=attention,
            remat=config.model.remat,
            rngs=nnx.Rngs(0),
        )
        return trainable(config, model)

    method, layout = _method_and_layout(config, shapes, nnx.eval_shape(make), devices)
    optimizer = build_optimizer(config) if optimizer is None else optimizer
    controller = build_controller(config)
    options = StepOptions(
        loss=loss_options_of(config),
        microbatch=work.rows,
        kl_estimator=config.kl.estimator,
        kl_share=config.kl.share if predicts_kl else 0.0,
    )
    step = build_step(method, optimizer, controller, options, layout)

    def make_state(weights: nnx.State | None = None) -> TrainState:
        weights = weights_of(make()) if weights is None else weights
        trained = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), method.trained)
        return initial_state(weights, trained, optimizer, controller)

    state, batch = jax.eval_shape(make_state), _random_batch(work, shapes.vocab_size)
    shardings = layout and layout.state_shardings(optimizer, controller, method.trained)
    if is_abstract:
        if layout:
            where = layout.shardings(batch_specs(batch))
        else:
            where = shardings = devices and SingleDeviceSharding(devices[0])
        state, batch = _abstract(state, shardings), _abstract(batch, where)
    else:
        weights = _random_weights(make, shardings and shardings.weights)
        finish = jax.jit(make_state, donate_argnums=0, out_shardings=shardings)
        state = finish(weights)
        batch = layout.put_batch(batch) if layout else jax.device_put(batch)
    reference = 0
    if config.reference.policy == "base":
        reference = device_bytes(trained_weights(method, state.weights))
    gradients = device_bytes(gradient_shapes(method.trained, layout))
    return Trial(step, state, batch, gradients, reference)


def _method_and_layout(
    config: Config,
    shapes: DecoderConfig,
    model: Decoder,
    devices: Sequence[Any] | None,
) -> tuple[Method, Layout | None]:
    mesh = mesh_of(config, devices)
    if mesh is None:
        return method_of(config, model), None
    check_fits(shapes, mesh)
    method = method_of(config, place(model))
    return method, build_layout(mesh, method, weights_of(model))


def _random_weights(
    make: Callable[[], Decoder], shardings: nnx.State | None
) -> nnx.State:
    """Weights of a model, each made on its own: less memory than any step takes.

    Kernels and embeddings are noise, the rest is as it is at the start of a run.
    """

    def flat(tree: Any) -> dict[tuple, Any]:
        return dict(nnx.to_flat_state(tree))

    shapes = flat(jax.eval_shape(lambda: weights_of(make())))
    where = flat(shardings) if shardings else {}
    large = {path for path in shapes if path[-1] in ("kernel", "embedding")}

    def make_rest() -> dict[tuple, nnx.Variable]:
        return {p: v for p, v in flat(weights_of(make())).items() if p not in large}

    rest_where = {p: where[p] for p in shapes if p not in large} if where else None
    weights = jax.jit(make_rest, out_shardings=rest_where)()
    keys = jax.random.split(jax.random.key(0), len(large))
    for path, key in zip(sorted(large), keys, strict=True):
        variable = shapes[path]
        sharding = where[path].get_value() if where else None
        noise = jax.jit(_noise, static_argnums=(1, 2), out_shardings=sharding)
        weights[path] = variable.replace(noise(key, variable.shape, variable.dtype))
    return nnx.from_flat_state([(path, weights[path]) for path in shapes])


def _noise(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any) -> Array:
    """Normal with a deviation of 0.02, a part of the first axis at a time."""
    parts = next(n for n in range(min(64, shape[0]), 0, -1) if shape[0] % n == 0)
    # Of bfloat16 a CPU would convert all parts, whenever one is written.
    as_bits = dtype == jnp.bfloat16 and jax.default_backend() == "cpu"

    def make_part(key: Array) -> Array:
        size = (shape[0] // parts, *shape[1:])
        part = (0.02 * jax.random.normal(key, size)).astype(dtype)
        return jax.lax.bitcast_convert_type(part, jnp.uint16) if as_bits else part

    noise = jax.lax.map(make_part, jax.random.split(key, parts)).reshape(shape)
    return jax.lax.bitcast_convert_type(noise, dtype) if as_bits else noise


def _abstract(tree: Any, shardings: Any = None) -> Any:
    """Shapes in place of arrays, with one sharding or a tree of them."""
    if shardings is None or isinstance(shardings, SingleDeviceSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def _random_batch(work: Workload, vocab_size: int) -> Batch:
    """Full rows of random tokens, on the host; half of them were rewarded."""
    rng, rows = np.random.default_rng(0), work.batch

    def tokens(width: int) -> np.ndarray:
        return rng.integers(0, vocab_size, (rows, width), dtype=np.int32)

    rest: Any = {  # on the host for now
        "prefix": np.zeros((0,), np.int32),
        "rewards": np.arange(rows, dtype=np.float32) % 2,
    }

    fields = Fields(
        prompts=tokens(work.prompt),
        prompt_lengths=np.full((rows,), work.prompt, np.int32),
        completions=tokens(work.new),
        mask=np.ones((rows, work.new), bool),
        logprobs=np.full((rows, work.new), -math.log(vocab_size), np.float32),
    )
    return Batch(
        **fields._asdict(),
        **rest,
        packed=pack(fields, work.tokens, work.parts) if work.is_packed else None,
    )

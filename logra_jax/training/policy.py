"""The model of a run: loaded, made trainable, and answering questions."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Key

from logra_jax.algorithm.basis import Basis
from logra_jax.algorithm.dense import dense
from logra_jax.algorithm.lora import lora
from logra_jax.algorithm.sketch import Probe, perturbed, sketch
from logra_jax.algorithm.table import sketch_table
from logra_jax.models.decoder import Decoder
from logra_jax.models.hf import load_decoder
from logra_jax.models.hf_config import read_config
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.sharding import make_mesh, place
from logra_jax.models.sources import find_model
from logra_jax.models.tokenizer import ChatTokenizer
from logra_jax.rl.tasks import Question, Task
from logra_jax.rollout.local import LocalEngine
from logra_jax.rollout.sglang import SGLangEngine
from logra_jax.rollout.types import Completions, Sampling, common_prefix
from logra_jax.training.layout import Layout, build_layout
from logra_jax.training.methods import (
    Method,
    adamw_method,
    logra_method,
    lora_method,
    weights_of,
)
from logra_jax.training.packing import check_row
from logra_jax.training.paths import default_cache_dir
from logra_jax.training.prompts import encode_question, encode_task
from logra_jax.training.schema import Config

# All exchanges of a program go by one name there, and may run at the same time: one is
# given another's parts (NaN), or all wait for ever. GPUs order them.
CPU_EXCHANGES_MIX = jax.__version_info__ >= (0, 12)
# Kinds that differ in what the optimizer makes of a kernel's gradient alone.
WHOLE_GRADIENTS = ("adamw", "galore")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The model's static parts, and what turns questions into responses with it.

    Attributes:
        method: what is trained of the model, and how.
        tokenizer: with the chat template.
        engine: samples token ids, in this process or on servers.
        system_prompt: before each question, or None.
        graph: of the model as it is on one device; on a mesh ``method`` has another.
        layout: of state and batches on the mesh; None for one device.
    """

    method: Method
    tokenizer: ChatTokenizer
    engine: LocalEngine | SGLangEngine
    system_prompt: str | None
    graph: nnx.GraphDef
    layout: Layout | None = None

    @property
    def probes(self) -> nnx.State:
        """The zeros that sketches are cotangents of; `optimizer.kind=logra` alone."""
        assert self.method.basis is not None
        return self.method.split(nnx.State({}))[0]

    def sketch_table(self, weights: nnx.State) -> str:
        """What is trained; `optimizer.kind=logra` alone."""
        shapes = jax.eval_shape(self.method.whole, weights)
        return sketch_table(nnx.merge(self.graph, shapes))

    def respond(
        self,
        weights: nnx.State,
        questions: Sequence[Question],
        sampling: Sampling,
        key: Key[Array, ""],
    ) -> tuple[Completions, list[str]]:
        """One completion for each question, as token ids and as text."""
        prompts = self.encode(questions)
        whole = self.method.whole(weights)
        completions = self.engine.generate(whole, prompts, sampling, key)
        return completions, self.decode(completions)

    def encode(self, questions: Sequence[Question]) -> list[list[int]]:
        """The prompts' token ids."""
        return [
            encode_question(self.tokenizer, q, self.system_prompt) for q in questions
        ]

    def decode(self, completions: Completions) -> list[str]:
        """The completions as text."""
        ended = zip(completions.tokens, completions.lengths, strict=True)
        return [self.tokenizer.decode(row[:n]) for row, n in ended]


def model_directory(config: Config, *, shapes_only: bool = False) -> Path:
    """The Hugging Face directory of ``model.path``, fetched or converted first.

    Args:
        config: names the model, and the cache.
        shapes_only: config.json is all that is needed.

    Raises:
        ValueError: a preset, no such model, or one that cannot be had.
    """
    name = config.model.path
    if name is None:
        raise ValueError(
            "`model.path` must name a model with weights, got the preset "
            f"{config.model.preset!r}, which is shapes alone; `logra plan` and `logra "
            "bench step` take it."
        )
    return find_model(name, default_cache_dir(config), shapes_only=shapes_only)


def load_policy(
    config: Config, task: Task, directory: Path
) -> tuple[Policy, nnx.State]:
    """Load the model and make it trainable; the static parts, and the weights.

    Raises:
        ValueError: the directory cannot be loaded, a bad rank or match, a prompt that
            does not fit the context.
    """
    tokenizer = ChatTokenizer.load(directory)
    if config.rollout.engine == "sglang":
        check_served(config, read_config(directory))
    mesh = mesh_of(config)
    _check_exchanges(mesh)
    check_attention_runs(config)
    model = load_decoder(
        directory,
        dtype=config.model.dtype,
        activations=config.model.activations,
        remat=config.model.remat,
        mesh=mesh,
    )
    model.attention = config.model.attention
    shapes = model.config
    if tokenizer.vocab_size > shapes.vocab_size:
        raise ValueError(
            f"The tokenizer of {str(directory)!r} must fit the model's `vocab_size` "
            f"({shapes.vocab_size}), got ids up to {tokenizer.vocab_size - 1}."
        )
    model = trainable(config, model)
    weights, graph = weights_of(model), nnx.graphdef(model)
    method, layout = method_of(config, model), None
    if mesh is not None:
        method = method_of(config, place(model))
        layout = build_layout(mesh, method, weights)
        weights = layout.put_weights(weights)
    prompts = encode_task(config, task, tokenizer, shapes)
    longest, new = max(map(len, prompts)), config.rollout.max_new_tokens
    prefix, bucket = common_prefix(prompts), config.rollout.prompt_bucket
    if config.train.microbatch_tokens is not None:
        check_row(
            "The longest prompt and `rollout.max_new_tokens`",
            longest - len(prefix) + new - 1,
            config.train.microbatch_tokens,
        )
    # One width for all batches: nothing is compiled in the middle of a run.
    width = -(-(longest - len(prefix)) // bucket) * bucket
    engine = LocalEngine(
        method.graph,
        max_positions=shapes.max_positions,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        prefix=prefix,
        bucket=width,
        mesh=mesh,
    )
    prompt = config.task.system_prompt
    return Policy(method, tokenizer, engine, prompt, graph, layout), weights


def check_served(config: Config, shapes: DecoderConfig) -> None:
    """Refuse a model that SGLang could not compute.

    Raises:
        ValueError: Gated DeltaNet layers in float32, which its kernels do not take.
    """
    if shapes.delta is not None and config.model.dtype != "bfloat16":
        raise ValueError(
            "`model.dtype` must be bfloat16 for SGLang to serve a model with Gated "
            f"DeltaNet layers, got {config.model.dtype!r}; or use "
            "`rollout.engine=local`."
        )


def check_attention_runs(config: Config) -> None:
    """Refuse a kernel of attention that this machine does not have.

    Raises:
        ValueError: flash attention without a GPU.
    """
    if config.model.attention == "flash" and jax.default_backend() != "gpu":
        raise ValueError(
            "`model.attention` must be auto, full or chunked on a machine without an "
            f"NVIDIA GPU ({jax.default_backend()}), got 'flash'; use auto."
        )


def _check_exchanges(mesh: Mesh | None) -> None:
    """Refuse a mesh whose devices would hear each other wrongly.

    Raises:
        ValueError: CPU devices of one process, under a JAX that mixes them up.
    """
    if mesh is None or jax.default_backend() != "cpu" or jax.process_count() > 1:
        return
    if CPU_EXCHANGES_MIX:
        raise ValueError(
            "`mesh` must be of one device on CPUs with JAX 0.12, whose XLA mixes up "
            f"exchanges between CPU devices of one process, got {mesh.size}; use JAX "
            "0.10, or a process for each device (`distributed.enabled`)."
        )


def mesh_of(config: Config, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The devices of a run; None for a single one.

    Args:
        config: of the run.
        devices: to choose from; all that this process sees, by default.

    Raises:
        ValueError: there are not as many, or more that a process would be left out of.
    """
    mesh, several = config.mesh, jax.process_count() > 1
    if several and mesh.devices != jax.device_count():
        raise ValueError(
            "`mesh.data` times `mesh.fsdp` times `mesh.tensor` must be the number of "
            f"devices of all {jax.process_count()} processes ({jax.device_count()}), "
            f"got {mesh.devices}."
        )
    if mesh.devices == 1:
        return None
    return make_mesh(mesh.data, mesh.fsdp, mesh.tensor, devices)


def trainable(config: Config, model: Decoder) -> Decoder:
    """A copy of the model, the same buffers, whose matched layers are trained.

    Raises:
        ValueError: a bad rank or match, or one of the head: the KL of an update is
            that of two policies with one head (:func:`logra_jax.predict_kl`).
    """
    rank, match = config.sketch.rank, config.sketch.match
    if not model.config.tie_embeddings and re.search(match, "lm_head"):
        raise ValueError(
            f"`sketch.match` must not match the head, lm_head, got {match!r}: the KL "
            "of an update is predicted for one head, before and after; '_proj$' leaves "
            "it out."
        )
    kind = config.optimizer.kind
    if kind in WHOLE_GRADIENTS:
        return dense(model, match, config.seed)
    if kind == "lora":
        alpha = config.optimizer.settled.lora_alpha
        return lora(model, rank, match, alpha, config.seed)
    return sketch(model, rank, match, basis_of(config))


def method_of(config: Config, model: Decoder) -> Method:
    """How a :func:`trainable` model (or its shapes) is trained."""
    kind, rounding = config.optimizer.kind, config.sketch.rounding
    if kind in WHOLE_GRADIENTS:
        return adamw_method(model, rounding=rounding)
    if kind == "lora":
        return lora_method(model)
    graph, probes, _ = nnx.split(model, Probe, ...)
    plain_graph, _, _ = nnx.split(perturbed(model), Probe, ...)
    return logra_method(
        graph,
        plain_graph,
        probes,
        basis_of(config),
        rounding=rounding,
        bits=config.sketch.bits,
    )


def basis_of(config: Config) -> Basis:
    """The run's basis rule."""
    sketch = config.sketch
    return Basis(seed=config.seed, refresh=sketch.refresh, kind=sketch.basis)

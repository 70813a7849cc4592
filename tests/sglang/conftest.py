"""Tiny random models, and real SGLang servers of them.

The servers' interpreter is the one that the environment variable `LOGRA_SGLANG_PYTHON`
names; requirements-cpu.txt says how to make one.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logra_jax.rollout.serve import Launched, ServeOptions, launch

KINDS = ("qwen2", "qwen3")
DTYPES = ("float32", "bfloat16")
VOCAB = 512

GATED_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,  # the same, for SGLang
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}

ROPE_OF_IMAGES = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
VISION_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Everything in this directory needs a real server."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that has SGLang."""
    python = os.environ.get("LOGRA_SGLANG_PYTHON")
    if not python:
        pytest.fail(
            "LOGRA_SGLANG_PYTHON must name a Python that has SGLang; "
            "tests/sglang/requirements-cpu.txt says how to make one.",
            pytrace=False,
        )
    return python


def make_tiny_model(kind: str, dtype: str, directory: Path) -> Path:
    """A two-layer random model with byte tokens and a chat template.

    Its logits spread over several nats, so that which token comes next is no toss-up.
    """
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    if kind == "qwen2":
        model_class: Any = transformers.Qwen2ForCausalLM
        config = transformers.Qwen2Config(**sizes)
    elif kind == "qwen3_5":
        model_class = transformers.Qwen3_5ForCausalLM
        config = transformers.Qwen3_5TextConfig(**sizes, **GATED_DELTA_NET)
    elif kind == "qwen3_5_sees":
        model_class = transformers.Qwen3_5ForConditionalGeneration
        config = transformers.Qwen3_5Config(
            text_config=sizes | GATED_DELTA_NET | {"rope_parameters": ROPE_OF_IMAGES},
            vision_config=VISION_TOWER,
            tie_word_embeddings=True,
        )
        save_processor(directory)
    else:
        model_class = transformers.Qwen3ForCausalLM
        config = transformers.Qwen3Config(head_dim=32, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).to(getattr(torch, dtype))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.08)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.02)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


def save_processor(directory: Path) -> None:
    """How images and films become patches, without which SGLang does not start."""
    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    patches |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for name, kind in (("", "image"), ("video_", "video")):
        model = {"image": "Qwen2VLImage", "video": "Qwen3VLVideo"}[kind]
        content = {
            f"{kind}_processor_type": f"{model}Processor",
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": 2**16, "longest_edge": 2**24},
        }
        path = directory / f"{name}preprocessor_config.json"
        path.write_text(json.dumps(content | patches))


def save_byte_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer without merges: four special tokens, 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|unused|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[1]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


@pytest.fixture(scope="session")
def tiny_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], Path]:
    """Directory of the tiny model of a kind ("qwen2") and dtype ("float32")."""
    made: dict[tuple[str, str], Path] = {}

    def tiny(kind: str, dtype: str) -> Path:
        if (kind, dtype) not in made:
            directory = tmp_path_factory.mktemp(f"{kind}-{dtype}")
            made[kind, dtype] = make_tiny_model(kind, dtype, directory)
        return made[kind, dtype]

    return tiny


StartServer = Callable[..., Launched]


def _options(python: str, model_dir: Path, dtype: str, **options: Any) -> ServeOptions:
    defaults: dict[str, Any] = {
        "python": python,
        "port": 0,
        "device": "cpu",
        "threads": 1,  # tiny matrices
        "max_tokens": 16384,
        "start_timeout": 300.0,
    }
    return ServeOptions(model_dir=model_dir, dtype=dtype, **(defaults | options))


@pytest.fixture
def start_server(
    sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """Start a server of this test's own: `start_server(model_dir, dtype, tp=1, ...)`.

    Further arguments are fields of `ServeOptions`; it is killed after the test.
    """
    started: list[Launched] = []

    def start(model_dir: Path, dtype: str, **options: Any) -> Launched:
        log = tmp_path_factory.mktemp("server") / "log"
        options = {"log": log} | options
        server = launch(_options(sglang_python, model_dir, dtype, **options))
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def shared_server(
    sglang_python: str,
    tiny_model: Callable[[str, str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Launched]]:
    """The server of a tiny model that tests share: `shared_server("qwen2", "float32")`.

    Started at the first call and kept, for tests that leave its weights as they are, or
    begin from whatever it holds.
    """
    servers: dict[tuple[str, str, int], Launched] = {}

    def shared(kind: str, dtype: str, tp: int = 1) -> Launched:
        key = (kind, dtype, tp)
        if key not in servers or servers[key].process.poll() is not None:
            log = tmp_path_factory.mktemp("server") / "log"
            options = _options(
                sglang_python, tiny_model(kind, dtype), dtype, tp=tp, log=log
            )
            servers[key] = launch(options)
        return servers[key]

    yield shared
    for server in servers.values():
        server.stop()


@functools.cache
def _moves(source: Path, dtype: str) -> tuple[Any, ...]:
    """A sketched model, and a compiled step that moves all of its projections."""
    import jax
    from flax import nnx

    import logra_jax as logra
    from logra_jax.algorithm.factor import quantise
    from logra_jax.algorithm.merge import merge
    from logra_jax.models.hf import load_decoder

    basis = logra.Basis(seed=2**32 - 7)
    model = load_decoder(source, dtype=dtype)
    positions = model.config.max_positions
    match = r"(q|k|v|o|gate|up|down|out)_proj|in_proj_(qkv|z)"
    model = logra.sketch(model, 4, match, basis)
    graph, probes, weights = nnx.split(model, logra.Probe, ...)

    @jax.jit
    def step(weights, key):
        leaves, tree = jax.tree.flatten(probes)
        keys = jax.random.split(key, len(leaves))
        moved = [
            leaf + 1e-3 * jax.random.normal(key, leaf.shape)
            for leaf, key in zip(leaves, keys, strict=True)
        ]
        factors = quantise(jax.tree.unflatten(tree, moved), basis)
        return merge(weights, factors, basis), factors

    return graph, probes, weights, basis, step, positions


class Trainer:
    """The sending side: a tiny model moved by random updates of all projections."""

    def __init__(self, source: Path, dtype: str, where: Path):
        from logra_jax.training.updates import Updates

        self.source, self.dtype, self.where = source, dtype, where
        moves = _moves(source, dtype)
        self.graph, self.probes, self.weights, basis, self._step = moves[:5]
        self.max_positions = moves[5]
        self.version = 0
        self.updates = Updates(
            where, self.graph, self.probes, basis, "stochastic", 0, self.weights
        )

    def step(self) -> bytes:
        """One more update; its bytes on the wire."""
        import jax

        self.weights, factors = self._step(self.weights, jax.random.key(self.version))
        self.version += 1
        return self.updates.write(self.version, factors, self.weights)

    @property
    def model(self) -> Any:
        from flax import nnx

        return nnx.merge(self.graph, self.probes, self.weights)

    def tensors(self) -> dict[str, Any]:
        """Every weight by its Hugging Face name, on the host."""
        from logra_jax.models.hf import named_tensors

        return dict(named_tensors(self.model))

    def state(self) -> Any:
        """What weight sync needs to know."""
        from logra_jax.rollout.sync import Weights

        return Weights(self.version, self.updates.digests, self.export)

    def export(self) -> Path:
        from logra_jax.models.hf import save_decoder

        directory = self.where / f"full-{self.version}"
        return save_decoder(self.model, directory, source=self.source, dtype=self.dtype)

    def local(self) -> Any:
        """The in-process engine on the same model."""
        from flax import nnx

        from logra_jax.rollout.local import LocalEngine

        graph, _ = nnx.split(self.model)
        return LocalEngine(
            graph, max_positions=self.max_positions, eos_ids=(1,), bucket=4
        )


@pytest.fixture
def trainer(
    tiny_model: Callable[[str, str], Path], tmp_path: Path
) -> Callable[[str, str], Trainer]:
    """A trainer of the tiny model of a kind and dtype."""

    def make(kind: str, dtype: str) -> Trainer:
        return Trainer(tiny_model(kind, dtype), dtype, tmp_path / "run")

    return make

"""Fifty pushes to real servers: their weights are the trainer's, bit for bit."""

import hashlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

from logra_jax.rollout.history import History
from logra_jax.rollout.servers import Servers
from logra_jax.rollout.sglang import SGLangEngine
from logra_jax.rollout.sync import WeightSync
from logra_jax.rollout.types import Sampling

PUSHES = 50
WITHOUT_TRITON = {
    "args": ["--disable-overlap-schedule", "--skip-server-warmup"],
    # It counts as healthy without having made a token.
    "environment": {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"},
}
PROMPTS = [
    np.random.default_rng(i).integers(4, 260, 4 + 3 * i).tolist() for i in range(6)
]
GREEDY = Sampling(temperature=0.0, max_new_tokens=16)
HEADS, KV_HEADS = 4, 2
MOVED = r"_proj\.weight|in_proj_(qkv|z|qkvz)\."
KEYS = 2 * 16  # rows of the queries, and of the keys, of a Gated DeltaNet


def checksums(servers: Servers) -> list[dict[str, str]]:
    """SGLang's own, of every parameter of text on every rank; no tables, no copies."""
    body = {"action": "checksum"}
    reply = servers.run(
        servers.servers[0].call("/weights_checker", body, deadline=60.0)
    )
    return [
        {
            name: checksum
            for name, checksum in rank["checksums"].items()
            if not name.startswith(("logra", "visual."))
            and not name.endswith(("gemma_weight", "axis_map"))
        }
        for rank in reply["ranks"]
    ]


def sha(tensor: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()[:16]


def expected(tensors: dict[str, np.ndarray], rank: int, ranks: int) -> dict[str, str]:
    """Checksums of what a rank must hold, by Megatron's rule of splitting."""

    def rows(name: str, parts: int) -> np.ndarray:
        """Rank's share of the rows; with more ranks than parts, ranks share one."""
        count = min(parts, ranks)
        return np.array_split(tensors[name], count)[rank * count // ranks]

    own = {}
    for name, tensor in tensors.items():
        prefix = name.rpartition("self_attn.")[0]
        leaf = name.rsplit(".", 1)[-1]
        if "linear_attn" in name:
            pass
        elif "q_proj" in name:
            parts = [
                rows(name.replace("q_proj", other), heads)
                for other, heads in (
                    ("q_proj", HEADS),
                    ("k_proj", KV_HEADS),
                    ("v_proj", KV_HEADS),
                )
            ]
            own[f"{prefix}self_attn.qkv_proj.{leaf}"] = np.concatenate(parts)
        elif "gate_proj" in name:
            parts = [rows(name, ranks), rows(name.replace("gate", "up"), ranks)]
            own[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(parts)
        elif "o_proj" in name or "down_proj" in name:
            own[name] = np.array_split(tensor, ranks, axis=1)[rank]
        elif "embed_tokens" in name:
            own[name] = rows(name, ranks)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            own[name] = tensor
    own |= delta_nets(tensors, rank, ranks)
    if any("linear_attn" in name for name in own):  # it has no module of attention
        own = {name.replace("self_attn.", ""): own[name] for name in own}
    return {name: sha(tensor) for name, tensor in own.items()}


def delta_nets(
    tensors: dict[str, np.ndarray], rank: int, ranks: int
) -> dict[str, np.ndarray]:
    """The same for Gated DeltaNets: by heads, of queries, keys and values each."""

    def share(tensor: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.array_split(tensor, ranks, axis)[rank]

    def mixed(tensor: np.ndarray) -> np.ndarray:
        return np.concatenate([share(x) for x in np.split(tensor, [KEYS, 2 * KEYS])])

    own = {}
    for prefix in {n.rpartition("conv1d")[0] for n in tensors if "conv1d" in n}:
        net = {n.removeprefix(prefix): x for n, x in tensors.items() if prefix in n}
        qkv, z, b, a = (
            net[f"in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")
        )
        parts = {
            "in_proj_qkvz.weight": np.concatenate([mixed(qkv), share(z)]),
            "in_proj_ba.weight": np.concatenate([share(b), share(a)]),
            "conv1d.weight": mixed(net["conv1d.weight"]),
            "out_proj.weight": share(net["out_proj.weight"], axis=1),
            "A_log": share(net["A_log"]),
            "dt_bias": share(net["dt_bias"]),
            "norm.weight": net["norm.weight"],
        }
        own |= {prefix + name: tensor for name, tensor in parts.items()}
    return own


def push_fifty(sender, servers: Servers, ranks: int) -> None:
    """Move the projections of both sides, and compare what each has then."""
    before = checksums(servers)
    tensors = sender.tensors()
    assert before == [expected(tensors, rank, ranks) for rank in range(ranks)]
    sync = WeightSync(servers, sender.updates.history, deadline=60.0)
    (report,) = sync.connect(sender.state())
    assert report.outcome == "held"
    for _ in range(PUSHES):
        blob = sender.step()
        (report,) = sync.push(sender.state(), blob)
        assert report.outcome == "pushed", report.message
    after = checksums(servers)
    changed = sender.tensors()
    assert after == [expected(changed, rank, ranks) for rank in range(ranks)]
    moved = {name for name in tensors if np.any(tensors[name] != changed[name])}
    assert moved == {n for n in tensors if re.search(MOVED, n)}
    for rank in range(ranks):
        kept = {n for n in before[rank] if not re.search(MOVED, n)}
        assert len(kept) >= 6
        assert all(before[rank][n] == after[rank][n] for n in kept)


@pytest.mark.parametrize(
    ("kind", "dtype", "ranks"),
    [
        ("qwen2", "bfloat16", 1),
        ("qwen3", "float32", 1),
        ("qwen2", "float32", 2),
        ("qwen3", "bfloat16", 2),
    ],
)
def test_after_fifty_pushes_the_servers_weights_are_the_trainers(
    trainer, start_server, kind, dtype, ranks
):
    sender = trainer(kind, dtype)
    server = start_server(sender.source, dtype, tp=ranks)
    with Servers([server.url]) as servers:
        push_fifty(sender, servers, ranks)
        engine = SGLangEngine(
            servers, max_positions=sender.max_positions, eos_ids=(1,), bucket=4
        )
        remote = engine.generate(None, PROMPTS, GREEDY, None)
        assert remote.versions is not None
        assert set(remote.versions[remote.mask]) == {PUSHES}
        _, state = nnx.split(sender.model)
        local = sender.local().generate(state, PROMPTS, GREEDY, jax.random.key(0))
        if dtype == "float32":
            np.testing.assert_array_equal(remote.tokens, local.tokens)
            np.testing.assert_allclose(remote.logprobs, local.logprobs, atol=1e-4)
        else:
            # Rounding of activations may turn a near tie. Up to there, and there, the
            # likeliest tokens are equally likely.
            same = np.cumprod(remote.tokens == local.tokens, axis=1).astype(bool)
            reached = np.pad(same[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            both = reached & remote.mask & local.mask
            gap = np.abs(remote.logprobs - local.logprobs)[both]
            assert gap.max() < 0.1
            assert same.mean() > 0.5


@pytest.mark.parametrize(
    ("kind", "ranks"), [("qwen3_5", 1), ("qwen3_5", 2), ("qwen3_5_sees", 2)]
)
def test_a_gated_delta_net_follows_on_servers_that_could_not_compute_it(
    trainer, start_server, tmp_path, kind, ranks
):
    """Its kernels are Triton's; its weights are moved, and loaded, in plain torch."""
    sender = trainer(kind, "bfloat16")
    server = start_server(sender.source, "bfloat16", tp=ranks, **WITHOUT_TRITON)
    with Servers([server.url]) as servers:
        push_fifty(sender, servers, ranks)
        sender.step()  # which no server is sent: all weights, then
        elsewhere = History(tmp_path / "none")
        sync = WeightSync(servers, elsewhere, deadline=60.0)
        (report,) = sync.connect(sender.state(), load=True)
        assert report.outcome == "loaded"
        now = sender.tensors()
        assert checksums(servers) == [
            expected(now, rank, ranks) for rank in range(ranks)
        ]

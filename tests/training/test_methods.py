"""Dense AdamW, LoRA and GaLore in LoGRA's loop, and their steps' oracles."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from logra_jax.algorithm.dense import WideKernel, dense, land_dense, widen
from logra_jax.algorithm.galore import GAP
from logra_jax.algorithm.lora import LoRAFactor
from logra_jax.models import stack as stack_module
from logra_jax.models.attention import Span
from logra_jax.models.decoder import Decoder
from logra_jax.models.hf import load_decoder
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.sharding import make_mesh, place
from logra_jax.training.assemble import build_optimizer, loss_options_of
from logra_jax.training.checkpoint import check_resumable
from logra_jax.training.config import Config, load_config
from logra_jax.training.journal import deterministic, read_metrics
from logra_jax.training.layout import build_layout
from logra_jax.training.methods import Method, weights_of
from logra_jax.training.parts import Parts, StepOptions
from logra_jax.training.policy import method_of, trainable
from logra_jax.training.state import Batch
from logra_jax.training.step import accumulate

Run = Callable[..., Path]
KINDS = ("adamw", "lora")
MATCH = r"_proj$"


@functools.cache
def decoder(directory: Path, dtype: str = "float32", remat: str = "layer") -> Decoder:
    return load_decoder(directory, dtype=dtype, activations="float32", remat=remat)


def config_of(path: Path, kind: str, *overrides: str) -> Config:
    return load_config(path, [f"optimizer.kind={kind}", *overrides])


TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) * 7


def logits_of(model: Decoder) -> jax.Array:
    tokens = jnp.asarray(TOKENS)
    hidden, _ = model(tokens, jnp.arange(12)[None], Span.causal(12))
    return model.logits(hidden)


def loss_of(model: Decoder) -> jax.Array:
    logprobs = jax.nn.log_softmax(logits_of(model))
    return -jnp.mean(logprobs[:, np.arange(11), TOKENS[:, 1:]])


def gradients_of(method: Method, weights: nnx.State) -> nnx.State:
    def loss(trained, weights):
        return loss_of(nnx.merge(method.graph, trained, method.split(weights)[1]))

    return jax.jit(lambda w: jax.grad(loss)(method.split(w)[0], w))(weights)


def by_layer(state: nnx.State) -> dict[tuple, np.ndarray]:
    return {
        path[:-1]: np.asarray(value[...], np.float32)
        for path, value in nnx.to_flat_state(state)
    }


def is_projection(path: tuple, variable) -> bool:
    return path[-1] == "kernel" and str(path[-2]).endswith("_proj")


def plain_gradients(model: Decoder) -> dict[tuple, np.ndarray]:
    """Of an ordinary model's projections, by ordinary autodiff."""
    graph, kernels, rest = nnx.split(model, is_projection, ...)
    loss = jax.jit(jax.grad(lambda k, rest: loss_of(nnx.merge(graph, k, rest))))
    return by_layer(loss(kernels, rest))


@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dense_gradient_is_that_of_the_plain_model(tiny_model_dir, dtype, remat):
    model = dense(decoder(tiny_model_dir, dtype, remat), MATCH)
    graph, _, weights = nnx.split(model, WideKernel, ...)

    def loss(wide, weights):
        return loss_of(nnx.merge(graph, wide, weights))

    found = jax.jit(lambda w: jax.grad(loss)(widen(w), w))(weights)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(found))
    # bfloat16 is exact in float32: the same model, without rounding of its gradient
    graph, state = nnx.split(decoder(tiny_model_dir, dtype, remat))
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), state)
    expected = plain_gradients(nnx.merge(graph, wide))
    found = by_layer(found)
    assert found.keys() == expected.keys()
    for path, gradient in expected.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[path], gradient, atol=1e-5 * scale)


def test_the_gradient_of_b_is_the_sketch_of_the_dense_gradient(tiny_config: Path):
    config = config_of(tiny_config, "lora")
    model = trainable(config, decoder(Path(str(config.model.path))))
    dense_gradients = plain_gradients(decoder(Path(str(config.model.path))))
    found = gradients_of(method_of(config, model), weights_of(model))
    found = {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(found)}
    factors = dict(nnx.to_flat_state(nnx.state(model, LoRAFactor)))
    for layer, gradient in dense_gradients.items():
        a = np.asarray(factors[*layer, "lora_a"][...])
        expected = 32 / 4 * np.einsum("lkd,lrk->ldr", gradient, a)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found[*layer, "lora_b"], expected, atol=1e-4 * scale)
        assert not found[*layer, "lora_a"].any()  # as B is zero


@pytest.mark.slow
def test_adamw_takes_the_steps_of_optax_on_a_plain_float32_model(tiny_config: Path):
    """Three of them, decay and clipping included, without the KL controller."""
    options = ["optimizer.learning_rate=1e-2", "optimizer.weight_decay=0.1"]
    config = config_of(tiny_config, "adamw", *options, "optimizer.clip_norm=0.5")
    plain = decoder(Path(str(config.model.path)))
    model = trainable(config, plain)
    method, weights = method_of(config, model), weights_of(model)
    ours = build_optimizer(config)
    state = ours.init(method.trained)
    theirs = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1)
    )
    graph, kernels, rest = nnx.split(plain, is_projection, ...)
    their_state = theirs.init(kernels)
    for _ in range(3):
        proposal, state = ours.update(
            gradients_of(method, weights), state, method.split(weights)[0]
        )
        weights, landings, factors = method.land(weights, proposal, {})
        assert factors is None
        gradients = jax.jit(jax.grad(lambda k: loss_of(nnx.merge(graph, k, rest))))
        updates, their_state = theirs.update(gradients(kernels), their_state, kernels)
        kernels = optax.apply_updates(kernels, updates)
    found, before = by_layer_kernels(weights), by_layer_kernels(nnx.state(plain))
    for path, expected in by_layer(kernels).items():
        moved = np.abs(expected - before[path]).max()
        assert moved > 1e-2
        np.testing.assert_allclose(found[path], expected, atol=1e-3 * moved)
    for landing in landings.values():
        np.testing.assert_allclose(landing.landed, landing.intended, rtol=1e-3)


def test_galore_takes_the_steps_of_optax_on_each_matrix_of_a_plain_model(
    tiny_config: Path,
):
    """Two of them, decay and clipping included, the second along older vectors."""
    options = ["learning_rate=1e-2", "weight_decay=0.1", "eps=1e-3", "clip_norm=0.5"]
    ranks = "sketch.rank={mlp: 3, attn: 2}"
    options = [ranks, *(f"optimizer.{option}" for option in options)]
    config = config_of(tiny_config, "galore", *options)
    plain = decoder(Path(str(config.model.path)))
    model = trainable(config, plain)
    method, weights = method_of(config, model), weights_of(model)
    tx = build_optimizer(config)
    state, before = tx.init(method.trained), by_layer_kernels(weights)
    gradients, update = [], jax.jit(tx.update)
    for _ in range(2):
        wide, gradient = method.split(weights)[0], gradients_of(method, weights)
        proposal, state = update(gradient, state, wide)
        gradients.append(by_layer(gradient))
        weights, _, factors = method.land(weights, proposal, {})
        assert factors is None
    norms = [sum(np.sum(np.square(g)) for g in each.values()) for each in gradients]
    clips = [min(1.0, 0.5 / np.sqrt(norm)) for norm in norms]
    assert min(clips) < 1
    for path, kernels in by_layer_kernels(weights).items():
        theirs = optax.contrib.galore(
            1e-2,
            rank=3 if "mlp" in path else 2,
            base_optimizer=optax.scale_by_adam(eps=1e-3),
            weight_decay=0.1,
        )
        their_update = jax.jit(theirs.update)
        for i, kernel in enumerate(before[path]):
            matrix, their_state = jnp.asarray(kernel), theirs.init(jnp.asarray(kernel))
            for each, clip in zip(gradients, clips, strict=True):
                gradient = clip * jnp.asarray(each[path][i])
                step, their_state = their_update(gradient, their_state, matrix)
                matrix = matrix + step
            moved = np.abs(matrix - kernel).max()
            assert moved > 1e-4
            np.testing.assert_allclose(kernels[i], matrix, atol=1e-3 * moved)


def by_layer_kernels(state: nnx.State) -> dict[tuple, np.ndarray]:
    return {
        path[:-1]: np.asarray(value[...], np.float32)
        for path, value in nnx.to_flat_state(state)
        if path[-1] == "kernel"
    }


def test_a_small_dense_update_lands_on_bfloat16_in_the_mean():
    """And on the nearest not at all; float32 takes it as it is."""
    linear = nnx.Linear(64, 64, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    linear.kernel[...] = jnp.full((64, 64), 0.02, jnp.bfloat16)
    weights = weights_of(dense(linear, seed=5))
    update = jax.tree.map(lambda w: jnp.full_like(w, 1e-6), widen(weights))
    for rounding, low, high in (("stochastic", 0.8, 1.2), ("nearest", 0.0, 0.0)):
        after, landings = land_dense(weights, update, rounding=rounding)
        moved = after["kernel"][...].astype(jnp.float32) - jnp.float32(
            linear.kernel[...]
        )
        assert low <= float(jnp.mean(moved)) / 1e-6 <= high
        assert after["kernel"].dtype == jnp.bfloat16
        found = float(jnp.mean(moved != 0)) * 64 * 64
        assert float(landings[""].changed) == pytest.approx(found)
        assert int(after["address"][1]) == 1


def test_each_step_and_seed_rounds_by_bits_of_its_own():
    def landed(seed: int, steps: int) -> np.ndarray:
        linear = nnx.Linear(64, 64, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        weights = weights_of(dense(linear, seed=seed))
        address = weights["address"]
        address[...] = address[...].at[1].set(steps)
        update = jax.tree.map(lambda w: jnp.full_like(w, 1e-4), widen(weights))
        return np.asarray(land_dense(weights, update)[0]["kernel"][...], np.float32)

    first = landed(0, 0)
    np.testing.assert_array_equal(first, landed(0, 0))
    assert (first != landed(0, 1)).any()
    assert (first != landed(1, 0)).any()


def test_the_dense_kernel_refuses_to_be_differentiated():
    graph, state = nnx.split(dense(nnx.Linear(4, 3, rngs=nnx.Rngs(0))))
    with pytest.raises(ValueError, match="`w` of a dense projection must not be"):
        jax.grad(
            lambda s: jnp.sum(nnx.merge(graph, s)(jnp.ones((2, 4)))), allow_int=True
        )(state)


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="`match` must hit at least one"):
        dense(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "q_proj")
    with pytest.raises(ValueError, match="`rounding` must be one of"):
        land_dense(nnx.State({}), nnx.State({}), rounding="up")


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_twin_predicts_what_a_small_step_does(tiny_config: Path, kind: str):
    """Forward mode along an update is the difference of finite ones, and of landing."""
    config = config_of(tiny_config, kind, "model.dtype=float32")
    model = trainable(config, decoder(Path(str(config.model.path))))
    method, weights = method_of(config, model), weights_of(model)
    step = jax.tree.map(lambda g: -1e-3 * jnp.sign(g), gradients_of(method, weights))

    def loss(graph, trained, weights):
        return loss_of(nnx.merge(graph, trained, method.split(weights)[1]))

    trained = method.split(weights)[0]
    _, rate = jax.jvp(
        lambda t: loss(method.plain_graph, t, weights), (trained,), (step,)
    )
    moved = jax.tree.map(lambda t, s: t + 0.1 * s, trained, step)
    finite = loss(method.plain_graph, moved, weights)
    tenth = jax.tree.map(lambda s: 0.1 * s, step)
    landed = method.land(weights, tenth, {})[0]
    landed = loss(method.graph, method.split(landed)[0], landed)
    now = loss(method.graph, trained, weights)
    assert float(finite) == pytest.approx(float(landed), rel=1e-5)
    assert float(finite - now) == pytest.approx(0.1 * float(rate), rel=0.05)


def test_no_float32_copy_of_the_kernels_is_made():
    """Beside the gradient itself, and in landing one layer's update at a time."""
    layers, width = 16, 96

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return nnx.Linear(
            width, width, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs
        )

    class Model(nnx.Module):
        def __init__(self):
            self.layers = stack(nnx.Rngs(0))

        def __call__(self, x):
            graph, weights = nnx.split(self.layers)

            def layer(x, inputs):
                return nnx.merge(graph, inputs[0])(x), None

            run = stack_module.Run(layer, weights, ())
            return stack_module.scan_layers([run], x, remat="layer")[0]

    model = dense(Model())
    graph, _, weights = nnx.split(model, WideKernel, ...)
    x = jnp.ones((2, width))

    def gradient(weights):
        def loss(wide):
            return jnp.sum(nnx.merge(graph, wide, weights)(x))

        return jax.grad(loss)(widen(weights))

    def temporaries(f, *args):
        compiled = jax.jit(f, donate_argnums=0).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    kernels = 4 * layers * width * width
    assert temporaries(gradient, weights) < kernels / 2
    updates = jax.eval_shape(gradient, weights)
    # less than that: on CPUs the bits of a bfloat16 stack are copied
    found = temporaries(lambda w, u: land_dense(w, u)[0], weights, updates)
    assert found <= kernels / 2 + 5 * kernels / layers


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_updates_on_a_mesh_are_those_of_one_device(
    tiny_config: Path, tiny_model_dir: Path, getkey, kind: str
):
    config = config_of(tiny_config, kind)
    model = trainable(config, decoder(tiny_model_dir, "bfloat16"))
    weights = weights_of(model)
    for path, variable in nnx.to_flat_state(weights):
        if path[-1] == "lora_b":  # else there is no gradient of A
            variable[...] = jax.random.normal(getkey(), variable.shape)
    mesh = make_mesh(1, 2, 2)
    cut = method_of(config, place(model))
    layout = build_layout(mesh, cut, weights)
    parts = jax.device_put(weights, layout.shardings(layout.weights))
    rows, new, vocab = 4, 5, model.config.vocab_size
    tokens = jax.random.randint(getkey(), (rows, 8 + new), 0, vocab)
    batch = Batch(
        prefix=jnp.zeros((0,), jnp.int32),
        prompts=tokens[:, :8],
        prompt_lengths=jnp.full((rows,), 8, jnp.int32),
        completions=tokens[:, 8:],
        mask=jnp.ones((rows, new), bool),
        logprobs=jnp.full((rows, new), -8.0, jnp.float32),
        rewards=jnp.arange(4, dtype=jnp.float32),
    )
    options = StepOptions(
        loss_options_of(config), microbatch=2, kl_estimator="jvp", kl_share=0.0
    )

    def update(method, layout):
        """Gradients, and weights after a step of their signs."""
        advantages = jnp.array([1.0, -1.0, 0.5, 0.25])
        pieces = Parts(method, options, layout)

        def run(weights, batch):
            gradients, _ = accumulate(
                method, weights, batch, advantages, options, layout
            )
            step = jax.tree.map(lambda g: 1e-5 * jnp.sign(g), gradients)
            after, landings, _ = pieces.land(weights, step)
            return gradients, after, landings

        return jax.jit(run)

    whole = update(method_of(config, model), None)(weights, batch)
    cut_up = update(cut, layout)(parts, layout.put_batch(batch))
    for one, many in zip(*map(jax.tree.leaves, (whole[0], cut_up[0])), strict=True):
        scale = float(jnp.max(jnp.abs(one)))
        assert scale > 0
        np.testing.assert_allclose(np.asarray(many), one, atol=1e-3 * scale)
    after = [jax.tree.leaves(jax.device_get(x[1])) for x in (whole, cut_up)]
    for one, many in zip(*after, strict=True):
        # but for a sign here and there: the bits of the rounding are the same
        assert np.mean(np.float32(one) != np.float32(many)) < 1e-3
    for one, many in zip(*map(jax.tree.leaves, (whole[2], cut_up[2])), strict=True):
        np.testing.assert_allclose(np.asarray(many), one, rtol=1e-2)


def journal(run_dir: Path) -> list[dict]:
    return [deterministic(row) for row in read_metrics(run_dir)]


def tensors(directory: Path) -> dict[str, np.ndarray]:
    import ml_dtypes  # noqa: F401
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("adamw", []),
        ("lora", []),
        # SVDs before and after the resumption, which goes on along the old vectors.
        ("galore", ["optimizer.projection_gap=3"]),
    ],
)
def test_a_run_trains_resumes_bit_for_bit_and_exports(
    tiny_run: Run, tiny_model_dir: Path, tmp_path: Path, kind: str, more: list[str]
):
    from logra_jax.cli import main

    budget = ["kl.budget=constant", "kl.start=1e-3", "kl.alpha_max=1e5"]
    options = [f"optimizer.kind={kind}", *budget, *more]
    whole = tiny_run("whole", *options)
    rows = read_metrics(whole)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        assert 0 < row["kl/predicted"] <= row["kl/budget"] * 1.001
        assert row["kl/realised"] == pytest.approx(row["kl/predicted"], rel=0.5)
    names = set(tensors(tiny_model_dir))
    before, after = tensors(tiny_model_dir), tensors(whole / "model")
    assert names == set(after)
    moved = {n for n in names if (before[n] != after[n]).any()}
    assert moved == {n for n in names if n.endswith("_proj.weight")}

    half = tiny_run("half", *options, "train.steps=2")
    tiny_run("unused", f"resume={half}", *options)
    assert journal(half) == journal(whole)
    for name, value in tensors(half / "model").items():
        np.testing.assert_array_equal(value, after[name])

    assert main(["export", str(whole), str(tmp_path / "out")]) == 0
    exported = tensors(tmp_path / "out")
    assert all((exported[n] == after[n]).all() for n in names)


@pytest.mark.slow
def test_a_run_without_a_budget_takes_the_optimizers_step(tiny_run: Run):
    options = ["optimizer.kind=adamw", "kl.budget=none"]
    rows = read_metrics(tiny_run("run", *options, "train.steps=1"))
    assert rows[-1]["alpha"] == 1.0
    assert rows[-1]["landed/q_proj/changed"] > 0


def test_the_model_that_lora_exports_has_the_logits_of_the_adapted_one(
    tiny_config: Path, tiny_model_dir: Path, tmp_path: Path, getkey
):
    from logra_jax.training.export import export_model

    config = config_of(tiny_config, "lora")
    model = trainable(config, decoder(tiny_model_dir, "float32"))
    for _, variable in nnx.to_flat_state(nnx.state(model, LoRAFactor)):
        variable[...] = 0.3 * jax.random.normal(getkey(), variable.shape)
    method = method_of(config, model)
    out = export_model(method, weights_of(model), tiny_model_dir, tmp_path / "out")
    merged = load_decoder(out, dtype="float32", activations="float32")
    adapted = logits_of(model)
    change = float(jnp.max(jnp.abs(adapted - logits_of(decoder(tiny_model_dir)))))
    error = float(jnp.max(jnp.abs(adapted - logits_of(merged))))
    assert error < 0.05 * change  # written in bfloat16


def test_null_is_the_usual_value_of_the_kind(tiny_config: Path):
    kinds = ("adamw", "lora", "galore")
    usual = {kind: config_of(tiny_config, kind).optimizer.settled for kind in kinds}
    assert usual["adamw"] == (1e-6, 0.9, 0.999, 1e-8, 0.01, 0.0, 0)
    assert usual["lora"] == (1e-4, 0.9, 0.999, 1e-8, 0.0, 32.0, 0)
    assert usual["galore"] == (1e-5, 0.9, 0.999, 1e-8, 0.0, 0.0, GAP)
    logra_ = load_config(tiny_config).optimizer.settled
    assert (logra_.learning_rate, logra_.b2, logra_.eps) == (1e-4, 0.95, 1e-12)
    given = config_of(tiny_config, "adamw", "optimizer.b2=0.95").optimizer.settled
    assert (given.b2, given.b1) == (0.95, 0.9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer.kind=sgd"],
            "`optimizer.kind` must be one of logra, adamw, lora, galore, got 'sgd'.",
        ),
        (
            ["optimizer.b1=0.9"],
            "`optimizer.b1` must be null when `optimizer.kind` is logra, got 0.9; it "
            "is for optimizer.kind=adamw, lora and galore.",
        ),
        (
            ["optimizer.kind=adamw", "optimizer.projection_gap=9"],
            "`optimizer.projection_gap` must be null when `optimizer.kind` is adamw, "
            "got 9; it is for optimizer.kind=galore.",
        ),
        (
            ["optimizer.kind=galore", "optimizer.projection_gap=0"],
            "`optimizer.projection_gap` must be at least 1, got 0; 200 is usual.",
        ),
        (
            ["optimizer.kind=galore", "optimizer.lora_alpha=16"],
            "`optimizer.lora_alpha` must be null when `optimizer.kind` is galore, got "
            "16.0; it is for optimizer.kind=lora.",
        ),
        (
            ["optimizer.kind=galore", "train.save_updates=true"],
            "`train.save_updates` must be false when `optimizer.kind` is galore, got "
            "True; it is made of the sketches of optimizer.kind=logra.",
        ),
        (
            ["optimizer.weight_decay=0"],
            "`optimizer.weight_decay` must be null when `optimizer.kind` is logra",
        ),
        (
            ["optimizer.kind=adamw", "optimizer.lora_alpha=16"],
            "`optimizer.lora_alpha` must be null when `optimizer.kind` is adamw, got "
            "16.0; it is for optimizer.kind=lora.",
        ),
        (
            ["optimizer.kind=adamw", "optimizer.b1=1"],
            "`optimizer.b1` must lie in [0, 1), got 1.0.",
        ),
        (
            ["optimizer.kind=adamw", "optimizer.weight_decay=-1"],
            "`optimizer.weight_decay` must be finite and not negative, got -1.0.",
        ),
        (
            ["optimizer.kind=lora", "optimizer.lora_alpha=0"],
            "`optimizer.lora_alpha` must be positive and finite, got 0.0; 32 is usual.",
        ),
        (
            ["optimizer.kind=adamw", "optimizer.learning_rate=0"],
            "`optimizer.learning_rate` must be positive and finite, got 0.0; 1e-06 is "
            "usual.",
        ),
        (
            ["optimizer.kind=lora", "train.save_updates=true"],
            "`train.save_updates` must be false when `optimizer.kind` is lora, got "
            "True; it is made of the sketches of optimizer.kind=logra.",
        ),
        (
            [
                "optimizer.kind=adamw",
                "rollout.engine=sglang",
                "rollout.urls=[http://127.0.0.1:1]",
            ],
            "`rollout.engine` must be local when `optimizer.kind` is adamw, got "
            "'sglang'",
        ),
        (
            ["optimizer.kind=adamw", "monitor.every=1"],
            "`monitor.every` must be 0 when `optimizer.kind` is adamw, got 1",
        ),
    ],
)
def test_what_does_not_fit_the_kind_is_one_sentence(tiny_config, overrides, message):
    with pytest.raises(ValueError) as error:
        load_config(tiny_config, overrides)
    assert str(error.value).startswith(message)


def test_another_kind_is_another_run_but_not_a_usual_value_that_is_given(
    tiny_config: Path,
):
    ours = load_config(tiny_config)
    with pytest.raises(ValueError, match=r"`optimizer.kind` must stay 'logra'"):
        check_resumable(config_of(tiny_config, "adamw"), ours)
    given = ["optimizer.learning_rate=1e-4", "optimizer.b2=0.95", "optimizer.eps=1e-12"]
    check_resumable(load_config(tiny_config, given), ours)
    with pytest.raises(ValueError, match=r"`optimizer.b2` must stay 0.95 .* got 0.9"):
        check_resumable(load_config(tiny_config, ["optimizer.b2=0.9"]), ours)


def test_a_rank_that_galore_has_no_room_for_is_one_sentence(tiny_run: Run):
    """As of the other kinds; the head of a key has 16 columns here."""
    with pytest.raises(ValueError, match=r"`rank` must be in .* = \[1, 16\] for layer"):
        tiny_run("run", "optimizer.kind=galore", "sketch.rank=17")


@pytest.mark.parametrize("kind", ["logra", "adamw", "lora"])
def test_a_head_is_not_trained_as_its_kl_would_not_be_predicted(tiny_config, kind):
    config = config_of(tiny_config, kind, "sketch.match=.*")
    shape = DecoderConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_positions=8,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
    )
    model = Decoder(shape, dtype="float32", activations="float32", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"must not match the head, .*'\.\*'"):
        trainable(config, model)

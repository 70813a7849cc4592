import functools
import inspect
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import logra_jax as logra
from logra_jax.models.decoder import Decoder
from logra_jax.models.layers import DecoderConfig

N, K, D, R, LAYERS = 9, 7, 6, 3, 4  # examples, in, hidden, rank: all distinct

# Compile time is what these tests cost, so XLA is told not to try hard.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Model(nnx.Module):
    """One layer, then a stack that is scanned, then one layer; all with biases."""

    def __init__(self):
        make = nnx.vmap(lambda key: nnx.Linear(D, D, rngs=nnx.Rngs(key)))
        self.first = nnx.Linear(K, D, rngs=nnx.Rngs(0))
        self.hidden = nnx.Dict(block=make(jax.random.split(jax.random.key(1), LAYERS)))
        self.last = nnx.Linear(D, K, rngs=nnx.Rngs(2))

    def __call__(self, x):
        graph, state = nnx.split(self.hidden.block)

        def layer(h, s):
            return h + jnp.tanh(nnx.merge(graph, s)(h)), None

        return self.last(lax.scan(layer, self.first(x), state)[0])


@functools.cache
def model():
    return Model()


X = np.random.default_rng(3).normal(size=(N, K)).astype(np.float32)
LABELS = np.argmax(np.sin(5 * X), -1)


def loss(model):
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(model(jnp.asarray(X)), LABELS).mean()


def lift(update, address, basis, k):
    """(U A)ᵀ from the definition, of one matrix or a stack of them."""
    if update.ndim > 2:
        pairs = zip(update, address, strict=True)
        return jnp.stack([lift(u, a, basis, k) for u, a in pairs])
    return (update @ basis.matrix(address, update.shape[-1], k)).T


def moves_of_sketched_layers(inner, rank, basis, steps, extra):
    """Kernels' moves, by layer: sketch, jax.grad on probes, inner, lift by hand."""
    graph, probes, weights = nnx.split(
        logra.sketch(model(), rank, basis=basis), logra.Probe, ...
    )
    state = inner.init(probes)
    before = weights

    @jit
    def step(weights, state):
        sketches = jax.grad(lambda p: loss(nnx.merge(graph, p, weights)))(probes)
        updates, state = inner.update(sketches, state, probes, **extra(weights))
        flat = dict(nnx.to_flat_state(weights))
        for (*layer, _), u in nnx.to_flat_state(updates):
            kernel, address = flat[*layer, "kernel"], flat[*layer, "address"]
            words = address[...]
            moved = kernel[...] + lift(u[...], words, basis, kernel.shape[-2])
            flat[*layer, "kernel"] = kernel.replace(moved)
            flat[*layer, "address"] = address.replace(words.at[..., 1].add(1))
        return nnx.from_flat_state(flat), state

    for _ in range(steps):
        weights, state = step(weights, state)
    return kernel_moves(before, weights)


def moves_of_dense_gradients(tx, steps, extra):
    """The same from dense gradients through ``tx``."""
    graph, params, rest = nnx.split(model(), nnx.Param, ...)
    state = tx.init(params)
    before = params

    @jit
    def step(params, state):
        gradients = jax.grad(lambda p: loss(nnx.merge(graph, p, rest)))(params)
        updates, state = tx.update(gradients, state, params, **extra(params))
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    for path, bias in nnx.to_flat_state(params):
        if path[-1] == "bias":
            np.testing.assert_array_equal(bias[...], before_of(before, path))
    return kernel_moves(before, params)


def before_of(state, path):
    return dict(nnx.to_flat_state(state))[path][...]


def kernel_moves(before, after):
    return {
        path: np.asarray(kernel[...] - before_of(before, path))
        for path, kernel in nnx.to_flat_state(after)
        if path[-1] == "kernel"
    }


def assert_same_moves(actual, expected, rtol=1e-4):
    assert actual.keys() == expected.keys()
    assert len(actual) == 3
    for path, move in expected.items():
        assert np.linalg.norm(move) > 0
        error = np.linalg.norm(actual[path] - move) / np.linalg.norm(move)
        assert error <= rtol, path


# --- the oracle of sketched layers


def square_of(updates):
    """Stands for a predicted KL: quadratic in the update, in whatever tree."""
    return sum(jnp.sum(jnp.square(u)) for u in jax.tree.leaves(updates))


def readme_chain():
    return optax.chain(
        optax.clip_by_global_norm(0.05),  # below the sketches' norm: it acts
        logra.scale_by_row_adam(),
        optax.scale_by_learning_rate(0.1),
        logra.scale_by_predicted_kl(optax.linear_schedule(2e-2, 1e-2, 3), 10.0),
    )


ON_SKETCHES = {
    "row_adam": (readme_chain, ("refreshed", "fixed")),
    "sgd": (lambda: optax.sgd(0.5), ("refreshed",)),
    "momentum": (lambda: optax.sgd(0.3, momentum=0.9), ("fixed",)),
    "adam": (lambda: optax.adam(0.02), ("fixed",)),
    "lion": (lambda: optax.lion(0.01), ("fixed",)),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name, (_, hows) in ON_SKETCHES.items() for how in hows],
)
def test_dense_gradients_move_weights_as_sketched_layers_do(name, how):
    make, _ = ON_SKETCHES[name]
    rank = {"first|last": R - 1, "hidden": R}
    options = {"seed": 5, "refresh": how == "refreshed"}
    if name == "sgd":
        options["kind"] = "gaussian"

    def extra(_):
        return {"predicted_kl": square_of} if name == "row_adam" else {}

    expected = moves_of_sketched_layers(make(), rank, logra.Basis(**options), 4, extra)
    tx = logra.low_rank(make(), rank, **options)
    assert_same_moves(moves_of_dense_gradients(tx, 4, extra), expected)


def test_the_kl_of_the_dense_update_is_that_of_the_probes():
    def on_sketches():
        return optax.chain(logra.scale_by_row_adam(), optax.scale(-0.1))

    def controller():
        return logra.scale_by_predicted_kl(1e-2, 10.0)

    x = jnp.asarray(X)
    sketched = logra.sketch(model(), R)
    _, probes, _ = nnx.split(sketched, logra.Probe, ...)
    twin, _, _ = nnx.split(logra.perturbed(sketched), logra.Probe, ...)
    graph, _, rest = nnx.split(model(), nnx.Param, ...)

    def kl(hidden, at):
        return lambda u: logra.predict_kl(hidden, lambda z: z, at, u, jnp.ones(N))[0]

    def on_probes(weights):
        hidden = kl(lambda p: nnx.merge(twin, p, weights)(x), probes)
        return {"predicted_kl": hidden}

    def on_weights(params):
        return {"predicted_kl": kl(lambda p: nnx.merge(graph, p, rest)(x), params)}

    inside = optax.chain(on_sketches(), controller())
    after = optax.chain(logra.low_rank(on_sketches(), R), controller())
    expected = moves_of_sketched_layers(inside, R, logra.Basis(), 2, on_probes)
    assert_same_moves(moves_of_dense_gradients(after, 2, on_weights), expected)


def names_given(model, names=None):
    """The names that matrices are drawn by when all kernels are trained."""
    given = []

    def record(path, layer):
        by_default = ".".join((path, *map(str, layer)))
        given.append(names(path, layer) if names else by_default)
        return given[-1]

    kernels = nnx.state(model, lambda path, _: path[-1] == "kernel")
    jax.eval_shape(logra.low_rank(optax.sgd(1.0), 2, names=record).init, kernels)
    return set(given)


def test_names_are_those_of_sketched_layers():
    config = DecoderConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=20,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        max_positions=8,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
    )
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    linear = nnx.eval_shape(lambda: nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    cases = [
        (nnx.eval_shape(Model), None, "hidden.block.3"),
        (nnx.Sequential(linear, jnp.tanh), None, "layers.0"),
        (linear, None, ""),
        (decoder, decoder.tensor_name, "model.layers.1.mlp.up_proj.weight"),
    ]
    for of, names, one_of_them in cases:
        given = names_given(of, names)
        assert one_of_them in given
        sketched = nnx.state(logra.sketch(of, 2))
        words = [
            np.unique(address[..., 2])
            for path, address in nnx.to_flat_state(sketched)
            if path[-1] == "address"
        ]
        crcs = {zlib.crc32(name.encode()) for name in given}
        assert crcs == {int(word) for word in np.concatenate(words)}


def test_plain_trees_are_named_by_their_dotted_paths():
    seen = []
    tx = logra.low_rank(
        optax.sgd(1.0), 1, names=lambda *where: seen.append(where) or "a"
    )
    w = jnp.ones((2, 2))
    tx.init({"attention": {"value": {"kernel": w}, "query": w}, "other": {"value": w}})
    paths = ["attention.query", "attention.value", "other.value"]
    assert seen == [(path, ()) for path in paths]
    seen.clear()
    tx.init([jnp.ones((2, 1, 3, 2))])
    assert seen == [("0", (0, 0)), ("0", (1, 0))]


# --- each matrix has its own basis, and its own step


def test_a_stack_is_projected_and_lifted_matrix_by_matrix(getkey):
    gradient = {"a": {"kernel": jax.random.normal(getkey(), (2, 3, K, D))}}
    tx = logra.low_rank(optax.identity(), R, seed=9)
    state = tx.init(gradient)
    for step in range(2):
        updates, state = jit(tx.update)(gradient, state)
        for i, j in np.ndindex(2, 3):
            address = jnp.array(logra.Basis(9).address(f"a.{i}.{j}", step), jnp.uint32)
            A = np.asarray(logra.Basis(9).matrix(address, R, K))
            np.testing.assert_allclose(
                updates["a"]["kernel"][i, j],
                A.T @ A @ np.asarray(gradient["a"]["kernel"][i, j]),
                atol=1e-5,
            )


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_lifted_sketches_are_the_gradient_on_average_over_steps(kind, getkey):
    gradient = jax.random.normal(getkey(), (K, D))
    steps = 1000

    def error(**options):
        tx = logra.low_rank(optax.identity(), R, kind=kind, **options)

        def body(state, _):
            update, state = tx.update(gradient, state)
            return state, update

        _, updates = lax.scan(body, tx.init(gradient), length=steps)
        return jnp.linalg.norm(updates.mean(0) - gradient) / jnp.linalg.norm(gradient)

    expected = ((K + 1) / R / steps) ** 0.5  # of independent draws
    assert error() < 2 * expected
    assert error(refresh=False) > 10 * expected


def test_bfloat16_gradients_are_projected_in_float32_and_come_back_as_bfloat16(getkey):
    gradient = jax.random.normal(getkey(), (LAYERS, K, D)).astype(jnp.bfloat16)
    tx = logra.low_rank(optax.trace(0.9), R, refresh=False)
    low, state = jit(tx.update)(gradient, tx.init(gradient))
    assert low.dtype == jnp.bfloat16
    assert state.inner.trace.dtype == jnp.float32
    wide = gradient.astype(jnp.float32)
    exact, _ = jit(tx.update)(wide, tx.init(wide))
    np.testing.assert_array_equal(low, exact.astype(jnp.bfloat16))


# --- which leaves are trained


def test_vectors_stay_fixed_and_holes_pass_through():
    params = {
        "up": {"kernel": jnp.ones((2, K, D)), "bias": jnp.ones((2, D))},
        "norm": {
            "scale": jnp.ones((2, D)),
            "offset": jnp.ones(D),
            "gain": jnp.ones(()),
        },
        "none": None,
        "masked": optax.MaskedNode(),
    }
    tx = logra.low_rank(optax.adam(0.1), R, refresh=False)
    state = tx.init(params)
    assert [m.shape for m in jax.tree.leaves(state.inner[0].mu)] == [(2, D, R)]
    updates, _ = jit(tx.update)(params, state)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for path, u in jax.tree.leaves_with_path(updates):
        assert bool(jnp.any(u != 0)) == (path[-1].key == "kernel")


def test_other_leaves_are_reached_through_multi_transform():
    params = {"up": jnp.ones((K, D)), "bias": jnp.ones(D), "table": jnp.ones((3, 2))}
    labels = {"up": "projections", "bias": "rest", "table": "rest"}
    low_rank = logra.low_rank(logra.scale_by_row_adam(), R)
    tx = optax.multi_transform(
        {"projections": low_rank, "rest": optax.sgd(0.5)}, labels
    )
    updates, _ = jit(tx.update)(params, tx.init(params))
    np.testing.assert_array_equal(updates["table"], -0.5 * params["table"])
    np.testing.assert_array_equal(updates["bias"], -0.5 * params["bias"])
    alone = {"up": params["up"]}
    expected, _ = jit(low_rank.update)(alone, low_rank.init(alone))
    np.testing.assert_array_equal(updates["up"], expected["up"])


def test_weight_decay_acts_after_and_not_inside():
    params = {"w": jnp.ones((K, D))}
    gradient = {"w": jnp.zeros((K, D))}
    inside = logra.low_rank(optax.adamw(1.0, weight_decay=0.1), R, refresh=False)
    updates, _ = jit(inside.update)(gradient, inside.init(params), params)
    assert jnp.all(updates["w"] == 0)
    tx = optax.chain(
        logra.low_rank(logra.scale_by_row_adam(), R), optax.add_decayed_weights(0.1)
    )
    updates, _ = jit(tx.update)(gradient, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], 0.1 * params["w"])


def test_flax_s_optimizer_trains_a_model_with_it():
    trained = nnx.clone(model())
    tx = logra.low_rank(readme_chain(), R)
    optimizer = nnx.Optimizer(trained, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients, predicted_kl=square_of)
        return value

    values = [float(step(trained, optimizer)) for _ in range(20)]
    assert values[-1] < 0.5 * values[0]


def test_optax_finds_the_sketch_shaped_leaves_of_the_state():
    params = {"w": jnp.ones((K, D)), "b": jnp.ones(D)}
    tx = logra.low_rank(optax.adam(0.1), R, refresh=False)
    marked = optax.tree.map_params(
        tx, lambda _: "moment", tx.init(params), transform_non_params=lambda _: "other"
    )
    assert marked.count == "other"
    assert marked.inner[0].mu["w"] == "moment"


# --- memory


def test_the_bases_of_a_stack_are_never_held_together():
    layers, k, d, rank = 16, 512, 8, 8
    gradients = {"w": jax.ShapeDtypeStruct((layers, k, d), jnp.float32)}
    tx = logra.low_rank(logra.scale_by_row_adam(), rank)
    state = jax.eval_shape(tx.init, gradients)
    compiled = jax.jit(tx.update).lower(gradients, state).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    basis, sketches = 4 * rank * k, 4 * layers * d * rank
    assert temporary < 4 * (basis + sketches) < layers * basis


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, r"`rank` must be a positive int .* got 0"),
        ({"rank": 1.5}, r"`rank` must be a positive int .* got 1\.5"),
        ({"rank": {"w": -1}}, r"`rank` must be a positive int .* got \{'w': -1\}"),
        ({"rank": 1, "seed": -1}, r"`seed` must be in \[0, 2\*\*32\), got -1"),
        ({"rank": 1, "kind": "dct"}, r"`kind` must be one of .* got 'dct'"),
    ],
)
def test_bad_arguments_are_refused_in_the_factory(arguments, message):
    factory = inspect.unwrap(logra.low_rank)  # in tests a type checker comes first
    with pytest.raises(ValueError, match=message):
        factory(optax.identity(), **arguments)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (7, r"`rank` must be in \[1, min.* = \[1, 6\] for layer 'layers\.up', got 7"),
        ({"up": 2}, r"`rank` must cover .*'layers\.down'; add an expression"),
    ],
)
def test_a_rank_that_does_not_fit_names_the_leaf(rank, message):
    params = {
        "layers": {
            "up": {"kernel": jnp.ones((LAYERS, K, D))},
            "down": {"kernel": jnp.ones((LAYERS, 8, 9))},
        }
    }
    with pytest.raises(ValueError, match=message):
        logra.low_rank(optax.identity(), rank).init(params)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logra_jax as logra
from logra_jax.algorithm import alignment
from logra_jax.algorithm.alignment import KURTOSIS, Moments, measure_moments
from logra_jax.algorithm.basis import KINDS

TOKENS, K, D = 30, 24, 10


def layer(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs with a falling spectrum and cotangents that follow them; float64."""
    rng = np.random.default_rng(seed)
    scale = np.arange(1.0, K + 1) ** -0.5
    turn = np.linalg.qr(rng.normal(size=(K, K)))[0]
    x = (rng.normal(size=(TOKENS, K)) * scale) @ turn
    return x, rng.normal(size=(TOKENS, D)) + x[:, :D]


def draw(seed: int, rank: int, kind: str) -> np.ndarray:
    return np.asarray(
        logra.basis_matrix(jax.random.key(seed), rank, K, kind), np.float64
    )


def by_hand(x: np.ndarray, g: np.ndarray, A: np.ndarray) -> dict[str, float]:
    """The definitions, every matrix formed."""
    G, C = g.T @ x, x.T @ x / len(x)
    S = G @ A.T
    lifted = S @ A
    only = np.diag(np.diag(C))
    return {
        "gradient": np.sum(G**2),
        "gradient_cost": np.trace(G @ C @ G.T),
        "gradient_diagonal": np.trace(G @ only @ G.T),
        "inputs": np.trace(C),
        "sketch": np.sum(S**2),
        "lifted": np.sum(lifted**2),
        "lifted_cost": np.trace(lifted @ C @ lifted.T),
        "lifted_diagonal": np.trace(lifted @ only @ lifted.T),
    }


def moments(x, g, A) -> Moments:
    return Moments.of(
        measure_moments(*(jnp.asarray(a, jnp.float32) for a in (x, g, A)))
    )


def sample(x, g, rank: int, kind: str, draws: int) -> Moments:
    """Moments over many bases, (draws,)."""
    X, Y = jnp.asarray(x, jnp.float32), jnp.asarray(g, jnp.float32)
    basis = logra.Basis(seed=1, kind=kind)

    def one(step):
        address = jnp.stack([jnp.uint32(1), step, jnp.uint32(0)])
        return measure_moments(X, Y, basis.matrix(address, rank, K))

    found = jax.jit(jax.vmap(one))(jnp.arange(draws, dtype=jnp.uint32))
    return Moments.of(found)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_their_definitions(kind):
    x, g = layer(0)
    A = draw(1, 5, kind)
    found = moments(x, g, A)
    for name, value in by_hand(x, g, A).items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-4)


def test_tokens_that_the_loss_does_not_depend_on_do_not_count():
    x, g = layer(0)
    A = draw(1, 5, "rademacher")
    g[7:12] = 0.0
    real = np.r_[0:7, 12:TOKENS]
    for value, expected in zip(
        moments(x, g, A), moments(x[real], g[real], A), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_measures_are_their_definitions():
    x, g = layer(0)
    A = draw(1, 5, "rademacher")
    m = moments(x, g, A)
    G, C = g.T @ x, x.T @ x / TOKENS
    lifted = G @ A.T @ A

    def norm(v: np.ndarray) -> float:
        return float(np.linalg.norm(v))

    def gain(v: np.ndarray) -> float:
        """Of a step along v, at equal cost."""
        return float(np.sum(G * v) / np.sqrt(np.trace(v @ C @ v.T)))

    expected = {
        "cosine": np.sum(G * lifted) / norm(G) / norm(lifted),
        "snr": norm(lifted) / norm(lifted - G),
        "norm_ratio": norm(lifted) / norm(G),
        "effective_dimension": norm(G) ** 2 * np.trace(C) / np.trace(G @ C @ G.T),
        "realised_cos_c": gain(lifted) / gain(G),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(alignment, name)(m), value, rtol=1e-4)


def test_kurtosis_is_that_of_the_entries():
    for kind in KINDS:
        entries = np.asarray(logra.basis_matrix(jax.random.key(0), 64, 4096, kind))
        fourth = np.mean(entries**4) / np.mean(entries**2) ** 2
        np.testing.assert_allclose(KURTOSIS[kind], fourth, rtol=0.02)
    assert KURTOSIS["rademacher"] == 1.0
    assert 2.9 < KURTOSIS["gaussian"] < 3.0


def mean(values) -> tuple[float, float]:
    """Mean and four standard errors."""
    values = np.asarray(values, np.float64)
    return values.mean(), 4 * values.std() / len(values) ** 0.5


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_one_identity_holds_on_average(kind, rank):
    """E tr(Ĝ C Ĝᵀ), for C = I, mean xxᵀ and its diagonal."""
    x, g = layer(2)
    found = sample(x, g, rank, kind, draws=20000)
    G, C = g.T @ x, x.T @ x / TOKENS
    kurtosis = {"rademacher": 1.0, "gaussian": 2.92}[kind]
    for name, c in (
        ("lifted", np.eye(K)),
        ("lifted_cost", C),
        ("lifted_diagonal", np.diag(np.diag(C))),
    ):
        cost, diagonal = (np.trace(G @ m @ G.T) for m in (c, np.diag(np.diag(c))))
        spread = np.sum(G**2) * np.trace(c)
        expected = cost + (cost + spread + (kurtosis - 3) * diagonal) / rank
        average, error = mean(getattr(found, name))
        assert abs(average - expected) < error
        # else the term of the diagonal, the smallest, could be left out
        assert kind == "gaussian" or error < 1.5 * diagonal / rank


@pytest.mark.parametrize("kind", KINDS)
def test_laws_are_ratios_of_means_over_draws(kind):
    x, g = layer(3)
    rank = 8
    m = sample(x, g, rank, kind, draws=20000)
    law = np.asarray(alignment.cos_c(m, rank, kind))
    np.testing.assert_allclose(law, law[0], rtol=1e-5)  # no draw is in it
    averages = Moments(*(mean(values)[0] for values in m))
    realised = averages.sketch / averages.gradient
    realised *= np.sqrt(averages.gradient_cost / averages.lifted_cost)
    np.testing.assert_allclose(realised, law[0], rtol=0.02)
    cosine = averages.sketch / np.sqrt(averages.gradient * averages.lifted)
    expected = alignment.expected_cosine(K, rank, kind)
    np.testing.assert_allclose(cosine, expected, rtol=0.01)
    # The mean of the ratio itself is near, and not below.
    near = float(np.mean(alignment.realised_cos_c(m)))
    assert law[0] < near < 1.1 * law[0]
    d_eff = alignment.effective_dimension(m)[0]
    assert alignment.expected_cos_c(d_eff, rank, kind) < law[0]


def test_the_laws_of_signs_and_normals_by_shape():
    for width, rank in ((1536, 4), (8960, 256)):
        signs = alignment.expected_cosine(width, rank)
        normal = alignment.expected_cosine(width, rank, "gaussian")
        assert signs == pytest.approx((1 + (width - 1) / rank) ** -0.5, rel=1e-12)
        # on its grid, whose kurtosis is a little below 3
        assert normal == pytest.approx((1 + (width + 1) / rank) ** -0.5, rel=1e-4)
        assert normal < signs


def test_white_inputs_have_the_dimension_of_the_space():
    """C = I: d_eff = k, and cos_C is the cosine of matrices."""
    x = np.linalg.qr(np.random.default_rng(0).normal(size=(TOKENS, K)))[0]
    x *= TOKENS**0.5
    _, g = layer(0)
    for kind in KINDS:
        m = moments(x, g, draw(0, 5, kind))
        np.testing.assert_allclose(alignment.effective_dimension(m), K, rtol=1e-4)
        np.testing.assert_allclose(
            alignment.cos_c(m, 5, kind),
            alignment.expected_cosine(K, 5, kind),
            rtol=1e-4,
        )


def test_one_direction_of_inputs_costs_nothing_to_sketch():
    """x of rank 1: d_eff = 1, however many features."""
    direction = np.random.default_rng(0).normal(size=K)
    x = np.random.default_rng(1).normal(size=(TOKENS, 1)) * direction
    _, g = layer(0)
    m = moments(x, g, draw(0, 5, "gaussian"))
    np.testing.assert_allclose(alignment.effective_dimension(m), 1.0, rtol=1e-4)
    np.testing.assert_allclose(alignment.realised_cos_c(m), 1.0, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sketch_alone_estimates_the_cost_without_bias(kind):
    x, g = layer(4)
    rank = 12
    m = sample(x, g, rank, kind, draws=20000)
    square = np.asarray(alignment.sketched_cos_c(m, rank, kind), np.float64) ** 2
    assert np.mean(square == 0) < 1e-3  # where it is cut off, it is biased
    average, error = mean(square * m.lifted_cost)
    assert abs(average - m.gradient_cost[0]) < error
    # Left out, the factor 1 + 1/r or the term of κ would be noticed.
    assert error < 0.5 * average / rank
    assert kind == "gaussian" or error < 1.5 * m.gradient_diagonal[0] / rank
    law = float(alignment.cos_c(m, rank, kind)[0])
    assert abs(np.sqrt(square).mean() - law) < 0.05


def test_estimates_at_rank_one_are_numbers():
    x, g = layer(0)
    for kind in KINDS:
        m = moments(x, g, draw(0, 1, kind))
        assert 0 <= float(alignment.sketched_cos_c(m, 1, kind)) <= 1


def test_no_gradient_is_no_number():
    x, g = layer(0)
    m = moments(x, 0 * g, draw(0, 5, "rademacher"))
    assert float(m.gradient) == 0
    assert np.isnan(alignment.cos_c(m, 5, "rademacher"))
    assert np.isnan(alignment.cosine(m))

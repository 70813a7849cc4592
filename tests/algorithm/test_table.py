import jax
import jax.numpy as jnp
from flax import nnx

import logra_jax as logra


class Model(nnx.Module):
    """Stacked heads, experts, a layer alone, and what is not sketched."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.LinearGeneral(8, (2, 5), use_bias=False, rngs=rngs)

        self.heads = make(rngs)
        self.experts = nnx.Einsum("tec,ecd->ted", (4, 8, 6), rngs=rngs)
        self.out = nnx.Linear(6, 7, rngs=rngs)
        self.again = self.out
        self.embed = nnx.Embed(100, 8, rngs=rngs)


def test_the_table_lists_every_matrix_once_and_shares_of_all_parameters():
    model = logra.sketch(Model(nnx.Rngs(0)), {"heads": 4, "": 2})
    parameters = 3 * 8 * 10 + 4 * 8 * 6 + (6 * 7 + 7) + 100 * 8
    lines = [line.split() for line in logra.sketch_table(model).splitlines()]
    titles, *rows, total = lines
    assert titles == ["layer", "stack", "k", "d", "rank", "parameters", "share"]
    expected = {
        "heads": (3, 8, 10, 4, 240),
        "experts": (4, 8, 6, 2, 192),
        "again": (1, 6, 7, 2, 42),
    }
    assert {row[0]: tuple(map(int, row[1:6])) for row in rows} == expected
    assert {row[0]: row[6] for row in rows} == {
        name: f"{row[-1] / parameters:.1%}" for name, row in expected.items()
    }
    assert total == ["total", "8", "474", f"{474 / parameters:.1%}"]


def test_the_table_s_lines_are_equally_long_and_thousands_are_marked():
    table = logra.sketch_table(logra.sketch(nnx.Linear(60, 50, rngs=nnx.Rngs(0)), 2))
    assert len({len(line) for line in table.splitlines()}) == 1
    assert "(the model)" in table
    assert " 3,000 " in table


def test_the_table_needs_no_arrays():
    model = logra.sketch(Model(nnx.Rngs(0)), 2)
    graph, state = nnx.split(model)
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.copy, state))
    abstract = nnx.merge(graph, shapes)
    assert logra.sketch_table(abstract) == logra.sketch_table(model)


def test_the_table_of_a_model_that_is_not_sketched_is_empty():
    *_, total = logra.sketch_table(Model(nnx.Rngs(0))).splitlines()
    assert total.split() == ["total", "0", "0", "0.0%"]

r"""math-verify as the judge of expressions, sets, relations and matrices.

The parser and sympy behind it compute what they are given, for as long as it takes, so
that expressions are looked over first: `9^{9^{9^9}}`, `100000000!` and brackets a
hundred deep never reach them. Their own time limits are signals, which work in the main
thread alone; here they are off.
"""

import functools
import itertools
import logging
import re
from math import prod
from typing import Any, cast

from logra_jax.rl.math_text import depths

_LONGEST = 300
# An answer that is longer than this many times the reference, and this many
# characters, is not simplified: it is wrong.
_TIMES_LONGER, _LONGER = 4, 60
_DEEPEST = 8
_KNOWN = r"""
    frac sqrt binom cdot times div pm mp infty le ge ne in cup cap setminus emptyset
    sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh ln log exp
    alpha beta gamma delta epsilon varepsilon theta lambda mu pi rho sigma tau phi
    varphi psi omega mathbb text circ prime overline bar vec angle triangle
    lfloor rfloor lceil rceil lvert rvert vert mid begin end
"""
_COMMANDS = frozenset(_KNOWN.split())
# n! and 20! may be; (n + 1)!, 100! and 5!! not.
_FACTORIAL = re.compile(r"(?<![0-9A-Za-z!])([0-9]{1,2}|[a-z])!(?!\s*!)")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_FUNCTIONS = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot|arc|ln|log|exp|sqrt|binom)")
_REFUSED = re.compile(
    r"""
    [^ -~]                                    # not ASCII
    | [0-9]{19}
    | (?<![_0-9])[0-9]+[ ]+[0-9.]             # added by math-verify: 1 2 3 is 6
    | (?<![\\A-Za-z{])[A-Za-z]{7}             # a word
    | \)\s*_                                  # (n)_{k} is taken for n!/(n - k)!
    | \\binom.*[0-9]{4}
    | \\sqrt\s*\(                             # lost by math-verify
    | \\end\s*\{[a-z]*\}\s*\^                 # powers of matrices
    | ^(?=.*(?:[<>=]|\\[lg]e(?![a-z]))).*\^\s*\{?\s*-?\s*[0-9]{2}  # slow to solve
    """,
    re.VERBOSE,
)
_EXPONENT = re.compile(
    r"([)}\]]?)\s*\^\s*(\{(?:[^{}]|\{[^{}]*\})*\}|\([^()]*\)|-?\s*(?:[0-9]+|\\?[A-Za-z]+))"
)
_MOST_FUNCTIONS, _MOST_QUOTIENTS = 8, 6
_MOST_POWER, _MOST_IN_TOWER = 10_000, 4
# Values that differ by more than this times their size are different: math-verify
# takes what is below 1e-15 for nothing.
_NEAR = 1e-5


def is_harmless(text: str) -> bool:
    """Whether a clean expression can be handed to sympy: a look, nothing computed."""
    return (
        len(text) <= _LONGEST
        and max((depth for _, depth in depths(text)), default=0) <= _DEEPEST
        and _COMMANDS.issuperset(_COMMAND.findall(text))
        and not _REFUSED.search(text)
        and text.count("!") == len(_FACTORIAL.findall(text))
        and text.count("/") <= _MOST_QUOTIENTS
        and len(_FUNCTIONS.findall(text)) <= _MOST_FUNCTIONS
        and _has_small_powers(text)
    )


def verified(answer: str, gold: str) -> bool:
    """Whether math-verify takes a clean answer for the reference."""
    if not (is_harmless(answer) and is_harmless(gold)):
        return False
    if len(answer) > _TIMES_LONGER * len(gold) + _LONGER:
        return False
    parse, verify = _math_verify()
    given, wanted = (
        [_union(value) for value in parse(f"${text}$") if not isinstance(value, str)]
        for text in (answer, gold)
    )
    pairs = itertools.product(given, wanted)
    return not any(_differ(*pair) for pair in pairs) and bool(verify(wanted, given))


def _differ(one: Any, other: Any) -> bool:
    """Whether two expressions differ at a point: to simplify such may take for ever."""
    from sympy import Expr, Set

    expressions = [isinstance(value, Expr) for value in (one, other)]
    if not all(expressions):
        # A set is no number, but to look whether it is one may take long.
        return any(expressions) and (isinstance(one, Set) or isinstance(other, Set))
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    point: Any = {name: 0.7 + 0.3 / (2 + i) for i, name in enumerate(names)}
    try:
        sizes = [abs(value.evalf(subs=point)) for value in (one - other, one, other)]
        return bool(sizes[0] > _NEAR * max(sizes[1:]))
    # What has no value there, or none at all: log 0, 1/0, f(x).
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False


def _union(value: Any) -> Any:
    """The numbers of "x < 1 or x > 4", which are read as a set of two relations."""
    from sympy import FiniteSet, Union

    members: Any = value.args if isinstance(value, FiniteSet) else ()
    relations = members and all(member.is_Relational for member in members)
    return Union(*(member.as_set() for member in members)) if relations else value


def forget() -> None:
    """Empties sympy's caches, which grow with every new expression."""
    from sympy.core.cache import clear_cache

    clear_cache()


def _has_small_powers(text: str) -> bool:
    """Whether what the exponents multiply up to stays small.

    A power of a power multiplies its exponents; a tower raises them. Exponents behind a
    bracket may be of the first kind, whatever it holds.
    """
    largest, chain, seen = 1, 1, 0
    for behind, exponent in _EXPONENT.findall(text):
        numerals = [max(int(n), 1) for n in re.findall("[0-9]+", exponent)]
        nested = exponent.count("^")
        if nested > 1 or (nested and max(numerals, default=1) > _MOST_IN_TOWER):
            return False
        chain *= prod(numerals) if behind else 1
        largest = max(largest, prod(numerals))
        seen += 1 + nested
    return seen == text.count("^") and largest * chain <= _MOST_POWER


@functools.cache
def _math_verify() -> tuple[Any, Any]:
    """math-verify's `parse` and `verify`, without their time limits."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    # It warns, twice in a process, that limits are off; that is what pools are for.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its reading of units takes the t of 3t for one.
    spelling = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    parse = functools.partial(
        math_verify.parse,
        extraction_config=[
            math_verify.LatexExtractionConfig(normalization_config=spelling)
        ],
        parsing_timeout=cast(int, None),  # annotated too narrowly
    )
    verify = functools.partial(
        math_verify.verify, timeout_seconds=None, allow_set_relation_comp=True
    )
    return parse, verify

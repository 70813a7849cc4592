r"""Whether two symbolic expressions are the same, by math-verify's parser.

The parser and sympy behind it compute what they are given, for as long as it takes, so
that expressions are looked over first: `9^{9^{9^9}}`, `100000000!` and brackets a
hundred deep never reach them. Their own time limits are signals, which work in the main
thread alone; here they are off.

Two expressions are the same when they agree at random points, to 12 digits: that is
quicker than to simplify their difference, and as sure.
"""

import functools
import logging
import re
from fractions import Fraction
from typing import Any, cast

from logra_jax.rl.math_numbers import approximates, number
from logra_jax.rl.math_text import matching
from logra_jax.rl.math_values import values_at_points

_LONGEST = 300
# An answer that is longer than this many times the reference, and this many
# characters, is not simplified: it is wrong.
_TIMES_LONGER, _LONGER = 4, 60
_FEWEST_POINTS = 2
_DEEPEST = 8
_KNOWN = r"""
    frac sqrt binom cdot times div pm mp infty le ge ne in cup cap setminus emptyset
    sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh ln log exp
    alpha beta gamma delta epsilon varepsilon theta lambda mu pi rho sigma tau phi
    varphi psi omega mathbb text circ prime overline bar vec angle triangle
    lfloor rfloor lceil rceil lvert rvert vert mid begin end
"""
_COMMANDS = frozenset(_KNOWN.split())
_FUNCTIONS = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot|arc|ln|log|exp|sqrt|binom)")
_MOST_FUNCTIONS = 8
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_ASCII = re.compile(r"[ -~]*")
_MANY_DIGITS = re.compile(r"[0-9]{19,}")
# math-verify adds numbers that stand side by side: 1 2 3 is 6.
_SIDE_BY_SIDE = re.compile(r"(?<![_0-9])[0-9]+ +[0-9.]")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{7,}")
# n! and 20! may be; (n + 1)!, 100! and 5!! not.
_FACTORIAL = re.compile(r"(?<![0-9A-Za-z!])([0-9]{1,2}|[a-z])!(?!\s*!)")
# math-verify takes (n)_{k} for a falling factorial.
_FALLING = re.compile(r"\)\s*_")
_NUMERAL = re.compile(r"[0-9]+")
_BIG_BINOMIAL = re.compile(r"\\binom.*[0-9]{4}")
_REFUSED = (_MANY_DIGITS, _SIDE_BY_SIDE, _LONG_WORD, _FALLING, _BIG_BINOMIAL)
_MOST_POWER = 10_000
_MOST_IN_TOWER = 4
_MOST_IN_CHAIN = 100_000


def is_harmless(text: str) -> bool:
    """Whether a clean expression can be handed to sympy: a look, nothing computed."""
    if len(text) > _LONGEST or not _ASCII.fullmatch(text) or _depth(text) > _DEEPEST:
        return False
    if not _COMMANDS.issuperset(_COMMAND.findall(text)):
        return False
    if any(pattern.search(text) for pattern in _REFUSED):
        return False
    if text.count("!") != len(_FACTORIAL.findall(text)):
        return False
    return len(_FUNCTIONS.findall(text)) <= _MOST_FUNCTIONS and _has_small_powers(text)


def same_expression(answer: str, gold: str) -> bool:
    """Whether two clean expressions are the same number, function, set or relation.

    A decimal is taken for an irrational number where it gives six places.
    """
    if not (is_harmless(answer) and is_harmless(gold)):
        return False
    if len(answer) > _TIMES_LONGER * len(gold) + _LONGER:
        return False
    wanted, given = _parse(gold), _parse(answer)
    if wanted is None or given is None:
        return False
    decimal = number(answer)
    if decimal is not None and decimal.decimals is not None:
        value = _constant(wanted)
        return value is not None and approximates(decimal, value)
    if not (_is_expression(given) or _is_expression(wanted)):
        # Sets, relations, products of matrices: their own comparison may take long.
        return len(answer) <= len(gold) + _LONGER and _verify(wanted, given)
    return _agree(given, wanted)


def same_equation(answer: tuple[str, str], gold: tuple[str, str]) -> bool:
    """Whether two equations, each its two sides, are multiples of each other."""
    if not all(map(is_harmless, answer + gold)):
        return False
    sides = [_parse(side) for side in answer + gold]
    if not all(map(_is_expression, sides)):
        return False
    ratios = [
        (a - b) / (c - d) for a, b, c, d in values_at_points(sides) if not _near(c, d)
    ]
    if len(ratios) < _FEWEST_POINTS or abs(ratios[0]) < 1e-9:
        return False
    return all(_near(ratio, ratios[0]) for ratio in ratios)


def forget() -> None:
    """Empties sympy's caches, which grow with every new expression."""
    from sympy.core.cache import clear_cache

    clear_cache()
    _parse.cache_clear()


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _has_small_powers(text: str) -> bool:
    """Whether what the exponents multiply up to stays small.

    A power of a power multiplies its exponents; a tower raises them. Exponents behind a
    bracket may be of the first kind, whatever it holds.
    """
    largest, chain = 1, 1
    for position, character in enumerate(text):
        if character != "^":
            continue
        exponent = _operand(text, position + 1)
        size, most = 1, 0
        for numeral in _NUMERAL.findall(exponent):
            size *= max(int(numeral), 1)
            most = max(most, int(numeral))
        nested = exponent.count("^")
        if size > _MOST_POWER or nested > 1 or (nested and most > _MOST_IN_TOWER):
            return False
        if text[:position].rstrip().endswith((")", "}", "]")):
            chain *= size
        else:
            largest = max(largest, size)
    return largest * chain <= _MOST_IN_CHAIN


def _operand(text: str, start: int) -> str:
    """The exponent behind a "^": a group, a signed number or one token."""
    while start < len(text) and text[start] in " -":
        start += 1
    if start < len(text) and text[start] in "({":
        end = matching(text, start)
        return text[start:] if end is None else text[start : end + 1]
    match = re.compile(r"[0-9]+|\\?[A-Za-z]+|").match(text, start)
    return match.group() if match else ""


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    """The sympy object, or None where there is none."""
    found = _math_verify()[0](f"${text}$")
    return None if not found or isinstance(found[0], str) else found[0]


@functools.cache
def _math_verify() -> tuple[Any, Any]:
    """math-verify's `parse` and `verify`, without their time limits."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # It warns, twice in a process, that limits are off; that is what pools are for.
    for name in ("parser", "grader"):
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    spelling = NormalizationConfig(
        basic_latex=True,
        # It takes the t of 3t for a unit.
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="none",
        equations=False,
    )
    extraction = [LatexExtractionConfig(normalization_config=spelling)]
    return (
        functools.partial(
            parse,
            extraction_config=extraction,
            parsing_timeout=cast(int, None),  # annotated too narrowly
        ),
        functools.partial(verify, timeout_seconds=None, allow_set_relation_comp=True),
    )


def _verify(gold: Any, answer: Any) -> bool:
    return bool(_math_verify()[1](gold, answer))


def _is_expression(value: Any) -> bool:
    import sympy

    return isinstance(value, sympy.Expr)


def _agree(given: Any, wanted: Any) -> bool:
    """Whether two expressions agree at random points, or are the same tree."""
    if not (_is_expression(given) and _is_expression(wanted)):
        return False
    # A constant against a function: that x - x is one is not worth the trouble.
    if bool(given.free_symbols) != bool(wanted.free_symbols):
        return False
    pairs = values_at_points([given, wanted])
    if len(pairs) < _FEWEST_POINTS:
        return bool(given == wanted)
    return all(_near(a, b) for a, b in pairs)


def _near(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= 1e-12 * max(abs(a), abs(b)))


def _constant(value: Any) -> Fraction | None:
    """The value of a real expression without variables."""
    if not _is_expression(value) or value.free_symbols:
        return None
    points = values_at_points([value])
    if not points or points[0][0].imag != 0:
        return None
    return Fraction(str(points[0][0].real))

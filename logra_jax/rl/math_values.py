"""The values of sympy expressions at random points.

Sympy's own `evalf` evaluates the factors of nested products again and again, up to
exponential time. This walks each tree once, in numbers of 30 digits.
"""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_DIGITS = 30
_POINTS = 5
# Powers of ten that the size of a value stays below: beyond, powers take long.
_LARGEST = 5000
_SAME_NAMES = """
    sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log floor factorial
    binomial re im conjugate
"""
# mpmath's names of sympy's functions.
_FUNCTIONS = {name: name for name in _SAME_NAMES.split()} | {
    "Abs": "fabs",
    "ceiling": "ceil",
}
_local = threading.local()


def values_at_points(expressions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Values of the expressions at the same few points, where all have a finite one.

    Variables take values of both signs, so that |x| is not x. The points are the same
    every time; an expression without variables is evaluated at each of them too.

    Returns:
        Complex numbers of mpmath, a tuple for each point; none where a function is
        unknown.
    """
    context = _context()
    names = sorted({str(s) for e in expressions for s in e.free_symbols})
    draw = random.Random(0).uniform
    found = []
    for _ in range(_POINTS):
        point = {name: context.mpf(draw(-2.5, 2.5)) for name in names}
        try:
            values = tuple(_value(e, point, context) for e in expressions)
        # What has no value there, or none at all: log 0, 1/0, f(x).
        except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
            continue
        if all(context.isfinite(value) for value in values):
            found.append(values)
    return found


def _context() -> Any:
    """A thread's own arithmetic: mpmath keeps the precision in a shared object."""
    if not hasattr(_local, "context"):
        from mpmath.ctx_mp import MPContext

        _local.context = MPContext()
        _local.context.dps = _DIGITS
    return _local.context


def _value(node: Any, point: Mapping[str, Any], context: Any) -> Any:
    if node.is_Symbol:
        return context.mpc(point[str(node)])
    if node.is_Rational:
        return context.mpc(context.mpf(int(node.p)) / int(node.q))
    if node.is_Float:
        return context.mpc(context.mpf(str(node)))
    name = type(node).__name__
    constants = {"Pi": context.pi, "Exp1": context.e, "ImaginaryUnit": context.j}
    if name in constants:
        return context.mpc(constants[name])
    values = [_value(argument, point, context) for argument in node.args]
    if node.is_Add:
        return context.fsum(values)
    if node.is_Mul:
        return context.fprod(values)
    if node.is_Pow:
        return _power(values[0], values[1], context)
    if name == "UnevaluatedExpr":
        return values[0]
    return _apply(getattr(context, _FUNCTIONS[name]), values, context)


def _power(base: Any, exponent: Any, context: Any) -> Any:
    if base == 0 and exponent.real <= 0:
        raise ZeroDivisionError
    size = abs(context.log10(abs(base))) if base != 0 else 0
    if abs(exponent) * (size + 1) > _LARGEST:
        raise OverflowError
    return base**exponent


def _apply(function: Callable[..., Any], values: list[Any], context: Any) -> Any:
    if any(abs(value) > _LARGEST for value in values):
        raise OverflowError
    # Floors and factorials are of real numbers, and cheaper so.
    real = all(value.imag == 0 for value in values)
    return context.mpc(function(*((v.real for v in values) if real else values)))

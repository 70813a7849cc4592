"""The rules that values of a configuration are held to; each complaint one sentence.

It names the field, the rule, the value received and what to do.
"""

import math
import re
from collections.abc import Callable


def show(value: object) -> str:
    """A value as the reader wrote it: null, not None."""
    return "null" if value is None else repr(value)


def require(ok: bool, name: str, value: object, rule: str, remedy: str = "") -> None:
    """Raise the one sentence that says which rule `name` broke, and what to do."""
    if not ok:
        hint = f"; {remedy}" if remedy else ""
        end = "" if hint.endswith("?") else "."
        raise ValueError(f"`{name}` must {rule}, got {show(value)}{hint}{end}")


def require_if_set(
    rule: Callable[..., None], name: str, value: object, *remedy: str
) -> None:
    """Hold a value to a rule of this module, unless it is null."""
    if value is not None:
        rule(name, value, *remedy)


def at_least(name: str, value: int, low: int, remedy: str = "") -> None:
    """Raise if `value` lies below `low`."""
    require(value >= low, name, value, f"be at least {low}", remedy)


def positive(name: str, value: float, remedy: str = "") -> None:
    """Raise unless `value` is positive and finite."""
    require(0 < value < math.inf, name, value, "be positive and finite", remedy)


def seed_in_range(name: str, value: int) -> None:
    """Raise unless `value` is a seed: 32 bits."""
    require(0 <= value < 2**32, name, value, "lie in [0, 2**32)")


def regular_expression(name: str, value: object) -> None:
    """Raise unless `value` compiles."""
    try:
        re.compile(str(value))
    except re.error as error:
        require(False, name, value, "be a regular expression", str(error))

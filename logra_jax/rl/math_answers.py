r"""Whether an answer to a mathematical question is the one wanted.

An answer is taken apart first: lists, tuples, sets, intervals, inequalities, matrices,
equations and units. Numbers are compared exactly, words as words, and only what is left
goes to a computer algebra system (see `math_symbols`).

What a reference answer asks for, an answer must give:

- a number asks for a number: 4/8 is 1/2, but 2+3, 2^3 or \sqrt{25} are left to compute
  and are not accepted. An expression (2\pi, 2^{10}, x+1) accepts any equal one.
- (1, 2) asks for that order; 1, 2 and \{1, 2\} for these members in any order.
- brackets of an interval count: [1, 2) is not (1, 2).
- x = 5 and 5 name the same; a unit may be missing, but not be another.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from logra_jax.rl.math_numbers import number, same_number
from logra_jax.rl.math_symbols import same_equation, same_expression
from logra_jax.rl.math_text import (
    clean,
    enclosed,
    leading_letter,
    letter,
    plain_words,
    split_top,
    squeeze,
    words,
)
from logra_jax.rl.math_units import contradict, split_unit

_LONGEST = 2000
_DEEPEST = 20
_NAME = re.compile(
    r"(?:\\?[A-Za-z]+|\\text\s*\{[^{}]*\}|\\(?:vec|angle|triangle|overline)\s*\{?\s*\w+\}?)"
    r"(?:_(?:\w|\{\w+\}))?'*(?:\s*\(\s*[a-z](?:\s*,\s*[a-z])*\s*\))?"
    r"|\(\s*[a-z](?:\s*,\s*[a-z])*\s*\)"
)
_MEMBER = re.compile(r"(?:\\?[A-Za-z]+|\([a-z, ]+\))\s*\\in(?![A-Za-z])\s*(.+)")
_BUILDER = re.compile(r"\\\{\s*[A-Za-z]\s*(?:\\mid(?![A-Za-z])|:|\|)(.+)\\\}")
_ORDER = re.compile(r"<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_MATRIX = re.compile(
    r"\\begin\s*\{([pbv]?matrix|array)\}(?:\s*\{[lcr|]*\})?(.*)\\end\s*\{\1\}"
)
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def same_answer(answer: str, gold: str) -> bool:
    """Whether a final answer is the reference, both as they were written."""
    if len(answer) > _LONGEST or len(gold) > _LONGEST:
        return False
    given, wanted = clean(answer), clean(gold)
    if not given or not wanted:
        return False
    return _same(given, wanted)


class _Group(NamedTuple):
    r"""Several values; a bare list has empty brackets, a union of sets "\cup"."""

    opening: str
    closing: str
    items: list[str]


def _same(answer: str, gold: str, depth: int = 0) -> bool:
    if not answer or not gold or depth > _DEEPEST:
        return False
    if squeeze(answer) == squeeze(gold):
        return True
    for kind in (_same_words, _same_matrix, _same_relation, _same_named, _same_group):
        verdict = kind(answer, gold, depth + 1)
        if verdict is not None:
            return verdict
    return _same_value(answer, gold)


def _same_words(answer: str, gold: str, depth: int) -> bool | None:
    """Names, yes and no, letters of a multiple choice."""
    del depth
    choice = letter(gold)
    if choice is not None and (gold.isupper() or len(gold) > 1):
        return leading_letter(answer) == choice
    wanted = words(gold)
    if wanted is None:
        return None
    if wanted == plain_words(answer):
        return True
    # A list of words, or a number in \text{}, may still agree in another way.
    splits = len(split_top(gold, ",;")) > 1 or any(c.isdigit() for c in gold)
    return None if splits else False


def _same_matrix(answer: str, gold: str, depth: int) -> bool | None:
    wanted = _MATRIX.fullmatch(gold)
    if wanted is None:
        return None
    given = _MATRIX.fullmatch(_assigned(answer))
    if given is None or ("v" in given.group(1)) != ("v" in wanted.group(1)):
        return False
    rows, others = _cells(given.group(2)), _cells(wanted.group(2))
    if [len(row) for row in rows] != [len(row) for row in others]:
        return False
    return all(
        _same(cell, other, depth)
        for row, other_row in zip(rows, others, strict=True)
        for cell, other in zip(row, other_row, strict=True)
    )


def _cells(body: str) -> list[list[str]]:
    rows = [row for row in body.split(r"\\") if row.strip()]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def _same_relation(answer: str, gold: str, depth: int) -> bool | None:
    r"""Inequalities, x \in S and unions, all of them sets of numbers."""
    wanted, given = _as_union(gold), _as_union(answer)
    if wanted is None and given is None:
        return None
    names = (_variable(answer), _variable(gold))
    if None not in names and names[0] != names[1]:
        return False
    return _same_members(_intervals(answer, given), _intervals(gold, wanted), depth)


def _intervals(text: str, union: list[str] | None) -> list[str]:
    return [text] if union is None else union


def _as_union(text: str) -> list[str] | None:
    """The intervals of a relation, a membership or a union; None for other things."""
    member = _MEMBER.fullmatch(text)
    if member:
        return _as_union(member.group(1)) or [member.group(1)]
    builder = _BUILDER.fullmatch(text)
    if builder:
        return _as_union(builder.group(1).strip())
    if _UNION.search(text):
        return [part.strip() for part in _UNION.split(text)]
    parts = split_top(text, ",;")
    intervals = [_interval(part) for part in parts]
    if all(interval is not None for interval in intervals):
        return [interval for interval in intervals if interval is not None]
    if squeeze(text) in (r"\mathbb{R}", r"\R"):
        return [r"(-\infty,\infty)"]
    return None


def _interval(text: str) -> str | None:
    r"""`1 < x \le 2` as `(1,2]`."""
    signs = _ORDER.findall(text)
    parts = [part.strip() for part in _ORDER.split(text)]
    if len(signs) == 1:
        left, right = parts
        if _NAME.fullmatch(left) and not _NAME.fullmatch(right):
            left, right, signs = right, left, [_FLIPPED[signs[0]]]
        if not _NAME.fullmatch(right):
            return None
        low = signs[0] in ("<", r"\le")
        ends = (left, r"\infty") if low else (r"-\infty", left)
        closed = signs[0] in (r"\le", r"\ge")
        brackets = ("[" if closed and low else "(", "]" if closed and not low else ")")
        return f"{brackets[0]}{ends[0]},{ends[1]}{brackets[1]}"
    if len(signs) != 2 or not _NAME.fullmatch(parts[1]):
        return None
    if all(sign in (">", r"\ge") for sign in signs):
        parts, signs = parts[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    if not all(sign in ("<", r"\le") for sign in signs):
        return None
    opening = "[" if signs[0] == r"\le" else "("
    closing = "]" if signs[1] == r"\le" else ")"
    return f"{opening}{parts[0]},{parts[2]}{closing}"


def _variable(text: str) -> str | None:
    """The variable of the first inequality."""
    if not _ORDER.search(text):
        return None
    parts = _ORDER.split(split_top(text, ",;")[0])
    names = [part.strip() for part in parts if _NAME.fullmatch(part.strip())]
    return names[0] if names else None


def _same_named(answer: str, gold: str, depth: int) -> bool | None:
    """Equations: x = 5 names 5, 2x + y = 1 is what it says."""
    wanted, given = _sides(gold), _sides(answer)
    if len(wanted) == len(given) == 1:
        return None
    if len(wanted) == 1:
        return _same(_assigned(answer), gold, depth)
    if len(given) == 1:
        named = _NAME.fullmatch(wanted[0]) is not None
        return named and _same(answer, wanted[-1], depth)
    if squeeze(given[0]) == squeeze(wanted[0]):
        return _same(given[-1], wanted[-1], depth)
    return same_equation((given[0], given[-1]), (wanted[0], wanted[-1]))


def _sides(text: str) -> list[str]:
    """The sides of a single equation; the text alone where it is none, or a list."""
    if len(split_top(text, ",;")) > 1:
        return [text]
    sides = split_top(text, "=")
    return sides if all(sides) else [text]


def _assigned(text: str) -> str:
    """What an equation comes to: its last side, or the first if that is the number."""
    sides = _sides(text)
    value = sides[-1]
    turned = len(sides) > 1 and _NAME.fullmatch(value) and not _NAME.fullmatch(sides[0])
    return sides[0] if turned else value


def _same_group(answer: str, gold: str, depth: int) -> bool | None:
    wanted, given = _group(gold), _group(answer)
    if wanted is None:
        alone = given is not None and len(given.items) == 1
        return None if given is None else alone and _same(given.items[0], gold, depth)
    if given is None:
        alone = len(wanted.items) == 1 and wanted.opening != "("
        return alone and _same(answer, wanted.items[0], depth)
    if len(wanted.items) != len(given.items):
        return False
    names, asked = _names(given.items), _names(wanted.items)
    ordered = wanted.opening in ("(", "[") or (asked and not names)
    if ordered or given.opening in ("(", "["):
        if not _brackets_fit(given, wanted):
            return False
        items = given.items
        if names and wanted.opening == "(":
            items = [item for _, item in sorted(zip(names, items, strict=True))]
        return all(map(_at(depth), items, wanted.items))
    return _same_members(given.items, wanted.items, depth)


def _at(depth: int) -> Callable[[str, str], bool]:
    return lambda answer, gold: _same(answer, gold, depth)


def _brackets_fit(given: _Group, wanted: _Group) -> bool:
    """Whether an ordered group may stand for another."""
    if (given.opening, given.closing) == (wanted.opening, wanted.closing):
        return True
    if wanted.opening == "":
        return (given.opening, given.closing) == ("(", ")")
    return (wanted.opening, wanted.closing) == ("(", ")") and given.opening == ""


def _same_members(given: list[str], wanted: list[str], depth: int) -> bool:
    """Whether two lists have the same members, as often as each."""
    if len(given) != len(wanted):
        return False
    left = list(wanted)
    for item in given:
        match = next((w for w in left if _same(item, w, depth)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _names(items: list[str]) -> list[str]:
    """The names that items give to their values, if all do and all differ."""
    sides = [_sides(item) for item in items]
    named = [s[0] for s in sides if len(s) > 1 and _NAME.fullmatch(s[0])]
    return named if len(set(named)) == len(items) > 1 else []


def _group(text: str) -> _Group | None:
    r"""Takes a list, tuple, set or `a \pm b` apart."""
    if number(split_unit(text)[0]) is not None and not text.startswith("("):
        return None
    parts = split_top(text, ",;")
    if len(parts) > 1:
        return _Group("", "", _drop_shared_name(parts))
    if text.count(r"\pm") == 1:
        head, _, tail = text.partition(r"\pm")
        plus = f"{head}+{tail}" if head.strip() else tail.strip()
        return _Group("", "", [plus, f"{head}-{tail}"])
    opening = enclosed(text)
    if opening is None or opening == "{":
        return None
    closing = r"\}" if opening == r"\{" else text[-1]
    inside = text[len(opening) : -len(closing)].strip()
    items = split_top(inside, ",;")
    if opening == r"\{":
        return _Group(opening, closing, [item for item in items if item])
    return _Group(opening, closing, items) if len(items) > 1 else None


def _drop_shared_name(parts: list[str]) -> list[str]:
    """`x = 1, 2` and `x = 1, x = 2` as 1, 2."""
    sides = [_sides(part) for part in parts]
    named = {s[0] for s in sides if len(s) > 1 and _NAME.fullmatch(s[0])}
    if len(named) == 1 and len(sides[0]) > 1:
        return [s[-1] for s in sides]
    return parts


def _same_value(answer: str, gold: str) -> bool:
    wanted, given = split_unit(gold), split_unit(answer)
    if contradict(given[1:], wanted[1:]):
        return False
    asked, got = number(wanted[0]), number(given[0])
    if asked is not None:
        return got is not None and same_number(got, asked)
    return same_expression(given[0], wanted[0])

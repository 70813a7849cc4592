r"""Whether an answer to a mathematical question is the one wanted.

The judge is math-verify (see `math_verifier`). Here is what it gets wrong:

- a number asks for a number: 4/8 is 1/2, but 2+3, 2^3 or \sqrt{25} are left to compute
  and are not accepted. An expression (2\pi, 2^{10}, x+1) accepts any equal one.
- words and letters of a choice are compared as words, not as products of variables.
- (1, 2) asks for that order; 1, 2 and \{1, 2\} for these members in any order, each as
  often. Brackets count: [1, 2) is not (1, 2).
- a unit may be missing, but not be another.
"""

import re
from fractions import Fraction

from logra_jax.rl.math_text import clean, enclosed, same_words, split_top, squeeze
from logra_jax.rl.math_verifier import verified

_LONGEST = 2000
_NAME = re.compile(r"[A-Za-z\\(][^-+*/^<>]*")


def same_answer(answer: str, gold: str) -> bool:
    """Whether a final answer is the reference, both as they were written."""
    if len(answer) > _LONGEST or len(gold) > _LONGEST:
        return False
    return _same(clean(answer), clean(gold))


def _same(answer: str, gold: str, depth: int = 0) -> bool:
    if not answer or not gold or depth > 8:
        return False
    if squeeze(answer) == squeeze(gold):
        return True
    # math-verify takes "x < \infty" for the empty set.
    if gold == r"\emptyset":
        return False
    verdict = same_words(answer, gold)
    if verdict is not None:
        return verdict
    wanted, given = _group(gold), _group(answer)
    if wanted and given:
        return _same_group(given, wanted, depth + 1)
    return _same_named(answer, gold, depth + 1)


def _same_named(answer: str, gold: str, depth: int) -> bool:
    """Equations: x = 5 names 5, 2x + y = 1 is what it says."""
    wanted, given = _sides(gold), _sides(answer)
    if len(given) > 1 and (len(wanted) == 1 or squeeze(given[0]) == squeeze(wanted[0])):
        turned = _NAME.fullmatch(given[-1]) and not _NAME.fullmatch(given[0])
        return _same(given[0] if turned else given[-1], wanted[-1], depth)
    if len(wanted) > len(given):
        named = _NAME.fullmatch(wanted[0]) is not None
        return named and _same(answer, wanted[-1], depth)
    return _same_value(answer, gold)


def _sides(text: str) -> list[str]:
    """The sides of a single equation; the text alone where it is none, or a list."""
    sides = split_top(text, "=")
    return sides if all(sides) and len(split_top(text, ",;")) == 1 else [text]


_Group = tuple[str, list[str], str]


def _group(text: str) -> _Group | None:
    r"""The opening bracket, members and closing bracket of a list, tuple or set.

    A bare list has empty brackets; `a \pm b` is a list of two.
    """
    if number(split_unit(text)[0]) is not None:
        return None
    items = split_top(text, ",;")
    if len(items) > 1:
        return "", items, ""
    if text.count(r"\pm") == 1:
        return "", [text.replace(r"\pm", sign) for sign in "+-"], ""
    opening = enclosed(text)
    if opening in (None, "{"):
        return None
    closing = text[-len(opening) :]
    items = split_top(text[len(opening) : -len(closing)], ",;")
    return (opening, items, closing) if len(items) > 1 else None


def _same_group(given: _Group, wanted: _Group, depth: int) -> bool:
    items, others = _by_name(given[1]), _by_name(wanted[1])
    brackets = {given[0] + given[2], wanted[0] + wanted[2]}
    if len(given[1]) != len(wanted[1]):
        return False
    if brackets <= {"", r"\{\}"} and not (others and not items):
        left = list(wanted[1])
        for item in given[1]:
            match = next((other for other in left if _same(item, other, depth)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    pairs = zip(items or given[1], others or wanted[1], strict=True)
    fit = len(brackets) == 1 or brackets == {"", "()"}
    return fit and all(_same(item, other, depth) for item, other in pairs)


def _by_name(items: list[str]) -> list[str] | None:
    """The values that items give to different names, in the order of the names."""
    sides = [_sides(item) for item in items]
    values = {s[0]: s[-1] for s in sides if len(s) > 1 and _NAME.fullmatch(s[0])}
    return [values[n] for n in sorted(values)] if len(values) == len(items) else None


def _same_value(answer: str, gold: str) -> bool:
    (given, unit), (wanted, other) = split_unit(answer), split_unit(gold)
    if unit and other and unit != other:
        return False
    value, asked = number(given), number(wanted)
    if asked is None:
        return verified(given, wanted)
    return value is not None and _same_number(given, value, wanted, asked)


_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_POWER = re.compile(r"(?:\s*\\(?:times|cdot)\s*|^)10\s*\^\s*\{?\s*(-?[0-9]+)\s*\}?$")
_THOUSANDS = re.compile(
    r"(?<![0-9.])[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+(?!/))(?![0-9])"
)
_QUOTIENT = re.compile(r"(?:([0-9]+) +)?(-?) ?([0-9]+) ?/ ?(-?) ?([0-9]+)")
_DECIMAL = re.compile(
    r"([0-9]*\.?[0-9]*)(?:\\overline ?\{([0-9]+)\})?(?:[eE]([-+]?[0-9]{1,3}))?"
)


def number(text: str) -> Fraction | None:
    r"""Reads a literal number, or nothing where an operation is left to do.

    Literals are integers (thousands grouped by commas or spaces), decimals, repeating
    decimals (`0.\overline{3}`), fractions of integers, mixed numbers and scientific
    notation; each with a sign, and a percent sign that does not count here.

    Example:
        >>> number("-1,250.50")
        Fraction(-2501, 2)
        >>> number("2+3") is None
        True
    """
    text = text.removesuffix("%").strip()
    if enclosed(text) == "(" and "," not in text:
        return number(text[1:-1])
    sign = -1 if text.startswith("-") else 1
    text = text[text.startswith(("-", "+")) :].strip()
    text = _FRACTION.sub(r" \1\2/\3\4", text).strip()
    text = _POWER.sub(r"e\1", text)
    text = f"1{text}" if text.startswith("e") else text
    text = _THOUSANDS.sub(lambda found: re.sub("[, ]", "", found.group()), text)
    quotient, decimal = _QUOTIENT.fullmatch(text), _DECIMAL.fullmatch(text)
    if len(text) > 1000:
        return None
    if quotient and quotient.group(5).strip("0"):
        whole, minus, above, other, below = quotient.groups()
        turned = -1 if (minus == "-") != (other == "-") else 1
        return sign * (int(whole or 0) + turned * Fraction(int(above), int(below)))
    if decimal is None or not decimal.group(1).strip("."):
        return None
    digits, period, power = decimal.groups()
    value = Fraction(f"0{digits}0" if "." in digits else digits)
    if period:
        places = len(digits.partition(".")[2])
        value += Fraction(int(period), (10 ** len(period) - 1) * 10**places)
    return sign * value * Fraction(10) ** int(power or 0)


def _same_number(answer: str, given: Fraction, gold: str, wanted: Fraction) -> bool:
    """Whether an answer is the number wanted, exactly.

    A decimal may stand for a fraction that is none where it gives six places. "10%" is
    0.1 and not 10; where "10%" is wanted, 10 names it too.
    """
    if answer.endswith("%") and not gold.endswith("%"):
        return given / 100 == wanted
    if gold.endswith("%") and not answer.endswith("%") and given * 100 == wanted:
        return True
    return given == wanted or any(
        len(decimal.partition(".")[2]) >= 6
        and "." not in other
        and 10**99 % value.denominator != 0
        and abs(given - wanted) < min(Fraction(1, 10**6), abs(value) / 10**4)
        for decimal, other, value in ((answer, gold, wanted), (gold, answer, given))
    )


_UNITS = """
    foot feet ft|inch inche in|mile mi|yard|centimeter cm|millimeter mm|kilometer km|
    meter m|gram g|kilogram kg|pound lb|ounce oz|liter l|milliliter ml|gallon|
    degree deg|second sec s|minute min|hour hr h|day|week|month|year yr|dollar usd|cent|
    euro|radian rad|unit|newton n|joule j|watt w|volt v
"""
_KNOWN = {name: row.split()[0] for row in _UNITS.split("|") for name in row.split()}
# They change the number in front of them.
_MULTIPLES = """
    hundred thousand million billion trillion dozen squared cubed factorial half thirds
    quarters and or times plus minus over mod to
"""
_IN_TEXT = re.compile(
    r"\\text\s*\{([A-Za-z /.^0-9]*)\}\s*(?:\^\s*\{?\s*([0-9])\s*\}?)?$"
)
_BARE = re.compile(
    r"(?<![A-Za-z\\])([A-Za-z]+(?:[ /][A-Za-z]+){0,3})(?:\^\s*\{?\s*([0-9])\s*\}?)?$"
)
_DEGREES = re.compile(r"(?<=.)\^\s*\\circ\s*(?:[CF]|\\text\s*\{\s*[CF]\s*\})?$")
_MODULUS = re.compile(r"(?<=.)(?:\\pmod\s*\{?|\(\s*\\?mod)\s*([0-9]+)\s*[})]?$")


def split_unit(text: str) -> tuple[str, str | None]:
    r"""Takes the unit off a clean answer; a modulus counts as one.

    Bare words count as one behind a plain number ("5 apples"), known ones behind any
    value ("2\pi cm"), and a letter only apart from the number ("5 m", not "5m"). The
    unit is None unless it is known: of "apples" and "fruits" nobody can tell.
    """
    money = re.match(r"(-?)\s*\\?\$\s*(?=[-0-9.\\])", text)
    if money:
        return f"{money.group(1)}{text[money.end() :]}", "dollar"
    for pattern in (_DEGREES, _MODULUS):
        found = pattern.search(text)
        if found:
            unit = "degree" if pattern is _DEGREES else f"mod {found.group(1)}"
            return text[: found.start()].strip(), unit
    found = _IN_TEXT.search(text) or _BARE.search(text)
    if not found:
        return text, None
    head, name = text[: found.start()].rstrip(), found.group(1).lower().strip(" .")
    unit = _unit(name, found.group(2) or "1")
    value = re.search(r"(?:[0-9})%]|\\pi)$", head)
    if not value or set(re.split("[ /]", name)) & set(_MULTIPLES.split()):
        return text, None
    if found.re is _BARE:
        apart, known = text[len(head)] == " ", unit is not None and len(name) > 1
        plain = re.fullmatch(r"-?\s*(?:\\frac)?[0-9{}.,/ ]+", head)
        if not ((apart or known) if plain else (apart and known)):
            return text, None
    return head, unit


def _unit(name: str, power: str) -> str | None:
    """`square feet` as `foot^2`, `miles per hour` as `mile/hour`, if known."""
    parts = []
    for part in name.replace("mph", "mile/hour").replace(" per ", "/").split("/"):
        *before, word = part.replace("tre", "ter").split() or [""]
        word, _, inline = word.partition("^")
        raised = {"square": "2", "sq": "2", "cubic": "3"}.get(" ".join(before))
        unit = _KNOWN.get(word) or _KNOWN.get(word.removesuffix("s"))
        if unit is None or (before and raised is None):
            return None
        parts.append(f"{unit}^{raised or inline or power}".removesuffix("^1"))
    return "/".join(parts)

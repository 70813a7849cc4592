"""Numbers as answers write them: exact, and equal only when they are."""

import re
from dataclasses import dataclass
from fractions import Fraction

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_INT = r"\{?\s*(-?\s*[0-9]+)\s*\}?"
_FRACTION = re.compile(
    r"\\frac\s*(?:\{\s*(-?\s*[0-9,]+)\s*\}|([0-9]))\s*(?:\{\s*(-?\s*[0-9,]+)\s*\}|([0-9]))"
    r"|\(?\s*([0-9,]+)\s*\)?\s*/\s*\(?\s*([0-9,]+)\s*\)?"
)
_PLAIN = re.compile(_DECIMAL)
_MIXED = re.compile(r"([0-9]+)(?:\s*(?=\\frac)|\s+)(\S.*)")
_REPEATING = re.compile(r"([0-9]*\.[0-9]*)\s*\\(?:overline|bar)\s*\{?([0-9]+)\}?")
_SCIENTIFIC = re.compile(
    rf"(?:({_DECIMAL})\s*\\(?:times|cdot)\s*)?10\s*\^\s*{_INT}|({_DECIMAL})[eE]([+-]?[0-9]+)"
)
# Digits of a number, and the power of ten beyond which it is not written out.
_MOST_DIGITS = 1000
_MOST_POWER = 400
# Digits behind the point, as the field has it, and digits that are not leading zeros.
_PLACES, _SIGNIFICANT = 6, 5


@dataclass(frozen=True)
class Number:
    """A number as written.

    Attributes:
        value: what stands before the percent sign, if there is one.
        percent: whether there is one.
        decimals: digits behind the point where it is written as a decimal, else None.
    """

    value: Fraction
    percent: bool = False
    decimals: int | None = None


def number(text: str) -> Number | None:
    r"""Reads a literal number, or nothing where an operation is left to do.

    Literals are integers (thousands grouped by commas or spaces), decimals, repeating
    decimals (`0.\overline{3}`), fractions of integers, mixed numbers, scientific
    notation and powers of ten; each with a sign and a percent sign. `2+3`, `2^3`,
    `\sqrt{4}` and `3!` are none.

    Example:
        >>> number("-1,250.50").value
        Fraction(-2501, 2)
        >>> number("2+3") is None
        True
    """
    text = text.strip()
    while text.startswith(("(", "{")) and text.endswith((")", "}")):
        inner = text[1:-1].strip()
        if "," in inner or any(bracket in inner for bracket in "(){}"):
            break
        text = inner
    percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    negative = text.startswith("-")
    if text.startswith(("-", "+")):
        text = text[1:].lstrip()
    if not text or len(text) > _MOST_DIGITS:
        return None
    read = _decimal(text) or _exact(text)
    if read is None:
        return None
    value, decimals = read
    return Number(-value if negative else value, percent, decimals)


def same_number(answer: Number, gold: Number) -> bool:
    """Whether an answer is the number wanted.

    Equal means exactly equal, but for a decimal against a fraction that is none: there
    six digits behind the point, rounded or cut off, are enough. "10%" is 0.1 and not
    10; where "10%" is wanted, 10 names it too.
    """
    if gold.percent and not answer.percent:
        hundredth = Number(gold.value / 100, decimals=gold.decimals)
        return _close(answer, Number(gold.value, decimals=gold.decimals)) or _close(
            answer, hundredth
        )
    if answer.percent and not gold.percent:
        return answer.value / 100 == gold.value
    return _close(answer, gold)


def approximates(decimal: Number, value: Fraction) -> bool:
    """Whether a decimal gives a value to six places or more, rounded or cut off."""
    places = decimal.decimals
    if places is None or decimal.percent:
        return False
    digits = str(abs(decimal.value.numerator * 10**places // decimal.value.denominator))
    enough = places >= _PLACES and len(digits.lstrip("0")) >= _SIGNIFICANT
    return enough and abs(decimal.value - value) < Fraction(1, 10**places)


def _close(answer: Number, gold: Number) -> bool:
    if answer.value == gold.value:
        return True
    for decimal, fraction in ((answer, gold), (gold, answer)):
        if fraction.decimals is None and not _terminates(fraction.value):
            return approximates(
                Number(decimal.value, decimals=decimal.decimals), fraction.value
            )
    return False


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1


def _decimal(text: str) -> tuple[Fraction, int | None] | None:
    if _PLAIN.fullmatch(text) is None:
        return None
    plain = text.replace(",", "").replace(" ", "").removesuffix(".")
    _, point, behind = plain.partition(".")
    return Fraction(plain), len(behind) if point else None


def _exact(text: str) -> tuple[Fraction, int | None] | None:
    """Fractions, mixed numbers, repeating decimals and scientific notation."""
    mixed = _MIXED.fullmatch(text)
    if mixed:
        rest = _fraction(mixed.group(2))
        good = rest is not None and 0 <= rest < 1
        return (int(mixed.group(1)) + rest, None) if good and rest is not None else None
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        start, period = repeating.groups()
        places = len(start.partition(".")[2])
        tail = Fraction(int(period), (10 ** len(period) - 1) * 10**places)
        return Fraction(f"0{start}0") + tail, None
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific:
        mantissa, power, other, exponent = scientific.groups()
        raised = int((power or exponent).replace(" ", ""))
        if abs(raised) > _MOST_POWER:
            return None
        front = _decimal(mantissa or other or "1")
        return (front[0] * Fraction(10) ** raised, None) if front else None
    fraction = _fraction(text)
    return None if fraction is None else (fraction, None)


def _fraction(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    above, below = (g.replace(",", "") for g in match.groups() if g is not None)
    if not below.strip("-0 ") or not above.strip("- "):
        return None
    return Fraction(int(above.replace(" ", "")), int(below.replace(" ", "")))

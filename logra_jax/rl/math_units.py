r"""Units of a number: `5\text{ cm}^2`, `5 square centimetres`, `\$5`, `90^\circ`."""

import re

_ALIASES = {
    "foot": "foot feet ft",
    "inch": "inch inches in",
    "mile": "mile miles mi",
    "yard": "yard yards yd",
    "cm": "cm centimeter centimetre centimeters centimetres",
    "mm": "mm millimeter millimetre millimeters millimetres",
    "km": "km kilometer kilometre kilometers kilometres",
    "m": "m meter metre meters metres",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "pound": "pound pounds lb lbs",
    "ounce": "ounce ounces oz",
    "l": "l liter litre liters litres",
    "ml": "ml milliliter millilitre milliliters millilitres",
    "gallon": "gallon gallons",
    "second": "second seconds sec s",
    "minute": "minute minutes min",
    "hour": "hour hours hr hrs h",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "euro": "euro euros",
    "degree": "degree degrees deg",
    "radian": "radian radians rad",
    "unit": "unit units",
    "n": "n newton newtons",
    "j": "j joule joules",
    "w": "w watt watts",
    "v": "v volt volts",
    "mile/hour": "mph",
}
_KNOWN = {alias: unit for unit, names in _ALIASES.items() for alias in names.split()}
# They change the number in front of them.
_NOT_UNITS = (
    "hundred thousand million billion trillion dozen squared cubed factorial half "
    "thirds quarters and or times plus minus over mod to"
)
_MULTIPLES = frozenset(_NOT_UNITS.split())
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}

_CURRENCY = re.compile(r"(-?)\s*\\?\$\s*(?=[-0-9.\\])")
_IN_TEXT = re.compile(
    r"\\text\s*\{([A-Za-z /.^0-9]*)\}\s*(?:\^\s*\{?\s*([0-9])\s*\}?)?$"
)
_BARE = re.compile(
    r"(?<![A-Za-z\\])([A-Za-z]+(?:[ /][A-Za-z]+){0,3})(?:\^\s*\{?\s*([0-9])\s*\}?)?$"
)
_DEGREES = re.compile(r"\^\s*\\circ\s*(?:[CF]|\\text\s*\{\s*[CF]\s*\})?$")
_MODULUS = re.compile(r"(?:\\pmod\s*\{?|\(\s*\\?mod)\s*([0-9]+)\s*[})]?$")
_VALUE_END = re.compile(r"(?:[0-9})%]|\\pi)$")
_NUMBER_END = re.compile(r"^-?\s*(?:\\frac)?[0-9{}.,/ ]+$")


def split_unit(text: str) -> tuple[str, str | None, bool]:
    r"""Takes the unit off a clean answer; a modulus counts as one.

    Bare words count as a unit behind a plain number ("5 apples"), known ones behind
    any value ("2\pi cm"), and a single letter only apart from a number ("5 m", not
    "5m").

    Returns:
        The rest, the unit or None, and whether the unit is a known one (two known ones
        that differ are a contradiction; of "apples" and "fruits" nobody can tell).
    """
    text = text.strip()
    money = _CURRENCY.match(text)
    if money:
        return f"{money.group(1)}{text[money.end() :]}", "dollar", True
    degrees = _DEGREES.search(text)
    if degrees and text[: degrees.start()].strip():
        return text[: degrees.start()].strip(), "degree", True
    modulus = _MODULUS.search(text)
    if modulus and text[: modulus.start()].strip():
        return text[: modulus.start()].strip(), f"mod {modulus.group(1)}", True
    for pattern in (_IN_TEXT, _BARE):
        found = pattern.search(text)
        if found is None:
            continue
        head = text[: found.start()].rstrip()
        name = found.group(1).lower().strip(" .")
        if not _VALUE_END.search(head) or not _may_be_unit(name):
            continue
        if pattern is _BARE and not _behind_number(text, head, name):
            continue
        unit, known = _canonical(name, int(found.group(2) or 1))
        return head, unit, known
    return text, None, False


def contradict(one: tuple[str | None, bool], other: tuple[str | None, bool]) -> bool:
    """Whether two units, each with "is it known?", cannot be the same."""
    return one[1] and other[1] and one[0] != other[0]


def _may_be_unit(name: str) -> bool:
    return _MULTIPLES.isdisjoint(name.replace("/", " ").split())


def _behind_number(text: str, head: str, name: str) -> bool:
    apart, known = text[len(head)] == " ", _canonical(name, 1)[1]
    if not _NUMBER_END.match(head):
        return apart and known and len(name) > 1
    return apart or (known and len(name) > 1)


def _canonical(name: str, power: int) -> tuple[str, bool]:
    """`square feet` as `foot^2`, `miles per hour` as `mile/hour`; are all known?"""
    parts, known = [], True
    for part in name.replace(" per ", "/").split("/"):
        first, _, rest = part.strip().partition(" ")
        raised = _POWERS.get(first.rstrip("."), 0) if rest else 0
        word = rest if raised else part.strip()
        word, _, inline = word.partition("^")
        unit = _KNOWN.get(word.strip(), word.strip())
        known = known and word.strip() in _KNOWN
        total = raised or (int(inline) if inline.isdigit() else power)
        parts.append(unit if total == 1 else f"{unit}^{total}")
    return "/".join(parts), known

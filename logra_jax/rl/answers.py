"""What of a response is its answer: the last box, the last number, all of it.

Each reading takes time linear in the length of the text.
"""

import re
from collections import deque

READINGS = ("final_answer", "last_boxed", "last_number", "whole_text")

# ASCII digits only. Thousands may be grouped by commas; a point counts only between
# digits, or before them where no word or ellipsis ends.
_NUMBER = re.compile(
    r"(?:[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))+|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![\w.])\.[0-9]+"
)
_MINUS = ("-", "\N{MINUS SIGN}", "\N{EN DASH}")
_OPERAND_END = tuple("0123456789)]}%")


def last_number(text: str) -> str | None:
    """Finds the last number of a text, in time linear in its length.

    Thousands lose their commas, a Unicode minus becomes "-", and the period that ends a
    sentence is no part of the number. A minus that touches the number is its sign
    unless an operand stands before it (5 - 3, 5-3, x-3); one that stands apart is a
    sign only after "=".

    Returns:
        The number as `Decimal` reads it, or None where the text has no ASCII digit.

    Example:
        >>> last_number("4 - 9 = -5.")
        '-5'
        >>> last_number("It costs $1,234.50 (was 7-3)")
        '3'
        >>> last_number("none") is None
        True
    """
    last = deque(_NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    number = last[0].group().replace(",", "")
    head = text[: last[0].start()].removesuffix("$")
    stripped = head.rstrip(" \t")
    if not stripped.endswith(_MINUS):
        return number
    left = stripped[:-1]
    if stripped == head:
        operand = left.rstrip(" \t").endswith(_OPERAND_END) or left[-1:].isalnum()
        return number if operand else f"-{number}"
    return f"-{number}" if left.rstrip(" \t").endswith("=") else number


# A command with its braces, an escaped character (no brace of its own), or a brace.
_BOX_OR_BRACE = re.compile(r"(\\(?:boxed|fbox)(?![A-Za-z])\s*\{?)|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_TOKEN = re.compile(r"\S*")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` or `\fbox{...}`, braces balanced.

    Of boxes inside each other it is the outermost, without the inner commands. A box
    that never closes is no answer: the response was cut there.

    Returns:
        The content without outer white space, or None where there is no last box, or
        nothing in it.

    Example:
        >>> last_boxed(r"so \boxed{7} or rather \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
        >>> last_boxed(r"\boxed{7} and then \boxed{\frac{1}{2}") is None
        True
    """
    open_braces: list[int] = []  # for a box where its content starts, else -1
    content: tuple[int, int] | None = None
    is_open = False
    for match in _BOX_OR_BRACE.finditer(text):
        found = match.group()
        if match.group(1) and not found.endswith("{"):
            # Without braces TeX takes a token, and so do we: \boxed 42
            content, is_open = (match.end(), -1), False
        elif match.group(1) or found == "{":
            open_braces.append(match.end() if match.group(1) else -1)
            is_open = is_open or bool(match.group(1))
        elif found == "}" and open_braces:
            start = open_braces.pop()
            if start >= 0:
                content, is_open = (start, match.start()), False
    if content is None or is_open:
        return None
    start, end = content
    token = _TOKEN.match(text, start) if end < 0 else None
    inside = token.group() if token else text[start:end]
    return _BOX.sub("", inside).strip() or None


# Between dollars neither end may be white space: "$5 and $7" are prices.
_MATH_SPAN = re.compile(
    r"\$\$([^$]+)\$\$|(?<!\\)\$(?!\s)([^$\n]+)(?<!\s)\$(?![0-9])"
    r"|\\\((.+?)\\\)|\\\[(.+?)\\\]",
    re.DOTALL,
)
_ANNOUNCED = re.compile(r"\banswer\b[*_ ]*(?:is\b|[:=])[*_: ]*\s*", re.IGNORECASE)
_NUMBER_LIKE = re.compile(
    r"[-+\N{MINUS SIGN}]?\$?[-+\N{MINUS SIGN}]?[0-9][0-9,]*(?:\.[0-9]+)?"
    r"\\?(%?)[A-Za-z°]*"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_LONGEST_LINE = 120
# Characters at the end of a response in which an answer without a box is looked for:
# it stands there, and what could be quadratic costs nothing.
_TAIL = 2000
_MARKS = "*_\"'`.,;:!? \t"


def final_answer(text: str) -> str | None:
    r"""The answer that a response ends on.

    In this order: its last box (see :func:`last_boxed`; an empty or unclosed one means
    that there is no answer); what follows the last "answer is" or "answer:" on that
    line, where that is short; the last formula between dollars, `\(\)` or `\[\]`; a
    response that is nothing but one short expression; its last number, with all that
    touches it ("3/4", "x=5").

    Example:
        >>> final_answer("The answer is: 3/4.")
        '3/4'
        >>> final_answer("We get 4 - 9 = - 5")
        '-5'
        >>> final_answer("I do not know") is None
        True
    """
    if _BOX.search(text):
        return last_boxed(text)
    text = text[-_TAIL:]
    return _announced(text) or _last_span(text) or _bare(text) or _last_token(text)


def read(text: str, reading: str) -> str | None:
    """The answer of a response.

    Args:
        text: the response.
        reading: one of `READINGS`; "whole_text" only loses the white space around it.

    Raises:
        ValueError: the reading is unknown.
    """
    readers = {
        "final_answer": final_answer,
        "last_boxed": last_boxed,
        "last_number": last_number,
        "whole_text": lambda text: text.strip() or None,
    }
    if reading not in readers:
        raise ValueError(
            f"`answer` must be one of {', '.join(READINGS)}, got {reading!r}"
        )
    return readers[reading](text)


def _announced(text: str) -> str | None:
    last = deque(_ANNOUNCED.finditer(text), maxlen=1)
    if not last:
        return None
    line = text[last[0].end() :].partition("\n")[0].strip(_MARKS)
    if not 0 < len(line) <= _LONGEST_LINE:
        return None
    span = _MATH_SPAN.search(line)
    if span:
        return _content(span)
    is_phrase = len(line.split()) <= 4 and not re.search("[0-9]", line)
    return _bare(line) or (line if is_phrase else None)


def _last_span(text: str) -> str | None:
    last = deque(_MATH_SPAN.finditer(text), maxlen=1)
    return _content(last[0]) if last else None


def _content(span: re.Match[str]) -> str | None:
    return next(group for group in span.groups() if group is not None).strip() or None


def _bare(text: str) -> str | None:
    """The text, if it is one expression and no prose."""
    line = text.strip(_MARKS + "\n")
    if not line or "\n" in line or len(line) > _LONGEST_LINE:
        return None
    words = _WORD.findall(line)
    # One word may be all of it, a unit, or a function.
    alone = len(words) == 1 and (line.endswith(words[0]) or f"{words[0]}(" in line)
    return line if not words or alone else None


def _last_token(text: str) -> str | None:
    number = last_number(text)
    if number is None:
        return None
    last = re.search("[0-9]", text[::-1])
    assert last is not None
    end = len(text) - last.start()
    start = max(text.rfind(white, 0, end) for white in " \t\n") + 1
    rest = _TOKEN.match(text, end)
    token = (text[start:end] + (rest.group() if rest else "")).strip(_MARKS)
    for opening, closing in ("()", "[]"):
        if token.count(opening) != token.count(closing):
            token = token.strip(opening + closing)
    like = _NUMBER_LIKE.fullmatch(token)
    if like is None:
        return token if len(token) <= _LONGEST_LINE else None
    return number + like.group(1)

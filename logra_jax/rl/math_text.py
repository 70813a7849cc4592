r"""One spelling for the many in which a mathematical answer may be written.

`\dfrac12`, `½` and `1/2`; `- 5` and `−5`; `2*pi` and `2\pi`; `5\,\text{cm}` and `5 cm`.
Also what is read without mathematics: words, letters, and where brackets close.
"""

import re
from collections.abc import Iterator

_LATEX = r"""
    ×=\times ·=\cdot ⋅=\cdot ÷=\div ±=\pm π=\pi θ=\theta α=\alpha β=\beta λ=\lambda
    ∞=\infty ≤=\le ≥=\ge ≠=\ne ∪=\cup ∩=\cap ∈=\in ∅=\emptyset ℝ=\mathbb{R} °=^\circ
    ½=\frac{1}{2} ⅓=\frac{1}{3} ⅔=\frac{2}{3} ¼=\frac{1}{4} ¾=\frac{3}{4} ²=^2 ³=^3
    √=\sqrt
"""
_CHARACTERS = str.maketrans(
    dict.fromkeys("−–—‐‑﹣－", "-")
    | dict.fromkeys("\u00a0\u2009\u202f\u2007\t\n\r", " ")
    | dict.fromkeys("’′", "'")
    | dict.fromkeys("€£¥₹", "")
    | {"≈": "=", "％": "%"}
    | {pair[0]: pair[2:] + " " for pair in _LATEX.split()}
)
_END = r"(?![A-Za-z])"
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (rf"\\(?:left|right)(?:\.|{_END})|\\displaystyle{_END}|\\!", ""),
        (rf"(?<!\\)\\[,;:> ]|\\q?quad{_END}|~", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (rf"\\langle{_END}", "("),
        (rf"\\rangle{_END}", ")"),
        (rf"\\leq(?:slant)?{_END}|<=", r"\\le "),
        (rf"\\geq(?:slant)?{_END}|>=", r"\\ge "),
        (rf"\\(?:approx|equiv){_END}", "="),
        (rf"\\varnothing{_END}|\\\{{\s*\\\}}", r"\\emptyset "),
        (rf"\\degree{_END}|\^\s*\{{\s*\\circ\s*\}}", r"^\\circ "),
        (r"\{\s*,\s*\}", ","),
        (r"\\(?:text(?:bf|it|rm|normal)|mbox|mathrm|operatorname)\b", r"\\text"),
        (r"\\(?:mathbf|mathit|mathcal|boldsymbol|bm)\s*\{\s*(\w+)\s*\}", r"\1"),
        (r"\\text\s*\{([^{}]*)\}\s*/\s*\\text\s*\{([^{}]*)\}", r"\\text{\1/\2}"),
        (r"\\text\s*\{\s*\^\\circ\s*[CF]?\s*\}", r"^\\circ "),
        (r"\*\*", "^"),
        (r"(?<![\\A-Za-z{])(pi|theta|sqrt|sin|cos|tan|ln|log)(?![A-Za-z])", r"\\\1"),
        (r"\\text\s*\{\s*(?:and|or)\s*\}|(?<=[^A-Za-z\\ ])\s*,?\s+(?:and|or)\s+", ","),
        (r"\\%|(?<=[0-9}])\s*(?:\\text\s*\{\s*)?(?:percent|per cent)\s*\}?", "%"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\\{\s*[A-Za-z]\s*(?:\\mid(?![A-Za-z])|:|\|)(.+)\\\}", r"\1"),
        (r"^\\\{((?:[^,;{}]|\{[^{}]*\})+)\\\}$", r"\1"),
        (" {2,}", " "),
    )
]
_WRAPPINGS = 8
# A space between two digits is none to leave out: 3 4 is not 34.
_IDLE_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")


def clean(text: str) -> str:
    """The text in the common spelling, without what only decorates it.

    Its length is at most a few times the text's.
    """
    text = _SPELLINGS[0][0].sub(_SPELLINGS[0][1], text.strip(" *_\n"))
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _SPELLINGS[1:]:
        text = pattern.sub(replacement, text)
    for _ in range(_WRAPPINGS):
        text = text.strip().strip('"`').removeprefix("=").strip()
        if text.endswith((".", ",", ";", ":")):
            text = text[:-1]
        for opening, closing in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inside = text[len(opening) : -len(closing)]
            if text == f"{opening}{inside}{closing}" and "$" not in inside:
                text = inside
        if enclosed(text) == "{":
            text = text[1:-1]
    return text


def squeeze(text: str) -> str:
    """What of a clean text decides whether two are spelled alike."""
    return _IDLE_SPACE.sub("", text).removeprefix("+")


def split_top(text: str, separators: str) -> list[str]:
    """The parts of a clean text between separators outside of all brackets."""
    cuts = [i for i, depth in depths(text) if not depth and text[i] in separators]
    edges = zip([-1, *cuts], [*cuts, len(text)], strict=True)
    return [text[start + 1 : end].strip() for start, end in edges]


def enclosed(text: str) -> str | None:
    r"""The bracket that encloses all of the text: "(", "[", "{" or "\{"."""
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    if opening not in ("(", "[", "{", r"\{"):
        return None
    return opening if matching(text, len(opening) - 1) == len(text) - 1 else None


def matching(text: str, start: int) -> int | None:
    """Where the bracket that opens at `start` closes; round and square ones mix."""
    inside = text[start:]
    return next((start + i for i, depth in depths(inside) if depth == 0), None)


def depths(text: str) -> Iterator[tuple[int, int]]:
    r"""Positions, and how many brackets are open behind each; `\,` is one position."""
    depth = 0
    for found in re.finditer(r"\\[^{}]|.", text, re.DOTALL):
        depth += (found.group() in "([{") - (found.group() in ")]}")
        yield found.start(), depth


_WHOLE_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_PLAIN_WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_LETTER = re.compile(r"(?:\\text\s*\{\s*)?\(?\s*([A-Ja-j])\s*\)?\s*\}?[.:]?")
_LETTER_FIRST = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\(([A-Ja-j])\)|([A-J])(?:[.:)]| \())[} ]*"
)
# Short words that are no products of variables.
_SHORT = re.compile("no|yes|one|two|six|ten|red|odd|all|up|on|off", re.IGNORECASE)


def same_words(answer: str, gold: str) -> bool | None:
    r"""Compares names, yes and no, letters of a choice; None for what is mathematics.

    Words are what stands in `\text{}` as a whole, and what consists of words alone. Up
    to three letters are a product of variables ("xyz") unless they are a known word.
    """
    choice = _LETTER.fullmatch(gold)
    if choice and (gold.isupper() or len(gold) > 1):
        found = _LETTER_FIRST.match(answer) or _LETTER.fullmatch(answer)
        return bool(found) and found[found.lastindex or 0].upper() == choice[1].upper()
    if not _WHOLE_TEXT.fullmatch(gold):
        letters = _PLAIN_WORDS.fullmatch(gold) and gold.replace(" ", "")
        if not letters or (len(letters) <= 3 and not _SHORT.fullmatch(letters)):
            return None
    if _bare(gold) and _bare(answer) == _bare(gold):
        return True
    # A list of words, or a number in \text{}, may still agree in another way.
    return None if re.search("[0-9,;]", gold) else False


def _bare(text: str) -> str:
    """Words in lower case, without punctuation or an article."""
    text = _WHOLE_TEXT.sub(r"\1", text).lower()
    return re.sub("^(?:the|an?) ", "", re.sub("[^a-z0-9]+", " ", text).strip())

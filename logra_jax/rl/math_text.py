r"""One spelling for the many in which a mathematical answer may be written.

`\dfrac12`, `½` and `1/2`; `- 5` and `−5`; `2*pi` and `2\pi`; `5\,\text{cm}` and `5 cm`.
"""

import re

# Characters that stand for LaTeX, or for plain ASCII.
_CHARACTERS = str.maketrans(
    dict.fromkeys("−–—‐‑﹣－", "-")
    | dict.fromkeys("\u00a0\u2009\u202f\u2007\t\n\r", " ")
    | dict.fromkeys("’′", "'")
    | dict.fromkeys("€£¥₹", "")
    | {
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": r"\div ",
        "±": r"\pm ",
        "π": r"\pi ",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "λ": r"\lambda ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": "=",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "°": r"^\circ ",
        "％": "%",
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "²": "^2",
        "³": "^3",
        "√": r"\sqrt ",
    }
)
_END = r"(?![A-Za-z])"
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"\\(?:left|right)\.", ""),
        (rf"\\(?:left|right|[bB]ig{{1,2}}[lr]?|displaystyle|limits){_END}", ""),
        (r"\\!", ""),
        (rf"(?<!\\)\\[,;:> ]|\\q?quad{_END}|~", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (rf"\\(?:lbrace){_END}", r"\\{"),
        (rf"\\(?:rbrace){_END}", r"\\}"),
        (rf"\\langle{_END}", "("),
        (rf"\\rangle{_END}", ")"),
        (rf"\\leq(?:slant)?{_END}|<=", r"\\le "),
        (rf"\\geq(?:slant)?{_END}|>=", r"\\ge "),
        (rf"\\lt{_END}", "<"),
        (rf"\\gt{_END}", ">"),
        (rf"\\neq{_END}|!=", r"\\ne "),
        (rf"\\(?:approx|equiv){_END}", "="),
        (rf"\\varnothing{_END}", r"\\emptyset "),
        (rf"\\degree{_END}|\^\s*\{{\s*\\circ\s*\}}", r"^\\circ "),
        (r"\{\s*,\s*\}", ","),
        (
            r"\\(?:textbf|textit|textrm|textnormal|mbox|mathrm|operatorname)\b",
            r"\\text",
        ),
        (r"\\text\s*\{\s*([a-zA-Z]|ln|log|sin|cos|tan)\s*\}(?=\s*[(^\\])", r" \1"),
        (r"\\(?:mathbf|mathit|mathcal|boldsymbol|bm)\s*\{\s*(\w+)\s*\}", r"\1"),
        (
            r"\\text\s*\{([^{}]*)\}\s*/\s*\\text\s*\{([^{}]*)\}",
            r"\\text{\1/\2}",
        ),
        (r"\\text\s*\{\s*\^\\circ\s*[CF]?\s*\}", r"^\\circ "),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (
            r"(?<![\\A-Za-z{])(pi|theta|alpha|beta|sqrt|sin|cos|tan|ln|log|infty)"
            r"(?![A-Za-z])",
            r"\\\1",
        ),
        (rf"(?<![\\A-Za-z])(?:infinity|inf){_END}", r"\\infty "),
        (r"\\text\s*\{\s*(?:and|or)\s*\}", ","),
        (r"(?<=[^A-Za-z\\ ])\s*,?\s+(?:and|or)\s+", ","),
        (r"\\%|(?<=[0-9}])\s*(?:\\text\s*\{\s*)?(?:percent|per cent)\s*\}?", "%"),
    )
]
_SPACES = re.compile(r" {2,}")
# A space between two digits is none to leave out: 3 4 is not 34.
_IDLE_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")
_OPEN, _CLOSE = "([{", ")]}"


def clean(text: str) -> str:
    """The text in the common spelling, without what only decorates it.

    Its length is at most a few times the text's.
    """
    roots, *others = _SPELLINGS
    text = roots[0].sub(roots[1], text.strip(" *_\n")).translate(_CHARACTERS)
    for pattern, replacement in others:
        text = pattern.sub(replacement, text)
    return _unwrap(_root_braces(_SPACES.sub(" ", text)))


def _unwrap(text: str) -> str:
    """Without dollars, outer braces, bold marks and the sentence's period."""
    before = None
    while text != before:
        before = text
        text = text.strip().strip('"`').removeprefix("=").strip()
        if text.endswith((".", ",", ";", ":")) and not text.endswith(("\\,", "\\;")):
            text = text[:-1]
        for opening, closing in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inside = text[len(opening) : -len(closing)]
            if text != inside and text == f"{opening}{inside}{closing}":
                text = inside if "$" not in inside else text
        if enclosed(text) == "{":
            text = text[1:-1]
    return text


def _root_braces(text: str) -> str:
    r"""`\sqrt(2)` as `\sqrt{2}`."""
    start = text.find(r"\sqrt(")
    while start >= 0:
        opening = start + len(r"\sqrt")
        closing = matching(text, opening)
        if closing is None:
            break
        text = f"{text[:opening]}{{{text[opening + 1 : closing]}}}{text[closing + 1 :]}"
        start = text.find(r"\sqrt(", opening)
    return text


def squeeze(text: str) -> str:
    """What of a clean text decides whether two are spelled alike."""
    return _IDLE_SPACE.sub("", text).removeprefix("+")


def matching(text: str, start: int) -> int | None:
    """Where the bracket that opens at `start` closes; round and square ones mix."""
    depth, skip = 0, False
    for position in range(start, len(text)):
        character = text[position]
        if skip:
            skip = False
        elif character == "\\":
            skip = text[position + 1 : position + 2] not in ("{", "}")
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
            if depth == 0:
                return position
    return None


def enclosed(text: str) -> str | None:
    r"""The bracket that encloses all of the text: "(", "[", "{" or "\{"."""
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    if opening not in ("(", "[", "{", r"\{"):
        return None
    end = matching(text, len(opening) - 1)
    return opening if end == len(text) - 1 else None


def split_top(text: str, separators: str) -> list[str]:
    """The parts of a clean text between separators outside of all brackets."""
    parts, start, depth, skip = [], 0, 0, False
    for position, character in enumerate(text):
        if skip:
            skip = False
        elif character == "\\":
            skip = text[position + 1 : position + 2] not in ("{", "}")
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif depth == 0 and character in separators:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


_WHOLE_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_PLAIN_WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_LETTER = re.compile(r"(?:\\text\s*\{\s*)?\(?\s*([A-Ja-j])\s*\)?\s*\}?[.:]?")
_LETTER_FIRST = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\(([A-Ja-j])\)|([A-J])(?:[.:)]| \())[} ]*"
)
_NOT_WORDS = re.compile(r"[^a-z0-9]+")
_ARTICLE = re.compile(r"^(?:the|an?) ")
# Short words that are no products of variables.
_SHORT = frozenset(
    ("no", "yes", "one", "two", "six", "ten", "red", "odd", "all", "up", "on", "off")
)


def words(text: str) -> str | None:
    r"""A text answer in lower case without punctuation; None for what is mathematics.

    Text is what stands in `\text{}` as a whole, and what consists of words alone. Up to
    three letters are a product of variables ("xyz") unless they are a known word.
    """
    whole = _WHOLE_TEXT.fullmatch(text)
    if not whole:
        letters = _PLAIN_WORDS.fullmatch(text) and text.replace(" ", "")
        if not letters or (len(letters) <= 3 and letters.lower() not in _SHORT):
            return None
    return plain_words(text) or None


def plain_words(text: str) -> str:
    r"""Letters and digits of a text, or of what a `\text{}` around it holds."""
    whole = _WHOLE_TEXT.fullmatch(text)
    bare = _NOT_WORDS.sub(" ", (whole.group(1) if whole else text).lower()).strip()
    return _ARTICLE.sub("", bare)


def letter(text: str) -> str | None:
    """The letter of a multiple choice: (C), C, C. are "C"; None for anything else."""
    match = _LETTER.fullmatch(text)
    return match.group(1).upper() if match else None


def leading_letter(text: str) -> str | None:
    """The letter with which an answer begins that also repeats the choice's text."""
    match = _LETTER_FIRST.match(text)
    return (match.group(1) or match.group(2)).upper() if match else letter(text)

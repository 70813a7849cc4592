"""From a row of a table, however it is stored, to a question."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from logra_jax.rl.tasks import Question, nearest


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold what.

    A name may be a path into what a column holds, its parts joined by dots: names of
    mappings and numbers of lists, such as `prompt.0.content`. A column that is itself
    called so comes first.

    Attributes:
        question: the user's message, text.
        answer: the reference answer, text, a number or a truth value; None where there
            is none, and a reward of one's own needs none.
        family: what accuracy is averaged over; None for one family.
        keep: further ones, for a reward of one's own: `entry["metadata"]` holds them.
    """

    question: str = "question"
    answer: str | None = "answer"
    family: str | None = None
    keep: tuple[str, ...] = ()

    @property
    def named(self) -> list[tuple[str, str]]:
        """What each named column is for, and its name."""
        some = {"answer": self.answer, "family": self.family}
        given = [(column, name) for column, name in some.items() if name is not None]
        keep = [("keep", name) for name in self.keep]
        return [("question", self.question), *given, *keep]


def needed(columns: Columns, there: Sequence[str], where: str) -> list[str]:
    """Those columns of a table that have to be read.

    Args:
        columns: which are meant.
        there: all that there are.
        where: the table's name.

    Raises:
        ValueError: one is missing.
    """
    found = []
    for column, name in columns.named:
        root = name if name in there else name.partition(".")[0]
        if root not in there:
            raise _missing(column, name, where, root, nearest(root, there))
        found.append(root)
    return list(dict.fromkeys(found))


def questions_of(
    rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Columns
) -> Iterator[Question]:
    """A question for each row.

    Args:
        rows: where each row is from ("line 3 of a.jsonl"), and its columns.
        columns: which of them hold what.

    Raises:
        ValueError: a column is missing or holds what it cannot hold; where that is.
    """
    for where, row in rows:
        question = _value(row, columns.question, "question", where)
        if not (isinstance(question, str) and question.strip()):
            raise ValueError(
                f"`columns.question` must name text, got {_show(question)} in "
                f"`{columns.question}` of {where}{_hint(columns.question, question)}"
            )
        answer = ""
        if columns.answer is not None:
            answer = _text(row, columns.answer, "answer", where)
        family = ""
        if columns.family is not None:
            family = _text(row, columns.family, "family", where)
        kept = {name: _value(row, name, "keep", where) for name in columns.keep}
        entry = {"question": question, "answer": answer, "metadata": kept}
        yield Question(question, answer, entry, family=family)


def _text(row: Mapping[str, Any], path: str, column: str, where: str) -> str:
    """What a column holds, as text.

    Numbers and truth values as JSON writes them, but whole numbers without a point:
    one file format stores 5.0 where another has 5.
    """
    value = _value(row, path, column, where)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        whole = value.is_integer() and abs(value) < 2**53  # beyond, digits are made up
        return str(int(value)) if whole else repr(value)
    if isinstance(value, int):
        return str(value)
    if not (isinstance(value, str) and value.strip()):
        raise ValueError(
            f"`columns.{column}` must name text or numbers, got {_show(value)} in "
            f"`{path}` of {where}{_hint(path, value)}"
        )
    return value


def _value(row: Mapping[str, Any], path: str, column: str, where: str) -> Any:
    """What lies at a path in a row."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise _missing(column, path, where, part, _nearest_part(part, value))
    return value


def _missing(column: str, path: str, where: str, part: str, hint: str) -> ValueError:
    if column == "answer":  # the one that a table may well lack
        hint = f"{hint.removesuffix('?')}, or null, for questions without one?"
    return ValueError(
        f"`columns.{column}` must name a column, got {path!r}, of which {where} has no "
        f"{part!r}{hint}"
    )


def _nearest_part(part: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return nearest(part, map(str, value))
    return f"; there is {_show(value)}"


def _hint(path: str, value: Any) -> str:
    """The path to a text inside of `value`, if there is one."""
    parts = value if isinstance(value, Mapping) else {}
    if isinstance(value, list):
        parts = dict(enumerate(value))
    for name, part in parts.items():
        if isinstance(part, str) and name != "role":
            return f"; did you mean `{path}.{name}`?"
        if inner := _hint(f"{path}.{name}", part):
            return inner
    return ""


def _show(value: Any) -> str:
    """A value, or what kind of value where it is long."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return "nothing"
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value))}"
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:60]

"""Questions in files: JSON lines, CSV and Parquet."""

import csv
import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logra_jax.rl.rows import Columns, needed, questions_of
from logra_jax.rl.tasks import Question

Rows = Iterator[tuple[str, dict[str, Any]]]


def file_questions(pattern: str, columns: Columns) -> list[Question]:
    """The questions of one or several files, in the order of their names.

    Args:
        pattern: a path, or one with `*`, `?` or `[...]`; each file is .jsonl (an object
            in each line; empty lines are skipped), .csv (the first line names the
            columns, all values are text) or .parquet (which needs pyarrow, of the
            extra `data`). All are UTF-8.
        columns: where question and answer are.

    Raises:
        ValueError: no such file, one that cannot be read, or one without questions; a
            line that is no JSON object, a column that is missing or does not hold text.
    """
    questions: list[Question] = []
    for path in _paths(pattern):
        read = _READERS.get(path.suffix.lower())
        if read is None:
            raise ValueError(
                f"`name` must name {', '.join(_READERS)} files, got {str(path)!r}"
            )
        try:
            found = list(questions_of(read(path, columns), columns))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise ValueError(
                f"`name` must name files that can be read, got {str(path)!r}: {reason}"
            ) from error
        if not found:
            raise ValueError(
                f"`name` must name files with questions, got {str(path)!r}, which has "
                "none"
            )
        questions += found
    return questions


def json_rows(path: Path) -> Rows:
    """The objects in the lines of a file, each with where it is from.

    Raises:
        ValueError: a line that is no JSON object.
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    # Not splitlines: it breaks at separators that JSON allows inside of a text.
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"line {number} of {path.name}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"`name` must name files with a JSON object in each line, got "
                    f"{line.strip()[:40]!r} in {where}: {error.msg}"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(
                    "`name` must name files with a JSON object in each line, got "
                    f"{line.strip()[:40]!r} in {where}"
                )
            yield where, row


def _json_rows(path: Path, columns: Columns) -> Rows:
    return json_rows(path)


def _csv_rows(path: Path, columns: Columns) -> Rows:
    # A question may well be longer than the 128 kB that a field is held to.
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                where = f"line {reader.line_num} of {path.name}"
                if None in row or None in row.values():
                    raise ValueError(
                        "`name` must name CSV files with as many values in each row as "
                        f"in the first ({len(reader.fieldnames or ())}), got another "
                        f"number in {where}"
                    )
                yield where, row
    finally:
        csv.field_size_limit(limit)


def _parquet_rows(path: Path, columns: Columns) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"`name` must name .jsonl or .csv files where pyarrow is not installed, "
            f"got {str(path)!r}; `pip install logra-jax[data]` brings it"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            wanted = needed(columns, table.schema_arrow.names, path.name)
            number = 0
            for batch in table.iter_batches(columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number} of {path.name}", row
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"`name` must name files that can be read, got {str(path)!r}: {reason}"
        ) from error


_READERS = {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}


def _paths(pattern: str) -> list[Path]:
    """The files that a path or pattern names, sorted."""
    expanded = str(Path(pattern).expanduser())
    if Path(expanded).is_file():  # a name may hold a bracket
        return [Path(expanded)]
    found = sorted(Path(path) for path in glob.glob(expanded, recursive=True))
    files = [path for path in found if path.is_file()]
    if not files:
        directory = Path(expanded).is_dir()
        remedy = f"; `{pattern}/*.jsonl` names those inside" if directory else ""
        raise ValueError(
            f"`name` must name a file, or several by a pattern, got {pattern!r}, which "
            f"names none{remedy}"
        )
    return files

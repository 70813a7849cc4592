"""Questions of a data set on the Hugging Face Hub, or of a directory like one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from logra_jax.rl.rows import Columns, needed, questions_of
from logra_jax.rl.tasks import Question


def hub_questions(
    name: str, columns: Columns, *, subset: str | None, split: str
) -> list[Question]:
    """The questions of a split, in its order.

    Needs `datasets`, of the extra `data`; it keeps what it fetched in its own cache.

    Args:
        name: `owner/name`, `owner/name@revision`, or a directory.
        columns: where question and answer are.
        subset: where the data set has several, which; `datasets` calls it a name or a
            configuration.
        split: such as "train" or "test".

    Raises:
        ValueError: no such data set, subset or split, or it cannot be had; a column
            that is missing or does not hold text.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "`source` must not be hub where `datasets` is not installed, got "
            f"{name!r}; `pip install logra-jax[data]` brings it"
        ) from error
    path, revision = _path_and_revision(name)
    with _without_progress_bars():
        try:
            table: Any = datasets.load_dataset(
                path, subset, split=split, revision=revision
            )
        # Dozens of kinds, some of them bare; all mean that it cannot be had.
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(
                f"`name` must name a data set that `datasets` can load, got {name!r} "
                f"(subset {subset}, split {split}): {reason}"
            ) from error
    wanted = needed(columns, table.column_names, name)
    rows = (
        (f"row {number} of {name}", row)
        for number, row in enumerate(table.select_columns(wanted), 1)
    )
    questions = list(questions_of(rows, columns))
    if not questions:
        raise ValueError(
            f"`split` must have questions, got {split!r} of {name}, which has none"
        )
    return questions


def _path_and_revision(name: str) -> tuple[str, str | None]:
    directory = Path(name).expanduser()
    if directory.is_dir():  # its name may hold an @
        return str(directory), None
    path, _, revision = name.partition("@")
    return path, revision or None


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """A run has a display of its own."""
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()

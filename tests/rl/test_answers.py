import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.rl.answers import last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", "5"),
        ("The answer is 12", "12"),
        ("3.", "3"),
        ("3.\n", "3"),
        ("is 3, then", "3"),
        ("2.50", "2.50"),
        ("2.50.", "2.50"),
        (".5", ".5"),
        ("is .5", ".5"),
        ("wait...5", "5"),
        ("done.5", "5"),
        ("3.14.15", "15"),
        ("1,234", "1234"),
        ("1,234,567.89.", "1234567.89"),
        ("1234,567", "567"),
        ("1,2345", "2345"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
        ("=12", "12"),
        ("**12**", "12"),
        ("$5", "5"),
        ("$-5$", "-5"),
        ("-$5", "-5"),
        (r"\boxed{-5}", "-5"),
        ("(-5)", "-5"),
        ("**-5**", "-5"),
        ("**Answer:** -5", "-5"),
        ("-5", "-5"),
        ("The answer is -5.", "-5"),
        ("4 - 9 = -5", "-5"),
        ("4-9=-5", "-5"),
        ("4 - 9 = - 5", "-5"),
        ("- 5", "5"),
        ("a list:\n- 5", "5"),
        ("5 - 3", "3"),
        ("5 -3", "3"),
        ("7-3", "3"),
        ("(2 + 5)-3", "3"),
        ("x-3", "3"),
        ("\N{GREEK SMALL LETTER ALPHA}-3", "3"),
        ("5 - -3", "-3"),
        ("5--3", "-3"),
        ("9\n-3", "-3"),
        ("\N{MINUS SIGN}5", "-5"),
        ("4 \N{MINUS SIGN} 9 = \N{MINUS SIGN}5", "-5"),
        ("pages 3\N{EN DASH}5", "5"),
        ("007", "007"),
        ("50%", "50"),
        ("2nd", "2"),
        ("5 \N{ARABIC-INDIC DIGIT THREE}", "5"),
        ("\N{FULLWIDTH DIGIT FIVE}", None),
        ("x\N{SUPERSCRIPT TWO}", None),
        ("five", None),
        ("-", None),
        (".", None),
        ("", None),
    ],
)
def test_last_number_is_what_a_reader_would_call_it(text, number):
    assert last_number(text) == number


@given(
    st.text(),
    st.decimals(allow_nan=False, allow_infinity=False, places=2),
    st.text(alphabet=st.characters(exclude_categories=["N", "P"])),
)
def test_last_number_is_found_after_any_text(before, number, after):
    assert last_number(f"{before} = {number:,}{after}") == str(number)


@given(st.text(alphabet="0123456789.,- =$\N{MINUS SIGN}a"))
def test_last_number_is_always_a_number_and_the_only_one_left(text):
    number = last_number(text)
    if number is None:
        assert not any(character in "0123456789" for character in text)
    else:
        assert Decimal(number).is_finite()
        assert last_number(number) == number


@pytest.mark.parametrize(
    "piece", ["7", "-", " ", "1,", "1,234,", ".", ".5", "$", "= - ", "-1", "a", "٣"]
)
def test_last_number_takes_linear_time(piece):
    text = piece * (1_000_000 // len(piece))
    for hostile in (text, f"1{text}", f"{text}1", f"1{text}- 1"):
        started = time.process_time()
        last_number(hostile)
        # A quadratic search of a million characters takes hours.
        assert time.process_time() - started < 5

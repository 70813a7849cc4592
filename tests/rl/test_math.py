import importlib
import json
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.rl.answers import final_answer, last_boxed
from logra_jax.rl.reward_pool import RewardPool
from logra_jax.rl.rewards import MathReward, math
from logra_jax.rl.tasks import Question

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "math_pairs.jsonl").read_text().splitlines()
]
# (answer, gold) whose verdict is known to be wrong.
MISSES = {
    (r"\boxed{on Tuesday}", "Tuesday"),
    (r"\boxed{y=2x}", "f(x)=2x"),
    (r"\boxed{7\mod 12}", "7"),
}


@pytest.fixture(scope="module")
def hostile():
    sys.path.insert(0, str(Path(__file__).parent))
    yield importlib.import_module("hostile_answers")
    sys.path.remove(str(Path(__file__).parent))
    del sys.modules["hostile_answers"]


def box(text: object) -> str:
    return rf"So it is \boxed{{{text}}}."


def test_ordinary_answers_get_the_verdict_of_a_reader():
    wrong = {
        (pair["answer"], pair["gold"])
        for pair in PAIRS
        if math(pair["answer"], pair["gold"]) != pair["right"]
    }
    assert wrong == MISSES
    assert len(PAIRS) >= 300
    assert len(MISSES) <= 0.01 * len(PAIRS)
    # A checker that says the same to everything fails.
    assert 0.3 < np.mean([pair["right"] for pair in PAIRS]) < 0.7


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_are_right_when_equal_however_they_are_written(number, other):
    for text in (number, f"{number:,}", f"{number}.0", f"x = {number}", f"{number} cm"):
        assert math(box(text), str(number)) == 1.0
        assert math(box(text), str(other)) == (number == other)
    assert math(f"That makes {number}", str(number)) == 1.0


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(2, 9))
def test_fractions_are_right_when_equal(above, below, factor):
    gold = rf"\frac{{{above}}}{{{below}}}"
    value = Fraction(above, below)
    for text in (
        gold,
        rf"\dfrac{{{above * factor}}}{{{below * factor}}}",
        f"{above}/{below}",
        f"{value.numerator}/{value.denominator}",
    ):
        assert math(box(text), gold) == 1.0
    assert math(box(rf"\frac{{{above + below}}}{{{below}}}"), gold) == 0.0
    if above:
        assert math(box(rf"\frac{{{-above}}}{{{below}}}"), gold) == 0.0


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.data())
def test_sets_and_lists_have_no_order_and_tuples_have_one(numbers, data):
    shuffled = data.draw(st.permutations(numbers))
    plain, other = (", ".join(map(str, items)) for items in (numbers, shuffled))
    assert math(box(other), plain) == 1.0
    assert math(box(rf"\{{{other}\}}"), rf"\{{{plain}\}}") == 1.0
    assert math(box(f"({other})"), f"({plain})") == (shuffled == numbers)
    assert math(box(f"{other}, 100"), plain) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{7} or \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed 42, surely", "42,"),
        (r"\boxed{a \boxed{b}}", "a {b}"),
        (r"an open \boxed{ before \boxed{5}", "5"),
        (r"\boxed{5} and \boxed{6", None),
        (r"\boxed{}", None),
        (r"\boxed{5}, in short \boxed{ }", None),
        (r"\boxed", None),
        (r"\boxedness 5", None),
        ("5", None),
    ],
)
def test_last_box_is_the_one_that_a_reader_sees(response, answer):
    assert last_boxed(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"The answer is 3, no: \boxed{4}", "4"),
        (r"The answer is 3, in \boxed{}", None),
        ("The answer is 3/4.", "3/4"),
        ("Answer: **42**", "42"),
        ("The final answer is:\n\n12 cm", "12 cm"),
        ("the answer is $x=5$, as $2+3=5$", "x=5"),
        ("The answer is no solution.", "no solution"),
        ("we get $2+3$", "2+3"),
        (r"we get \(3\pi\) and \[ x = 4 \]", "x = 4"),
        ("it costs $5 or $6 now", "6"),
        ("2x + 1", "2x + 1"),
        ("Monday", "Monday"),
        ("It must be Monday or Tuesday then", None),
        ("we get 4 - 9 = - 5", "-5"),
        ("so we take 3/4 of them", "3/4"),
        ("so it is 10% then", "10%"),
        (r"that is \frac{1}{2} in all", r"\frac{1}{2}"),
        ("", None),
    ],
)
def test_final_answer_is_what_a_response_ends_on(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "piece",
    ["7", "{", "}", r"\boxed{", r"\boxed", r"\(", r"\[", "$", "answer is ", " ", "* "],
)
def test_final_answer_takes_linear_time(piece):
    text = piece * (1_000_000 // len(piece))
    closed = text + "}" * text.count("{")
    for response in (text, closed, text + "5", "answer is" + text, r"\boxed{" + text):
        started = time.process_time()
        final_answer(response)
        # A quadratic search of a million characters takes hours.
        assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        "9^9^9^9",
        "(((2^{99})^{99})^{99})^{99}",
        "100000000!",
        "((20!)!)!",
        r"\binom{100000000}{50000000}",
        "(100000000)_{2}",
        r"x^{99999999}",
        r"\sum_{n=1}^{99999999} n",
        "(" * 300 + "x" + ")" * 300,
        "1/2/3" + "/7" * 140,
        r"\sqrt{" + "7" * 1900 + "}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{99999999}",
    ],
)
def test_what_could_take_long_is_refused_without_computing_it(text):
    MathReward().prepare()
    for gold in (r"2\pi", "x^2 + 1", "y = 2x + 1", "A \\cap B"):
        started = time.process_time()
        assert math(box(text), gold) == 0.0
        # Computed, each takes from many seconds to for ever.
        assert time.process_time() - started < 1


def test_any_thread_may_score_and_no_signal_is_touched():
    before = signal.getsignal(signal.SIGALRM)
    expected = [math(pair["answer"], pair["gold"]) for pair in PAIRS]
    seen = set()

    def score(pair):
        seen.add(threading.get_ident())
        return math(pair["answer"], pair["gold"])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(score, PAIRS)) == expected
    assert threading.get_ident() not in seen
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_echoed_question_is_no_answer():
    question = Question(r"Is it \boxed{5}, or 6? Answer: 5", "5", {})
    reward = MathReward()
    assert reward(question, question.text) == 0.0
    assert reward(question, f"{question.text} Well. {question.text}") == 0.0
    assert reward(question, f"{question.text} It is 5") == 1.0


LAZY = [
    "",
    r"\boxed{}",
    r"\boxed{?}",
    r"\boxed{answer}",
    r"\boxed{\text{your answer}}",
    r"\boxed{\ldots}",
    r"\boxed{x=x}",
    r"\boxed{x/x}",
    r"\boxed{0^0}",
    r"\boxed{\frac{0}{0}}",
    r"\boxed{\infty-\infty}",
    r"\boxed{nan}",
    r"\boxed{1,2,3,4,5,6,7,8,9,10}",
    r"\boxed{\{0,1,2,3,4,5\}}",
    r"\boxed{1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20}",
    r"\boxed{A, B, C, D}",
    r"\boxed{A or B or C or D}",
    r"\boxed{yes or no}",
    r"\boxed{\text{Monday, Tuesday, Wednesday}}",
    r"\boxed{f(x)}",
    r"\boxed{x<\infty}",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    "A B C D E",
    "The answer is",
    "I don't know.",
]


@pytest.mark.parametrize("answer", LAZY)
def test_lazy_answers_win_nothing(answer):
    golds = sorted({pair["gold"] for pair in PAIRS})
    assert [gold for gold in golds if math(answer, gold)] == []


@pytest.mark.slow
def test_hostile_answers_cost_neither_time_nor_memory_nor_the_pool(hostile):
    golds = ["5", r"2\pi", "x^2+1", "(1,2)", "x=5", r"\{1,2\}", "[1,2)", "y=2x+1"]
    golds += [r"\text{Monday}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"]
    questions = [Question(hostile.PROMPT, gold, {}) for gold in golds] * 1000
    texts = hostile.hostile_answers(10_000)
    ordinary = PAIRS[:60]
    asked = [Question("?", pair["gold"], {}) for pair in ordinary]

    def held(pool):
        watch = [Question("?", "", {})] * 64
        return max(pool.score(watch, ["MiB?"] * 64).values)

    with RewardPool(hostile.Watched(), workers=2, memory=2.0) as pool:
        first = pool.score(questions[:2000], texts[:2000])
        early = held(pool)
        rest = pool.score(questions[2000:], texts[2000:])
        late = held(pool)
        after = pool.score(asked, [pair["answer"] for pair in ordinary])
    for rewards in (first, rest):
        assert not rewards.values.any()
        assert (rewards.failed, rewards.first_failure) == (0, None)
    assert late < early + 32
    assert after.values.tolist() == [float(pair["right"]) for pair in ordinary]

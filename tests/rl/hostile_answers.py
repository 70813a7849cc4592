"""Answers that nobody should have to read: they hang, crash or fill a naive checker."""

import os
import random
from collections.abc import Callable
from pathlib import Path

from logra_jax.rl.rewards import MathReward
from logra_jax.rl.tasks import Question

PROMPT = r"Solve for x. Put your final answer within \boxed{}, for example \boxed{5}."


def hostile_answers(count: int, seed: int = 0) -> list[str]:
    """`count` answers, the same for the same seed; none of them is 5."""
    rng = random.Random(seed)
    kinds = list(KINDS)
    return [rng.choice(kinds)(rng) for _ in range(count)]


def box(text: str) -> str:
    return rf"\boxed{{{text}}}"


def digits(rng: random.Random, most: int) -> str:
    return "".join(rng.choices("123456789", k=rng.randint(1, most)))


def tower(rng: random.Random) -> str:
    height, base = rng.randint(2, 6), rng.choice(["9", "99", "x", "(x+1)", "e", r"\pi"])
    text = base
    for _ in range(height):
        text = f"{base}^{{{text}}}"
    return box(text)


def power_of_power(rng: random.Random) -> str:
    text = rng.choice(["2", "x+1", "1.0001"])
    for _ in range(rng.randint(1, 8)):
        text = f"({text})^{{{rng.choice([2, 64, 999, 10**9])}}}"
    return box(text)


def large_power(rng: random.Random) -> str:
    return box(f"{digits(rng, 3)}^{{{digits(rng, 12)}}}")


def factorial(rng: random.Random) -> str:
    return box(digits(rng, 9) + "!" * rng.randint(1, 40))


def unbalanced(rng: random.Random) -> str:
    pieces = ["{", "}", "(", ")", "[", "]", r"\frac", r"\left(", r"\right.", "$", r"\{"]
    return box("".join(rng.choices([*pieces, "x", "1"], k=rng.randint(1, 60))))


def long_text(rng: random.Random) -> str:
    piece = rng.choice(
        ["7", "x+", "\\", "{", r"\boxed{", "$", " ", "- ", "1,", r"\frac"]
    )
    return rng.choice([box, str])(piece * (100_000 // len(piece)))


def other_digits(rng: random.Random) -> str:
    return box("".join(rng.choices("٣५５²Ⅷ三𝟝①", k=rng.randint(1, 30))))


def echo(rng: random.Random) -> str:
    return PROMPT * rng.randint(1, 20)


def many_boxes(rng: random.Random) -> str:
    wrong = (box(str(n)) for n in range(6, 6 + rng.randint(2, 200)))
    return " or ".join(["Could be", *wrong])


def null_bytes(rng: random.Random) -> str:
    return box("\0".join(rng.choices(["x", "7", "\x1b[2J", "\ud7ff", "\r"], k=20)))


def deep(rng: random.Random) -> str:
    depth = rng.choice([5, 50, 500, 5000])
    opening, closing = rng.choice(
        [("(", ")"), ("{", "}"), (r"\sqrt{", "}"), ("[", "]")]
    )
    return box(opening * depth + "x" + closing * rng.choice([depth, depth - 1]))


def fractions(rng: random.Random) -> str:
    text = "x"
    for _ in range(rng.choice([3, 10, 100])):
        text = rf"\frac{{{rng.randint(1, 9)}}}{{{text}+1}}"
    return box(text)


def continued(rng: random.Random) -> str:
    return box(
        "/".join(str(rng.randint(1, 9)) for _ in range(rng.choice([3, 30, 300])))
    )


def matrix(rng: random.Random) -> str:
    size = rng.choice([2, 10, 40])
    row = "&".join(["9^{9^9}", *["x"] * (size - 1)])
    body = r"\\".join([row] * size)
    power = rng.choice(["", "^{-1}", "^{1000}"])
    return box(rf"\begin{{pmatrix}}{body}\end{{pmatrix}}{power}")


def huge_integer(rng: random.Random) -> str:
    number = digits(rng, 9) * rng.choice([1, 10, 1000, 10_000])
    return box(
        rng.choice(
            ["{}", "-{}", "1/{}", r"\sqrt{{{}}}", "{}e9", "0.{}", "x+{}"]
        ).format(number)
    )


def functions(rng: random.Random) -> str:
    names = [r"\sin", r"\cos", r"\tan", r"\ln", r"\log_2", r"\arctan", r"\sqrt"]
    text = "x"
    for _ in range(rng.choice([2, 7, 30])):
        text = f"{rng.choice(names)}{{({text}+1)}}"
    return box(text)


def computed(rng: random.Random) -> str:
    return box(
        rng.choice(
            [
                r"\sum_{n=1}^{10^9} n",
                r"\int_0^1 \sin(\sin(\sin x)) dx",
                r"\prod_{k=1}^{99999} k",
                r"\lim_{x\to0} x^{x^{x}}",
                r"\binom{100000000}{50000000}",
                "(100000000)_{2}",
                "factorial(10**9)",
                "__import__('os').system('true')",
                r"\gcd(10^{99}, 10^{98})",
                "1e999999999",
                r"10^{999999999}",
                r"0.\overline{" + "9" * 900 + "}",
            ]
        )
    )


def polynomial(rng: random.Random) -> str:
    terms = [rf"{rng.randint(2, 9)}x^{{{rng.randint(2, 60)}}}" for _ in range(12)]
    return box("+".join(terms) + rng.choice(["", "=0", "<9"]))


def soup(rng: random.Random) -> str:
    pieces = (
        r"x y 1 2 + - * / ^ _ ( ) { } \frac \sqrt \pi \cdot , ; = < \le \cup \pm % !"
    )
    return box("".join(rng.choices(pieces.split(), k=rng.randint(2, 40))))


def noise(rng: random.Random) -> str:
    return "".join(chr(rng.randint(1, 0xD7FF)) for _ in range(rng.randint(1, 300)))


KINDS: tuple[Callable[[random.Random], str], ...] = (
    tower,
    power_of_power,
    large_power,
    factorial,
    unbalanced,
    long_text,
    other_digits,
    echo,
    many_boxes,
    null_bytes,
    deep,
    fractions,
    continued,
    matrix,
    huge_integer,
    functions,
    computed,
    polynomial,
    soup,
    noise,
)


class Watched(MathReward):
    """A reward that also tells what its process holds."""

    def __call__(self, question: Question, text: str) -> float:
        if text == "MiB?":
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return super().__call__(question, text)

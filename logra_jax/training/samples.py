"""Responses of an evaluation, kept for reading: `samples/<step>.jsonl` of a run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from logra_jax.training.paths import write_aside

SAMPLES_DIRECTORY = "samples"  # of a run directory


class Sample(NamedTuple):
    """A response to a question of an evaluation; a line of the file, under these keys.

    ``n``-th (from 0) of the responses to its question in its ``mode``.
    """

    set: str
    mode: str  # "greedy" or "sampled"
    family: str
    question: str
    gold: str  # reference answer
    response: str
    answer: str | None  # what the response votes for
    reward: float
    length: int  # tokens
    finished: bool  # an end of sequence came before the limit
    n: int


def samples_path(run_dir: Path, step: int) -> Path:
    """Where the samples of the evaluation after ``step`` updates are."""
    return run_dir / SAMPLES_DIRECTORY / f"{step:06d}.jsonl"


def write_samples(path: Path, samples: Sequence[Sample], keep: int = -1) -> None:
    """Write samples, one JSON object a line, in place of what is there.

    Args:
        path: of the file; it is whole (written aside, renamed) or not there.
        samples: in order.
        keep: how many, spread evenly over them; -1 is all, and 0 writes no file.
    """
    chosen = samples if keep < 0 else spread(samples, keep)
    if keep == 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(s._asdict(), ensure_ascii=False) + "\n" for s in chosen)
    write_aside(path, "".join(lines))


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file."""
    with path.open(encoding="utf-8") as lines:
        return [Sample(**json.loads(line)) for line in lines]


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Up to ``count`` of the samples, spread evenly over them."""
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def to_show(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Those to look at: of the first set, one a question, greedy where there are such.

    The same questions at each evaluation.
    """
    first = [s for s in samples if s.set == samples[0].set and s.n == 0]
    return [s for s in first if s.mode == first[0].mode][:count]

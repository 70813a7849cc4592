"""What a run's questions were, so that it goes on with the same.

`data.json` in the run directory: where the questions came from, how many there are and
were dropped, and fingerprints of those to train on. A position in the stream of
questions (:func:`~logra_jax.rl.tasks.draw`) means the same only while they are.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from logra_jax.rl.tasks import Question, Task
from logra_jax.training.paths import DATA_FILE, write_aside
from logra_jax.training.schema import Config

_COMPARED = ("train", "fingerprint", "fingerprint_of_texts", "fingerprint_in_any_order")


def task_fingerprint(task: Task) -> str:
    """A hash of the texts and answers of the questions to train on, in their order.

    Equal for equal questions, however often and from what file they are loaded.
    """
    return _hash((q.text, q.answer) for q in task.train)


def data_record(config: Config, task: Task) -> dict[str, Any]:
    """What `data.json` says: plain values alone."""
    return {
        "source": config.task.source,
        "name": task.name,
        "train": len(task.train),
        "held_out": len(task.held_out),
        "dropped": dict(task.dropped),
        "eval_sets": {
            one.name: {
                "source": config.eval.sets[one.name].source,
                "questions": len(one.questions),
                "dropped": dict(one.dropped),
            }
            for one in task.eval_sets
        },
        "fingerprint": task_fingerprint(task),
        # What else it takes to say what has changed.
        "fingerprint_of_texts": _hash((q.text,) for q in task.train),
        "fingerprint_in_any_order": _hash(sorted(_pairs(task.train))),
    }


def describe_data(task: Task) -> list[str]:
    """A line for the task and each evaluation set: how many questions, and dropped."""
    counts = f"{len(task.train):,} questions to train on"
    if task.held_out:
        counts += f", {len(task.held_out):,} held out"
    lines = [f"{task.name}: {counts}{_dropped(task.dropped)}"]
    for one in task.eval_sets:
        count = f"{len(one.questions):,} questions to measure on"
        lines.append(f"{one.name}: {count}{_dropped(one.dropped)}")
    return lines


def write_data_record(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Put the record into the run directory, whole or not at all."""
    write_aside(run_dir / DATA_FILE, json.dumps(record, indent=2) + "\n")


def check_data_record(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Refuse to resume a run on other questions than it began with.

    A run without a record is taken as it is: it is older, or was killed before its
    first.

    Raises:
        ValueError: the questions to train on differ; how.
    """
    path = run_dir / DATA_FILE
    try:
        stored = json.loads(path.read_text("utf-8"))
        same = [name for name in _COMPARED if stored[name] == record[name]]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`resume` must name a run whose {DATA_FILE} can be read, got {error!r} "
            f"for {str(path)!r}."
        ) from error
    if "fingerprint" in same:
        return
    count = f"{record['train']:,} questions to train on"
    if "train" not in same:
        change = f"{count} where it had {stored['train']:,}"
    elif "fingerprint_of_texts" in same:
        change = f"{count} as before, with other answers"
    elif "fingerprint_in_any_order" in same:
        change = f"{count} as before, in another order"
    else:
        change = f"{count}, as many as before but others"
    raise ValueError(
        "`task` must give a resumed run the questions that it began with, got "
        f"{change}; put the data back or start a new run."
    )


def _pairs(questions: Iterable[Question]) -> list[tuple[str, str]]:
    return [(question.text, question.answer) for question in questions]


def _hash(items: Iterable[tuple[str, ...]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        # JSON, so that no two lists of texts are written alike; any text has a form.
        digest.update(json.dumps(item).encode() + b"\n")
    return digest.hexdigest()


def _dropped(dropped: Mapping[str, int]) -> str:
    reasons = [f"{count:,} {reason}" for reason, count in dropped.items()]
    return f"; dropped: {', '.join(reasons)}" if reasons else ""

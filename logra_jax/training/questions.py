"""From the config's data sections to questions."""

import contextlib
import re
from collections.abc import Iterator

from logra_jax.rl.aime import aime_questions
from logra_jax.rl.file_tasks import file_questions
from logra_jax.rl.hub_tasks import hub_questions
from logra_jax.rl.reasoning_gym_tasks import Family, mixed_questions
from logra_jax.rl.rows import Columns
from logra_jax.rl.tasks import (
    EvalSet,
    Question,
    Task,
    distinct,
    put_in_prompt,
    split,
    without,
)
from logra_jax.training.schema import Config
from logra_jax.training.schema_task import DataConfig

# Why questions of the training data are not trained on.
IN_EVAL_SETS = "in evaluation sets"


def load_questions(config: Config) -> Task:
    """All questions of a run: to train on, held out, and of its evaluation sets.

    Each source gives distinct questions; where files, hub data sets or AIME give a
    question with different answers, it is dropped, as nothing says which is right. What
    is of the class of a question of an evaluation set is not trained on.

    Raises:
        ValueError: a source has no such questions, or nothing is left to train on.
    """
    sets = tuple(_eval_set(config, name) for name in config.eval.sets)
    task = config.task
    with _naming("task"):
        questions, dropped = _distinct_questions(task, task.prompt)
        train, held_out = split(questions, task.held_out, task.seed)
    clean = without(train, [q for one in sets for q in one.questions])
    if not clean:
        raise ValueError(
            "`eval.sets` must leave questions to train on, got sets that hold all "
            f"{len(train)} training questions; give the task another split or name"
        )
    if len(clean) < len(train):
        dropped |= {IN_EVAL_SETS: len(train) - len(clean)}
    return Task(task.name, clean, held_out, sets, dropped)


def _eval_set(config: Config, name: str) -> EvalSet:
    section = config.eval.sets[name]
    prompt = config.task.prompt if section.prompt is None else section.prompt
    with _naming(f"eval.sets.{name}"):
        questions, dropped = _distinct_questions(section, prompt)
    return EvalSet(name, questions, dropped)


@contextlib.contextmanager
def _naming(section: str) -> Iterator[None]:
    """A source names its own argument; the error then names the key of the config."""
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"^`", f"`{section}.", str(error))) from error


def _distinct_questions(
    section: DataConfig, prompt: str | None
) -> tuple[tuple[Question, ...], dict[str, int]]:
    """The section's questions in their prompts, and counts of what was dropped."""
    made_up = section.source == "reasoning_gym"
    questions, dropped = distinct(_read(section), contradictions=made_up)
    if not questions:
        raise ValueError(
            f"`name` must name questions with one answer each, got {section.name!r}, "
            f"whose {dropped['contradictory']} contradict one another"
        )
    questions = questions[: section.limit]
    return (put_in_prompt(questions, prompt) if prompt else questions), dropped


def _read(section: DataConfig) -> list[Question]:
    """The section's questions as its source gives them."""
    source, name, columns = section.source, section.name, section.columns
    if source == "reasoning_gym":
        return mixed_questions(_families(section), size=section.size, seed=section.seed)
    if source == "aime":
        return aime_questions(name)
    where = Columns(columns.question, columns.answer, columns.family, (*columns.keep,))
    if source == "files":
        return file_questions(name, where)
    return hub_questions(name, where, subset=section.subset, split=section.split)


def _families(section: DataConfig) -> list[Family]:
    if not section.mix:
        return [Family(section.name, section.options, section.level)]
    return [
        Family(name, family.options, family.level, family.weight)
        for name, family in section.mix.items()
    ]

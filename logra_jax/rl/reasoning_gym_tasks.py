"""Questions that reasoning-gym makes up: one data set, or a mix of several.

A data set's difficulty is set by its own options, or by a level of the curriculum that
reasoning-gym has for most of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from logra_jax.rl.reasoning_gym_entries import Order, make_entries
from logra_jax.rl.tasks import (
    Question,
    Task,
    apportion,
    check_at_least,
    check_data_set,
    distinct,
    nearest,
    split,
)


@dataclass(frozen=True)
class Family:
    """A reasoning-gym data set as part of a mix.

    Attributes:
        name: such as "chain_sum".
        options: its own, such as `{"max_terms": 2}`; not `size` or `seed`. They win
            over what `level` sets.
        level: of the data set's curriculum, from 0; None leaves its defaults.
        weight: of its share in the mix, > 0.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    level: int | None = None
    weight: float = 1.0


def reasoning_gym_task(
    name: str,
    options: Mapping[str, Any],
    *,
    size: int,
    seed: int,
    held_out: float,
) -> Task:
    """Draws a reasoning-gym data set and splits it by question.

    The result depends on the arguments alone.

    Args:
        name: a reasoning-gym data set, such as "chain_sum".
        options: its own options, such as `{"max_terms": 2}`; not `size` or `seed`.
        size: entries drawn, >= 1. Small data sets repeat themselves: only distinct
            questions are kept, in the order in which they first appear.
        seed: of the data set and of the split, >= 0.
        held_out: share of the question classes to hold out, inside (0, 1).

    Returns:
        The task; both of its splits hold at least one question.

    Raises:
        ValueError: an argument is out of range, the data set or an option is unknown
            or refused, or a split would be empty.
    """
    if not 0 < held_out < 1:
        raise ValueError(
            f"`held_out` must lie inside (0, 1), got {held_out}; 0.3 is a good start"
        )
    drawn = mixed_questions([Family(name, options)], size=size, seed=seed)
    questions, dropped = distinct(drawn, contradictions=True)
    return Task(name, *split(questions, held_out, seed), dropped=dropped)


def mixed_questions(
    families: Sequence[Family], *, size: int, seed: int
) -> list[Question]:
    """Draws questions of one or several reasoning-gym data sets.

    Args:
        families: each at most once; each gets its part of `size`, by weight. With
            another `seed`, or another part of `size`, its questions are others.
        size: entries drawn in all, >= 1; some may be equal.
        seed: of every data set, >= 0.

    Returns:
        The questions, one family after the other; `Question.family` says which.

    Raises:
        ValueError: an argument is out of range, the data set, its level or an option
            is unknown or refused, or a family would get no question.
    """
    check_at_least("size", size, 1)
    check_at_least("seed", seed, 0)
    parts = apportion(size, [family.weight for family in families])
    if 0 in parts:
        raise ValueError(
            f"`size` must give every family of the mix a question, got {size} for "
            f"{len(families)}, of which {families[parts.index(0)].name} gets none; "
            "raise it, or that `weight`"
        )
    orders = [
        Order(family.name, _settled_options(family), part, seed)
        for family, part in zip(families, parts, strict=True)
    ]
    return [
        Question(
            entry["question"],
            "" if entry["answer"] is None else str(entry["answer"]),
            entry,
            family=order.name,
        )
        for order, entries in zip(orders, make_entries(orders), strict=True)
        for entry in entries
    ]


def level_options(name: str, level: int) -> dict[str, Any]:
    """The options that a level of a data set's curriculum stands for.

    An option whose curriculum has fewer levels stays at its highest; one that is a
    range spans all levels up to this one, as reasoning-gym has it by default.

    Raises:
        ValueError: the data set has no curriculum, or not so many levels.
    """
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(name):
        raise ValueError(
            f"`level` must be null for {name}, which has no curriculum, got {level}; "
            "set its `options`"
        )
    curriculum: Any = create_curriculum(name)
    attributes = list(curriculum.attributes.values())
    highest = max(len(attribute.levels) for attribute in attributes) - 1
    if not 0 <= level <= highest:
        raise ValueError(
            f"`level` must lie in [0, {highest}] for {name}, got {level}; beyond it "
            "set its `options`"
        )
    curriculum.set_global_level(level)
    made = curriculum.generate_configuration()
    kinds = ("field_name", "lower_field_name", "upper_field_name")
    set_by = [
        getattr(a, kind) for a in attributes for kind in kinds if hasattr(a, kind)
    ]
    return {option: getattr(made, option) for option in set_by}


def _settled_options(family: Family) -> dict[str, Any]:
    """The options of a data set that there is, those of its level included."""
    check_data_set("name", family.name)
    _check_options(family.name, family.options)
    level = {} if family.level is None else level_options(family.name, family.level)
    return level | dict(family.options)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    known = {option.name for option in dataclasses.fields(DATASETS[name][1])}
    for option in options:
        if option in ("size", "seed"):
            raise ValueError(
                f"`options` must not set `{option}`, got {options[option]!r}; "
                f"it is an argument of the task itself"
            )
        if option not in known:
            raise ValueError(
                f"`options` of {name} must be options it has, got {option!r}"
                f"{nearest(option, known - {'size', 'seed'})}"
            )

"""The KL budget of a run, from `kl.budget` and `kl.schedule`: an optax schedule.

Imported only where JAX is at hand anyway, or where the config names an optax schedule.
"""

import difflib
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax.training.checks import require
from logra_jax.training.schema_update import BUDGETS, KLConfig


def build_budget(kl: KLConfig, steps: int) -> optax.ScalarOrSchedule | None:
    """The budget of each of ``steps`` updates, nats per token; None for no control.

    Raises:
        ValueError: the schedule does not run, or not to numbers that are budgets.
    """
    if kl.budget == "none":
        return None
    if kl.budget == "constant":
        return kl.start
    if kl.budget == "cosine":
        return optax.cosine_decay_schedule(
            kl.start, max(1, steps - 1), kl.end / kl.start
        )
    try:
        schedule = find_schedule(kl.budget)(**kl.schedule)
        values = np.asarray(jax.vmap(schedule)(jnp.arange(steps)), np.float64)
        if values.shape != (steps,):
            raise ValueError("a budget must be one number")
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"`kl.schedule` must hold values that optax.{kl.budget} takes, got "
            f"{kl.schedule}; it says: {reason}."
        ) from None
    is_budget = np.isfinite(values) & (values >= 0)
    if not is_budget.all():
        update = int(np.argmin(is_budget))
        raise ValueError(
            "`kl.schedule` must give finite budgets, none of them negative, got "
            f"{values[update]:.3g} nats per token at update {update + 1}."
        )
    if not values.any():
        raise ValueError(
            "`kl.schedule` must give a positive budget at some update, got 0 nats per "
            "token at all of them; every update would be dropped."
        )
    return schedule


def check_schedule(kl: KLConfig) -> None:
    """Refuse a name that is no optax schedule, and arguments that it does not have.

    Raises:
        ValueError: one sentence.
    """
    known = schedule_names()
    if kl.budget not in known:
        raise ValueError(
            f"`kl.budget` must be {', '.join(BUDGETS)} or the name of an optax "
            f"schedule, got {kl.budget!r}; {_nearest(kl.budget, [*BUDGETS, *known])}"
        )
    parameters = inspect.signature(find_schedule(kl.budget)).parameters
    for name in kl.schedule:
        if name not in parameters:
            raise ValueError(
                f"`kl.schedule` must hold arguments of optax.{kl.budget}, got "
                f"{name!r}; {_nearest(name, list(parameters))}"
            )
    for name, parameter in parameters.items():
        require(
            name in kl.schedule or parameter.default is not inspect.Parameter.empty,
            "kl.schedule",
            kl.schedule,
            f"hold `{name}`, which optax.{kl.budget} needs",
        )
    steps = kl.schedule.get("transition_steps", 1)
    require(
        not isinstance(steps, int | float) or steps >= 1,
        "kl.schedule.transition_steps",
        steps,
        "be at least 1",
        "optax would make the schedule a constant",
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"the choice is {', '.join(known)}."


def schedule_names() -> list[str]:
    """Optax's functions from plain values to a schedule."""
    return [
        name
        for name in dir(optax.schedules)
        if name.endswith(("_schedule", "_decay")) and hasattr(optax, name)
    ]


def find_schedule(name: str) -> Callable[..., optax.Schedule]:
    """The factory of a schedule in :func:`schedule_names`."""
    return getattr(optax.schedules, name)

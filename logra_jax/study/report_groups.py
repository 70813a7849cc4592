"""Runs of a report side by side: in what their configs differ, what they are called.

groups = group_runs(read_runs(["runs/a-0", "runs/a-1", "runs/b-0"]))
[group.label for group in groups]  # ["rl.advantage = grpo", "rl.advantage = rloo"]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from logra_jax.study.report_runs import Run

# Keys that say where a run is kept, not what it does.
_PLACES = ("run_dir", "resume", "cache_dir", "name")


class Group(NamedTuple):
    """Runs that differ in nothing but their seed."""

    label: str
    runs: tuple[Run, ...]


def differing(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Dotted keys that not all configs give the same value, but for places."""
    configs = list(configs)
    keys = dict.fromkeys(key for config in configs for key in config)
    absent = object()
    return [
        key
        for key in keys
        if key not in _PLACES
        and any(
            config.get(key, absent) != configs[0].get(key, absent) for config in configs
        )
    ]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by what their configs say but for the seed, named by what differs.

    Where configs are alike to the seed, the names of the directories tell runs apart.
    """
    found: list[list[Run]] = []
    for run in runs:
        alike = (
            group
            for group in found
            if differing([group[0].config, run.config]) in ([], ["seed"])
            and run.config.get("seed") not in [one.config.get("seed") for one in group]
        )
        group = next(alike, None)
        if group is None:
            found.append([run])
        else:
            group.append(run)
    labels = _labels([group[0] for group in found])
    return [
        Group(label, tuple(group)) for label, group in zip(labels, found, strict=True)
    ]


def _labels(firsts: Sequence[Run]) -> list[str]:
    """A label for each of some runs, from the fewest keys that tell them apart."""
    if len(firsts) == 1:
        return [firsts[0].name]
    configs = [run.config for run in firsts]
    keys = [key for key in differing(configs) if key != "seed"]
    telling = [[key] for key in keys if _tells([key], configs)]
    chosen = telling[0] if telling else keys
    if not keys or not _tells(chosen, configs):
        return [run.name for run in firsts]
    labels = [
        ", ".join(f"{key} = {show(config.get(key))}" for key in chosen)
        for config in configs
    ]
    return labels if max(map(len, labels)) <= 60 else [run.name for run in firsts]


def _tells(keys: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no two configs are alike in these keys."""
    values = {tuple(show(config.get(key)) for key in keys) for config in configs}
    return len(values) == len(configs)


def show(value: Any) -> str:
    """A config's value as the file would have it."""
    return json.dumps(value) if not isinstance(value, str) else value


def label_of(group: Group, run: Run) -> str:
    """A run among the others: its group, and its seed where the group has several."""
    if len(group.runs) == 1:
        return group.label
    return run.name

"""A study: one config, what is varied of it, and the cells that come of that.

    study = load_study("configs/studies/methods.yaml", ["train.steps=4", "seeds=[0]"])
    [cell.name for cell in study.cells]   # method=logra,seed=0; method=lora,seed=0; …

A study is a YAML file:

    config: ../quickstart.yaml    # beside this file
    set: {train.steps: 10}        # of every run; dotted keys
    seeds: [0, 1, 2]              # innermost in tables, outermost in time
    axes:                         # every combination is a run
      method:                     # a name of yours: what each label sets
        logra: {}
        lora: {optimizer.kind: lora, sketch.rank: 16}
      sketch.rank: [4, 16]        # or a key of the config: its values
    baseline: {method: adamw}     # what savings are counted against
    plan: {tokens: 4096}          # compile the step of each combination too
    reconstruction: {ranks: [4, 16, 64]}   # and measure sketches of real gradients
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from logra_jax.training.checks import require, seed_in_range
from logra_jax.training.config import (
    flatten,
    load_config,
    read_yaml,
    unknown_key,
)
from logra_jax.training.schema import Config

Kind = Literal["plan", "reconstruction", "train"]
Settings = Mapping[str, Any]  # dotted keys of a config and their values
_LONGEST = 200  # bytes of a cell's name: file systems take 255 at most

KEYS = (
    "config",
    "set",
    "seeds",
    "axes",
    "baseline",
    "plan",
    "reconstruction",
)
# Keys of a config that a study gives its runs itself.
_OWN = {
    "seed": "give seeds: [...]",
    "run_dir": "each run has a directory of its own; --out is the study's",
    "resume": "a study that is started again goes on by itself",
    "name": "each run has a name of its own",
}


@dataclass(frozen=True)
class Cell:
    """One piece of a study, done in a process of its own.

    Attributes:
        kind: a training run; the plan of its step; or sketches of its gradients.
        labels: of the study's axes, in order.
        seed: of a run; None for what needs none.
        settings: what the axes set; later ones win.
        config: the whole config.
    """

    kind: Kind
    labels: Mapping[str, str]
    seed: int | None
    settings: Settings
    config: Config

    @property
    def group(self) -> str:
        """What it has in common with the cells of other seeds."""
        labels = [f"{axis}={label}" for axis, label in self.labels.items()]
        return ",".join(labels) or "all"

    @property
    def name(self) -> str:
        """Of the cell's directory."""
        parts = [f"{axis}={label}" for axis, label in self.labels.items()]
        parts += [] if self.seed is None else [f"seed={self.seed}"]
        parts += [] if self.kind == "train" else [self.kind]
        return re.sub(r"[^\w.,=+-]", "_", ",".join(parts))


@dataclass(frozen=True)
class Study:
    """What a study's file and overrides say; see the module's docstring.

    Attributes:
        name: the file's stem.
        header: the comment on top of the file.
        cells: in the order in which they are done.
        axes: labels of each axis, in order.
        seeds: of the runs.
        baseline: label of an axis that savings are counted against; empty for none.
        plan: arguments of the plans, None for no plans.
        reconstruction: arguments of that measurement, None for none.
    """

    name: str
    header: str
    cells: Sequence[Cell]
    axes: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    baseline: Mapping[str, str] = field(default_factory=dict)
    plan: Settings | None = None
    reconstruction: Settings | None = None

    @property
    def groups(self) -> list[str]:
        """What differs in more than the seed, in the order of the axes."""
        labels = [[f"{axis}={x}" for x in these] for axis, these in self.axes.items()]
        return [",".join(parts) or "all" for parts in itertools.product(*labels)]


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study and build the config of each of its cells.

    Args:
        path: the YAML file.
        overrides: ``key=value``: a key of the study (``seeds=[0]``), or a dotted key of
            the config, for every run.

    Raises:
        ValueError: one sentence on what is wrong, with the study or with a cell's
            config.
    """
    path = Path(path)
    tree = read_yaml(path)
    rest = []
    for text in overrides:
        key, equals, _ = text.partition("=")
        if equals and key.partition(".")[0] in KEYS:
            _override(tree, text)
        else:
            rest.append(text)
    for key in tree:
        if key not in KEYS:
            raise ValueError(unknown_key(key, KEYS, "a study"))
    base = tree.get("config")
    require(isinstance(base, str), "config", base, "name a config file")
    given = _mapping("set", tree.get("set"))
    seeds = tree.get("seeds", [0])
    is_list = _is_list_of(seeds, int) and bool(seeds)
    require(is_list, "seeds", seeds, "be a list of integers")
    require(len(set(seeds)) == len(seeds), "seeds", seeds, "differ from each other")
    for seed in seeds:
        seed_in_range("seeds", seed)
    axes = {
        axis: _options(axis, values)
        for axis, values in _mapping("axes", tree.get("axes")).items()
    }
    _check_keys(given, axes, rest)
    plan = _arguments(tree, "plan", {"tokens": _count})
    reconstruction = _arguments(
        tree, "reconstruction", {"ranks": _counts, "responses": _count}
    )
    common = [_as_override(key, value) for key, value in given.items()] + rest
    cells = list(
        _cells(path.parent / str(base), common, seeds, axes, plan, reconstruction)
    )
    _check_names(cells)
    return Study(
        name=path.stem,
        header=_header(path),
        cells=cells,
        axes={axis: list(options) for axis, options in axes.items()},
        seeds=seeds,
        baseline=_baseline(tree.get("baseline"), axes),
        plan=plan,
        reconstruction=reconstruction,
    )


def _cells(
    base: Path,
    common: Sequence[str],
    seeds: Sequence[int],
    axes: Mapping[str, Mapping[str, Settings]],
    plan: Settings | None,
    reconstruction: Settings | None,
) -> Iterator[Cell]:
    """What is quick first, then the runs: the first seed of all, and so on."""
    groups = []
    for labels in itertools.product(*axes.values()):
        chosen = dict(zip(axes, labels, strict=True))
        settings: dict[str, Any] = {}
        for axis, label in chosen.items():
            settings |= axes[axis][label]
        groups.append((chosen, settings))

    def cell(kind: Kind, labels: Mapping, settings: Settings, seed: int | None) -> Cell:
        own = [_as_override(key, value) for key, value in settings.items()]
        own += [f"seed={seeds[0] if seed is None else seed}"]
        try:
            config = load_config(base, [*common, *own])
        except ValueError as error:
            where = ", ".join(f"{axis}={label}" for axis, label in labels.items())
            raise ValueError(f"With {where or 'this study'}: {error}") from None
        return Cell(kind, labels, seed, settings, config)

    if plan is not None:
        for labels, settings in groups:
            yield cell("plan", labels, settings, None)
    if reconstruction is not None:
        yield cell("reconstruction", {}, {}, None)
    for seed in seeds:
        for labels, settings in groups:
            found = cell("train", labels, settings, seed)
            # A preset has no weights: there is nothing to train.
            if found.config.model.preset is None:
                yield found
            else:
                require(
                    plan is not None,
                    "plan",
                    None,
                    f"be given where `model.preset` is {found.config.model.preset}",
                    "shapes alone can be planned, not trained",
                )


def _options(axis: str, values: Any) -> Mapping[str, Settings]:
    """What each label of an axis sets."""
    rule = "be a list of values, or a mapping from labels to what they set"
    if isinstance(values, Mapping):
        options: dict[str, Settings] = {
            _label(label): _mapping(f"axes.{axis}.{_label(label)}", settings)
            for label, settings in values.items()
        }
    else:
        require(isinstance(values, list), f"axes.{axis}", values, rule)
        options = {_label(value): {axis: value} for value in values}
        count = len(values)
        require(len(options) == count, f"axes.{axis}", values, "hold unlike values")
    require(len(options) > 0, f"axes.{axis}", values, rule)
    return options


def _label(value: Any) -> str:
    """As YAML has it; what JSON has not (a date) as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _check_names(cells: Sequence[Cell]) -> None:
    """Refuse cells that would share a directory, or whose name no directory can have.

    Names are compared as the file systems do that take a for A.
    """
    names: dict[str, Cell] = {}
    for cell in cells:
        size, remedy = len(cell.name.encode()), "give its values short labels"
        require(size <= _LONGEST, "axes", cell.group, "give short names", remedy)
        other = names.setdefault(cell.name.casefold(), cell)
        if other is not cell:
            raise ValueError(
                f"`axes` must give each run a name of its own, got {other.group!r} and "
                f"{cell.group!r}, both of which would be kept in {cell.name!r}; "
                "change a label."
            )


def _check_keys(
    given: Settings, axes: Mapping[str, Mapping[str, Settings]], rest: Sequence[str]
) -> None:
    """Refuse keys that the study gives itself, and values that an axis would hide."""
    varied = {
        key: axis
        for axis, options in axes.items()
        for settings in options.values()
        for key in flatten(settings)
    }
    keys = [text.partition("=")[0] for text in rest]
    for key in [*given, *varied, *keys]:
        if key in _OWN:
            raise ValueError(f"`{key}` must not be set in a study: {_OWN[key]}.")
    for key, other in itertools.product(keys, varied):
        # A section holds its keys: either hides the other.
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            raise ValueError(
                f"`{key}` must not be overridden: the axis `{varied[other]}` of the "
                f"study sets it; override `axes.{varied[other]}` in its place."
            )


def _baseline(value: Any, axes: Mapping[str, Mapping]) -> dict[str, str]:
    baseline = {k: _label(v) for k, v in _mapping("baseline", value).items()}
    for axis, label in baseline.items():
        name = f"baseline.{axis}"
        require(axis in axes, name, label, f"name an axis: {', '.join(axes) or 'none'}")
        labels = ", ".join(axes[axis])
        require(label in axes[axis], name, label, f"be a label of its axis: {labels}")
    return baseline


def _arguments(
    tree: Mapping, key: str, known: Mapping[str, Callable[[str, Any], None]]
) -> dict[str, Any] | None:
    """A section that may be missing (None), or empty; each value held to its rule."""
    if key not in tree or tree[key] is False:
        return None
    values = {} if tree[key] is True else _mapping(key, tree[key])
    for name, value in values.items():
        if name not in known:
            raise ValueError(unknown_key(name, sorted(known), f"`{key}`"))
        known[name](f"{key}.{name}", value)
    return values


def _count(name: str, value: Any) -> None:
    require(type(value) is int and value > 0, name, value, "be a positive integer")


def _counts(name: str, value: Any) -> None:
    are_counts = _is_list_of(value, int) and bool(value) and min(value) > 0
    require(are_counts, name, value, "be a list of positive integers")


def _mapping(name: str, value: Any) -> dict[str, Any]:
    require(isinstance(value, Mapping | None), name, value, "be a mapping")
    return {str(key): item for key, item in (value or {}).items()}


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _as_override(key: str, value: Any) -> str:
    return f"{key}={_label(value)}"


def _override(tree: dict[str, Any], text: str) -> None:
    """Set a key of a study, an axis, or a label of one: ``axes.method.logra=…``."""
    import yaml

    key, _, value = text.partition("=")
    first, _, rest = key.partition(".")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"`{key}` must be YAML, got {value!r}.") from None
    section = tree.get(first)
    if first == "config":  # of the shell's directory, not of the file's
        parsed = str(Path(value).absolute())
    if not rest:
        tree[first] = parsed
        return
    if not isinstance(section, dict):
        section = tree[first] = {}
    for axis, options in section.items():
        label = rest.removeprefix(f"{axis}.")
        if label != rest and isinstance(options, dict):
            options[label] = parsed
            return
    section[rest] = parsed


def _header(path: Path) -> str:
    """The lines of the comment on top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    top = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.removeprefix("#").strip() for line in top).strip()

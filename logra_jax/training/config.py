"""A run's configuration, from a YAML file and `dotted.key=value` overrides.

OmegaConf merges and converts, the dataclasses of `schema` check values.

    config = load_config("configs/quickstart.yaml", ["train.steps=2", "sketch.rank=8"])
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from logra_jax.training.checks import require, show
from logra_jax.training.schema import Config, ModelConfig, TrainConfig
from logra_jax.training.schema_reward import RewardConfig
from logra_jax.training.schema_rl import ReferenceConfig, RLConfig, ShapingConfig
from logra_jax.training.schema_rollout import RolloutConfig
from logra_jax.training.schema_task import (
    ColumnsConfig,
    EvalSetConfig,
    FamilyConfig,
    TaskConfig,
)
from logra_jax.training.schema_update import KLConfig, OptimizerConfig, SketchConfig
from logra_jax.training.schema_watch import EvalConfig, MonitorConfig

__all__ = [
    "ColumnsConfig",
    "Config",
    "EvalConfig",
    "EvalSetConfig",
    "FamilyConfig",
    "KLConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "RLConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "ShapingConfig",
    "SketchConfig",
    "TaskConfig",
    "TrainConfig",
    "load_config",
    "to_yaml",
]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides, check everything.

    Args:
        path: the YAML file.
        overrides: `key=value` strings; later ones win. Values are YAML, except that a
            text field takes its text as it stands.

    Raises:
        ValueError: one sentence that names the field, the rule and the value received.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as where:
        ...     path = Path(where, "tiny.yaml")
        ...     _ = path.write_text("{model: {path: my-model}, train: {steps: 3}}")
        ...     config = load_config(path, ["train.steps=5", "sketch.rank=32"])
        >>> config.name, config.train.steps, config.sketch.rank
        ('tiny', 5, 32)
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = Path(path)
    layers = [{"name": path.stem}, read_yaml(path)]
    layers += [_name_one_model(_parse_override(text)) for text in overrides]
    for layer in layers:
        _check_tree(layer, Config, "")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), *layers)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error, layers)) from None
    assert isinstance(config, Config)
    return config


def to_yaml(config: Config) -> str:
    """The YAML text from which `load_config` rebuilds exactly this config."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_literal(dataclasses.asdict(config))))


def _literal(value: Any) -> Any:
    """A value whose texts are read back as they stand: `${` refers to nothing."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: _literal(one) for key, one in value.items()}
    return [_literal(one) for one in value] if isinstance(value, list) else value


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted key; lists and empty ones are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def read_yaml(path: Path) -> dict[str, Any]:
    """The top-level mapping of a YAML file, interpolations left as they are.

    Raises:
        ValueError: the file cannot be read, is no YAML, or holds no mapping.
    """
    import yaml
    from omegaconf import DictConfig, OmegaConf

    try:
        tree = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or _one_line(error)
        raise ValueError(f"Cannot read the config file `{path}`: {reason}.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"`{path}` is not valid YAML: {_one_line(error)}.") from None
    if not isinstance(tree, DictConfig):
        raise ValueError(f"`{path}` must hold `key: value` lines, got a list.")
    return typing.cast(dict[str, Any], OmegaConf.to_container(tree))


def _parse_override(text: str) -> dict[str, Any]:
    """`a.b=1` as {"a": {"b": 1}}."""
    import yaml
    from omegaconf import OmegaConf

    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"An override must look like `train.steps=2`, got {text!r}.")
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        parsed: Any = typing.cast(dict[str, Any], tree)["value"]
    except yaml.YAMLError:
        parsed = value
    # Text stays text: `run_dir=1e5` is a directory's name, not a number.
    if str in _alternatives(_leaf_type(key)) and not isinstance(parsed, str | None):
        parsed = value
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return typing.cast(dict[str, Any], parsed)


def _name_one_model(override: dict[str, Any]) -> dict[str, Any]:
    """A model named by an override replaces the one before it: path or preset."""
    model = override.get("model")
    if isinstance(model, Mapping) and len(model) == 1:
        for name, other in (("preset", "path"), ("path", "preset")):
            if isinstance(model.get(name), str):
                return override | {"model": {**model, other: None}}
    return override


def _fields(kind: Any) -> dict[str, Any]:
    """Names and types of a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _leaf_type(key: str) -> Any:
    """The type of the field at a dotted key, or None if there is no such field."""
    kind: Any = Config
    for part in key.split("."):
        section = _section_by_name(kind)
        known = _fields(kind) if dataclasses.is_dataclass(kind) else {}
        kind = section or known.get(part)
    return kind


def _section_by_name(kind: Any) -> Any:
    """The sections of a mapping from names to sections, or None if it is no such."""
    value = typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None
    return value if dataclasses.is_dataclass(value) else None


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _check_tree(tree: Mapping[str, Any], kind: Any, prefix: str) -> None:
    """Refuse unknown keys, and sections, texts and lists that are none."""
    known = _fields(kind)
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in known:
            raise ValueError(_unknown_key(name, prefix, known))
        if dataclasses.is_dataclass(known[key]):
            _check_section(value, known[key], name)
        elif section := _section_by_name(known[key]):
            require(isinstance(value, Mapping), name, value, "be a mapping")
            for part, values in value.items():
                _check_section(values, section, f"{name}.{part}")
        elif str in _alternatives(known[key]):
            rule, remedy = "be text", "put it in quotes"
            require(isinstance(value, str | None), name, value, rule, remedy)
        elif typing.get_origin(known[key]) is dict:
            require(isinstance(value, Mapping), name, value, "be a mapping")
        else:
            _check_list(value, known[key], name)


def _check_section(value: Any, kind: Any, name: str) -> None:
    rule, remedy = "be a section", f"its keys are {', '.join(_fields(kind))}"
    require(isinstance(value, Mapping), name, value, rule, remedy)
    _check_tree(value, kind, f"{name}.")


def _check_list(value: Any, kind: Any, name: str) -> None:
    """Refuse what is no list of the right values, if the field holds a list."""
    lists = [k for k in _alternatives(kind) if typing.get_origin(k) is list]
    if lists and not (value is None and types.NoneType in _alternatives(kind)):
        (item,) = typing.get_args(lists[0])
        allowed = str if item is str else int | float
        fits = isinstance(value, list) and all(isinstance(v, allowed) for v in value)
        require(fits, name, value, f"be {_describe(kind)}")


def unknown_key(name: str, known: Collection[str], where: str) -> str:
    """The sentence for a key that is none of the few that ``where`` has."""
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"`{name}` is not a key of {where}; did you mean `{near[0]}`?"
    return f"`{name}` is not a key of {where}; its keys are {', '.join(known)}."


def _unknown_key(name: str, prefix: str, siblings: Mapping[str, Any]) -> str:
    """The sentence for a key that does not exist, with the nearest that does."""
    leaf = name.rpartition(".")[2]
    elsewhere = {key.rpartition(".")[2]: key for key in _all_keys(Config)}
    near = [prefix + key for key in difflib.get_close_matches(leaf, siblings, 1)]
    near += [elsewhere[k] for k in difflib.get_close_matches(leaf, elsewhere, 1, 0.75)]
    if near:
        return f"`{name}` is not a config key; did you mean `{near[0]}`?"
    where = f"`{prefix[:-1]}`" if prefix else "a config"
    return (
        f"`{name}` is not a config key; the keys of {where} are {', '.join(siblings)}."
    )


def _all_keys(kind: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key, sections included."""
    for name, sub in _fields(kind).items():
        yield prefix + name
        if dataclasses.is_dataclass(sub):
            yield from _all_keys(sub, f"{prefix}{name}.")


def _explain(error: Any, layers: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for an OmegaConf error: the field, its type, the value received."""
    from omegaconf.errors import MissingMandatoryValue, ValidationError

    key = error.full_key or ""
    kind = _leaf_type(key)
    if isinstance(error, MissingMandatoryValue):
        missing = ".".join([key, *_first_required(kind)])
        return f"`{missing}` is missing: it has no default, give it in the file."
    if not isinstance(error, ValidationError) or kind is None:
        return f"The config cannot be read: {_one_line(error)}."
    value: Any = None
    for layer in layers:
        node: Any = layer
        for part in key.split("."):
            node = node.get(part, value) if isinstance(node, Mapping) else value
        value = node
    return f"`{key}` must be {_describe(kind)}, got {show(value)}."


def _first_required(kind: Any) -> list[str]:
    """The name of a section's first field without a default, if it has one."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    none = dataclasses.MISSING
    needed = (f for f in fields if f.default is none and f.default_factory is none)
    return [f.name for f in needed][:1]


def _describe(kind: Any) -> str:
    """A type in words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if len(_alternatives(kind)) > 1:
        return " or ".join(map(_describe, _alternatives(kind)))
    if typing.get_origin(kind) is list:
        return f"a list of {'texts' if str in typing.get_args(kind) else 'numbers'}"
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    return words.get(kind, "a mapping")


def _one_line(message: object) -> str:
    return " ".join(str(message).split()).rstrip(".")

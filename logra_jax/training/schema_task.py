"""Config sections of the questions: those of the task, and of evaluation sets."""

from dataclasses import dataclass, field
from typing import Any, Literal

from logra_jax.training.checks import (
    at_least,
    positive,
    require,
    seed_in_range,
)

# What the task's own held-out questions are called among the evaluation sets.
HELD_OUT = "heldout"


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig:
    """Which columns of files and hub data sets hold what.

    A name may be a path into a column, such as `prompt.0.content`.
    """

    question: str = "question"
    """The user's message."""
    answer: str | None = "answer"
    """The reference answer: text or a number; null where there is none, and
    `reward.function` needs none."""
    family: str | None = None
    """What accuracy is averaged over; null for one family."""
    keep: list[str] = field(default_factory=list)
    """Further columns, for a reward of one's own."""


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """A reasoning-gym data set as part of a mix."""

    weight: float = 1.0
    """Of its share of the questions."""
    level: int | None = None
    """Of its curriculum; null leaves the data set's defaults."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that data set; they win over what the level sets."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where questions come from."""

    source: Literal["reasoning_gym", "files", "hub", "aime"] = "reasoning_gym"
    """reasoning-gym makes questions up; JSONL, CSV or Parquet files; a data set on the
    Hugging Face Hub; or the problems of AIME, which sgl-eval brings."""
    name: str = "chain_sum"
    """A reasoning-gym data set, or what a mix of them is to be called; a path, or a
    pattern such as `data/*.jsonl`; `owner/name` or `owner/name@revision` on the Hub, or
    a directory; a year of AIME, or all."""
    subset: str | None = None
    """Of a hub data set, where it has several."""
    split: str = "train"
    """Of a hub data set."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """Of files and hub data sets."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a reasoning-gym data set; they win over what `level` sets."""
    level: int | None = None
    """Of a reasoning-gym data set's curriculum; null leaves the data set's defaults."""
    mix: dict[str, FamilyConfig] = field(default_factory=dict)
    """Several reasoning-gym data sets by name, in place of one."""
    size: int = 2000
    """Questions that reasoning-gym makes, before duplicates are dropped."""
    limit: int | None = None
    """The first so many distinct questions of another source; null takes all."""
    seed: int = 0
    """Seed of the questions and of the split, apart from the run's own seed."""
    prompt: str | None = None
    """The user's message, with `{question}` where the question goes; null is the
    question alone."""

    def check(self, section: str) -> None:
        """Check values, with the section's dotted name for complaints."""
        at_least(f"{section}.size", self.size, 1)
        seed_in_range(f"{section}.seed", self.seed)
        levels = {name: family.level for name, family in self.mix.items()}
        for name, value, low in (
            ("limit", self.limit, 1),
            ("level", self.level, 0),
            *((f"mix.{name}.level", level, 0) for name, level in levels.items()),
        ):
            if value is not None:
                at_least(f"{section}.{name}", value, low)
        require(self.name != "", f"{section}.name", self.name, "name a data set")
        require(
            self.prompt is None or self.prompt.count("{question}") == 1,
            f"{section}.prompt",
            self.prompt,
            "hold {question} once",
            "that is where the question goes",
        )
        self._check_source(section)
        for name, family in self.mix.items():
            positive(f"{section}.mix.{name}.weight", family.weight)

    def _check_source(self, section: str) -> None:
        """Refuse what another source has, and one data set's settings beside a mix."""
        for name, sources, off in (
            ("options", ("reasoning_gym",), {}),
            ("level", ("reasoning_gym",), None),
            ("mix", ("reasoning_gym",), {}),
            ("limit", ("files", "hub", "aime"), None),
            ("subset", ("hub",), None),
        ):
            value = getattr(self, name)
            rule = "be empty" if off == {} else "be null"
            require(
                value == off or self.source in sources,
                f"{section}.{name}",
                sorted(self.mix) if name == "mix" else value,
                f"{rule} when `{section}.source` is {self.source}",
                f"it is for {' and '.join(sources)}",
            )
            require(
                value == off or not self.mix or name not in ("options", "level"),
                f"{section}.{name}",
                value,
                f"{rule} beside `{section}.mix`",
                "give it to a family of the mix",
            )


@dataclass(frozen=True, kw_only=True)
class TaskConfig(DataConfig):
    """The questions of a run, split into training and held-out ones."""

    system_prompt: str | None = None
    """System message before each question, those of `eval.sets` included; null keeps
    the chat template's default."""
    held_out: float = 0.3
    """Share of the distinct questions that is never trained on; 0 holds out none, where
    `eval.sets` gives others to measure on."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What to do with questions, those of `eval.sets` included, whose prompt and
    response do not fit the model's context."""

    def __post_init__(self) -> None:
        """Check values."""
        self.check("task")
        at_least("task.size", self.size, 2, "both splits need a question")
        require(
            0 <= self.held_out < 1,
            "task.held_out",
            self.held_out,
            "lie in [0, 1)",
            "0.3 is usual",
        )


@dataclass(frozen=True, kw_only=True)
class EvalSetConfig(DataConfig):
    """Questions to measure on, none of which is trained on."""

    prompt: str | None = None
    """The user's message, with `{question}` where the question goes; null is as in the
    task."""
    reward: Literal["reasoning_gym", "math", "exact", "python"] | None = None
    """What scores the answers; null is the task's own reward."""

"""Config sections of what watches a run: held-out evaluation, monitor, alarms."""

import difflib
from dataclasses import dataclass, field
from typing import Literal

from logra_jax.training.checks import at_least, positive, require
from logra_jax.training.schema_task import EvalSetConfig

ALARMS = (
    "update_dropped",
    "rows_dropped",
    "taught_nothing",
    "kl_ratio",
    "kl_realised",
    "landed_nothing",
    "landed",
    "cos_c",
    "snr",
    "truncated",
    "reward_raised",
    "reward_timed_out",
    "length_growth",
    "repetition",
    "entropy_collapse",
    "kl_overspend",
    "eval_drop",
)
"""Names of all alarms, as `monitor.stop_on` and `alarms.jsonl` have them."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of each set: every question greedily, and samples of the policy."""

    samples: int = 256
    """Responses sampled, spread evenly over the questions of a set."""
    samples_per_question: int | None = None
    """Responses sampled to each question, in place of `samples`."""
    pass_at: list[int] = field(default_factory=list)
    """Numbers k of samples of which the best (pass@k) and the commonest answer (maj@k)
    are scored, none above `samples_per_question`; of 1 both are the plain mean."""
    temperature: float = 1.0
    """Of the samples."""
    top_p: float = 1.0
    """Of the samples; 1 is off."""
    max_new_tokens: int | None = None
    """Length at which a response is cut, tokens; null is `rollout.max_new_tokens`."""
    greedy: bool = True
    """Answer every question greedily too."""
    batch: int = 64
    """Responses sampled at once."""
    keep_samples: int = 100
    """Responses of an evaluation that are kept for reading, in `samples/<step>.jsonl`
    of the run directory; -1 keeps all."""
    show_samples: int = 2
    """Responses shown in the console before and after training."""
    best: str | None = None
    """Metric that says which weights are best; `train.target_accuracy` and the alarm
    `eval_drop` look at it too. null is `heldout/sampled`, or that of the first of
    `sets` where nothing is held out."""
    keep_best: bool = True
    """Keep the checkpoint of the best evaluation too, beside the newest: an evaluation
    that is the best so far writes one. The model before training is none."""
    export: Literal["last", "best"] | None = None
    """Which checkpoint a run exports at its end; null is the last one, or the best one
    where an alarm has ended the run."""
    sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Further questions to measure on, by name; none of them is trained on."""

    def __post_init__(self) -> None:
        """Check values."""
        at_least("eval.samples", self.samples, 1)
        name, most = "eval.samples_per_question", self.samples_per_question
        require(most is None or most >= 1, name, most, "be at least 1 or null")
        for k in self.pass_at:
            at_least("eval.pass_at", k, 1)
        needed = max(self.pass_at, default=0)
        rule = f"be at least {needed}, the largest of `eval.pass_at`"
        require((most or 0) >= needed, name, most, rule)
        positive("eval.temperature", self.temperature, "1.0 samples the policy")
        rule, remedy = "lie in (0, 1]", "1.0 turns it off"
        require(0 < self.top_p <= 1, "eval.top_p", self.top_p, rule, remedy)
        name, new = "eval.max_new_tokens", self.max_new_tokens
        require(new is None or new >= 1, name, new, "be at least 1 or null")
        at_least("eval.batch", self.batch, 1)
        at_least("eval.keep_samples", self.keep_samples, -1, "-1 keeps all")
        at_least("eval.show_samples", self.show_samples, 0, "0 shows none")
        best = self.best
        require(best is None or "/" in best, "eval.best", best, "be `<set>/<metric>`")
        require(
            self.keep_best or self.export != "best",
            "eval.export",
            self.export,
            "not be best when `eval.keep_best` is false",
        )


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """A look at real gradients now and then, and when a metric raises an alarm."""

    every: int = 0
    """Updates between measurements of how well the sketches keep gradients; 0 is never;
    each costs about one dense gradient of `responses`."""
    responses: int = 8
    """Responses of the batch whose gradient is measured, spread evenly over it."""
    min_cos_c: float = 0.25
    """Alarm below this gain of a layer kind's step at equal KL, of the dense step's."""
    min_snr: float = 0.5
    """Alarm below this signal-to-noise ratio in any layer."""
    kl_ratio_low: float = 0.3
    """Alarm below this ratio of the realised KL to the predicted one."""
    kl_ratio_high: float = 3.0
    """Alarm above this ratio of the realised KL to the predicted one."""
    landed_low: float = 0.5
    """Alarm below this part of an update landing on the weights, in its direction."""
    landed_high: float = 1.5
    """Alarm above this part."""
    max_truncated: float = 0.95
    """Alarm above this share of responses cut at the length limit."""
    max_failed: float = 0.1
    """Alarm above this share of responses whose scoring raised, or timed out."""
    window: int = 10
    """Updates whose mean is judged below; the first so many are the baseline."""
    max_length_growth: float = 2.0
    """Alarm above this length of responses, as a multiple of the baseline."""
    max_repetition: float = 0.5
    """Alarm above this share of a response's 4-grams that it has used before."""
    min_entropy: float = 0.1
    """Alarm below this entropy of the sampled tokens, as a share of the baseline."""
    max_kl_overspend: float = 2.0
    """Alarm above this realised KL, as a multiple of the budget."""
    max_eval_drop: float = 0.05
    """Alarm where `eval.best` lies this far below the best so far, and by more than 2
    standard errors of the difference."""
    stop_on: list[str] = field(default_factory=list)
    """Names of alarms that end the run, after the update under way, with exit status 3;
    it exports its best checkpoint. Others warn."""
    patience: int = 3
    """Times in a row that such an alarm must be raised: by updates, or by evaluations
    where it judges those."""

    def __post_init__(self) -> None:
        """Check values."""
        at_least("monitor.every", self.every, 0, "0 turns it off")
        at_least("monitor.responses", self.responses, 1, "8 is usual")
        for name in (
            *("min_cos_c", "min_snr", "max_truncated", "max_failed"),
            *("max_repetition", "min_entropy", "max_eval_drop"),
        ):
            value = getattr(self, name)
            require(0 <= value <= 1, f"monitor.{name}", value, "lie in [0, 1]")
        for name in ("max_length_growth", "max_kl_overspend"):
            value = getattr(self, name)
            require(value >= 1, f"monitor.{name}", value, "be at least 1", "2 is usual")
        at_least("monitor.window", self.window, 1, "10 is usual")
        at_least("monitor.patience", self.patience, 1, "1 stops at once")
        for alarm in self.stop_on:
            near = difflib.get_close_matches(alarm, ALARMS, 1, 0)[0]
            rule, remedy = "name alarms", f"did you mean {near!r}?"
            require(alarm in ALARMS, "monitor.stop_on", alarm, rule, remedy)
        for name in ("kl_ratio", "landed"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            require(
                0 <= low < high,
                f"monitor.{name}_low",
                low,
                f"be at least 0 and below `monitor.{name}_high` ({high})",
                "0 never raises an alarm",
            )

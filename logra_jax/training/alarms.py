"""Alarms: what in one update's metrics says that a run is going wrong, in a sentence.

    for alarm in find_alarms(metrics, config.monitor, responses=64):
        print(alarm.message)

`find_alarms` is a pure function of the metrics that the journal records too, so a
finished run can be searched with other thresholds. `AlarmLog` keeps what was raised.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from logra_jax.training.paths import write_aside
from logra_jax.training.schema_watch import MonitorConfig

ALARM_FILE = "alarms.jsonl"

# Nats per token: below it, realised KL is mostly the rounding of bfloat16 weights and
# activations, which no prediction knows of.
KL_FLOOR = 5e-4

Values = Mapping[str, float | int]


class Alarm(NamedTuple):
    """Something that needs a look."""

    name: str  # of the rule
    message: str  # one sentence


def find_alarms(
    values: Values, limits: MonitorConfig, *, responses: int
) -> list[Alarm]:
    """What is wrong with one update, judged by its metrics; nothing on a sound one.

    A metric that was not recorded, or is not a number, raises none (but for `kl/q`,
    whose not being a number is the fault).

    Args:
        values: metrics under the journal's keys.
        limits: thresholds.
        responses: in the update's batch.
    """
    rules = (_update, _kl, _landed, _alignment, _rollout)
    return [alarm for rule in rules for alarm in rule(values, limits, responses)]


def _update(values: Values, limits: MonitorConfig, responses: int) -> Iterator[Alarm]:
    del limits, responses
    q, alpha = values.get("kl/q", 0.0), values.get("alpha", 1.0)
    # A schedule may ask for no update.
    if not math.isfinite(q) or (alpha == 0 and values.get("kl/budget", 1.0) > 0):
        yield Alarm(
            "update_dropped",
            f"The update was dropped: its predicted KL is {q:.3g} and alpha is "
            f"{alpha:.3g}; look for rewards or log-probs that are not finite.",
        )
    elif values.get("update/sketch_norm") == 0:
        reward = values.get("reward", 0.0)
        yield Alarm(
            "taught_nothing",
            f"The batch taught nothing, its rewards (mean {reward:.3g}) being all "
            "alike: read what samples/ keeps, try the reward on answers whose score "
            f"you know, or ask {'easier' if reward <= 0 else 'other'} questions.",
        )
    elif (rows := values.get("update/rows_dropped", 0)) > 0:
        yield Alarm(
            "rows_dropped",
            f"{rows:.0f} rows of the update were dropped, because they hold values "
            "that are not finite.",
        )


def _kl(values: Values, limits: MonitorConfig, responses: int) -> Iterator[Alarm]:
    del responses
    predicted, realised = _get(values, "kl/predicted"), _get(values, "kl/realised")
    if predicted is None or predicted < KL_FLOOR:
        return
    if realised is None:
        if "kl/realised" in values:
            yield Alarm(
                "kl_realised",
                "The realised KL is not finite: the updated policy gives "
                "probabilities that are no numbers.",
            )
        return
    ratio = realised / predicted
    if not limits.kl_ratio_low <= ratio <= limits.kl_ratio_high:
        is_low = ratio < limits.kl_ratio_low
        remedy = (
            "most of the update did not land (stochastic rounding lets it)"
            if is_low
            else "the step is too large for the prediction; lower the budget"
        )
        yield Alarm(
            "kl_ratio",
            f"Realised KL is {ratio:.3g} times the predicted one ({realised:.2e} of "
            f"{predicted:.2e} nats per token): {remedy}.",
        )


def _landed(values: Values, limits: MonitorConfig, responses: int) -> Iterator[Alarm]:
    del responses
    # Nothing was to land where all rewards, and so all advantages, were alike.
    if values.get("alpha", 0.0) == 0 or values.get("update/sketch_norm") == 0:
        return
    changed = dict(_by_kind(values, "landed", "changed"))
    still = [kind for kind, share in changed.items() if share == 0]
    if still:
        yield Alarm(
            "landed_nothing",
            f"No weight of {_and(still)} changed, although alpha is "
            f"{values['alpha']:.3g}: the update is too small for the weights' grid, or "
            "is not applied.",
        )
    # Not the ratio of the norms alone: stochastic rounding adds noise of several times
    # a small update's norm, across its direction. Along it, all must arrive.
    arrived = {
        kind: ratio * values.get(f"landed/{kind}/cosine", math.nan)
        for kind, ratio in _by_kind(values, "landed", "norm_ratio")
        if kind not in still
    }
    # What is not a number is outside no limits.
    off = {
        kind: part
        for kind, part in arrived.items()
        if part < limits.landed_low or part > limits.landed_high
    }
    if off:
        yield Alarm(
            "landed",
            f"Of the update of {_and(off)} {_range(off.values())} landed, along its "
            "direction, where 1 is all: rounding is biased; use "
            "`sketch.rounding=stochastic` or float32 weights.",
        )


def _alignment(
    values: Values, limits: MonitorConfig, responses: int
) -> Iterator[Alarm]:
    del responses
    low = {
        kind: cos_c
        for kind, cos_c in _by_kind(values, "monitor", "cos_c")
        if cos_c < limits.min_cos_c
    }
    if low:
        yield Alarm(
            "cos_c",
            f"A step through the sketch of {_and(low)} may gain as little as "
            f"{_range(low.values())} of a dense step at the same KL: raise "
            "`sketch.rank` there.",
        )
    snr = _get(values, "monitor/snr_min")
    if snr is not None and snr < limits.min_snr:
        yield Alarm(
            "snr",
            f"The smallest signal-to-noise ratio of a layer's sketch is {snr:.2f}, "
            "and any sound basis gives about 1 or more: sketch and basis do not "
            "belong together, or the rank is tiny.",
        )


def _rollout(values: Values, limits: MonitorConfig, responses: int) -> Iterator[Alarm]:
    truncated = _get(values, "length/truncated")
    if truncated is not None and truncated > limits.max_truncated:
        yield Alarm(
            "truncated",
            f"{truncated:.0%} of the responses were cut at the length limit: raise "
            "`rollout.max_new_tokens`, or check that the model can end its answers.",
        )
    for name, what in (("raised", "raised an error"), ("timed_out", "timed out")):
        count = _get(values, f"reward/{name}") or 0
        if count > limits.max_failed * responses:
            yield Alarm(
                f"reward_{name}",
                f"Scoring {what} on {count:.0f} of {responses} responses, which then "
                "count as wrong.",
            )


def _get(values: Values, key: str) -> float | int | None:
    """A metric, or None if it is not there or is not finite."""
    value = values.get(key)
    return value if value is not None and math.isfinite(value) else None


def _by_kind(
    values: Values, group: str, name: str
) -> Iterator[tuple[str, float | int]]:
    """Layer kind and value of every `group/<kind>/name` that is finite."""
    for key in values:
        first, _, rest = key.partition("/")
        kind, _, last = rest.rpartition("/")
        value = _get(values, key)
        if kind and value is not None and (first, last) == (group, name):
            yield kind, value


def _and(kinds: Iterable[str]) -> str:
    """a, b and c."""
    *most, last = kinds
    return f"{', '.join(most)} and {last}" if most else last


def _range(numbers: Collection[float]) -> str:
    """The smallest and the largest, where they differ as written."""
    ends = [f"{end:.2g}" for end in (min(numbers), max(numbers))]
    return " to ".join(dict.fromkeys(ends))


class AlarmLog:
    """Appends a run's alarms to `alarms.jsonl`, one JSON line each; made when needed.

    Args:
        run_dir: the run directory.
        resume_step: drop the alarms of later steps, which the resumed run will raise
            again, and a last line that a killed run left torn; None keeps all.
    """

    def __init__(self, run_dir: str | Path, *, resume_step: int | None):
        self._path = Path(run_dir) / ALARM_FILE
        if resume_step is not None and self._path.exists():
            kept = [row for row in read_alarms(run_dir) if row["step"] <= resume_step]
            lines = "".join(json.dumps(row) + "\n" for row in kept)
            write_aside(self._path, lines)
        self._raised: set[str] = set()

    def write(self, step: int, alarms: Sequence[Alarm]) -> list[Alarm]:
        """Record the alarms of a step; those that the step before did not raise."""
        if alarms:
            with self._path.open("a", encoding="utf-8") as file:
                for alarm in alarms:
                    file.write(json.dumps({"step": step, **alarm._asdict()}) + "\n")
        new = [alarm for alarm in alarms if alarm.name not in self._raised]
        self._raised = {alarm.name for alarm in alarms}
        return new


def read_alarms(run_dir: str | Path) -> list[dict]:
    """The lines of `alarms.jsonl`, in order; none where there is no such file."""
    path = Path(run_dir) / ALARM_FILE
    if not path.exists():
        return []
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]

"""Alarms that need history: how a run gets worse, row by row, and when it is to end.

    watch = Watch(config)
    for row in read_metrics(run_dir):
        for alarm in watch.see(row):
            print(row["step"], alarm.message)

What is judged is a mean over the last `monitor.window` updates, against one over the
first, so that one odd batch raises nothing. The state is a function of the rows seen: a
resumed run rebuilds it from its journal.
"""

import math
from collections import deque
from collections.abc import Iterator

from logra_jax.training.alarms import KL_FLOOR, Alarm, Values, find_alarms
from logra_jax.training.schema import Config
from logra_jax.training.schema_watch import MonitorConfig

# Standard errors of the difference by which an accuracy must have fallen.
_ERRORS = 2.0
# What is not measured at every update: a metric that says whether it was.
_MEASURED = {"cos_c": "monitor/snr_min", "snr": "monitor/snr_min"}


class DegradationWatch:
    """Finds what grows worse in the course of a run.

    Args:
        limits: thresholds.
        best: the metric whose best evaluation others are compared with.
    """

    def __init__(self, limits: MonitorConfig, best: str = "heldout/sampled"):
        self._limits, self._metric = limits, best
        self._length, self._repetition, self._entropy, self._realised, self._budget = (
            _Trend(limits.window) for _ in range(5)
        )
        self._best = (-math.inf, 0.0)  # value and standard error

    def see(self, values: Values) -> list[Alarm]:
        """What the metrics of the next row show, together with those before.

        A metric that is not there, or is no number, is passed over.
        """
        for trend, key in (
            (self._length, "length/mean"),
            (self._repetition, "rollout/repetition"),
            (self._entropy, "entropy"),
        ):
            if math.isfinite(values.get(key, math.nan)):
                trend.add(float(values[key]))
        kl = [float(values.get(key, math.nan)) for key in ("kl/realised", "kl/budget")]
        if all(map(math.isfinite, kl)):
            self._realised.add(kl[0])
            self._budget.add(kl[1])
        is_update = "reward" in values
        return [*(self._trends() if is_update else ()), *self._evaluation(values)]

    def _trends(self) -> Iterator[Alarm]:
        limits = self._limits
        length, entropy = self._length, self._entropy
        if length.ratio > limits.max_length_growth:
            yield Alarm(
                "length_growth",
                f"Responses have grown to {length.last:.0f} tokens from "
                f"{length.first:.0f} at the start: read some, and see whether the "
                "reward asks for it.",
            )
        if self._repetition.last > limits.max_repetition:
            yield Alarm(
                "repetition",
                f"Responses repeat themselves: {self._repetition.last:.0%} of their "
                "4-grams stood in them before, on average; read some.",
            )
        if entropy.ratio < limits.min_entropy:
            yield Alarm(
                "entropy_collapse",
                f"The entropy of sampled tokens has fallen to {entropy.last:.2g} nats "
                f"from {entropy.first:.2g}: the policy explores little, and groups of "
                "its responses are alike.",
            )
        realised, budget = self._realised.last, self._budget.last
        if realised > max(KL_FLOOR, limits.max_kl_overspend * budget):
            yield Alarm(
                "kl_overspend",
                f"Updates realise a KL of {realised:.2e} nats per token, of a budget "
                f"of {budget:.2e}, on average: lower the budget, or raise `kl.share` "
                "for a better prediction.",
            )

    def _evaluation(self, values: Values) -> Iterator[Alarm]:
        now = float(values.get(self._metric, math.nan))
        if not math.isfinite(now):
            return
        error = float(values.get(f"{self._metric}_se", 0.0))
        best, best_error = self._best
        # A standard error that is not known is passed over: no comparison holds.
        beyond = best - now > _ERRORS * math.hypot(error, best_error)
        if beyond and best - now > self._limits.max_eval_drop:
            yield Alarm(
                "eval_drop",
                f"`{self._metric}` has fallen to {now:.3f} from {best:.3f} at its "
                "best, which is more than chance.",
            )
        self._best = max(self._best, (now, error))


class Watch:
    """All alarms of a run, and whether one of them is to end it.

    Args:
        config: of the run.

    Attributes:
        stop: the alarm of `monitor.stop_on` that the last row has raised for
            `monitor.patience` times in a row, or None.
    """

    stop: Alarm | None

    def __init__(self, config: Config):
        self._limits, self._responses = config.monitor, config.train.batch
        self._metric = config.best_metric
        self._degradation = DegradationWatch(self._limits, self._metric)
        self._times = dict.fromkeys(self._limits.stop_on, 0)
        self.stop = None

    def see(self, values: Values) -> list[Alarm]:
        """The alarms of the next row."""
        found = find_alarms(values, self._limits, responses=self._responses)
        found += self._degradation.see(values)
        by_name = {alarm.name: alarm for alarm in found}
        self.stop = None
        for name in self._times:
            if not self._is_judged(name, values):
                continue
            self._times[name] = self._times[name] + 1 if name in by_name else 0
            if self._times[name] >= self._limits.patience:
                self.stop = self.stop or by_name[name]
        return found

    def _is_judged(self, name: str, values: Values) -> bool:
        """Whether a row could have raised the alarm at all."""
        if name == "eval_drop":
            return self._metric in values
        return _MEASURED.get(name, "reward") in values


class _Trend:
    """Means of the first and the last ``window`` values; NaN until they differ."""

    def __init__(self, window: int):
        self._window, self._count, self._sum = window, 0, 0.0
        self._recent: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        self._count += 1
        if self._count <= self._window:
            self._sum += value
        self._recent.append(value)

    @property
    def first(self) -> float:
        return self._sum / self._window if self._count > self._window else math.nan

    @property
    def last(self) -> float:
        full = self._count > self._window
        return math.fsum(self._recent) / self._window if full else math.nan

    @property
    def ratio(self) -> float:
        """Of the last to the first; NaN where that is nothing."""
        return self.last / self.first if self.first > 0 else math.nan

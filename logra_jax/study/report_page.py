"""A report's page: what stands in its tables, and the template filled with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from typing import Any

from logra_jax.study.report_answers import pick_samples
from logra_jax.study.report_draw import POINTS, Figure, colour_of
from logra_jax.study.report_groups import Group, differing, label_of, show
from logra_jax.study.report_runs import Run, Score

_MARK = "<!doctype html>\n<!-- logra report -->\n"
_QUESTIONS = 6  # of a run whose answers are shown; fewer each of several runs
_LEAST = 3
_DASH = "–"


def is_page(text: str) -> bool:
    """Whether a file's beginning is that of a report."""
    return text.startswith(_MARK)


def fill_page(groups: Sequence[Group], figures: Sequence[Figure]) -> str:
    """The HTML page, which needs nothing else; all texts of runs are escaped."""
    from jinja2 import Environment, StrictUndefined

    template = resources.files("logra_jax.study") / "report_page.html"
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    runs = [run for group in groups for run in group.runs]
    heading = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    rows = _run_rows(groups)
    body = environment.from_string(template.read_text("utf-8")).render(
        title=f"{heading} · training report",
        heading=heading,
        facts=_facts(runs),
        notices=_notices(runs),
        several=len(runs) > 1,
        scores=_score_rows(groups, by_seed=False),
        by_seed=_score_rows(groups, by_seed=True) if len(runs) > len(groups) else [],
        points=POINTS,
        is_thinned=any(len(run.rows) > POINTS for run in runs),
        runs=rows,
        calm=[row["name"] for row in rows if not row["history"]],
        differences=_differences(runs),
        figures=figures,
    )
    return _MARK + body.removeprefix("<!doctype html>\n") + "\n"


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What stands under the title."""
    seeds = [show(run.config.get("seed")) for run in runs if "seed" in run.config]
    questions = [
        f"{run.data['train']:,} to train on, {run.data.get('held_out', 0):,} held out"
        for run in runs
        if isinstance(run.data.get("train"), int)
    ]
    facts = [
        ("Model", _joined(_model(run) for run in runs)),
        ("Task", _joined(_task(run) for run in runs)),
        ("Questions", _joined(questions)),
        ("Hardware", _joined(_hardware(run) for run in runs)),
        ("Seed" if len(set(seeds)) == 1 else "Seeds", ", ".join(dict.fromkeys(seeds))),
        ("Updates done", _joined(_progress(run) for run in runs)),
    ]
    return [(name, value) for name, value in facts if value]


def _progress(run: Run) -> str:
    return f"{run.done} of {run.planned}" if run.planned else f"{run.done}"


def _joined(texts: Iterable[str]) -> str:
    """Different texts, each once, in order."""
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _model(run: Run) -> str:
    name = run.config.get("model.path") or run.config.get("model.preset")
    dtype = run.config.get("model.dtype")
    return f"{name}, {dtype}" if name and dtype else str(name or "")


def _task(run: Run) -> str:
    name = run.data.get("name") or run.config.get("task.name")
    source = run.data.get("source") or run.config.get("task.source")
    return f"{name} ({source})" if name and source else str(name or source or "")


def _hardware(run: Run) -> str:
    """The machine, or what the journal and the config tell of it."""
    if "device" in run.machine:
        return str(run.machine["device"])
    devices = math.prod(
        size
        for axis in ("data", "fsdp", "tensor")
        if isinstance(size := run.config.get(f"mesh.{axis}"), int)
    )
    has_device = any("memory/peak_device_gib" in row for row in run.rows)
    what = "accelerator" if has_device else "CPU device"
    return f"{devices} {what}{'s' * (devices != 1)}, kind not recorded"


def _notices(runs: Sequence[Run]) -> list[str]:
    """What has to be said of runs that are not at their end."""
    return [
        f"{run.name} is not finished: {run.done} of {run.planned or 'its'} updates are "
        "done. It was interrupted, or is still running; all below is as of then."
        for run in runs
        if not run.is_finished
    ]


def _score_rows(groups: Sequence[Group], *, by_seed: bool) -> list[dict[str, str]]:
    """Rows of the table of evaluations: of each metric, a row a group or a row a run.

    A group of several seeds is a row of means with their range.
    """
    runs = [run for group in groups for run in group.runs]
    rows = []
    for metric in dict.fromkeys(name for run in runs for name in run.metrics):
        first = {"metric": metric, "meaning": _meaning(metric, runs), "kind": "section"}
        for i, group in enumerate(groups):
            each = [(run, run.scores(metric)) for run in group.runs]
            each = [(run, scores) for run, scores in each if scores]
            if len(group.runs) > 1 and not by_seed:
                found = _group_rows(group, [scores for _, scores in each])
            else:
                found = [
                    _score_row(scores) | {"run": label_of(group, run)}
                    for run, scores in each
                ]
            for row in found:
                rows.append({"metric": "", "meaning": "", "kind": ""} | row | first)
                rows[-1]["colour"] = colour_of(i)
                first = {}
    return rows


def _meaning(metric: str, runs: Sequence[Run]) -> str:
    """An evaluation metric in a few words."""
    kind = metric.rpartition("/")[2]
    if kind == "greedy":
        return "one greedy answer to each question"
    if kind == "sampled":
        key = "eval.temperature"
        at = _joined(show(run.config[key]) for run in runs if key in run.config)
        return f"answers sampled at temperature {at}" if at else "sampled answers"
    if kind.startswith("pass@"):
        return f"the best of {kind[5:]} sampled answers"
    if kind.startswith("maj@"):
        return f"the commonest of {kind[4:]} sampled answers"
    return "mean over families" if kind == "macro" else ""


def _score_row(scores: Sequence[Score]) -> dict[str, str]:
    first, last = scores[0], scores[-1]
    row = {
        "before": _DASH,
        "first": "",
        "change": _DASH,
        "after": _percent(last.value, last.se),
        "last": f"step {last.step}",
        "n": _DASH if last.n is None else f"{last.n:,}",
    }
    if len(scores) > 1:
        row["before"] = _percent(first.value, first.se)
        row["first"] = f"step {first.step}"
        error = math.hypot(first.se, last.se)
        row["change"] = _percent(last.value - first.value, error, sign=True)
    return row


def _group_rows(group: Group, each: Sequence[Sequence[Score]]) -> list[dict[str, str]]:
    """A row for several seeds: means, with their range, of first and last scores.

    Of the seeds that have come furthest alone: a mean over different steps is of
    nothing.
    """
    if not each:
        return []
    last = max(scores[-1].step for scores in each)
    far = [scores for scores in each if scores[-1].step == last]
    of = f"{len(far)} of {len(group.runs)}" if len(far) < len(group.runs) else len(far)
    label = f"{group.label}, {of} seeds"
    if len(far) == 1:
        return [_score_row(far[0]) | {"run": label}]
    before = [scores[0].value for scores in far]
    after = [scores[-1].value for scores in far]
    changes = [end - start for start, end in zip(before, after, strict=True)]
    row = _score_row(far[0]) | {
        "run": label,
        "after": _percent(_mean(after)),
        "last": ", ".join(filter(None, [_range(after), f"step {last}"])),
    }
    if all(len(scores) > 1 for scores in far):
        row["before"], row["first"] = _percent(_mean(before)), _range(before)
        row["change"] = _percent(_mean(changes), sign=True)
    if far[0][-1].n is not None:
        row["n"] += " each"
    return [row]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _range(values: Sequence[float]) -> str:
    """The lowest and the highest; nothing where they are written alike."""
    low, high = _percent(min(values)), _percent(max(values))
    return "" if low == high else f"{low} to {high}"


def _run_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """What the page says of each run."""
    questions = max(_LEAST, _QUESTIONS // len(groups))
    rows = []
    for i, group in enumerate(groups):
        for run in group.runs:
            gib, where = run.peak_memory
            history = alarm_history(run.alarms)
            rows.append(
                {
                    "name": label_of(group, run),
                    "path": str(run.path),
                    "colour": colour_of(i),
                    "status": run.status,
                    "seed": show(run.config.get("seed", _DASH)),
                    "updates": _progress(run),
                    "time": duration(float(run.elapsed[-1])),
                    "each": duration(run.seconds_per_update),
                    "memory": _DASH if math.isnan(gib) else f"{gib:.2f} GiB",
                    "where": where,
                    "alarms": ", ".join(alarm["name"] for alarm in history) or "none",
                    "history": history,
                    # One seed of a group speaks for all.
                    "samples": pick_samples(run, questions)
                    if run is group.runs[0]
                    else None,
                    "config": run.config_text,
                }
            )
    return rows


def _differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    configs = [run.config for run in runs]
    absent = "not set"
    return [
        (key, [show(c[key]) if key in c else absent for c in configs])
        for key in differing(configs)
    ]


def alarm_history(alarms: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Each alarm once: the steps at which it was raised, and its last message."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for alarm in alarms:
        by_name.setdefault(str(alarm.get("name")), []).append(alarm)
    return [
        {
            "name": name,
            "steps": _spans([int(one["step"]) for one in raised]),
            "message": str(raised[-1].get("message", "")),
        }
        for name, raised in by_name.items()
    ]


def _spans(steps: Sequence[int]) -> str:
    """3, 5–8, 11: steps in order, neighbours as one."""
    starts = [steps[0]] + [b for a, b in pairwise(steps) if b > a + 1]
    ends = [a for a, b in pairwise(steps) if b > a + 1] + [steps[-1]]
    spans = [
        f"{a}" if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True)
    ]
    more = len(spans) - 12
    if more > 0:
        spans = [*spans[:6], "…", *spans[-6:]]
    return ", ".join(spans) + (f" ({len(steps)} times)" if len(steps) > 1 else "")


def _percent(share: float, error: float = math.nan, *, sign: bool = False) -> str:
    text = f"{100 * share:{'+' if sign else ''}.1f}".replace("-", "−")
    return text if math.isnan(error) else f"{text} ± {100 * error:.1f}"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best.

    Example:
        >>> duration(8.44), duration(211.0), duration(7500.0)
        ('8.4 s', '3 min 31 s', '2 h 05 min')
    """
    if math.isnan(seconds):
        return _DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"

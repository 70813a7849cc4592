"""A study in words and tables: `report.md`, with its figures beside it.

Conclusions are of the model, task, machine and seeds that were measured. A saving is
printed where the baseline was measured, and never from an estimate.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from logra_jax.study.matrix import Cell, Study
from logra_jax.study.summary import (
    PARTS,
    REST,
    Group,
    Record,
    Spread,
    max_of_mean,
    update_peaks,
)
from logra_jax.study.trial import model_name
from logra_jax.training.paths import write_aside

Table = list[list[str]]

_NONE = "-"
_PART_NAMES = {
    "program": "program",
    "weights": "weights",
    "sketches": "gradients or sketches",
    "optimizer": "optimizer state",
    "reference": "reference weights",
    REST: "activations, temporaries",
}
_MEMORY_HEADS = (
    "run",
    "mean over updates",
    "maximum of the mean curve",
    "worst instant",
    "whole step",
)
_RESPONSE_HEADS = [
    "run",
    "tokens, first -> last fifth",
    "truncated, first -> last fifth",
    "alarms (updates that raised each)",
]
_MEMORY_NOTE = """\
An update's peak is the most memory in use while it ran, sampled every 20 ms ({where}).
The mean is over all updates of all seeds in which nothing was compiled; the maximum of
the mean curve is the highest point of the curve that averages the seeds at each update;
the worst instant is of any update of any seed. The rollout side is **not** in these
three. It is in "whole step", {rollout}."""

_ROLLOUT = {
    "local": "where it runs in the same process",
    "sglang": "but for servers, which have memory of their own",
}


def write_report(study: Study, study_dir: Path, records: Sequence[Record]) -> Path:
    """`report.md` of what is done so far, and its figures.

    Args:
        study: as it was asked for.
        study_dir: its directory.
        records: of the cells that are done: the lines of `results.jsonl`.
    """
    trained = [r for r in records if r["kind"] == "train"]
    groups = [
        Group(name, [r for r in trained if r["group"] == name]) for name in study.groups
    ]
    groups = [group for group in groups if group.all]
    header = f"```text\n{study.header}\n```" if study.header else ""
    parts = [f"# Study `{study.name}`", header, _about(study, records)]
    if groups:
        cells = [cell for cell in study.cells if cell.kind == "train"]
        parts += [_conclusion(cells, groups, trained)]
        parts += _sections(study, study_dir, groups, cells)
    parts += _failures(records)
    parts += _plans(records)
    parts += _reconstruction(study_dir, records)
    path = study_dir / "report.md"
    write_aside(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def _about(study: Study, records: Sequence[Record]) -> str:
    """What was measured, on what."""
    cells = study.cells
    machines = dict.fromkeys(
        f"{r['machine']['device']}; "
        + ", ".join(f"{k} {v}" for k, v in r["machine"]["versions"].items())
        for r in records
        if "machine" in r
    )
    models = dict.fromkeys(model_name(cell.config) for cell in cells)
    tasks = dict.fromkeys(_task(cell) for cell in cells)
    failed = sum(r["status"] == "failed" for r in records)
    lines = [
        f"- model: {', '.join(models)}",
        f"- task: {', '.join(tasks)}",
        f"- hardware: {' | '.join(machines) or 'not known yet'}",
        f"- seeds: {', '.join(map(str, study.seeds))}",
        f"- cells: {len(records)} of {len(cells)} done, {failed} of them failed",
    ]
    return "\n".join(lines)


def _task(cell: Cell) -> str:
    task = cell.config.task
    return f"{task.name} ({task.source})"


def _conclusion(
    cells: Sequence[Cell], groups: Sequence[Group], trained: Sequence[Record]
) -> str:
    """The best accuracy and the least memory, within what was measured."""
    metric = cells[0].config.best_metric
    measured = {group.name for group in groups if group.done}
    cells = [cell for cell in cells if cell.group in measured]
    models = " and ".join(dict.fromkeys(model_name(cell.config) for cell in cells))
    tasks = " and ".join(dict.fromkeys(map(_task, cells)))
    numbers = [len(group.done) for group in groups if group.done]
    seeds = max(numbers, default=0)
    several = _count(seeds, "seed")
    if min(numbers, default=0) < seeds:
        several = f"{min(numbers)} to {several} a run"
    where = f"On {models}, {tasks}, {_device(trained)}, {several}"
    scored = [(s, g) for g in groups if (s := g.spread("evaluations", metric, "after"))]
    if not scored:
        return ""
    best, group = max(scored, key=lambda pair: pair[0].mean)
    rivals = [g.name for s, g in scored if g is not group and s.high >= best.low]
    text = f"{where}: the highest {metric} is of `{group.name}`, {_range(best)}"
    if rivals and seeds > 1:
        text += f"; the ranges of {_names(rivals)} overlap with it"
    elif seeds == 1 and len(scored) > 1:
        text += "; of one seed, which says little about small differences"
    held = [(s, g) for g in groups if (s := g.spread("memory_gib", "mean"))]
    if held:
        least, leanest = min(held, key=lambda pair: pair[0].mean)
        text += (
            f". An update's peak memory, mean over updates, is least for "
            f"`{leanest.name}`: {least.mean:.2f} GiB"
        )
    return f"{text}. Other models, tasks and machines may differ."


def _sections(
    study: Study, study_dir: Path, groups: Sequence[Group], cells: Sequence[Cell]
) -> list[str]:
    engines = {cell.config.rollout.engine for cell in cells}
    figures = _figures(study, study_dir, groups)
    metrics = list(
        dict.fromkeys(m for g in groups for r in g.done for m in r["evaluations"])
    )
    return [
        "## Accuracy",
        _table(["run", "seeds", *_accuracy_heads(metrics)], groups, _accuracy(metrics)),
        "Mean of the seeds [lowest to highest]; the reward is the mean of the first "
        "and of the last fifth of the updates.",
        *figures.get("accuracy", []),
        *figures.get("reward", []),
        "## Memory of an update, GiB",
        _table(
            [*_MEMORY_HEADS, *_saving_head(study)],
            groups,
            _memory(study, study_dir, groups),
        ),
        _MEMORY_NOTE.format(
            where="resident memory of the process, XLA's programs included"
            if "CPU" in _device([r for g in groups for r in g.done])
            else "allocated by JAX on the first device",
            rollout=" or ".join(_ROLLOUT[engine] for engine in sorted(engines)),
        ),
        _table(["run", *_PART_NAMES.values()], groups, _split),
        "The parts that are held are counted from the arrays; activations and "
        "temporaries are what the mean peak holds beside them.",
        *figures.get("memory", []),
        "## Time, seconds",
        _table(
            ["run", "update: median [p10 to p90]", "a whole step, mean", "whole run"],
            groups,
            _time,
        ),
        "An update is timed on the device, compiling ones left out; a whole step is "
        "from one update to the next: with generation, scoring, evaluation and "
        "checkpoints. The whole run is that of its last process.",
        *figures.get("time", []),
        "## KL, nats per token",
        _table(
            ["run", "predicted", "realised", "realised / predicted", "sum of realised"],
            groups,
            _kl,
        ),
        *figures.get("kl", []),
        "## Responses",
        _table(
            _RESPONSE_HEADS,
            groups,
            _responses,
        ),
        *figures.get("length", []),
    ]


def _figures(
    study: Study, study_dir: Path, groups: Sequence[Group]
) -> dict[str, list[str]]:
    """Markdown of the figures, by section."""
    from logra_jax.study.compare_figures import write_figures

    runs = {
        g.name: {r["seed"]: study_dir / r["run_dir"] for r in g.done}
        for g in groups
        if g.done
    }
    if not runs:
        return {}
    figures = write_figures(study_dir, runs)
    return {
        name: [f"![{figure.title}]({name}.png)", figure.reading]
        for name, figure in figures.items()
    }


def _accuracy_heads(metrics: Sequence[str]) -> list[str]:
    heads = []
    for metric in metrics:
        heads += [f"{metric}: before", "after", "best"]
    return [*heads, "reward", "updates"]


def _accuracy(metrics: Sequence[str]) -> Callable[[Group], list[str]]:
    def row(group: Group) -> list[str]:
        cells = [str(len(group.done))]
        for metric in metrics:
            cells += [
                _range(group.spread("evaluations", metric, when))
                for when in ("before", "after", "best")
            ]
        return [*cells, _ends(group, "reward", ".2f"), _updates(group)]

    return row


def _updates(group: Group) -> str:
    """How long the runs were: a target or an alarm may have ended some early."""
    steps = sorted({record["steps"] for record in group.done})
    stopped = sum(record["status"] != "finished" for record in group.done)
    text = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    return f"{text} ({stopped} stopped by an alarm)" if stopped else text


def _saving_head(study: Study) -> list[str]:
    if not study.baseline:
        return []
    of = ", ".join(f"{axis}={label}" for axis, label in study.baseline.items())
    return [f"saving of the mean against {of}"]


def _memory(
    study: Study, study_dir: Path, groups: Sequence[Group]
) -> Callable[[Group], list[str]]:
    def row(group: Group) -> list[str]:
        peaks = [update_peaks(study_dir / r["run_dir"]) for r in group.done]
        worst = group.spread("memory_gib", "worst")
        cells = [
            _range(group.spread("memory_gib", "mean"), ".2f"),
            _number(max_of_mean(peaks), ".2f"),
            _number(worst and worst.high, ".2f"),
            _range(group.spread("memory_gib", "step"), ".2f"),
        ]
        if study.baseline:
            cells.append(_saving(group, _baseline_of(study, group, groups)))
        return cells

    return row


def _baseline_of(
    study: Study, group: Group, groups: Sequence[Group]
) -> "Group | str | None":
    """The group that differs from this one in the baseline's axes alone."""
    first = group.all[0]["labels"]
    wanted = {**first, **study.baseline}
    if wanted == first:
        return "baseline"
    return next((g for g in groups if g.all[0]["labels"] == wanted), None)


def _saving(group: Group, baseline: "Group | str | None") -> str:
    """A percentage, or why there is none."""
    if isinstance(baseline, str):
        return baseline
    if baseline is None:
        return "not measurable (the baseline has not run)"
    if baseline.failure:
        return f"not measurable (the baseline {baseline.failure})"
    ours = group.spread("memory_gib", "mean")
    theirs = baseline.spread("memory_gib", "mean")
    if ours is None or theirs is None:
        return f"not measurable ({group.failure or 'no update was measured'})"
    return f"{100 * (1 - ours.mean / theirs.mean):.1f} %"


def _split(group: Group) -> list[str]:
    spreads = [group.spread("memory_gib", part) for part in (*PARTS, REST)]
    return [_number(s and s.mean, ".2f") for s in spreads]


def _time(group: Group) -> list[str]:
    parts = [
        group.spread("seconds", k)
        for k in ("step", "step_p10", "step_p90", "end_to_end")
    ]
    step, low, high, whole = (_number(p and p.mean, ".2f") for p in parts)
    run = Spread.of([r["wall_seconds"] for r in group.done])
    middle = _NONE if step == _NONE else f"{step} [{low} to {high}]"
    return [middle, whole, _number(run and run.mean, ".0f")]


def _kl(group: Group) -> list[str]:
    return [
        _range(group.spread("kl", "predicted"), ".2e"),
        _range(group.spread("kl", "realised"), ".2e"),
        _range(group.spread("kl", "ratio"), ".2f"),
        _range(group.spread("kl", "sum"), ".2g"),
    ]


def _responses(group: Group) -> list[str]:
    alarms: dict[str, int] = {}
    for record in group.done:
        for name, count in record["alarms"].items():
            alarms[name] = alarms.get(name, 0) + count
    listed = ", ".join(f"{name} {count}" for name, count in sorted(alarms.items()))
    return [
        _ends(group, "length", ".1f"),
        _ends(group, "truncated", ".0%"),
        listed or "none",
    ]


def _failures(records: Sequence[Record]) -> list[str]:
    rows = [
        [r["cell"], r["phase"], f"{r['type']}: {r['message'][:300]}"]
        for r in records
        if r["status"] == "failed"
    ]
    if not rows:
        return []
    head = ["cell", "phase", "message"]
    return ["## Failed", _markdown([head, *rows])]


def _plans(records: Sequence[Record]) -> list[str]:
    planned = [r for r in records if r["kind"] == "plan" and "result" in r]
    if not planned:
        return []
    names = ("weights", "sketches", "optimizer", "activations", "other", "peak")
    rows = []
    for record in planned:
        gib = record["result"]["gib"]
        cells = [_number(gib.get(name), ".2f") for name in names]
        error = record["result"]["error"]
        rows.append([record["group"], *cells, error or ""])
    works = [record["result"]["workload"] for record in planned]
    batches = " or ".join(dict.fromkeys(str(work["batch"]) for work in works))
    heads = ["run", "weights", "gradients or sketches", "optimizer state"]
    heads += ["activations, temporaries", "batch, outputs", "peak", "error"]
    return [
        "## Planned memory of an update, GiB on each device",
        _markdown([heads, *rows]),
        "The step, compiled for shapes alone (`logra plan`) and not run: microbatches "
        f"of {works[0]['tokens_per_device']} tokens a device, {batches} responses an "
        "update.",
    ]


def _reconstruction(study_dir: Path, records: Sequence[Record]) -> list[str]:
    from logra_jax.study.compare_figures import write_heat_map

    found = [r for r in records if r["kind"] == "reconstruction" and "result" in r]
    if not found:
        return []
    result = found[0]["result"]
    write_heat_map(study_dir / "heat_map.png", result)
    rows = [
        [
            str(row["rank"]),
            row["basis"],
            *(_number(row[k], ".4f") for k in ("mean", "low", "high", "theory")),
        ]
        for row in result["means"]
    ]
    heads = ["rank", "basis", "mean cosine", "lowest layer", "highest layer", "theory"]
    return [
        "## Reconstruction of real gradients",
        _markdown([heads, *rows]),
        f"Cosine of the policy gradient of {result['responses']} responses and of what "
        "its sketch reconstructs, S A, mean over layers; theory is 1/sqrt(1 + (k-1)/r) "
        "for signs, 1/sqrt(1 + (k+1)/r) for normal entries.",
        "![reconstruction](heat_map.png)",
    ]


def _ends(group: Group, key: str, form: str) -> str:
    first, last = group.spread(key, "first"), group.spread(key, "last")
    if first is None or last is None:
        return _NONE
    return f"{first.mean:{form}} -> {last.mean:{form}}"


def _range(spread: Spread | None, form: str = ".3f") -> str:
    if spread is None:
        return _NONE
    if spread.seeds == 1:
        return f"{spread.mean:{form}}"
    return f"{spread.mean:{form}} [{spread.low:{form}} to {spread.high:{form}}]"


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else f"{value:{form}}"


def _device(records: Sequence[Record]) -> str:
    found = dict.fromkeys(r["machine"]["device"] for r in records if "machine" in r)
    return " and ".join(found) or "a machine that is not known"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _table(
    heads: list[str], groups: Sequence[Group], row: Callable[[Group], list[str]]
) -> str:
    """A line for each group; one whose runs all failed says where."""
    rows: Table = []
    for group in groups:
        if group.failure:
            rows.append([group.name, group.failure, *[""] * (len(heads) - 2)])
        elif group.done:
            rows.append([group.name, *row(group)])
    return _markdown([heads, *rows])


def _markdown(rows: Table) -> str:
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""Answers of a run for its report: the same questions, as training went on."""

from __future__ import annotations

from typing import Any

from logra_jax.study.report_runs import Run
from logra_jax.training.samples import Sample

_SHOWN = 700  # characters of an answer: its beginning and its end


def pick_samples(run: Run, count: int) -> dict[str, Any]:
    """Answers to the same questions at the start, the middle and the end of a run.

    Questions are spread evenly over those that were kept each time, not picked.
    """
    steps = run.sample_steps
    places = sorted({0, len(steps) // 2, len(steps) - 1}) if steps else []
    chosen = [steps[i] for i in places]
    kept = [{_question(s): s for s in run.samples(step)} for step in chosen]
    shared = [key for key in kept[0] if all(key in one for one in kept)] if kept else []
    # Where no question was kept each time, those of the end.
    keys = shared or (list(kept[-1]) if kept else [])
    greedy = [key for key in keys if key[1] == "greedy"]
    keys = greedy or keys
    count = min(count, len(keys))
    picked = [keys[i * len(keys) // count] for i in range(count)]
    rows = []
    for key in picked:
        found = [one.get(key) for one in kept]
        some = next(sample for sample in found if sample)
        answers = [sample and _answer(sample) for sample in found]
        rows.append({"question": some.question, "gold": some.gold, "answers": answers})
    how = "Greedy answers" if greedy else "Sampled answers"
    return {
        "steps": [_when(step) for step in chosen],
        "rows": rows,
        "note": f"{how}, to questions spread evenly over those that were kept.",
    }


def _question(sample: Sample) -> tuple[str, str, str, int]:
    return sample.set, sample.mode, sample.question, sample.n


def _when(step: int) -> str:
    return "Before training" if step == 0 else f"After update {step}"


def _answer(sample: Sample) -> dict[str, str]:
    kinds = {1.0: ("right", "✓ right"), 0.0: ("wrong", "✗ wrong")}
    partly = ("partly", f"◐ {sample.reward:g}")
    kind, verdict = kinds.get(sample.reward, partly)
    text, half = sample.response, _SHOWN // 2
    if len(text) > _SHOWN:
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[… {left_out:,} characters …]\n{text[-half:]}"
    cut = "" if sample.finished else ", cut at the limit"
    return {
        "kind": kind,
        "verdict": verdict,
        "text": text,
        "length": f"{sample.length:,} tokens{cut}",
    }

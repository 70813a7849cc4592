import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from logra_jax.study.report import report
from logra_jax.study.report_answers import pick_samples
from logra_jax.study.report_costs import breakdown, phase_means
from logra_jax.study.report_draw import mean_and_range, thinned
from logra_jax.study.report_figures import draw_figures
from logra_jax.study.report_groups import differing, group_runs
from logra_jax.study.report_page import alarm_history, duration
from logra_jax.study.report_runs import read_run, read_runs
from logra_jax.training.alarms import Alarm, AlarmLog
from logra_jax.training.figure_style import Series
from logra_jax.training.journal import Journal
from logra_jax.training.paths import CONFIG_FILE, MODEL_DIRECTORY
from logra_jax.training.samples import Sample, samples_path, write_samples

HOSTILE = "<script>alert(1)</script> \"a\" & 'b' $x^2$ </svg>"
PARTS = {"program": 0.4, "weights": 1.0, "sketches": 0.1, "optimizer": 0.2}
VOID = {"meta", "path", "use", "br", "link", "img", "input"}


def evaluation(accuracy):
    return {
        "heldout/greedy": accuracy,
        "heldout/greedy_se": 0.05,
        "heldout/greedy_n": 63,
        "heldout/sampled": accuracy / 2,
        "heldout/sampled_se": 0.025,
        "heldout/sampled_n": 256,
        "heldout/length": 12.0,
        "heldout/truncated": 0.0,
        "heldout/failed": 0,
        "seconds/eval": 4.0,
    }


def update(step, seed, **extra):
    wave = math.sin(1.7 * step + seed)
    return {
        "reward": 0.5 + 0.1 * wave,
        "kl/budget": 1e-2,
        "kl/predicted": 1e-2,
        "kl/realised": 1e-2 + 2e-3 * wave,
        "alpha": 20.0 + wave,
        "length/mean": 8.0 + wave,
        "length/truncated": 0.1,
        "seconds/rollout": 2.0,
        "seconds/reward": 0.1,
        "seconds/step": 6.0,
        "memory/peak_rss_gib": 3.5,
        **extra,
    }


def sample(question="1 + 1 =", response="It is 2.", reward=1.0, mode="greedy", n=0):
    texts = {"question": question, "gold": "2", "response": response, "answer": "2"}
    kind = {"set": "heldout", "family": "sums", "mode": mode, "n": n}
    return Sample(**texts, **kind, reward=reward, length=5, finished=reward > 0)


def write_run(
    path: Path,
    steps: int = 4,
    *,
    planned: int | None = None,
    seed: int = 0,
    config: dict | None = None,
    model: bool = True,
    evaluate: bool = True,
    samples: dict[int, list[Sample]] | None = None,
    first: dict | None = None,
    extra: dict | None = None,
) -> Path:
    """A made-up run: an evaluation, then ``steps`` updates, the last one evaluated."""
    with Journal(path, resume_step=None) as journal:
        row = evaluation(0.4) if evaluate else {}
        journal.write(0, row | {"seconds/total": 5.0} | (first or {}))
        for step in range(1, steps + 1):
            row = update(step, seed, **(extra or {}))
            row["seconds/total"] = 5.0 + 9.0 * step
            if evaluate and step == steps:
                row |= evaluation(0.6 + 0.1 * seed)
            journal.write(step, row)
    tree = {
        "name": path.name,
        "seed": seed,
        "run_dir": str(path),
        "model": {"path": "a-model", "dtype": "bfloat16"},
        "task": {"source": "reasoning_gym", "name": "chain_sum"},
        "train": {"steps": planned or steps},
    }
    (path / CONFIG_FILE).write_text(yaml.safe_dump(tree | (config or {})))
    data = {"source": "reasoning_gym", "name": "chain_sum", "train": 1370}
    (path / "data.json").write_text(json.dumps(data | {"held_out": 63}))
    for step, responses in (samples or {}).items():
        write_samples(samples_path(path, step), responses)
    if model:
        (path / MODEL_DIRECTORY).mkdir()
    return path


class Page(HTMLParser):
    """Tags, attributes and text of a page; every element must be closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page_of(*paths: Path) -> tuple[Page, str]:
    out = paths[0].parent / "page.html"
    assert report(paths, out) == 0
    text = out.read_text("utf-8")
    return Page(text), text


def figures_of(*paths: Path) -> dict:
    return {f.title: f for f in draw_figures(group_runs(read_runs(paths)))}


def test_the_page_needs_nothing_but_itself(tmp_path):
    page, text = page_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1))
    assert {"script", "link", "img", "iframe", "image"}.isdisjoint(dict(page.tags))
    for _, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith("#")
    assert not re.search("https?:|//", text)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}


def test_ids_are_one_figures_own_and_every_reference_has_one(tmp_path):
    page, text = page_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(ids)) == len(ids) > 0
    used = re.findall(r'(?:url\(|href=")#([^)"]+)', text)
    assert set(used) == set(ids)


def test_every_run_metric_and_figure_is_there(tmp_path):
    a = write_run(tmp_path / "a", config={"rl": {"advantage": "grpo"}})
    b = write_run(tmp_path / "b", config={"rl": {"advantage": "rloo"}})
    page, _ = page_of(a, b)
    for word in (
        *("heldout/greedy", "heldout/sampled", "rl.advantage = grpo"),
        *("rl.advantage = rloo", "a-model", "chain_sum", "1,370 to train on"),
        *("40.0 ± 5.0", "60.0 ± 5.0", "+20.0 ± 7.1", "4 of 4", "41.0 s", "3.50 GiB"),
        *("Training reward", "Accuracy", "Where the time goes", "Memory"),
    ):
        assert word in page.text, word
    labels = [attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg"]
    assert labels == list(figures_of(a, b))


def test_texts_of_a_run_are_escaped_wherever_they_stand(tmp_path):
    path = write_run(
        tmp_path / "a<b>&$c$",
        config={"task": {"name": HOSTILE}, "note": HOSTILE},
        samples={0: [sample(HOSTILE, HOSTILE)]},
    )
    (path / "data.json").unlink()
    AlarmLog(path, resume_step=None).write(1, [Alarm("<b>", HOSTILE)])
    other = write_run(tmp_path / "plain", config={"note": "none"})
    page, text = page_of(path, other)
    assert "<script" not in text
    assert "script" not in dict(page.tags)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    # Task, config's difference, question, answer, alarm; and folded, the config twice.
    assert page.text.count("<script>alert(1)</script>") >= 6
    assert "a<b>&$c$" in page.text


@pytest.mark.parametrize(
    ("steps", "planned", "model", "status"),
    [
        (3, 9, False, "unfinished: interrupted, or still running"),
        (9, 9, True, "finished"),
        (9, 9, False, "all steps done, no model exported"),
        (3, 9, True, "ended early, by a target or an alarm"),
    ],
)
def test_the_page_says_how_a_run_stands(tmp_path, steps, planned, model, status):
    path = write_run(tmp_path / "a", steps, planned=planned, model=model)
    page, _ = page_of(path)
    assert status in page.text
    is_open = "a is not finished: 3 of 9 updates are done" in page.text
    assert is_open == status.startswith("unfinished")


def test_a_torn_last_line_of_a_killed_run_is_passed_over(tmp_path):
    path = write_run(tmp_path / "a", 3, planned=9, model=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert "3 of 9 updates" in page_of(path)[0].text


@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_runs_of_any_length_are_drawn_without_a_warning(tmp_path, steps, evaluate):
    path = write_run(tmp_path / "a", steps, planned=5, evaluate=evaluate)
    page, _ = page_of(path)
    assert ("No evaluation was recorded." in page.text) != evaluate
    assert "No responses were kept." in page.text


def test_a_run_that_recorded_next_to_nothing_is_drawn(tmp_path):
    with Journal(tmp_path / "a", resume_step=None) as journal:
        journal.write(1, {"reward": math.nan, "kl/predicted": 0.0, "alpha": 0.0})
    (tmp_path / "a" / CONFIG_FILE).write_text("seed: 0\n")
    page, _ = page_of(tmp_path / "a")
    assert "not recorded" in page.text


def test_thousands_of_steps_stay_a_small_file(tmp_path):
    paths = [write_run(tmp_path / f"{seed}", 1200, seed=seed) for seed in range(2)]
    _, text = page_of(*paths)
    assert len(text) < 400_000
    series = Series(np.arange(3000.0), np.arange(3000.0))
    few = thinned(series)
    assert len(few) == 150
    np.testing.assert_array_equal(few.values[:2], [9.5, 29.5])
    assert thinned(series, np.max).values[-1] == 2999
    # None of the last ones stands alone.
    parts = thinned(Series(np.arange(151.0), np.ones(151)), np.sum).values
    np.testing.assert_array_equal(parts, [2] * 75 + [1])
    assert thinned(series, points=3000) is series


def test_the_same_runs_give_the_same_bytes(tmp_path):
    paths = [write_run(tmp_path / f"{seed}", seed=seed) for seed in range(3)]
    assert page_of(*paths)[1] == page_of(*paths)[1]


def test_seeds_of_a_config_are_a_group_with_their_mean_and_range(tmp_path):
    paths = [write_run(tmp_path / f"s{seed}", seed=seed) for seed in range(3)]
    paths.append(write_run(tmp_path / "other", config={"rl": {"advantage": "grpo"}}))
    groups = group_runs(read_runs(paths))
    assert [len(group.runs) for group in groups] == [3, 1]
    assert [group.label for group in groups] == [
        "rl.advantage = null",
        "rl.advantage = grpo",
    ]
    page, _ = page_of(*paths)
    # After 60, 70, 80 %, before 40 % in all of them.
    assert "rl.advantage = null, 3 seeds" in page.text
    assert re.search(r"40\.0 70\.0 60\.0 to 80\.0, step 4 \+30\.0", page.text)
    assert "(mean and range of 3 seeds)" in page.text


def test_the_mean_over_seeds_leaves_out_those_that_are_behind(tmp_path):
    paths = [write_run(tmp_path / f"s{seed}", seed=seed) for seed in range(2)]
    late = write_run(tmp_path / "late", 0, planned=4, seed=2, model=False)
    page, _ = page_of(*paths, late)
    assert re.search(
        r"2 of 3 seeds 40\.0 65\.0 60\.0 to 70\.0, step 4 \+25\.0", page.text
    )
    page, _ = page_of(paths[0], late)
    row = r"1 of 2 seeds 40\.0 ± 5\.0 step 0 60\.0 ± 5\.0 step 4 \+20\.0 ± 7\.1"
    assert re.search(row, page.text)


def test_mean_and_range_are_over_the_steps_that_all_have():
    runs = [
        Series(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 9.0])),
        Series(np.array([0.0, 1.0, 2.0]), np.array([7.0, 3.0, 8.0])),
        Series(np.array([1.0, 2.0, 4.0]), np.array([2.0, 5.0, 0.0])),
    ]
    mean, low, high = mean_and_range(runs)
    np.testing.assert_array_equal(mean.steps, [1, 2])
    np.testing.assert_array_equal(mean.values, [2, 5])
    np.testing.assert_array_equal(low.values, [1, 2])
    np.testing.assert_array_equal(high.values, [3, 8])


def test_runs_that_do_not_differ_are_named_by_their_directories(tmp_path):
    paths = [write_run(tmp_path / part / "run") for part in "ab"]
    labels = [group.label for group in group_runs(read_runs(paths))]
    assert labels == [str(Path(part) / "run") for part in "ab"]
    page, _ = page_of(*paths)
    assert "In what the configs differ" not in page.text


def test_differing_keys_are_told_and_places_are_not():
    configs = [
        {"seed": 1, "run_dir": "a", "rl.loss": "ppo", "only": None},
        {"seed": 2, "run_dir": "b", "rl.loss": "ppo"},
    ]
    assert differing(configs) == ["seed", "only"]


def test_a_label_is_the_one_key_that_tells_all_apart(tmp_path):
    settings = [("grpo", 4), ("rloo", 4), ("none", 1)]
    paths = [
        write_run(tmp_path / name, config={"rl": {"advantage": name, "k": k}})
        for name, k in settings
    ]
    labels = [group.label for group in group_runs(read_runs(paths))]
    assert labels == [f"rl.advantage = {name}" for name, _ in settings]
    page, _ = page_of(*paths)
    assert "rl.k 4 4 1" in page.text


def test_the_parts_of_memory_add_up_to_the_mean_peak(tmp_path):
    first = {f"memory/{name}_gib": gib for name, gib in PARTS.items()}
    first["memory/reference_gib"] = 0
    path = write_run(tmp_path / "a", first=first, extra={"memory/update_peak_gib": 2.5})
    parts = breakdown(read_run(path))
    assert parts == PARTS | {"rest": pytest.approx(0.8)}
    drawn = figures_of(path)["Memory"].svg
    assert "activations and temporaries" in drawn
    assert "reference weights" not in drawn
    # An update that compiles holds the compiler's memory too.
    compiling = {"seconds/compile": 9.0, "memory/update_peak_gib": 70.0}
    rows = [row | compiling if row["step"] == 1 else row for row in read_run(path).rows]
    assert breakdown(dataclasses.replace(read_run(path), rows=rows)) == parts
    small = write_run(tmp_path / "b", first=first, extra={"memory/update_peak_gib": 1})
    assert breakdown(read_run(small))["rest"] == 0
    whole = {"memory/update_peak_gib": 2.5, "memory/step_peak_gib": 3.0}
    rollout = figures_of(write_run(tmp_path / "d", extra=whole))["Memory"].svg
    assert "whole step, with a local rollout" in rollout
    assert "whole step" not in drawn
    # Beside a run that has them, one that has not is drawn without them.
    other = write_run(tmp_path / "c")
    assert breakdown(read_run(other)) == {}
    assert "were not recorded" in figures_of(other)["Memory"].reading
    assert "What an update holds" in figures_of(path, other)["Memory"].svg


def test_phases_are_of_the_whole_run_divided_by_its_updates(tmp_path):
    run = read_run(write_run(tmp_path / "a", 4))
    assert phase_means(run) == pytest.approx(
        {"rollout": 2.0, "reward": 0.1, "step": 6.0, "eval": 2.0}
    )


def test_time_of_a_resumed_run_is_that_of_all_its_processes(tmp_path):
    path = write_run(tmp_path / "a", 2)  # its clock: 5, 14, 23
    with Journal(path, resume_step=2) as journal:
        journal.write(3, {"reward": 0.5, "seconds/total": 10.0})
        journal.write(4, {"reward": 0.5, "seconds/total": 16.0})
    run = read_run(path)
    np.testing.assert_allclose(run.elapsed, [5, 14, 23, 33, 39])
    assert run.seconds_per_update == 9.0  # of 9, 9, 10, 6
    # A process that took long to begin may be ahead of the clock before it.
    with Journal(path, resume_step=4) as journal:
        held = {"memory/weights_gib": 1.0}
        journal.write(5, {"reward": 0.5, "seconds/total": 20.0} | held)
    np.testing.assert_allclose(read_run(path).elapsed, [5, 14, 23, 33, 39, 59])
    texts = [duration(s) for s in (0.0, 59.94, 60.4, 3599.6, 7500.0, math.nan)]
    assert texts == ["0.0 s", "59.9 s", "1 min 00 s", "1 h 00 min", "2 h 05 min", "–"]


def test_an_alarms_history_is_its_steps_and_its_last_word(tmp_path):
    path = write_run(tmp_path / "a")
    log = AlarmLog(path, resume_step=None)
    for step in (3, 5, 6, 7, 9):
        log.write(step, [Alarm("kl_ratio", f"At {step}.")])
    log.write(9, [Alarm("entropy", "Low.")])
    history = alarm_history(read_run(path).alarms)
    assert history == [
        {"name": "kl_ratio", "steps": "3, 5–7, 9 (5 times)", "message": "At 9."},
        {"name": "entropy", "steps": "9", "message": "Low."},
    ]
    page, _ = page_of(path)
    assert "kl_ratio, entropy" in page.text
    assert "At 9." in page.text


def test_answers_to_the_same_questions_stand_side_by_side(tmp_path):
    def answers(step, names):
        return [
            sample(name, f"{name} at {step}", reward)
            for name, reward in zip(names, (1.0, 0.0, 0.5), strict=True)
        ]

    kept = {
        0: answers(0, ("q1", "q2", "q3")),
        2: answers(2, ("q2", "q3", "q9")),
        3: answers(3, ("q3", "q2", "q1")),
        4: answers(4, ("q3", "q1", "q2")),
    }
    path = write_run(tmp_path / "a", samples=kept)
    picked = pick_samples(read_run(path), 6)
    assert picked["steps"] == ["Before training", "After update 3", "After update 4"]
    assert [row["question"] for row in picked["rows"]] == ["q1", "q2", "q3"]
    for row in picked["rows"]:
        texts = [answer["text"] for answer in row["answers"]]
        assert texts == [f"{row['question']} at {step}" for step in (0, 3, 4)]
    page, _ = page_of(path)
    for word in ("✓ right", "✗ wrong", "◐ 0.5", "cut at the limit"):
        assert word in page.text


def test_questions_that_were_not_kept_each_time_leave_a_gap(tmp_path):
    kept = {0: [sample("q1")], 4: [sample("q2")]}
    path = write_run(tmp_path / "a", samples=kept)
    [row] = pick_samples(read_run(path), 6)["rows"]
    assert [bool(answer) for answer in row["answers"]] == [False, True]
    assert "not kept" in page_of(path)[0].text


def test_an_answer_that_is_no_text_at_all_is_shown(tmp_path):
    path = write_run(tmp_path / "a", samples={0: [sample("q", "never")]})
    kept = samples_path(path, 0)
    kept.write_text(kept.read_text().replace("never", r"half \ud800 \u0000 \u202e"))
    assert "half ? " in page_of(path)[0].text


def test_a_long_answer_is_shown_by_its_ends(tmp_path):
    long = "a" * 1000 + "end"
    path = write_run(tmp_path / "a", samples={0: [sample("q", long)]})
    [row] = pick_samples(read_run(path), 1)["rows"]
    text = row["answers"][0]["text"]
    assert text.startswith("aaa")
    assert text.endswith("aend")
    assert "[… 303 characters …]" in text


def test_the_page_lands_beside_its_run_or_where_one_stands(
    tmp_path, monkeypatch, capsys
):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    report([a])
    first = (a / "report.html").read_text()
    report([a])  # an older report of ours is replaced
    assert (a / "report.html").read_text() == first
    monkeypatch.chdir(tmp_path)
    report([a, b])
    assert "2 runs compared" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out.endswith("report: report.html\n")
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_is_no_report_is_not_replaced(tmp_path):
    path = write_run(tmp_path / "a")
    for out in (path, path / CONFIG_FILE):
        with pytest.raises(ValueError, match=r"^`--out` must be a new file or an"):
            report([path], out)
    with pytest.raises(ValueError, match=r"^`--out` must be a file that can be"):
        report([path], tmp_path / "none" / "page.html")


def test_what_is_no_run_is_said_in_a_sentence(tmp_path):
    def refuse(match, *paths):
        with pytest.raises(ValueError, match=match) as error:
            report(paths, tmp_path / "page.html")
        assert "\n" not in str(error.value)

    run = write_run(tmp_path / "a")
    refuse("'none', which is no directory", "none")
    refuse("which is no directory", run / CONFIG_FILE)
    (tmp_path / "empty").mkdir()
    refuse(f"which has no {CONFIG_FILE}", tmp_path / "empty")
    refuse("must name each run once", run, run)
    (run / "metrics.jsonl").write_text('{"loss": 0}\n')
    refuse("a line that has no `step`", run)
    (run / "metrics.jsonl").write_text('{"step": 0')
    refuse("has recorded no step yet", run)
    (run / "metrics.jsonl").unlink()
    refuse("has recorded no step yet", run)
    broken = write_run(tmp_path / "b", samples={0: [sample()]})
    samples_path(broken, 0).write_text("no JSON\n")
    refuse("must hold samples, one JSON object a line", broken)
    (broken / "alarms.jsonl").write_text("no JSON\n")
    refuse(r"alarms\.jsonl` must hold one JSON object a line", broken)
    (broken / CONFIG_FILE).write_text("- a list\n")
    refuse("must hold `key: value` lines", broken)
    (broken / CONFIG_FILE).write_text("a: [\n")
    refuse("is not valid YAML", broken)

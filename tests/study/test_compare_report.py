"""What a study says of its runs, from journals whose numbers are known."""

import fcntl
import json
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from logra_jax.study import cell as child
from logra_jax.study import compare, compare_report
from logra_jax.study.compare import compare_command, read_outcome, write_results
from logra_jax.study.compare_figures import by_layer, write_heat_map
from logra_jax.study.compare_report import write_report
from logra_jax.study.matrix import Cell, Study, load_study
from logra_jax.study.summary import Spread, max_of_mean, summarise_run
from logra_jax.training.config import to_yaml
from logra_jax.training.journal import Journal

BASE = "model: {path: a-model}\ntrain: {steps: 5}\n"
STUDY = """\
config: base.yaml
seeds: [0, 1]
axes: {method: {logra: {}, adamw: {optimizer.kind: adamw}}}
baseline: {method: adamw}
"""
FIGURES = ("reward", "accuracy", "kl", "length", "time", "memory")
MACHINE = {"device": "a card", "versions": {"jax": "0.1"}}


def write_run(run_dir: Path, *, gib: float, accuracy: float, steps: int = 5) -> None:
    """Updates of ``gib``, one more in each; the first, which compiles, of ten times."""
    with Journal(run_dir, resume_step=None) as journal:
        score = {"heldout/sampled_se": 0.1, "heldout/sampled_n": 64}
        parts = {"program": 0.5, "weights": 1.0, "sketches": 0.25, "optimizer": 0.125}
        first = {f"memory/{name}_gib": size for name, size in parts.items()}
        before = {"heldout/sampled": 0.1, "seconds/total": 10.0}
        journal.write(0, before | score | first)
        for step in range(1, steps + 1):
            row = {
                "reward": 0.1 * step,
                "length/mean": 20.0 - step,
                "length/truncated": 0.5,
                "kl/predicted": 1e-2,
                "kl/realised": 1.1e-2,
                "seconds/step": float(step),
                "seconds/compile": 4.0 if step == 1 else 0.0,
                "seconds/total": 10.0 + 3.0 * step,
                "memory/update_peak_gib": 10 * gib if step == 1 else gib + step,
                "memory/step_peak_gib": gib + step + 2,
            }
            if step == steps:
                row |= {"heldout/sampled": accuracy} | score
            journal.write(step, row)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "study.yaml").write_text(STUDY)
    return load_study(tmp_path / "study.yaml")


def finish(study: Study, study_dir: Path, *, failing: str = "") -> str:
    """The report of a study whose cells are done, those of one method by failing."""
    for cell in study.cells:
        cell_dir = study_dir / "cells" / cell.name
        cell_dir.mkdir(parents=True)
        method, seed = cell.labels["method"], cell.seed
        outcome = {"status": "finished", "wall_seconds": 60.0}
        if method == failing:
            outcome |= {"status": "failed", "phase": "update", "type": "XlaError"}
            outcome |= {"message": "RESOURCE_EXHAUSTED: Out of memory | 80 GiB"}
        else:
            gib = {"logra": 2.0, "adamw": 6.0}[method] + seed
            write_run(cell_dir / "run", gib=gib, accuracy=0.5 + 0.1 * seed)
            (cell_dir / "run" / "config.yaml").write_text(to_yaml(cell.config))
            (cell_dir / "run" / "machine.json").write_text(json.dumps(MACHINE))
        (cell_dir / "outcome.json").write_text(json.dumps(outcome))
    records = write_results(study, study_dir)
    return write_report(study, study_dir, records).read_text()


@pytest.fixture
def fake_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cells are done in this process, by a journal alone; names of those that were."""
    done: list[str] = []

    def run(study: Study, cell: Cell, cell_dir: Path, *_: object) -> dict:
        write_run(cell_dir / "run", gib=2.0, accuracy=0.5)
        for name, text in (
            ("run/config.yaml", to_yaml(cell.config)),
            ("run/machine.json", json.dumps(MACHINE)),
            ("run/checkpoints/4/weights", "half"),
            ("config.yaml", to_yaml(cell.config)),
            ("request.json", json.dumps({"kind": cell.kind, "arguments": {}})),
        ):
            (cell_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (cell_dir / name).write_text(text)
        done.append(cell.name)
        return {"status": "finished", "wall_seconds": 1.0}

    monkeypatch.setattr(compare, "_run", run)
    # Its figures take seconds.
    monkeypatch.setattr(compare_report, "write_report", lambda *_: None)
    return done


def test_a_kill_while_models_are_dropped_leaves_the_cell_done(
    study: Study, tmp_path: Path, fake_runs: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Gone on with from half of a checkpoint, it would fail."""

    def kill(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    out, path = tmp_path / "out", str(tmp_path / "study.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            compare_command(path, [], out=str(out))
    assert len(fake_runs) == 1
    assert len(list(out.glob("cells/*/run/checkpoints"))) == 1
    assert compare_command(path, [], out=str(out)) == 0
    assert sorted(fake_runs) == sorted(cell.name for cell in study.cells)
    assert not list(out.glob("cells/*/run/checkpoints"))
    # Models that were kept stay.
    assert compare_command(path, ["seeds=[7]"], out=str(out), keep_models=True) == 0
    assert compare_command(path, ["seeds=[0, 7]"], out=str(out)) == 0
    assert len(list(out.glob("cells/*seed=7/run/checkpoints"))) == 2


def test_an_outcome_that_lost_power_tore_is_none(tmp_path: Path):
    assert read_outcome(tmp_path) is None
    (tmp_path / "outcome.json").write_text("")
    assert read_outcome(tmp_path) is None


def test_a_failed_cell_that_is_done_again_goes_at_once(
    study: Study, tmp_path: Path, fake_runs: list[str], monkeypatch: pytest.MonkeyPatch
):
    def kill(path: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt

    out, path = tmp_path / "out", str(tmp_path / "study.yaml")
    finish(study, out, failing="adamw")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            compare_command(path, [], out=str(out), retry_failed=True)
    assert not (out / "cells" / "method=adamw,seed=0").exists()
    assert compare_command(path, [], out=str(out), retry_failed=True) == 0
    assert fake_runs == ["method=adamw,seed=0", "method=adamw,seed=1"]


def test_plans_of_other_sizes_are_refused_beside_those_that_are_there(
    study: Study, tmp_path: Path, fake_runs: list[str]
):
    cell_dir = tmp_path / "out" / "cells" / "method=logra,plan"
    cell_dir.mkdir(parents=True)
    (cell_dir / "config.yaml").write_text(to_yaml(study.cells[0].config))
    request = {"kind": "plan", "arguments": {"tokens": 256}}
    (cell_dir / "request.json").write_text(json.dumps(request))
    with pytest.raises(ValueError, match=r"`plan\.tokens` must be what it was .*\(256"):
        compare_command(
            str(tmp_path / "study.yaml"), ["plan.tokens=512"], out=str(tmp_path / "out")
        )
    assert not fake_runs


def row(report: str, section: str, label: str) -> list[str]:
    """Cells of the first line of a section's tables that begins with a label."""
    text = report.split(f"## {section}")[1]
    line = next(x for x in text.splitlines() if x.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_run_in_numbers(tmp_path: Path):
    write_run(tmp_path / "run", gib=2.0, accuracy=0.75)
    found = summarise_run(tmp_path / "run")
    assert found["steps"] == 5
    score = found["evaluations"]["heldout/sampled"]
    assert (score["before"], score["after"], score["n"]) == (0.1, 0.75, 64)
    assert found["reward"] == pytest.approx({"first": 0.1, "last": 0.5, "mean": 0.3})
    assert found["kl"]["ratio"] == pytest.approx(1.1)
    assert found["kl"]["sum"] == pytest.approx(5.5e-2)
    # Updates 2 to 5 compiled nothing: 4, 5, 6 and 7 GiB. The worst is of all.
    memory = found["memory_gib"]
    assert (memory["mean"], memory["worst"], memory["step"]) == (5.5, 20.0, 7.5)
    assert memory["activations"] == pytest.approx(5.5 - 0.5 - 1.0 - 0.25 - 0.125)
    assert found["seconds"]["step"] == 3.5
    assert found["seconds"]["end_to_end"] == 3.0


def test_a_whole_step_is_not_from_one_process_to_the_next(tmp_path: Path):
    """A clock that begins again may be ahead of where the one before it stopped."""
    with Journal(tmp_path, resume_step=None) as journal:
        for step, total in enumerate((10.0, 13.0, 60.0, 63.0), start=1):
            first = {"memory/weights_gib": 1.0} if step in (1, 3) else {}
            values = {"reward": 0.5, "seconds/step": 1.0, "seconds/total": total}
            journal.write(step, values | first)
    assert summarise_run(tmp_path)["seconds"]["end_to_end"] == 3.0


def test_results_are_json_whatever_was_measured(study: Study, tmp_path: Path):
    finish(study, tmp_path / "out")
    path = tmp_path / "out/cells/method=logra,seed=0/run/metrics.jsonl"
    path.write_text(path.read_text().replace('"reward": 0.5', '"reward": null'))
    write_results(study, tmp_path / "out")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    first, *_ = (tmp_path / "out/results.jsonl").read_text().splitlines()
    assert json.loads(first, parse_constant=refuse)["reward"]["last"] is None


def test_the_highest_point_of_the_mean_curve_is_of_steps_that_all_runs_have():
    assert max_of_mean([{1: 2.0, 2: 5.0}, {1: 4.0, 2: 3.0, 3: 99.0}]) == 4.0
    assert max_of_mean([]) is None


def test_a_spread_leaves_out_what_is_no_number():
    assert Spread.of([1.0, None, float("nan"), 3.0]) == Spread(2.0, 1.0, 3.0, 2)
    assert Spread.of([None]) is None


def test_statistics_of_memory_are_named_and_a_saving_is_of_measured_means(
    study: Study, tmp_path: Path
):
    report = finish(study, tmp_path / "out")
    # Means of seeds 0 and 1: 5.5 and 6.5 against 9.5 and 10.5.
    cells = row(report, "Memory", "method=logra")
    assert cells[1:4] == ["6.00 [5.50 to 6.50]", "7.50", "30.00"]
    assert cells[5] == "40.0 %"
    assert row(report, "Memory", "method=adamw")[5] == "baseline"
    assert "saving of the mean against method=adamw" in report
    assert "The rollout side is **not** in these" in report
    assert row(report, "Accuracy", "method=logra")[3] == "0.550 [0.500 to 0.600]"
    assert row(report, "Time", "method=logra")[1:3] == ["3.50 [2.30 to 4.70]", "3.00"]
    assert row(report, "KL", "method=logra")[3] == "1.10 [1.10 to 1.10]"


def test_no_saving_is_computed_against_a_baseline_that_failed(
    study: Study, tmp_path: Path
):
    report = finish(study, tmp_path / "out", failing="adamw")
    cells = row(report, "Memory", "method=logra")
    assert cells[5] == "not measurable (the baseline failed in update)"
    assert row(report, "Memory", "method=adamw")[1] == "failed in update"
    failed = report.split("## Failed")[1]
    assert failed.count("RESOURCE_EXHAUSTED: Out of memory \\| 80 GiB") == 2


def test_a_conclusion_names_model_task_machine_and_seeds(study: Study, tmp_path: Path):
    report = finish(study, tmp_path / "out")
    (line,) = [line for line in report.splitlines() if line.startswith("On ")]
    assert "On a-model, chain_sum (reasoning_gym), a card, 2 seeds:" in line
    assert "the ranges of `method=adamw` overlap with it" in line
    assert "least for `method=logra`: 6.00 GiB" in line


def test_a_conclusion_over_models_names_all_that_were_measured(
    study: Study, tmp_path: Path
):
    axis = "axes.model={x: {model.path: small}, y: {model.path: large}}"
    several = load_study(tmp_path / "study.yaml", [axis])
    report = finish(several, tmp_path / "out")
    (line,) = [line for line in report.splitlines() if line.startswith("On ")]
    assert line.startswith("On small and large, chain_sum (reasoning_gym), a card, 2 s")


def test_runs_that_ended_early_and_seeds_that_are_missing_are_said(
    study: Study, tmp_path: Path
):
    out = tmp_path / "out"
    finish(study, out)
    cut = out / "cells/method=logra,seed=0"
    lines = (cut / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "run/metrics.jsonl").write_text("".join(lines[:-2]))
    stopped = {"status": "stopped by an alarm", "wall_seconds": 1.0}
    (cut / "outcome.json").write_text(json.dumps(stopped))
    failed = {"status": "failed", "phase": "update", "type": "X", "message": "no"}
    failed_dir = out / "cells/method=adamw,seed=1"
    (failed_dir / "outcome.json").write_text(json.dumps(failed | {"wall_seconds": 1.0}))
    report = write_report(study, out, write_results(study, out)).read_text()
    logra = row(report, "Accuracy", "method=logra")
    assert logra[-1] == "3 to 5 (1 stopped by an alarm)"
    adamw = row(report, "Accuracy", "method=adamw")
    assert (adamw[1], adamw[-1]) == ("1", "5")
    assert ", 1 to 2 seeds a run: the highest" in report


def test_where_the_rollout_side_is_counted_is_said_of_every_engine(
    study: Study, tmp_path: Path
):
    served = "{rollout.engine: sglang, rollout.urls: ['http://a:1']}"
    axis = f"axes.method.adamw={served}"
    several = load_study(tmp_path / "study.yaml", [axis])
    report = finish(several, tmp_path / "out")
    assert "in the same process or but for servers, which have memory" in report


def test_a_plan_names_every_batch(study: Study, tmp_path: Path):
    axis = "axes.train.batch=[16, 32]"
    plans = load_study(tmp_path / "study.yaml", [axis, "plan={}"])
    for cell in plans.cells:
        if cell.kind == "plan":
            cell_dir = tmp_path / "out/cells" / cell.name
            cell_dir.mkdir(parents=True)
            work = {"tokens_per_device": 4096, "batch": cell.config.train.batch}
            result = {"gib": {"peak": 1.0}, "error": None, "workload": work}
            (cell_dir / "result.json").write_text(json.dumps(result))
            outcome = {"status": "finished", "wall_seconds": 1.0}
            (cell_dir / "outcome.json").write_text(json.dumps(outcome))
    records = write_results(plans, tmp_path / "out")
    report = write_report(plans, tmp_path / "out", records).read_text()
    assert "4096 tokens a device, 16 or 32 responses an update" in report


def test_a_cell_waits_for_the_process_that_a_killed_study_left_at_it(tmp_path: Path):
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=child.main, args=(tmp_path,), daemon=True)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert not (tmp_path / child.PHASE).exists()
    thread.join(60)
    assert not thread.is_alive()
    assert "config.yaml" in (tmp_path / child.ERROR).read_text()  # there is none


def test_figures_are_drawn_and_named_in_the_report(study: Study, tmp_path: Path):
    report = finish(study, tmp_path / "out")
    drawn = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert drawn == set(re.findall(r"!\[[^]]*\]\((.*?)\)", report))
    assert drawn == {f"{name}.png" for name in FIGURES}


def test_a_heat_map_is_of_layers_and_ranks(tmp_path: Path):
    cosines = {"a.q_proj": [[0.1, 0.3], [0.2, 0.4]], "a.k_proj": [[0.3, 0.5]] * 2}
    result = {"ranks": [4, 16], "cosines": {"rademacher": cosines}}
    write_heat_map(tmp_path / "map.png", result)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert by_layer(cosines) == pytest.approx(np.array([[0.2, 0.4], [0.25, 0.45]]))


def test_the_same_records_give_the_same_report(study: Study, tmp_path: Path):
    report = finish(study, tmp_path / "out")
    records = write_results(study, tmp_path / "out")
    assert write_report(study, tmp_path / "out", records).read_text() == report

"""What a study's file and overrides become."""

import itertools
from pathlib import Path

import pytest

from logra_jax.study.matrix import load_study

STUDIES = sorted((Path(__file__).parents[2] / "configs" / "studies").glob("*.yaml"))
BASE = """
model: {path: a-model}
train: {steps: 4}
"""
STUDY = """\
# Two lines
# of header.

config: base.yaml
set: {train.steps: 6}
seeds: [0, 1]
axes:
  method:
    logra: {}
    lora: {optimizer.kind: lora, optimizer.lora_alpha: 8.0}
  sketch.rank: [4, 16]
baseline: {method: lora}
"""


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(BASE)

    def to_file(text: str = STUDY) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(text)
        return path

    return to_file


def test_cells_are_every_combination_once_the_first_seed_of_all_before_the_next(write):
    study = load_study(write())
    found = [(c.seed, c.labels["method"], c.labels["sketch.rank"]) for c in study.cells]
    assert found == list(itertools.product((0, 1), ("logra", "lora"), ("4", "16")))
    assert len({cell.name for cell in study.cells}) == 8
    assert study.groups == list(dict.fromkeys(cell.group for cell in study.cells))


def test_a_cells_config_is_the_base_with_what_the_study_and_its_labels_set(write):
    cells = {cell.name: cell.config for cell in load_study(write()).cells}
    config = cells["method=lora,sketch.rank=16,seed=1"]
    assert (config.seed, config.train.steps, config.sketch.rank) == (1, 6, 16)
    assert (config.optimizer.kind, config.optimizer.lora_alpha) == ("lora", 8.0)
    assert cells["method=logra,sketch.rank=4,seed=0"].optimizer.kind == "logra"


def test_overrides_win_over_the_file_and_reach_every_cell(write):
    overrides = ["train.steps=9", "seeds=[5]", "axes.sketch.rank=[8]"]
    overrides += ["axes.method.dense={optimizer.kind: adamw}", "baseline.method=dense"]
    study = load_study(write(), overrides)
    assert [cell.name for cell in study.cells] == [
        f"method={method},sketch.rank=8,seed=5" for method in ("logra", "lora", "dense")
    ]
    assert all(cell.config.train.steps == 9 for cell in study.cells)
    assert study.cells[-1].config.optimizer.kind == "adamw"
    assert study.baseline == {"method": "dense"}


def test_a_config_given_as_an_override_is_of_the_working_directory(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write()
    (tmp_path / "elsewhere").mkdir()
    other = BASE.replace("a-model", "another")
    (tmp_path / "elsewhere" / "other.yaml").write_text(other)
    monkeypatch.chdir(tmp_path / "elsewhere")
    study = load_study(path, ["config=other.yaml"])
    assert study.cells[0].config.model.path == "another"


def test_plans_and_measurements_come_first_and_have_no_seed(write):
    text = STUDY + "plan: {tokens: 256}\nreconstruction: {ranks: [4]}\n"
    kinds = [(cell.kind, cell.seed) for cell in load_study(write(text)).cells]
    assert kinds[:5] == [("plan", None)] * 4 + [("reconstruction", None)]
    assert {kind for kind, _ in kinds[5:]} == {"train"}


def test_a_model_of_shapes_alone_is_planned_and_not_trained(write):
    text = STUDY + "plan: true\n"
    axis = "axes.model={here: {model.path: a}, big: {model.preset: qwen2.5-7b}}"
    cells = load_study(write(text), [axis]).cells
    assert {c.labels["model"] for c in cells if c.kind == "plan"} == {"here", "big"}
    assert {c.labels["model"] for c in cells if c.kind == "train"} == {"here"}
    with pytest.raises(ValueError, match=r"`plan` must be given where `model.preset`"):
        load_study(write(), [axis])


def test_names_are_directories(write):
    axis = "axes={model.path: [org/model, '../x y']}"
    names = [cell.name for cell in load_study(write(), [axis, "baseline={}"]).cells]
    assert names[0] == "model.path=org_model,seed=0"
    assert not any("/" in name or " " in name for name in names)


def test_cells_that_would_share_a_directory_are_refused(write):
    """The second would be taken for done as soon as the first is."""
    for labels in (
        "'a b': {}, a/b: {optimizer.kind: lora}",
        "A: {}, a: {kl.start: 0.1}",
    ):
        with pytest.raises(ValueError, match="must give each run a name of its own"):
            load_study(write(), [f"axes={{x: {{{labels}}}}}", "baseline={}"])
    with pytest.raises(ValueError, match=r"short names.* give its values short labels"):
        load_study(write(), [f"axes={{model.path: [{'a' * 250}]}}", "baseline={}"])


def test_labels_that_yaml_reads_as_other_than_text_are_what_the_file_says(write):
    text = "config: base.yaml\naxes: {x: {true: {}, 1.5: {train.steps: 9}}}\n"
    study = load_study(write(text + "baseline: {x: true}\n"))
    assert study.axes == {"x": ["true", "1.5"]}
    assert study.baseline == {"x": "true"}
    dates = load_study(write(), ["axes={model.path: [2024-01-01]}", "baseline={}"])
    assert dates.cells[0].config.model.path == "2024-01-01"


def test_a_label_that_sets_a_section_hides_no_override(write):
    axes = ["axes={x: {a: {}, b: {sketch: {rank: 8}}}}", "baseline={}"]
    with pytest.raises(ValueError, match="the axis `x` of the study sets it"):
        load_study(write(), [*axes, "sketch.rank=9"])
    with pytest.raises(ValueError, match=r"the axis `sketch\.rank` of the study sets"):
        load_study(write(), ["sketch={rank: 9}"])
    assert load_study(write(), [*axes, "sketch.basis=gaussian"]).cells


def test_the_header_is_the_comment_on_top(write):
    assert load_study(write()).header == "Two lines\nof header."


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["seed=1"], "`seed` must not be set in a study: give seeds: [...]."),
        (["sketch.rank=3"], "the axis `sketch.rank` of the study sets it"),
        (["optimizer.kind=adamw"], "the axis `method` of the study sets it"),
        (["seeds=[0, 0]"], "`seeds` must differ from each other, got [0, 0]."),
        (["seeds=[]"], "`seeds` must be a list of integers, got []."),
        (["seeds=3"], "`seeds` must be a list of integers, got 3."),
        (["seeds=[-1]"], "`seeds` must lie in [0, 2**32), got -1."),
        (["axes.method=3"], "`axes.method` must be a list of values, or a mapping"),
        (["axes.sketch.rank=[4, 4]"], "`axes.sketch.rank` must hold unlike values"),
        (["axes.sketch.rank=[]"], "`axes.sketch.rank` must be a list of values"),
        (["baseline.method=x"], "`baseline.method` must be a label of its axis: logra"),
        (["baseline.foo=x"], "`baseline.foo` must name an axis: method, sketch.rank"),
        (["plan.token=3"], "`token` is not a key of `plan`; did you mean `tokens`?"),
        (["plan.tokens=abc"], "`plan.tokens` must be a positive integer, got 'abc'."),
        (["reconstruction.ranks=4"], "`reconstruction.ranks` must be a list of posi"),
        (["reconstruction.ranks=[0]"], "must be a list of positive integers, got [0]."),
        (["train.setps=3"], "did you mean `train.steps`?"),
        (["axes.sketch.rank=[0]"], "With method=logra, sketch.rank=0: `sketch.rank`"),
        (["config=missing.yaml"], "Cannot read the config file"),
    ],
)
def test_bad_studies_get_one_sentence(write, overrides: list[str], complaint: str):
    with pytest.raises(ValueError) as error:
        load_study(write(), overrides)
    assert complaint in str(error.value)


def test_an_unknown_key_of_a_study_gets_the_nearest(write):
    with pytest.raises(ValueError, match=r"`axis` is not a key of a study; did you"):
        load_study(write("config: base.yaml\naxis: {}\n"))
    with pytest.raises(ValueError, match="`config` must name a config file, got null"):
        load_study(write("axes: {}\n"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_ready_study_can_be_begun_and_says_what_it_takes(path: Path):
    study = load_study(path)
    assert len(study.cells) >= 9
    for head in ("Command:", "Hardware:", "Wall time:", "On GPUs:"):
        assert head in study.header
    assert f"logra compare configs/studies/{path.name}" in study.header

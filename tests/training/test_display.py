import io
import math
import time

import pytest
from rich.console import Console

from logra_jax.training import display as display_module
from logra_jax.training.display import Display
from logra_jax.training.samples import Sample

VALUES = {
    "reward": 0.53125,
    "kl/predicted": 9.8e-3,
    "kl/realised": 1.02e-2,
    "alpha": 21.74,
    "length/mean": 8.06,
    "length/truncated": 0.125,
    "seconds/rollout": 2.42,
    "seconds/reward": 0.07,
    "seconds/step": 6.5,
}
ACCURACY = {
    "heldout/greedy": 0.4,
    "heldout/greedy_se": 0.063,
    "heldout/greedy_n": 60,
    "heldout/sampled": 0.15,
    "heldout/sampled_se": 0.022,
    "heldout/sampled_n": 256,
}


def console(*, terminal: bool = False, width: int = 80) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        force_interactive=terminal,
        width=width,
        highlight=False,
        color_system=None,
    )


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_one_plain_line_a_step_under_a_head():
    log = console()
    with Display(24, console=log) as display:
        display.step(0, ACCURACY)
        display.step(1, VALUES)
    groups, heads, before, row = text(log).splitlines()
    assert "held-out" in groups
    assert heads.split()[:4] == ["step", "reward", "greedy", "T=1"]
    assert before.split() == ["0/24", "0.400", "0.150"]
    assert row.split() == [
        *("1/24", "0.531", "9.8e-3", "1.0e-2", "21.7", "8.1", "12%"),
        *("2.4", "0.1", "6.5"),
    ]
    assert len(row) <= len(heads)
    assert "\x1b" not in text(log)


def test_the_head_comes_back_in_long_runs():
    log = console()
    with Display(100, console=log) as display:
        for step in range(100):
            display.step(step, VALUES)
    assert text(log).count("reward") == 4


@pytest.mark.parametrize("width", [40, 80, 120])
def test_rows_fit_the_terminal(width):
    terminal = console(terminal=True, width=width)
    display = Display(24, console=terminal)
    display.step(8, VALUES | ACCURACY | {"seconds/eval": 9.0})
    lines = text(terminal).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= width
    assert ("6.5" in lines[-1]) == (width >= 80)


def test_a_terminal_shows_phase_bar_and_time_left():
    terminal = console(terminal=True)
    with Display(24, console=terminal) as display, display.phase("rollout"):
        for step in (1, 2, 3):
            display.step(step, VALUES)
        assert display._live is not None
        display._live.refresh()
    assert "rollout 0 s" in text(terminal)
    assert "3/24" in text(terminal)
    assert "left" in text(terminal)


def test_a_resumed_runs_bar_begins_where_it_was():
    terminal = console(terminal=True)
    with Display(24, console=terminal) as display:
        display.start_from(7)
        assert display._live is not None
        display._live.refresh()
    assert "7/24" in text(terminal)


def test_a_slow_phase_speaks_up_in_a_log_and_a_quick_one_does_not(monkeypatch):
    monkeypatch.setattr(display_module, "_FIRST_PATIENCE", 0.02)
    log = console()
    with Display(2, console=log) as display:
        with display.phase("quick"):
            pass
        with display.phase("compiling"):
            time.sleep(0.2)
        # Known by now, so it may take its time.
        with display.phase("compiling"):
            time.sleep(0.05)
    assert text(log).splitlines() == ["compiling …"]


def test_a_phase_ends_when_its_block_raises():
    display = Display(2, console=console())
    outer = display._phase
    with pytest.raises(KeyError), display.phase("rollout"):
        raise KeyError
    assert display._phase == outer


def test_before_after_shows_accuracy_error_count_and_change():
    log = console()
    after = ACCURACY | {"heldout/greedy": 0.717, "heldout/sampled": 0.1}
    Display(2, console=log).before_after(ACCURACY, after)
    lines = text(log).splitlines()
    rows = [" ".join(line.strip("│").split()) for line in lines if "│" in line]
    assert rows == [
        "sampling │ answers │ before │ after │ change",
        "greedy │ 60 │ 0.400 ± 0.063 │ 0.717 ± 0.063 │ +0.317",
        "sampled │ 256 │ 0.150 ± 0.022 │ 0.100 ± 0.022 │ -0.050",
    ]


def test_sets_are_told_apart_and_what_one_evaluation_lacks_is_left_out():
    log = console(width=100)
    other = {f"aime/{k}": v for k, v in (("sampled", 0.1), ("sampled_se", 0.02))}
    other["aime/sampled_n"] = 30
    after = ACCURACY | other | {"aime/length": 7.0}
    Display(2, console=log).before_after(ACCURACY | other, after)
    Display(2, console=log).before_after(ACCURACY, after)
    rows = [
        line.split("│")[1].strip() for line in text(log).splitlines() if "│" in line
    ]
    assert rows == [
        *("sampling", "heldout/greedy", "heldout/sampled", "aime/sampled"),
        *("sampling", "greedy", "sampled"),
    ]


def test_an_evaluation_is_a_table_with_a_line_on_lengths():
    log = console(width=100)
    values = ACCURACY | {"heldout/length": 8.06, "heldout/truncated": 0.125}
    values |= {"heldout/failed": 2, "a/maj@4": 0.5, "a/maj@4_se": math.nan}
    Display(0, console=log).evaluation(values | {"a/maj@4_n": 8})
    lines = text(log).splitlines()
    rows = [" ".join(line.strip("│").split()) for line in lines if "│" in line]
    assert rows[1:] == [
        "heldout │ greedy │ 60 │ 0.400 ± 0.063",
        "│ sampled │ 256 │ 0.150 ± 0.022",
        "a │ maj@4 │ 8 │ 0.500 ± nan",
    ]
    assert lines[-1] == (
        "heldout: 8.1 tokens a sample, 12% cut at the limit, 2 responses could not be "
        "scored"
    )


def test_responses_are_shown_on_a_line_each_and_as_they_stand():
    log = console()
    middle = "[bold]x " * 200
    sample = Sample(
        *("heldout", "greedy", "f", "What\nis it?", "5", f"start {middle}end", "5"),
        *(1.0, 700, False, 0),
    )
    Display(0, console=log).samples([sample])
    head, question, response, reference, score = text(log).splitlines()
    assert head == "heldout, greedy, 700 tokens, cut"
    assert question == "  question  What is it?"
    assert response.startswith("  response  start [bold]x")
    assert response.endswith("x end")
    assert " … " in response
    assert len(response) < 430
    assert (reference, score) == ("  reference 5", "  score     1")


def test_a_phase_s_own_progress_is_shown_until_it_ends():
    terminal = console(terminal=True)
    with Display(24, console=terminal) as display:
        assert display._live is not None
        with display.phase("evaluation"):
            display.advance(64, 300)
            display._live.refresh()
            assert "64/300" in text(terminal)
        display._live.refresh()
        assert "0/24" in text(terminal).rpartition("64/300")[2]


def test_a_log_is_told_now_and_then_how_far_a_long_phase_is(monkeypatch):
    monkeypatch.setattr(display_module, "_SILENCE", 0.05)
    log = console()
    with Display(2, console=log) as display, display.phase("evaluating"):
        for done in (0, 64, 128, 192):
            display.advance(done, 300)
            if done == 64:
                time.sleep(0.1)
    assert text(log).splitlines() == ["evaluating 128/300"]


def test_a_note_is_written_as_it_stands():
    log = console()
    Display(2, console=log).note("results in runs/[bold]x " + "y" * 100)
    assert text(log) == "results in runs/[bold]x " + "y" * 100 + "\n"

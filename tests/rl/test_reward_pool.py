import importlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from logra_jax.rl.reward_pool import (
    PendingRewards,
    RewardPool,
    Rewards,
    check_failures,
)
from logra_jax.rl.tasks import Question

# A module of its own: workers import their reward, and must be able to.
CAST = """
    import os, re, resource, signal, sys, threading, time

    def play(question, text):
        return SCENES[text](question) if text in SCENES else float(text)

    def hang(question):
        while True:
            pass

    def hang_in_c(question):
        re.match(r"(a+)+$", "a" * 64 + "b")

    def hang_stubbornly(question):
        while True:
            try:
                while True:
                    time.sleep(1)
            except BaseException:
                pass

    def leave(question):
        os._exit(0)

    def crash(question):
        os.kill(os.getpid(), signal.SIGSEGV)

    def slow(question):
        time.sleep(0.1)
        return 2.0

    def give_up(question):
        sys.exit()

    HELD = []

    def hoard(question):
        HELD.append(bytearray(3 * 2**30))

    def swell(question):
        HELD.append(b"x" * (300 * 2**20))
        return os.getpid()

    def blame(question):
        raise KeyError("no entry\\nof that name " + 999 * "!")

    SCENES = {
        "hang": hang,
        "hang in C": hang_in_c,
        "hang stubbornly": hang_stubbornly,
        "leave": leave,
        "crash": crash,
        "slow": slow,
        "give up": give_up,
        "hoard": hoard,
        "swell": swell,
        "blame": blame,
        "nan": lambda question: float("nan"),
        "none": lambda question: None,
        "jax?": lambda question: "jax" in sys.modules,
        "limit?": lambda question: resource.getrlimit(resource.RLIMIT_DATA)[0],
        "pid?": lambda question: os.getpid(),
        "seen": lambda question: float(question.answer),
    }

    class Prepared:
        count = 0
        def prepare(self):
            time.sleep(0.6)
            type(self).count += 1
        def __call__(self, question, text):
            return self.count

    class Unprepared:
        def prepare(self):
            raise OSError("no such data")
        def __call__(self, question, text):
            return 1.0
"""


@pytest.fixture
def cast(tmp_path, monkeypatch):
    (tmp_path / "cast_of_rewards.py").write_text(textwrap.dedent(CAST))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("cast_of_rewards")
    del sys.modules["cast_of_rewards"]


def score(pool, *texts):
    return pool.score([Question("?", "7", {})] * len(texts), texts)


@pytest.mark.parametrize("workers", [1, 2])
def test_hostile_rewards_cost_nobody_else_their_score(cast, workers):
    texts = [str(i) for i in range(1, 31)]
    lost = {
        2: "hang",
        3: "leave",
        4: "not a number",
        9: "hang stubbornly",
        12: "nan",
        13: "none",
        20: "give up",
        21: "hang in C",
        29: "crash",
    }
    for position, text in lost.items():
        texts[position] = text
    expected = [0.0 if i in lost else i + 1.0 for i in range(30)]
    with RewardPool(cast.play, workers, timeout=0.3) as pool:
        rewards = score(pool, *texts)
        np.testing.assert_array_equal(rewards.values, expected)
        assert (rewards.raised, rewards.timed_out) == (6, 3)
        again = score(pool, "4", "5")
    np.testing.assert_array_equal(again.values, [4.0, 5.0])
    assert (again.raised, again.timed_out) == (0, 0)


def test_preparing_a_worker_is_not_charged_to_any_answer(cast):
    with RewardPool(cast.Prepared(), timeout=0.3) as pool:
        rewards = score(pool, *["x"] * 20)
    assert rewards.values.tolist() == [1.0] * 20


def test_answers_that_only_together_outlast_the_limit_are_all_scored(cast):
    with RewardPool(cast.play, timeout=0.5) as pool:
        rewards = score(pool, *["slow"] * 8)
    assert (rewards.values.tolist(), rewards.timed_out) == ([2.0] * 8, 0)


SCRIPT = """
    import sys
    import jax
    from cast_of_rewards import play
    from logra_jax.rl.reward_pool import RewardPool
    from logra_jax.rl.tasks import Question

    pool = RewardPool(play, timeout=600.0)
    question = Question("?", "", {})
    print(pool.score([question], ["jax?"]).values, flush=True)
"""


@pytest.mark.parametrize("way", ["file", "-c", "-", "-m"])
def test_worker_never_imports_jax_however_its_parent_runs(cast, tmp_path, way):
    script = textwrap.dedent(SCRIPT)
    (tmp_path / "parent_of_rewards.py").write_text(script)
    arguments = {
        "file": [tmp_path / "parent_of_rewards.py"],
        "-c": ["-c", script],
        "-": ["-"],
        "-m": ["-m", "parent_of_rewards"],
    }
    parent = subprocess.run(
        [sys.executable, *arguments[way]],
        input=script,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # No guarded main part, and no close: neither is the worker's business.
    assert (parent.stdout, parent.stderr) == ("[0.]\n", "")


def test_worker_killed_while_idle_is_replaced(cast):
    with RewardPool(cast.play) as pool:
        pid = int(score(pool, "pid?").values[0])
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        rewards = score(pool, "3")
    assert (rewards.values.tolist(), rewards.raised) == ([3.0], 0)


def test_worker_ignores_the_signals_that_stop_a_trainer(cast):
    with RewardPool(cast.play) as pool:
        pid = int(score(pool, "pid?").values[0])
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert int(score(pool, "pid?").values[0]) == pid


def test_reward_that_raises_or_exits_does_not_cost_a_process(cast):
    with RewardPool(cast.play) as pool:
        first, *zeros, last = score(pool, "pid?", "give up", "none", "pid?").values
    assert (first, zeros) == (last, [0.0, 0.0])


def test_batches_may_be_pending_at_once_and_be_read_twice(cast):
    question = Question("?", "7", {})
    with RewardPool(cast.play, workers=2) as pool:
        pool.warm()
        first = pool.submit([question] * 20, ["1"] * 20)
        second = pool.submit([question], ["seen"])
        assert second.result().values.tolist() == [7.0]
        assert first.result().values.tolist() == [1.0] * 20
        assert first.result().values.tolist() == [1.0] * 20
        assert score(pool).values.shape == (0,)


def test_batches_that_came_one_by_one_are_joined_in_order(cast):
    question = Question("?", "7", {})
    with RewardPool(cast.play, workers=2, timeout=0.5) as pool:
        parts = [pool.submit([question], [text]) for text in ("slow", "3", "hang")]
        parts.append(pool.submit([question] * 9, [str(i) for i in range(9)]))
        rewards = PendingRewards.join(parts).result()
    assert rewards.values.tolist() == [2.0, 3.0, 0.0, *range(9)]
    assert (rewards.timed_out, rewards.first_failure) == (1, "no verdict within 0.5 s")
    assert rewards.seconds >= 0.5
    with pytest.raises(ValueError, match="at least one batch, got none"):
        PendingRewards.join([])


def test_closing_does_not_wait_for_a_hanging_reward(cast):
    question = Question("?", "", {})
    with RewardPool(cast.play, timeout=600.0) as pool:
        score(pool, "1")
        begun = pool.submit([question], ["hang"])
        queued = pool.submit([question], ["1"])
        time.sleep(0.1)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    with pytest.raises(RuntimeError, match="cannot schedule"):
        score(pool, "1")
    for pending in (begun, queued):
        with pytest.raises(RuntimeError, match="the reward pool is closed"):
            pending.result()


def test_reward_that_cannot_start_is_an_error_and_not_a_zero(cast, capfd):
    with (
        RewardPool(cast.Unprepared()) as pool,
        pytest.raises(RuntimeError, match="the reward worker could not start"),
    ):
        score(pool, "1")
    assert "no such data" in capfd.readouterr().err


def test_worker_ends_with_a_parent_that_is_killed_while_a_reward_hangs(cast, tmp_path):
    script = textwrap.dedent(SCRIPT).replace("import jax\n", "")
    script += 'pool.submit([question], ["hang"])\nsys.stdin.read()\n'
    path = tmp_path / "parent_of_rewards.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as parent:
        assert parent.stdout.readline() == b"[0.]\n"
        parent.kill()
        # The worker inherited the other end: it closes when the worker is gone.
        parent.communicate(timeout=30)


def test_failures_are_counted_by_their_cause_and_the_first_is_named(cast):
    texts = ["1", "nan", "hang", "hoard", "crash", "leave", "blame", "2"]
    with RewardPool(cast.play, timeout=0.5, memory=2.0) as pool:
        rewards = score(pool, *texts)
        assert rewards.values.tolist() == [1.0] + [0.0] * 6 + [2.0]
        counts = (rewards.raised, rewards.out_of_memory, rewards.died)
        assert (*counts, rewards.timed_out, rewards.failed) == (5, 1, 2, 1, 6)
        assert rewards.first_failure == "the reward was nan"
        messages = {text: score(pool, text).first_failure for text in texts}
    assert messages["1"] is None
    assert messages["hang"] == "no verdict within 0.5 s"
    assert "memory" in messages["hoard"]
    assert messages["crash"].startswith("the scoring process ended by signal 11")
    assert messages["leave"] == "the scoring process ended with status 0"
    assert messages["blame"].startswith("KeyError: ")
    assert "\n" not in messages["blame"]
    assert len(messages["blame"]) < 350


def test_out_of_memory_costs_no_process(cast):
    with RewardPool(cast.play, memory=1.5) as pool:
        first, zero, last = score(pool, "pid?", "hoard", "pid?").values
    assert (first, zero) == (last, 0.0)


def test_memory_is_unlimited_where_none_is_named(cast):
    with RewardPool(cast.play) as pool:
        ours, _ = resource.getrlimit(resource.RLIMIT_DATA)
        assert score(pool, "limit?").values[0] == ours
    with RewardPool(cast.play, memory=1.5) as pool:
        assert score(pool, "limit?").values[0] == 1.5 * 2**30


def test_worker_that_has_swollen_is_replaced_between_answers(cast):
    with RewardPool(cast.play) as pool:
        slim = score(pool, "pid?").values[0]
        assert score(pool, "pid?").values[0] == slim
        assert score(pool, "swell").values[0] == slim
        rewards = score(pool, "pid?", "pid?")
    assert rewards.values[0] == rewards.values[1] != slim
    assert rewards.failed == 0


def test_seconds_are_those_between_submission_and_the_last_verdict(cast):
    question = Question("?", "7", {})
    with RewardPool(cast.play) as pool:
        score(pool, "1")
        pending = pool.submit([question] * 3, ["slow"] * 3)
        time.sleep(0.8)
        # Each takes 0.1 s; that nobody asked for the result yet does not count.
        assert 0.3 <= pending.result().seconds < 0.7
        assert score(pool).seconds == 0.0


def test_run_stops_where_more_than_its_share_of_answers_fails():
    values = np.zeros(10, np.float32)
    rewards = Rewards(
        values,
        raised=4,
        timed_out=2,
        out_of_memory=1,
        died=2,
        first_failure="KeyError: 'answer'",
    )
    check_failures(rewards, 0.6)
    check_failures(rewards, 1.0)
    check_failures(Rewards(values), 0.0)
    check_failures(Rewards(values[:0]), 0.0)
    with pytest.raises(ValueError) as caught:
        check_failures(rewards, 0.5)
    message = str(caught.value)
    assert message.startswith("`reward.max_failed_share` allows")
    assert "60% (6 of 10: 1 raised, 2 timed out, 1 ran out of memory, 2 to" in message
    assert "first with \"KeyError: 'answer'\"" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "`workers` must be at least 1, got 0"),
        ({"timeout": 0.0}, "`timeout` must be a finite number of seconds above 0"),
        ({"timeout": float("inf")}, "`timeout` must be a finite number of seconds"),
        ({"timeout": float("nan")}, "`timeout` must be a finite number of seconds"),
        ({"memory": 0.0}, "`memory` must be a finite number of GiB above 0, got 0.0"),
        ({"memory": float("inf")}, "`memory` must be a finite number of GiB"),
        ({"reward": lambda question, text: 1.0}, "`reward` must be picklable"),
    ],
)
def test_bad_pool_arguments_are_refused(cast, change, message):
    with pytest.raises(ValueError, match=message):
        RewardPool(**{"reward": cast.play} | change)


def test_unequal_numbers_of_questions_and_texts_are_refused(cast):
    with (
        RewardPool(cast.play) as pool,
        pytest.raises(ValueError, match="must be equally many, got 1 and 2"),
    ):
        pool.submit([Question("?", "", {})], ["1", "2"])

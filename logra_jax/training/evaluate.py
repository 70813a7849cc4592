"""Accuracy of a policy on sets of questions: greedily, sampled, best and vote of k.

The keys of an evaluation, for each set (``heldout`` is the task's own):

- ``<set>/greedy``: mean score of one greedy answer to each question;
- ``<set>/sampled``: mean score of the samples, which is pass@1;
- ``<set>/pass@<k>``, ``<set>/maj@<k>``: mean over questions of the expected best score
  of k samples, and of the expected score of the commonest answer among them;
- ``<set>/macro``: mean over families of their mean sampled scores, each of which is
  ``<set>/family/<name>``; where there is more than one family;
- with each of them ``_se``, its standard error clustered by question
  (:mod:`logra_jax.rl.eval_metrics`), and ``_n``, the responses that it is made of;
- ``<set>/length`` (tokens), ``<set>/truncated`` (share): of the samples;
- ``<set>/failed``: responses whose scoring raised or timed out; they count as wrong.

Every evaluation of a run draws the same random numbers, and so does one of the same
weights from elsewhere: what differs between two is the weights.
"""

import copy
import dataclasses
import re
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from logra_jax.rl.answers import read
from logra_jax.rl.eval_metrics import (
    Estimate,
    best_of_k,
    clustered_mean,
    macro_mean,
    vote_of_k,
)
from logra_jax.rl.reward_pool import PendingRewards, RewardPool
from logra_jax.rl.tasks import EvalSet, Question
from logra_jax.rollout.sglang import SGLangEngine, room_for
from logra_jax.rollout.types import Sampling, common_prefix
from logra_jax.training.assemble import repeat_to, stream_key
from logra_jax.training.distributed import from_leader, is_leader
from logra_jax.training.policy import Policy
from logra_jax.training.samples import Sample
from logra_jax.training.schema import Config
from logra_jax.training.scoring import reading_of

Values = dict[str, float | int]

_PLAIN_NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")


class Evaluation(NamedTuple):
    """What an evaluation found."""

    values: Values  # under the journal's keys
    samples: list[Sample]  # every response; empty but in the leading process


def evaluate(
    policy: Policy,
    weights: nnx.State,
    rewards: RewardPool,
    sets: Sequence[EvalSet],
    config: Config,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Answer and score the questions of every set, as section ``eval`` says.

    Responses are generated ``eval.batch`` at once, and the last batch is filled up;
    what fills it is not counted. One program is compiled for each width of prompts, and
    for greedy answers and samples each. Servers get as many requests at once as they
    may (``rollout.concurrency``), and nothing to fill up.

    Args:
        policy: static parts of the model, and what samples.
        weights: to evaluate.
        rewards: scores the responses.
        sets: of questions.
        config: of the run.
        progress: told how many responses of how many are there.

    Raises:
        ValueError: a prompt that does not fit the model's context.
    """
    plans = [
        (chosen, mode, sampling, asked)
        for chosen in sets
        for mode, sampling, asked in _plan(chosen, config)
    ]
    total, done = sum(len(asked) for *_, asked in plans), 0
    size = config.eval.batch
    if isinstance(policy.engine, SGLangEngine):
        size = max(size, config.rollout.concurrency)
    key = stream_key(config.seed, "eval", 0)
    values: Values = {}
    samples: list[Sample] = []
    for chosen, mode, sampling, asked in plans:
        answering = _fitted(policy, chosen, sampling, config)
        stream = zlib.crc32(f"{chosen.name}/{mode}".encode())
        reading = reading_of(config, chosen.questions[0].scorer)
        answers = _Answers(chosen, mode, reading)
        for start in range(0, len(asked), size):
            progress(done + start, total)
            part = asked[start : start + size]
            batch_key = jax.random.fold_in(jax.random.fold_in(key, stream), start)
            answers.add(answering, weights, rewards, part, sampling, batch_key, config)
        done += len(asked)
        found, failed = from_leader(answers.measure, config)
        values |= found
        name = f"{chosen.name}/failed"
        values[name] = values.get(name, 0) + failed
        samples += answers.samples
    progress(total, total)
    return Evaluation(values, samples)


def check_evaluation(policy: Policy, sets: Sequence[EvalSet], config: Config) -> None:
    """Refuse what a run's first evaluation would, before the run begins.

    Raises:
        ValueError: a prompt that does not fit the model's context, or an `eval.best`
            that is not measured.
    """
    known = []
    for chosen in sets:
        plan = _plan(chosen, config)
        for mode, sampling, _ in plan:
            _fitted(policy, chosen, sampling, config)
            known.append(f"{chosen.name}/{mode}")
        for k in set(config.eval.pass_at) - {1}:
            known += [f"{chosen.name}/pass@{k}", f"{chosen.name}/maj@{k}"]
        sampled = plan[-1][-1]  # few samples may leave a family out
        families = sorted({question.family for question in sampled})
        if len(families) > 1:
            names = ("macro", *(f"family/{family}" for family in families))
            known += [f"{chosen.name}/{name}" for name in names]
    best = config.best_metric
    if known and best not in known:
        raise ValueError(
            f"`eval.best` must be a metric of the evaluation, got {best!r}; there are "
            f"{', '.join(known)}."
        )


def _plan(
    chosen: EvalSet, config: Config
) -> list[tuple[str, Sampling, list[Question]]]:
    """What is asked of a set: mode, how it is sampled, and the questions."""
    options, questions = config.eval, list(chosen.questions)
    new = options.max_new_tokens or config.rollout.max_new_tokens
    count = options.samples
    if options.samples_per_question is not None:
        count = options.samples_per_question * len(questions)
    sampling = Sampling(options.temperature, options.top_p, max_new_tokens=new)
    plan = [("sampled", sampling, repeat_to(questions, count))]
    if options.greedy:
        plan.insert(0, ("greedy", Sampling(0.0, max_new_tokens=new), questions))
    return plan


def _fitted(
    policy: Policy, chosen: EvalSet, sampling: Sampling, config: Config
) -> Policy:
    """The policy with an engine whose prefix and width are those of a set's prompts.

    It is the policy as it is where they fit that: nothing more is compiled.
    """
    engine, prompts = policy.engine, policy.encode(chosen.questions)
    longest, new = max(map(len, prompts)), sampling.max_new_tokens
    is_remote = isinstance(engine, SGLangEngine)
    limit = engine.max_positions - (room_for(new) if is_remote else new)
    if longest > limit:
        name = "eval.max_new_tokens"
        if config.eval.max_new_tokens is None:
            name = "rollout.max_new_tokens"
        raise ValueError(
            f"`{name}` must leave the longest prompt of the evaluation set "
            f"{chosen.name!r} ({longest} tokens) room in the model's context of "
            f"{engine.max_positions}, got {new}."
        )
    start = len(engine.prefix)
    begins_alike = all(tuple(p[:start]) == engine.prefix for p in prompts)
    if (
        begins_alike
        and start < min(map(len, prompts))
        and (longest - start <= engine.bucket)
    ):
        return policy
    own = copy.copy(engine)
    own.prefix = common_prefix(prompts)
    bucket = config.rollout.prompt_bucket
    own.bucket = -(-(longest - len(own.prefix)) // bucket) * bucket
    return dataclasses.replace(policy, engine=own)


class _Answers:
    """The responses to a set's questions in one mode; they lie in the leader alone."""

    def __init__(self, chosen: EvalSet, mode: str, reading: str):
        self.samples: list[Sample] = []
        self._set, self._mode, self._reading = chosen, mode, reading
        self._pending: list[PendingRewards] = []
        self._unscored: list[Sample] = []

    def add(
        self,
        policy: Policy,
        weights: nnx.State,
        rewards: RewardPool,
        part: list[Question],
        sampling: Sampling,
        key: jax.Array,
        config: Config,
    ) -> None:
        """Answer some questions; they are scored while others are answered."""
        is_remote = isinstance(policy.engine, SGLangEngine)
        filled = part if is_remote else repeat_to(part, config.eval.batch)
        completions, texts = policy.respond(weights, filled, sampling, key)
        if not is_leader():
            return
        texts = texts[: len(part)]
        self._pending.append(rewards.submit(part, texts))
        for i, (question, text) in enumerate(zip(part, texts, strict=True)):
            self._unscored.append(
                Sample(
                    set=self._set.name,
                    mode=self._mode,
                    family=question.family,
                    question=question.text,
                    gold=question.answer,
                    response=text,
                    answer=answer_label(text, self._reading),
                    reward=0.0,
                    length=int(completions.lengths[i]),
                    finished=bool(completions.finished[i]),
                    n=len(self._unscored) // len(self._set.questions),
                )
            )

    def measure(self, config: Config) -> tuple[Values, int]:
        """Metrics, and the number of responses that could not be scored."""
        results = [pending.result() for pending in self._pending]
        scores = [float(value) for result in results for value in result.values]
        scored = zip(self._unscored, scores, strict=True)
        self.samples = [sample._replace(reward=score) for sample, score in scored]
        failed = sum(result.raised + result.timed_out for result in results)
        name, count = self._set.name, len(self._set.questions)
        by_question = [self.samples[i::count] for i in range(count)]
        by_question = [samples for samples in by_question if samples]
        if self._mode == "greedy":
            return _entry(f"{name}/greedy", _mean(by_question)), failed
        found = _sampled(by_question, config.eval.pass_at)
        return {f"{name}/{key}": value for key, value in found.items()}, failed


def _sampled(by_question: Sequence[Sequence[Sample]], pass_at: Sequence[int]) -> Values:
    """Metrics of a set's samples, grouped by question."""
    values = _entry("sampled", _mean(by_question))
    n = values["sampled_n"]
    for k in pass_at:
        if k == 1:  # that is what `sampled` is
            continue
        best = [best_of_k([s.reward for s in group], k) for group in by_question]
        vote = [
            vote_of_k([(s.answer, s.reward) for s in group], k) for group in by_question
        ]
        for name, each in ((f"pass@{k}", best), (f"maj@{k}", vote)):
            estimate = clustered_mean([[value] for value in each])
            values |= _entry(name, estimate._replace(n=int(n)))
    families: dict[str, list[Sequence[Sample]]] = {}
    for group in by_question:
        families.setdefault(group[0].family, []).append(group)
    if len(families) > 1:
        means = {name: _mean(groups) for name, groups in sorted(families.items())}
        values |= _entry("macro", macro_mean(means.values()))
        for name, estimate in means.items():
            values |= _entry(f"family/{name}", estimate)
    samples = [sample for group in by_question for sample in group]
    values["length"] = float(np.mean([s.length for s in samples]))
    values["truncated"] = float(np.mean([not s.finished for s in samples]))
    return values


def _mean(by_question: Sequence[Sequence[Sample]]) -> Estimate:
    return clustered_mean([[s.reward for s in group] for group in by_question])


def _entry(key: str, estimate: Estimate) -> Values:
    return {key: estimate.mean, f"{key}_se": estimate.se, f"{key}_n": estimate.n}


def answer_label(text: str, reading: str) -> str | None:
    """What a response votes for in maj@k: its answer, the same however it is written.

    Args:
        text: the response.
        reading: what of it is the answer, see :func:`logra_jax.rl.answers.read`. A
            number is the same with other zeros (3, 3.0 and 03 are one) but where the
            whole text is the answer; else case and white space do not count.

    Returns:
        The answer, or None where there is none.

    Example:
        >>> answer_label("It is 1,050.50", "last_number")
        '1050.5'
    """
    answer = read(text, reading)
    if answer is None:
        return None
    number = answer.replace(",", "")
    if reading == "whole_text" or not _PLAIN_NUMBER.fullmatch(number):
        return " ".join(answer.casefold().split()) or None
    whole, _, part = number.removeprefix("-").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    digits = f"{whole}.{part}" if part else whole
    return f"-{digits}" if number.startswith("-") and digits != "0" else digits

"""Questions as token ids, and those that do not fit the model's context."""

from collections.abc import Mapping
from pathlib import Path

from logra_jax.models.hf_config import read_config
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.tokenizer import ChatTokenizer
from logra_jax.rl.tasks import EvalSet, Question, Task
from logra_jax.rollout.sglang import room_for
from logra_jax.training.schema import Config

# Why questions are asked in no split.
TOO_LONG = "too long"


def encode_question(
    tokenizer: ChatTokenizer, question: Question, system_prompt: str | None
) -> list[int]:
    """The prompt's token ids: chat template, with a system message where one is set."""
    messages = [{"role": "user", "content": question.text}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return tokenizer.encode_chat(messages)


def encode_task(
    config: Config, task: Task, tokenizer: ChatTokenizer, shapes: DecoderConfig
) -> list[list[int]]:
    """The prompts of a run that fit the model's context, of all splits and sets.

    Raises:
        ValueError: one does not fit and `task.too_long` is refuse, or none fits.
    """
    sets = (one.questions for one in task.eval_sets)
    prompt, most = config.task.system_prompt, longest_prompt(config, shapes)
    prompts = [
        encode_question(tokenizer, question, prompt)
        for questions in (task.train, task.held_out, *sets)
        for question in questions
    ]
    fitting = [ids for ids in prompts if len(ids) <= most]
    if len(fitting) == len(prompts) or (fitting and config.task.too_long == "drop"):
        return fitting
    unused = _unused(config)
    less = f", less {unused} that SGLang leaves unused" if unused else ""
    remedy = "; `task.too_long=drop` leaves out what does not" if fitting else ""
    raise ValueError(
        "`rollout.max_new_tokens` and the longest prompt must fit the model's context "
        f"of {shapes.max_positions} tokens{less}, got {config.rollout.max_new_tokens} "
        f"+ {max(map(len, prompts))}{remedy}."
    )


def longest_prompt(config: Config, shapes: DecoderConfig) -> int:
    """Tokens that a prompt may have beside the response."""
    return shapes.max_positions - config.rollout.max_new_tokens - _unused(config)


def drop_too_long(config: Config, task: Task, directory: Path) -> Task:
    """The task without the questions whose prompts do not fit the model's context.

    Args:
        config: of the run.
        task: as loaded.
        directory: of the model: its tokenizer and its context count.

    Returns:
        The task; what each split and each evaluation set lost is counted.

    Raises:
        ValueError: all questions of a split or set are too long.
    """
    tokenizer = ChatTokenizer.load(directory)
    most = longest_prompt(config, read_config(directory))

    def fitting(questions: tuple[Question, ...], whose: str) -> tuple[Question, ...]:
        prompt = config.task.system_prompt
        kept = tuple(
            q for q in questions if len(encode_question(tokenizer, q, prompt)) <= most
        )
        if questions and not kept:
            raise ValueError(
                "`rollout.max_new_tokens` must leave room for prompts, got "
                f"{config.rollout.max_new_tokens}, which leaves {most} tokens, too few "
                f"for all {len(questions)} questions {whose}."
            )
        return kept

    train = fitting(task.train, "to train on")
    held_out = fitting(task.held_out, "held out")
    dropped = _count(task.dropped, TOO_LONG, task.train, train)
    dropped = _count(dropped, f"{TOO_LONG}, held out", task.held_out, held_out)
    sets = []
    for one in task.eval_sets:
        kept = fitting(one.questions, f"of `eval.sets.{one.name}`")
        counts = _count(one.dropped, TOO_LONG, one.questions, kept)
        sets.append(EvalSet(one.name, kept, counts))
    return Task(task.name, train, held_out, tuple(sets), dropped)


def _count(
    dropped: Mapping[str, int],
    reason: str,
    before: tuple[Question, ...],
    after: tuple[Question, ...],
) -> dict[str, int]:
    """The counts, with that of one more reason where it is not 0."""
    lost = len(before) - len(after)
    return {**dropped, **({reason: lost} if lost else {})}


def _unused(config: Config) -> int:
    """Tokens of the context that the engine leaves unused."""
    new = config.rollout.max_new_tokens
    return room_for(new) - new if config.rollout.engine == "sglang" else 0

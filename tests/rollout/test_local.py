import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from logra_jax.models.decoder import Decoder
from logra_jax.models.hf import load_decoder
from logra_jax.models.layers import DecoderConfig
from logra_jax.models.logprobs import token_logprobs
from logra_jax.models.tokenizer import ChatTokenizer
from logra_jax.rollout import local
from logra_jax.rollout.local import LocalEngine, prefill, sample
from logra_jax.rollout.types import Completions, Prompts, Sampling, common_prefix

VOCAB, CONTEXT, PAD = 300, 48, 299
PREFIX = [11, 12, 13, 14, 15]
PROMPTS = [[*PREFIX, *tail] for tail in ([1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 1])]
CONFIG = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=CONTEXT,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=False,
)
SAMPLED = Sampling(max_new_tokens=6)
GREEDY = Sampling(0.0, max_new_tokens=6)
PROSE = (
    "Photosynthesis is the process by which plants use sunlight, water, and carbon "
    "dioxide to create oxygen and energy in the form of sugar. The process takes place "
    "in the chloroplasts, which contain a green pigment called chlorophyll."
)


class Tiny(NamedTuple):
    """A random float32 decoder, split."""

    graph: nnx.GraphDef
    weights: nnx.State

    def engine(self, **changes) -> LocalEngine:
        options = {"eos_ids": (), "pad_id": PAD, "prefix": PREFIX, "bucket": 8}
        return LocalEngine(self.graph, max_positions=CONTEXT, **options | changes)


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    model = Decoder(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    model.norm.scale[...] *= 2.0  # neither flat nor peaked
    return Tiny(*nnx.split(model))


@pytest.fixture(scope="module")
def sampled(tiny: Tiny) -> Completions:
    """Six tokens after each prompt, no end of sequence."""
    return tiny.engine().generate(tiny.weights, PROMPTS, SAMPLED, jax.random.key(0))


@pytest.fixture(scope="module")
def greedy(tiny: Tiny) -> Completions:
    return tiny.engine().generate(tiny.weights, PROMPTS, GREEDY, jax.random.key(0))


def teacher_forced(tiny: Tiny, completions: Completions, temperature: float):
    """Log-probabilities of the completions, computed as the trainer does."""
    prompts = Prompts(*map(jnp.asarray, completions.prompts))
    tokens = jnp.asarray(completions.tokens)
    width, new = prompts.tokens.shape[1], tokens.shape[1]

    @jax.jit
    def compute(weights):
        model = nnx.merge(tiny.graph, weights)
        whole = jnp.concatenate([prompts.tokens, tokens[:, :-1]], 1)
        hidden, _, _ = prefill(
            model, prompts.prefix, whole, prompts.lengths, prompt_width=width
        )
        hidden = hidden[:, width - 1 :].reshape(-1, hidden.shape[-1])
        return token_logprobs(
            hidden, tokens.reshape(-1), model.logits, temperature=temperature
        )

    return np.asarray(compute(tiny.weights)).reshape(-1, new)


def same(a: Completions, b: Completions) -> None:
    """The same tokens with the same log-probabilities."""
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-4)


# The engine against the trainer and against itself


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_teacher_forced_ones(tiny, temperature):
    sampling = dataclasses.replace(SAMPLED, temperature=temperature)
    completions = tiny.engine().generate(
        tiny.weights, PROMPTS, sampling, jax.random.key(1)
    )
    expected = teacher_forced(tiny, completions, temperature)
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(completions.logprobs, expected, rtol=1e-4, atol=1e-4)


def test_greedy_logprobs_are_those_at_temperature_one(tiny, greedy):
    expected = teacher_forced(tiny, greedy, 1.0)
    np.testing.assert_allclose(greedy.logprobs, expected, rtol=1e-4, atol=1e-4)


def test_greedy_takes_the_likeliest_token_and_needs_no_key(tiny, greedy):
    again = tiny.engine().generate(tiny.weights, PROMPTS, GREEDY, jax.random.key(9))
    same(again, greedy)
    cold = dataclasses.replace(GREEDY, temperature=1e-5)
    frozen = tiny.engine().generate(tiny.weights, PROMPTS, cold, jax.random.key(9))
    np.testing.assert_array_equal(frozen.tokens, greedy.tokens)


def test_shared_prefix_changes_nothing(tiny, sampled):
    engine = tiny.engine(prefix=())
    whole = engine.generate(tiny.weights, PROMPTS, SAMPLED, jax.random.key(0))
    assert whole.prompts.prefix.size == 0
    same(whole, sampled)


def test_a_prompt_alone_is_answered_as_in_a_batch(tiny, greedy):
    key = jax.random.key(0)
    for i in (0, 1):
        alone = tiny.engine().generate(tiny.weights, PROMPTS[i : i + 1], GREEDY, key)
        np.testing.assert_array_equal(alone.tokens[0], greedy.tokens[i])
        assert alone.tokens.shape == (1, 6)


def test_same_key_same_tokens_other_key_other_tokens(tiny, sampled):
    engine = tiny.engine()
    again = engine.generate(tiny.weights, PROMPTS, SAMPLED, jax.random.key(0))
    np.testing.assert_array_equal(again.tokens, sampled.tokens)
    np.testing.assert_array_equal(again.logprobs, sampled.logprobs)
    other = engine.generate(tiny.weights, PROMPTS, SAMPLED, jax.random.key(1))
    assert (other.tokens != sampled.tokens).mean() > 0.5


def test_equal_prompts_of_a_batch_are_answered_independently(tiny):
    engine = tiny.engine()
    out = engine.generate(tiny.weights, PROMPTS[:1] * 4, SAMPLED, jax.random.key(0))
    assert len({tuple(row) for row in out.tokens}) == 4


# Ends


def test_end_of_sequence_stops_a_row_and_nothing_else(tiny, sampled):
    # Ends two rows at different places, leaves the others running.
    eos = (int(sampled.tokens[0, 2]), int(sampled.tokens[2, 4]))
    out = tiny.engine(eos_ids=eos).generate(
        tiny.weights, PROMPTS, SAMPLED, jax.random.key(0)
    )
    is_eos = np.isin(sampled.tokens, eos)
    ends = np.where(is_eos.any(1), is_eos.argmax(1) + 1, 6)
    assert len(set(ends)) > 1
    np.testing.assert_array_equal(out.lengths, ends)
    np.testing.assert_array_equal(out.finished, is_eos.any(1))
    np.testing.assert_array_equal(out.mask, np.arange(6)[None] < ends[:, None])
    np.testing.assert_array_equal(out.tokens[out.mask], sampled.tokens[out.mask])
    np.testing.assert_allclose(
        out.logprobs[out.mask], sampled.logprobs[out.mask], rtol=1e-5, atol=1e-5
    )
    assert (out.tokens[~out.mask] == PAD).all()
    assert (out.logprobs[~out.mask] == 0).all()


def test_without_an_end_of_sequence_no_row_is_finished(sampled):
    assert (sampled.lengths == 6).all()
    assert not sampled.finished.any()
    assert sampled.mask.all()


def test_end_of_sequence_as_the_last_token_that_fits_is_finished(tiny, sampled):
    eos = int(sampled.tokens[1, -1])
    assert eos not in sampled.tokens[1, :-1]
    out = tiny.engine(eos_ids=(eos,)).generate(
        tiny.weights, PROMPTS, SAMPLED, jax.random.key(0)
    )
    assert (out.lengths[1], out.finished[1]) == (6, True)


def test_pad_that_is_an_end_of_sequence_is_told_apart(tiny, sampled):
    eos = int(sampled.tokens[0, 1])
    assert eos != sampled.tokens[0, 0]
    out = tiny.engine(eos_ids=(eos,), pad_id=eos).generate(
        tiny.weights, PROMPTS, SAMPLED, jax.random.key(0)
    )
    assert out.lengths[0] == 2
    assert out.logprobs[0, 1] < 0
    np.testing.assert_array_equal(out.tokens[0, 1:], eos)
    np.testing.assert_array_equal(out.logprobs[0, 2:], 0)


def test_one_new_token_is_the_first_of_many(tiny, sampled):
    one = dataclasses.replace(SAMPLED, max_new_tokens=1)
    eos = int(sampled.tokens[3, 0])
    out = tiny.engine(eos_ids=(eos,)).generate(
        tiny.weights, PROMPTS, one, jax.random.key(0)
    )
    np.testing.assert_array_equal(out.tokens, sampled.tokens[:, :1])
    np.testing.assert_array_equal(out.lengths, 1)
    np.testing.assert_array_equal(out.finished, sampled.tokens[:, 0] == eos)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_completion_ends_before_its_least_length(tiny, temperature):
    """With a token that often comes first as the end of sequence."""
    free = Sampling(temperature, max_new_tokens=6)
    key = jax.random.key(5)
    unending = tiny.engine().generate(tiny.weights, PROMPTS, free, key)
    eos = int(unending.tokens[0, 0])
    engine = tiny.engine(eos_ids=(eos,))
    early = engine.generate(tiny.weights, PROMPTS, free, key)
    assert early.lengths[0] == 1
    late = engine.generate(
        tiny.weights, PROMPTS, dataclasses.replace(free, min_new_tokens=3), key
    )
    assert late.lengths.min() >= 4
    assert not np.any(late.tokens[:, :3] == eos)
    # What was sampled is told under the whole distribution, and is else as it was.
    assert np.all(late.logprobs[late.mask] < 0)
    whole = engine.generate(
        tiny.weights, PROMPTS, dataclasses.replace(free, min_new_tokens=6), key
    )
    assert not whole.finished.any()


# Programs and memory


def test_a_program_serves_a_bucket_any_temperature_and_any_weights(tiny):
    engine, count = tiny.engine(bucket=4), local._generate._cache_size
    key, new = jax.random.key(0), 2

    def ask(lengths, *, weights=tiny.weights, temperature=1.0, **filters):
        prompts = [[*PREFIX, *range(n)] for n in lengths]
        sampling = Sampling(temperature, max_new_tokens=new, **filters)
        before = count()
        engine.generate(weights, prompts, sampling, key)
        return count() - before

    assert ask([1, 2]) == 1
    assert ask([4, 3]) == 0
    assert ask([1, 4], temperature=0.5) == 0
    assert ask([2, 2], temperature=0.0) == 0
    assert ask([2, 2], weights=jax.tree.map(lambda a: a + 1, tiny.weights)) == 0
    assert ask([5, 1]) == 1
    assert ask([8, 8]) == 0
    assert ask([1, 1], top_k=3) == 1


def test_engines_of_one_run_share_their_programs(tiny, sampled):
    before = local._generate._cache_size()
    tiny.engine().generate(tiny.weights, PROMPTS, SAMPLED, jax.random.key(3))
    assert local._generate._cache_size() == before


def test_weights_are_read_where_they_lie(tiny):
    pointers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(tiny.weights)]
    tiny.engine().generate(tiny.weights, PROMPTS, SAMPLED, jax.random.key(0))
    after = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(tiny.weights)]
    assert after == pointers


def test_no_copy_of_the_weights_is_among_the_temporaries():
    # Many layers, since the working set of one of them is no copy of the weights.
    config = dataclasses.replace(CONFIG, num_layers=24)
    graph, weights = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    )
    lowered = local._generate.lower(
        graph,
        weights,
        jnp.zeros((2,), jnp.int32),
        jnp.zeros((1, 1), jnp.int32),
        jnp.ones((1,), jnp.int32),
        jnp.float32(1),
        jax.random.key_data(jax.random.key(0)),
        mesh=None,
        eos_ids=(),
        pad_id=PAD,
        new=2,
        least=0,
        top_p=1.0,
        top_k=0,
    )
    memory = lowered.compile().memory_analysis()
    size = 4 * sum(a.size for a in jax.tree.leaves(weights))
    assert memory.argument_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.15 * size


# Sampling


@pytest.mark.parametrize("vocab", [7, 255, 256, 257, 512, 513])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_distributed_as_softmax(getkey, vocab, temperature):
    rows = 20_000
    logits = jax.random.normal(getkey(), (vocab,))
    tokens, logprobs = jax.jit(sample)(
        jnp.tile(logits, (rows, 1)), jnp.float32(temperature), getkey()
    )
    expected = jax.nn.log_softmax(logits / temperature)
    np.testing.assert_allclose(logprobs, expected[tokens], rtol=1e-5, atol=1e-5)
    counts = np.bincount(tokens, minlength=vocab)
    assert counts.size == vocab
    frequencies = np.exp(np.asarray(expected, np.float64))
    frequencies *= rows / frequencies.sum()
    common = frequencies > 5
    # The rare ones share a bin, as chi-square wants.
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(frequencies[common], frequencies[~common].sum())
    keep = wanted > 0
    assert stats.chisquare(observed[keep], wanted[keep]).pvalue > 1e-3


EDGES = np.array([0.0, 2.0**-24, 0.5, 1 - 2.0**-24, 1.0], np.float32)


@pytest.mark.parametrize("vocab", [5, 256, 257, 700])
def test_token_of_probability_zero_is_never_picked(vocab):
    rng = np.random.default_rng(0)
    weights = rng.random((EDGES.size * 40, vocab), np.float32)
    weights *= rng.random(weights.shape) < np.repeat([0.5, 0.02], 100)[:, None]
    weights[:, 0] = weights[:, -1] = 0
    weights[np.arange(len(weights)), rng.integers(1, vocab - 1, len(weights))] = 1e-20
    picked = jax.jit(local._draw)(weights, np.tile(EDGES, 40))
    chosen = weights[np.arange(len(weights)), picked]
    assert (chosen > 0).all()


def test_draw_inverts_the_cumulative_distribution():
    weights = np.zeros((1, 600), np.float32)
    weights[0, [3, 255, 256, 599]] = [1, 2, 3, 2]
    uniform = np.array([0, 0.12, 0.13, 0.37, 0.38, 0.74, 0.76, 0.999], np.float32)
    picked = local._draw(jnp.tile(weights, (8, 1)), jnp.asarray(uniform))
    np.testing.assert_array_equal(picked, [3, 3, 255, 255, 256, 256, 599, 599])


def kept_by(logits: np.ndarray, top_p: float, top_k: int) -> list[set[int]]:
    """The sets that may be sampled: the k likeliest, then the fewest that reach p."""
    kept = []
    for row in logits.astype(np.float64):
        order = np.argsort(-row)[: top_k or None]
        mass = np.exp(row[order] - row.max())
        mass /= mass.sum()
        kept.append(set(order[np.cumsum(mass) - mass < top_p]))
    return kept


@pytest.mark.parametrize(
    ("top_p", "top_k"),
    [
        (1.0, 5),
        (0.9, 0),
        (0.4, 0),
        (0.8, 6),
        (1e-6, 0),
        (1.0, 1),
        (1.0, VOCAB),
        (1.0, 999),
    ],
)
def test_filters_keep_exactly_their_set_and_logprobs_stay_unfiltered(
    getkey, top_p, top_k
):
    logits = 3 * jax.random.normal(getkey(), (32, VOCAB))
    expected = kept_by(np.asarray(logits), top_p, top_k)

    @jax.jit
    def kept(z):
        return jnp.isfinite(local._filter(z, jax.nn.log_softmax(z), top_p, top_k))

    got = np.asarray(kept(logits))
    assert [set(np.flatnonzero(row)) for row in got] == expected

    draw = jax.jit(lambda z, key: sample(z, jnp.float32(1.0), key, top_p, top_k))
    tokens, logprobs = draw(logits, getkey())
    assert all(
        token in row for token, row in zip(tokens.tolist(), expected, strict=True)
    )
    unfiltered = jax.nn.log_softmax(logits)[np.arange(32), tokens]
    np.testing.assert_allclose(logprobs, unfiltered, rtol=1e-5, atol=1e-5)


def test_filtered_tokens_keep_their_proportions(getkey):
    logits = jnp.log(jnp.array([0.05, 0.4, 0.25, 0.2, 0.1]))
    tokens, _ = sample(jnp.tile(logits, (20_000, 1)), jnp.float32(1), getkey(), 1.0, 3)
    counts = np.bincount(tokens, minlength=5)
    assert counts[[0, 4]].sum() == 0
    wanted = np.array([0.4, 0.25, 0.2]) / 0.85 * 20_000
    assert stats.chisquare(counts[1:4], wanted).pvalue > 1e-3


# Bad input


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        ([*PREFIX, *range(CONTEXT - 5)], r"must have at most 42 tokens .*got 48"),
        ([1, 2, 3, 4, 5, 6], "must start with the common prefix of 5 tokens"),
        (PREFIX, "go on after it, got 5 tokens"),
        ([], "got 0 tokens"),
    ],
)
def test_prompt_that_cannot_be_answered_is_named(tiny, prompt, rule):
    with pytest.raises(ValueError, match=rf"`prompts\[1\]` .*{rule}"):
        tiny.engine().generate(
            tiny.weights, [PROMPTS[0], prompt], SAMPLED, jax.random.key(0)
        )


def test_longest_prompt_that_fits_is_answered(tiny):
    prompt = [*PREFIX, *range(CONTEXT - 5 - 6)]
    out = tiny.engine().generate(tiny.weights, [prompt], SAMPLED, jax.random.key(0))
    np.testing.assert_allclose(
        out.logprobs, teacher_forced(tiny, out, 1.0), rtol=1e-4, atol=1e-4
    )


def test_no_prompts_is_one_sentence(tiny):
    with pytest.raises(ValueError, match="`prompts` must hold at least one prompt"):
        tiny.engine().generate(tiny.weights, [], SAMPLED, jax.random.key(0))


# A real model


class SmolLM2(NamedTuple):
    directory: Path
    tokenizer: ChatTokenizer
    model: Decoder


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> SmolLM2:
    model = load_decoder(smollm2_dir, dtype=jnp.float32)
    return SmolLM2(smollm2_dir, ChatTokenizer.load(smollm2_dir), model)


@pytest.mark.model
def test_real_model_answers_greedily_as_in_transformers(smollm2):
    import torch
    from transformers import AutoModelForCausalLM

    questions = ["What is the capital of France?", "What is 3 + 5?"]
    prompts = [
        smollm2.tokenizer.encode_chat([{"role": "user", "content": text}])
        for text in questions
    ]
    graph, weights = nnx.split(smollm2.model)
    engine = LocalEngine(
        graph,
        max_positions=8192,
        eos_ids=smollm2.tokenizer.eos_ids,
        pad_id=smollm2.tokenizer.pad_id,
        prefix=common_prefix(prompts),
    )
    sampling = Sampling(0.0, max_new_tokens=10)
    out = engine.generate(weights, prompts, sampling, jax.random.key(0))
    answers = [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]
    assert smollm2.tokenizer.decode(answers[0]) == "The capital of France is Paris."

    oracle = AutoModelForCausalLM.from_pretrained(
        smollm2.directory, dtype=torch.float32
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False
        )
        assert whole[0, len(prompt) :].tolist() == answer


@pytest.mark.model
def test_real_model_finds_prose_as_likely_as_it_should(smollm2):
    tokens = jnp.array([smollm2.tokenizer.encode(PROSE)])

    @jax.jit
    def nll(model):
        empty, all_of_it = jnp.zeros((0,), jnp.int32), jnp.array([tokens.shape[1]])
        hidden, _, _ = prefill(model, empty, tokens, all_of_it)
        return -token_logprobs(hidden[0, :-1], tokens[0, 1:], model.logits).mean()

    assert 1.6 < nll(smollm2.model) < 1.9  # nats per token

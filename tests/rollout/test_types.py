import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra_jax.rollout.types import (
    Completions,
    Sampling,
    common_prefix,
    pack_prompts,
)

PROMPTS = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("min_new_tokens", 25),
    ],
)
def test_sampling_option_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=f"`{field}` must .* got {value}"):
        Sampling(**{field: value})


def test_sampling_is_hashable_and_frozen():
    assert hash(Sampling()) == hash(Sampling(1.0, 1.0, 0, 24))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().top_k = 3  # ty: ignore  # pyright: ignore[reportAttributeAccessIssue]


@given(PROMPTS)
def test_common_prefix_is_the_longest_that_leaves_a_token_to_each(prompts):
    prefix = common_prefix(prompts)
    n = len(prefix)
    assert all(tuple(p[:n]) == prefix and len(p) > n for p in prompts)
    longer = [tuple(p[: n + 1]) for p in prompts]
    assert len(set(longer)) > 1 or min(map(len, prompts)) == n + 1


def test_common_prefix_of_nothing_is_empty():
    assert common_prefix([]) == ()
    assert common_prefix([[], [1]]) == ()


@given(PROMPTS, st.integers(1, 8))
def test_packing_loses_nothing_and_pads_on_the_left(prompts, bucket):
    prefix = common_prefix(prompts)
    packed = pack_prompts(prompts, prefix=prefix, bucket=bucket, pad_id=9)
    width = packed.tokens.shape[1]
    longest = max(map(len, prompts)) - len(prefix)
    assert width % bucket == 0
    assert longest <= width < longest + bucket
    assert {a.dtype for a in packed} == {np.dtype(np.int32)}
    for row, length, prompt in zip(packed.tokens, packed.lengths, prompts, strict=True):
        assert [*packed.prefix, *row[width - length :]] == prompt
        assert (row[: width - length] == 9).all()


@pytest.mark.parametrize(
    ("prompts", "rule"),
    [
        ([[1, 2, 3], [1, 3, 3]], r"`prompts\[1\]` must start with the common prefix"),
        ([[1, 2]], r"`prompts\[0\]` must start .* and go on after it, got 2 tokens"),
        ([[1, 2, 3], []], r"`prompts\[1\]` must start .*, got 0 tokens"),
        ([[1, 2, 3, 4, 5, 6]], r"`prompts\[0\]` must have at most 5 tokens .*got 6"),
        ([], "`prompts` must hold at least one prompt"),
    ],
)
def test_prompt_that_cannot_be_packed_is_named(prompts, rule):
    with pytest.raises(ValueError, match=rule):
        pack_prompts(prompts, prefix=[1, 2], limit=5)


def test_empty_prompt_without_a_prefix_is_refused():
    with pytest.raises(ValueError, match=r"`prompts\[0\]` .* 0 tokens"):
        pack_prompts([[]])


def test_mask_covers_the_sampled_tokens():
    completions = Completions(
        pack_prompts([[1], [2], [3]]),
        tokens=np.zeros((3, 3), np.int32),
        logprobs=np.zeros((3, 3), np.float32),
        lengths=np.array([1, 3, 2], np.int32),
        finished=np.array([True, False, True]),
    )
    expected = [[1, 0, 0], [1, 1, 1], [1, 1, 0]]
    np.testing.assert_array_equal(completions.mask, np.array(expected, bool))

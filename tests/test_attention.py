"""Attention stays inside its segment, and every backend agrees with a dense masked softmax."""

import itertools

import naive_training
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.attention import (
    BLOCK_TOKENS,
    attend,
    check_device,
    choose_backend,
    segment_block_mask,
    segment_starts,
)
from training_io.errors import RecipeError

lengths_of_segments = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def offsets_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def heads(lengths, *, seed, num_heads=4, num_kv_heads=2, width=8, dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(lengths), n, width, dtype=dtype, generator=generator).requires_grad_(requires_grad)
        for n in (num_heads, num_kv_heads, num_kv_heads)
    ]


def outputs_and_gradients(function, tensors, seed=5):
    out = function(*tensors)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


@given(lengths=lengths_of_segments, num_kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_sdpa_equals_dense_masked_softmax(lengths, num_kv_heads, seed):
    tensors = heads(lengths, seed=seed, num_kv_heads=num_kv_heads)
    ours = outputs_and_gradients(lambda q, k, v: attend(q, k, v, offsets_of(lengths), max(lengths), "sdpa"), tensors)
    dense = outputs_and_gradients(lambda q, k, v: naive_training.dense_attention(q, k, v, lengths), tensors)
    for found, expected in zip(ours, dense, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


segments_of_one_length = st.tuples(st.integers(1, 9), st.integers(2, 6)).map(lambda shape: [shape[0]] * shape[1])


@given(
    lengths=st.one_of(lengths_of_segments, segments_of_one_length),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 999),
)
@settings(max_examples=40, deadline=None)
def test_exact_attention_is_the_plain_formula_to_the_last_digits(lengths, num_kv_heads, seed):
    tensors = heads(lengths, seed=seed, num_kv_heads=num_kv_heads)
    bounds = offsets_of(lengths)
    ours = outputs_and_gradients(lambda q, k, v: attend(q, k, v, bounds, max(lengths), exact=True), tensors)
    dense = outputs_and_gradients(lambda q, k, v: naive_training.dense_attention(q, k, v, lengths), tensors)
    for found, expected in zip(ours, dense, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_exact_attention_calls_no_fused_kernel():
    q, k, v = heads([5, 3], seed=1, requires_grad=False)

    def operators(exact):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            attend(q, k, v, offsets_of([5, 3]), 5, "sdpa", exact=exact)
        return {event.key for event in profile.key_averages()}

    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert fused in operators(exact=False)
    assert fused not in operators(exact=True)


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_exact_attention_by_a_fused_backend_is_refused(backend):
    q, k, v = heads([4], seed=1, requires_grad=False)
    with pytest.raises(RecipeError, match=f"expected backend sdpa .* found {backend}"):
        attend(q, k, v, offsets_of([4]), 4, backend, exact=True)


@pytest.mark.parametrize("num_rows", [2, 7])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_rows_of_one_length_go_through_one_call_with_the_same_results(num_rows, num_kv_heads):
    lengths = [6] * num_rows
    tensors = heads(lengths, seed=num_rows, num_kv_heads=num_kv_heads)
    ours = outputs_and_gradients(lambda q, k, v: attend(q, k, v, offsets_of(lengths), 6, "sdpa"), tensors)
    dense = outputs_and_gradients(lambda q, k, v: naive_training.dense_attention(q, k, v, lengths), tensors)
    for found, expected in zip(ours, dense, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(*tensors, offsets_of(lengths), 6, "sdpa")
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::scaled_dot_product_attention"] == 1


@given(lengths=lengths_of_segments, num_empty=st.integers(1, 3), seed=st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_empty_segments_behind_the_last_and_a_longer_limit_change_nothing(lengths, num_empty, seed):
    tensors = heads(lengths, seed=seed)
    bounds = offsets_of([*lengths, *[0] * num_empty])
    ours = outputs_and_gradients(lambda q, k, v: attend(q, k, v, bounds, 9, "sdpa"), tensors)
    dense = outputs_and_gradients(lambda q, k, v: naive_training.dense_attention(q, k, v, lengths), tensors)
    for found, expected in zip(ours, dense, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert segment_starts(bounds, sum(lengths)).tolist() == segment_starts(offsets_of(lengths), sum(lengths)).tolist()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("lengths", [[5, 1, 7, 3], [4, 4, 4, 4]])
def test_poking_one_segment_changes_no_other(lengths, exact):
    q, k, v = heads(lengths, seed=1, requires_grad=False)
    before = attend(q, k, v, offsets_of(lengths), max(lengths), exact=exact)
    start, end = sum(lengths[:2]), sum(lengths[:3])
    for x in (q, k, v):
        x[start:end] += 1.0
    after = attend(q, k, v, offsets_of(lengths), max(lengths), exact=exact)
    same = (before == after).flatten(1).all(dim=1)
    assert same.tolist() == [not start <= token < end for token in range(16)]


def test_no_token_reads_a_later_one():
    lengths = [6, 4]
    q, k, v = heads(lengths, seed=2)
    out = attend(q, k, v, offsets_of(lengths), 6)
    (gradient,) = torch.autograd.grad(out[2].sum(), v)
    assert gradient.flatten(1).any(dim=1).tolist() == [True] * 3 + [False] * 7


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths", [[3, 5, 1], [130, 126, 4, 128], [300]])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_flex_equals_dense_masked_softmax(lengths, num_kv_heads):
    q, k, v = heads(lengths, seed=3, num_kv_heads=num_kv_heads, requires_grad=False)
    found = attend(q, k, v, offsets_of(lengths), max(lengths), "flex")
    torch.testing.assert_close(found, naive_training.dense_attention(q, k, v, lengths), rtol=1e-10, atol=1e-10)


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_block_mask_names_every_tile_with_an_allowed_pair_and_calls_full_only_full_ones(lengths):
    num_tokens = sum(lengths)
    mask = segment_block_mask(offsets_of(lengths), num_tokens)
    starts = segment_starts(offsets_of(lengths), num_tokens)
    rows = torch.arange(num_tokens)
    allowed = (rows[None, :] <= rows[:, None]) & (rows[None, :] >= starts[:, None])
    for row in range(-(-num_tokens // BLOCK_TOKENS)):
        partial = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist()
        full = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist()
        tiles = allowed[row * BLOCK_TOKENS : (row + 1) * BLOCK_TOKENS].split(BLOCK_TOKENS, dim=1)
        assert sorted(partial + full) == [column for column, tile in enumerate(tiles) if tile.any()]
        assert full == [column for column, tile in enumerate(tiles) if tile.all() and column < row]


def test_flex_refuses_to_train_without_cuda_as_a_run_is_refused():
    q, k, v = heads([4], seed=1)
    with pytest.raises(RecipeError, match="expected CUDA for training") as refused:
        attend(q, k, v, offsets_of([4]), 4, "flex")
    with pytest.raises(RecipeError) as before_the_run:
        check_device("flex", q.device)
    assert str(refused.value) == str(before_the_run.value)


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_varlen_is_called_causally_and_agrees_with_sdpa(num_kv_heads):
    lengths = [3, 8, 1, 4]
    tensors = heads(lengths, seed=4, num_kv_heads=num_kv_heads)
    cu_seqlens = offsets_of(lengths)
    by_varlen = outputs_and_gradients(lambda q, k, v: attend(q, k, v, cu_seqlens, 8, "varlen"), tensors)
    by_sdpa = outputs_and_gradients(lambda q, k, v: attend(q, k, v, cu_seqlens, 8, "sdpa"), tensors)
    for found, expected in zip(by_varlen, by_sdpa, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "varlen", "flex"])
def test_no_tokens_give_no_rows_and_zero_gradients(backend):
    tensors = heads([], seed=1)
    out, *gradients = outputs_and_gradients(lambda q, k, v: attend(q, k, v, offsets_of([]), 0, backend), tensors)
    assert out.shape == (0, 4, 8)
    assert [gradient.shape[0] for gradient in gradients] == [0, 0, 0]


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cuda", torch.bfloat16, "varlen"),
        ("cuda", torch.float16, "varlen"),
        ("cuda", torch.float32, "sdpa"),
        ("cpu", torch.bfloat16, "sdpa"),
        ("cpu", torch.float64, "sdpa"),
    ],
)
def test_auto_is_varlen_only_where_its_kernel_runs(device, dtype, expected):
    assert choose_backend(torch.device(device), dtype) == expected


def test_unknown_backend_names_the_known_ones():
    q, k, v = heads([2], seed=1)
    with pytest.raises(RecipeError, match="auto, varlen, flex, sdpa, found 'flash'"):
        attend(q, k, v, offsets_of([2]), 2, "flash")


def test_heads_that_do_not_divide_are_refused():
    q, k, v = heads([2], seed=1, num_heads=4, num_kv_heads=3)
    with pytest.raises(RecipeError, match="found 4 and 3"):
        attend(q, k, v, offsets_of([2]), 2)

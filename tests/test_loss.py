"""The loss is a sum and a count; nothing is averaged before everything is added up."""

import itertools

import naive_training
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.batch import IGNORED
from training_io.loss import sum_cross_entropy


def random_logits(num_tokens, vocab, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_tokens, vocab, dtype=dtype, generator=generator)
    return logits, torch.randint(vocab, (num_tokens,), generator=generator)


@given(num_tokens=st.integers(0, 12), vocab=st.integers(1, 9), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_sum_equals_the_formula_token_by_token(num_tokens, vocab, seed):
    logits, targets = random_logits(num_tokens, vocab, seed)
    total, num_targets = sum_cross_entropy(logits, targets)
    expected = sum(map(naive_training.cross_entropy_of, logits.tolist(), targets.tolist()))
    assert total.item() == pytest.approx(expected, abs=1e-10)
    assert num_targets == num_tokens


@given(cuts=st.lists(st.integers(0, 20), max_size=4), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_loss_does_not_know_microbatches(cuts, seed):
    logits, targets = random_logits(20, 7, seed)
    whole, count = sum_cross_entropy(logits, targets)
    bounds = [0, *sorted(cuts), 20]
    parts = [sum_cross_entropy(logits[a:b], targets[a:b]) for a, b in itertools.pairwise(bounds)]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item(), abs=1e-10)
    assert sum(num for _, num in parts) == count


def test_mean_of_microbatch_means_is_another_number():
    logits, targets = random_logits(20, 7, seed=1)
    parts = [sum_cross_entropy(logits[a:b], targets[a:b]) for a, b in ((0, 2), (2, 20))]
    mean = sum(total for total, _ in parts) / sum(num for _, num in parts)
    mean_of_means = sum(total / num for total, num in parts) / len(parts)
    assert abs(mean - mean_of_means) > 0.05


@pytest.mark.parametrize(
    ("logits_dtype", "sum_dtype"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_sum_is_at_least_float32(logits_dtype, sum_dtype):
    logits, targets = random_logits(4, 5, seed=1, dtype=torch.float32)
    total, _ = sum_cross_entropy(logits.to(logits_dtype), targets)
    assert total.dtype == sum_dtype
    assert total.shape == ()


@given(ignored=st.lists(st.booleans(), max_size=12), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_ignored_targets_are_in_neither_the_sum_nor_the_count(ignored, seed):
    logits, targets = random_logits(len(ignored), 5, seed)
    logits.requires_grad_()
    total, count = sum_cross_entropy(logits, targets.masked_fill(torch.tensor(ignored, dtype=torch.bool), IGNORED))
    total.backward()
    rows = zip(logits.tolist(), targets.tolist(), ignored, strict=True)
    expected = [naive_training.cross_entropy_of(row, target) for row, target, is_ignored in rows if not is_ignored]
    assert total.item() == pytest.approx(sum(expected), abs=1e-10)
    assert count == len(expected)
    assert logits.grad.any(dim=1).tolist() == [not is_ignored for is_ignored in ignored]


def test_no_tokens_are_zero_and_differentiable():
    logits = torch.empty(0, 5, requires_grad=True)
    total, num_targets = sum_cross_entropy(logits, torch.empty(0, dtype=torch.int64))
    total.backward()
    assert (total.item(), num_targets, logits.grad.shape) == (0.0, 0, (0, 5))

"""The decoder: weights, positions, isolation, and shapes that cannot be built."""

import itertools
import math

import naive_training
import pytest
import torch

from training_io.errors import RecipeError
from training_io.loss import sum_cross_entropy
from training_io.model import Model, ModelConfig, num_parameters, rotary_angles, rotate

SMALL = {
    "vocab_size": 50,
    "d_model": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ff": 40,
    "max_positions": 16,
}
VARIANTS = [
    {"norm": norm, "positions": positions, "tied_embeddings": tied}
    for norm, positions, tied in itertools.product(("rmsnorm", "layernorm"), ("rotary", "learned"), (True, False))
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model(seed=0, dtype=torch.float64, **changes):
    return Model(ModelConfig(**(SMALL | changes)), torch.Generator().manual_seed(seed)).to(dtype)


def flat_batch(lengths, seed=1, vocab=50):
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(vocab, (2, sum(lengths)), generator=generator)
    positions = torch.tensor([position for length in lengths for position in range(length)], dtype=torch.int64)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return inputs, targets, (positions, cu_seqlens, max(lengths, default=0))


def loss_and_gradients(model, batches):
    model.zero_grad()
    logits = []
    for inputs, targets, rest in batches:
        logits.append(model(inputs, *rest))
        sum_cross_entropy(logits[-1], targets)[0].backward()
    return torch.cat(logits), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_equals_separate_outputs_and_gradients(variant):
    model = small_model(**variant)
    lengths = [5, 1, 9, 3]
    inputs, targets, rest = flat_batch(lengths)
    separate, start = [], 0
    for length in lengths:
        own = flat_batch([length])[2]
        separate.append((inputs[start : start + length], targets[start : start + length], own))
        start += length
    packed_logits, packed_gradients = loss_and_gradients(model, [(inputs, targets, rest)])
    logits, gradients = loss_and_gradients(model, separate)
    torch.testing.assert_close(packed_logits, logits, rtol=1e-10, atol=1e-12)
    for packed, alone in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(packed, alone, rtol=1e-8, atol=1e-10)


def test_positions_that_do_not_restart_give_other_logits():
    model = small_model(positions="learned")
    inputs, _, (positions, cu_seqlens, longest) = flat_batch([5, 6])
    running = torch.arange(11)
    assert not torch.equal(model(inputs, positions, cu_seqlens, longest), model(inputs, running, cu_seqlens, longest))


def test_rotary_attention_depends_on_distance_alone():
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64, generator=generator)
    scores = [
        (
            rotate(q, *rotary_angles(torch.tensor([far + 7]), 8, q.dtype))
            * rotate(k, *rotary_angles(torch.tensor([far]), 8, q.dtype))
        ).sum()
        for far in (0, 5, 100_000)
    ]
    torch.testing.assert_close(scores[1:], [scores[0]] * 2, rtol=1e-9, atol=1e-9)
    assert scores[0] != (q * k).sum()


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_count_equals_the_list_of_shapes(variant):
    config = ModelConfig(**(SMALL | variant))
    shapes = naive_training.parameter_shapes(
        vocab=50,
        width=24,
        layers=2,
        heads=4,
        kv_heads=2,
        ff=40,
        positions=16,
        layer_norm=variant["norm"] == "layernorm",
        learned=variant["positions"] == "learned",
        tied=variant["tied_embeddings"],
    )
    model = small_model(**variant)
    assert sorted(tuple(parameter.shape) for parameter in model.parameters()) == sorted(shapes)
    assert num_parameters(config) == sum(math.prod(shape) for shape in shapes)


def test_first_loss_is_that_of_a_uniform_guess():
    model = small_model(vocab_size=2_000, dtype=torch.float32)
    inputs, targets, rest = flat_batch([16] * 20, vocab=2_000)
    total, num_targets = sum_cross_entropy(model(inputs, *rest), targets)
    assert total.item() / num_targets == pytest.approx(math.log(2_000), abs=0.1)


def test_weights_come_from_the_generator_and_the_global_one_stands_still():
    before = torch.get_rng_state()
    first, again, other = (list(small_model(seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_residual_projections_start_narrower():
    model = small_model(d_model=64, d_ff=256, num_layers=8, dtype=torch.float32)
    block = model.blocks[0]
    assert block.feed_forward.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.feed_forward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.norm.weight.unique().tolist() == [1.0]


def test_empty_batch_gives_every_weight_a_zero_gradient():
    model = small_model()
    logits, gradients = loss_and_gradients(model, [flat_batch([])])
    assert logits.shape == (0, 50)
    assert not any(gradient.any() for gradient in gradients)


def test_segment_longer_than_the_learned_positions_is_refused():
    inputs, _, rest = flat_batch([17])
    with pytest.raises(RecipeError, match=r"at most 16 tokens .* found 17"):
        small_model(positions="learned")(inputs, *rest)
    assert small_model(positions="rotary")(inputs, *rest).shape == (17, 50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, r"model.d_model: expected a multiple of num_heads = 5, found 24"),
        ({"num_kv_heads": 3}, r"model.num_heads: expected a multiple of num_kv_heads = 3, found 4"),
        ({"num_heads": 8, "num_kv_heads": 8}, r"even d_model / num_heads .* found 24 / 8 = 3"),
        ({"d_ff": 0}, r"model.d_ff: expected at least 1, found 0"),
        ({"norm": "batchnorm"}, r"model.norm: expected one of rmsnorm, layernorm, found 'batchnorm'"),
        ({"positions": "alibi"}, r"model.positions: expected one of rotary, learned, found 'alibi'"),
    ],
)
def test_shapes_that_cannot_be_built_are_refused(changes, message):
    with pytest.raises(RecipeError, match=message):
        ModelConfig(**(SMALL | changes))


def test_unknown_backend_is_refused_before_any_weight_is_drawn():
    with pytest.raises(RecipeError, match="found 'flash'"):
        Model(ModelConfig(**SMALL), torch.Generator(), backend="flash")

"""The decoder: weights, positions, isolation, and shapes that cannot be built."""

import itertools
import math
from dataclasses import replace

import naive_training
import pytest
import torch

from training_io.errors import RecipeError
from training_io.loss import sum_cross_entropy
from training_io.model import Model, ModelConfig, num_parameters, preset, rotary_angles, rotate
from training_io.model_presets import MODEL_PRESETS

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


def small_model(seed=0, dtype=torch.float64, backend="auto", **changes):
    return Model(ModelConfig(**(SMALL | changes)), torch.Generator().manual_seed(seed), backend=backend).to(dtype)


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


@pytest.mark.parametrize(("name", "millions"), [("tiny", 1.44), ("124m", 123.55)])
def test_presets_have_the_parameters_that_their_shapes_say(name, millions):
    shape = MODEL_PRESETS[name]
    shapes = naive_training.parameter_shapes(
        vocab={"tiny": 8_192, "124m": 50_257}[name],
        width=shape["d_model"],
        layers=shape["num_layers"],
        heads=shape["num_heads"],
        kv_heads=shape["num_kv_heads"],
        ff=shape["d_ff"],
        positions=1_024,
        layer_norm=False,
        learned=False,
        tied=True,
    )
    num = num_parameters(preset(name, shapes[0][0], 1_024))
    assert num == sum(math.prod(shape) for shape in shapes)
    assert num / 1e6 == pytest.approx(millions, abs=0.005)


def test_a_124m_model_is_within_a_percent_of_gpt2s_parameters():
    gpt2 = 50_257 * 768 + 1_024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768  # 124,439,808
    assert num_parameters(preset("124m", 50_257, 1_024)) == pytest.approx(gpt2, rel=0.01)


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(RecipeError, match=r"model.preset: expected one of tiny, 124m, found 'large'"):
        preset("large", 100, 16)


@pytest.mark.parametrize("context", [2, 3, 4_096, 8_192])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_contexts_run_up_to_the_models_and_one_more_token_is_refused_where_positions_are_learned(context, positions):
    config = replace(preset("tiny", 64, context), positions=positions)
    model = Model(config, torch.Generator().manual_seed(0))
    inputs, _, rest = flat_batch([context, 1], vocab=64)
    poked = inputs.clone()
    poked[0] = (poked[0] + 1) % 64
    with torch.no_grad():
        logits = model(inputs, *rest)
        same = (model(poked, *rest) == logits).all(dim=1)
    assert logits.isfinite().all()
    assert not same[context - 1]  # the last token sees the first, and the other segment does not
    assert same[context]
    longer, _, rest = flat_batch([context + 1], vocab=64)
    if positions == "learned":
        with pytest.raises(RecipeError, match=f"at most {context:,} tokens .* found {context + 1:,}"):
            model(longer, *rest)


def compiled_and_eager(batches, **changes):
    """A model compiled whole, run over batches with gradients, beside the plain one on another backend."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = small_model(backend="varlen", **changes)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    found = []
    for inputs, targets, rest in batches:
        model.zero_grad()
        logits = compiled(inputs, *rest)
        sum_cross_entropy(logits, targets)[0].backward()
        found.append((logits, [parameter.grad.clone() for parameter in model.parameters()]))
    return found, [loss_and_gradients(small_model(**changes), [batch]) for batch in batches]


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_compiled_on_varlen_constant_shapes_are_one_graph_and_equal_the_reference(num_kv_heads):
    batches = []
    for lengths in ([5, 1, 9, 3], [16, 1, 1, 0], [18, 0, 0, 0], [2, 2, 2, 12]):
        inputs, targets, (positions, cu_seqlens, _) = flat_batch(lengths)
        batches.append((inputs, targets, (positions, cu_seqlens, 18)))
    found, expected = compiled_and_eager(batches, num_kv_heads=num_kv_heads)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for (logits, gradients), (plain_logits, plain_gradients) in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, plain_logits, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradients, plain_gradients, rtol=1e-8, atol=1e-10)


def test_compiled_on_flex_constant_shapes_are_one_graph_and_equal_the_reference():
    """Forward alone: FlexAttention has no backward on the CPU."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(small_model(backend="flex"), backend="aot_eager", fullgraph=True, dynamic=False)
    model = small_model()
    with torch.no_grad():
        for lengths in ([100, 1, 55, 100], [200, 56, 0, 0], [256, 0, 0, 0]):
            inputs, _, (positions, cu_seqlens, _) = flat_batch(lengths)
            expected = model(inputs, positions, cu_seqlens, 256)
            found = compiled(inputs, positions, cu_seqlens, 256)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


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
        ({"max_positions": 1}, r"model.max_positions: expected at least 2, found 1"),
        ({"d_ff": 0}, r"model.d_ff: expected 1 to 65,536, found 0"),
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

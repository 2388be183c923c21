"""Preflight: each law holds for a sound model on any batch, and fails for a model or batch that is broken in one place."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.batch import IGNORED, PackedBatch
from training_io.model import Model, ModelConfig
from training_io.preflight import (
    TOLERANCE,
    backends_agree,
    backends_on,
    excerpt,
    first_loss_is_uniform,
    first_loss_of,
    loss_knows_no_microbatches,
    off_uniform,
    one_pack_is_overfitted,
    overfitted,
    packed_equals_separate,
    padded,
    padded_equals_packed,
    positions_are_relative,
    positions_restart,
    together,
)

CPU = torch.device("cpu")
EOS = 0
VOCAB = 60
SHAPE = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "d_ff": 24,
    "max_positions": 64,
}
LENGTHS = [5, 1, 9, 3]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(kind=Model, **changes):
    """A model with weights wide enough that attention matters."""
    model = kind(ModelConfig(**(SHAPE | changes)), torch.Generator().manual_seed(3), backend="sdpa").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def batch_of(lengths, ignored=()):
    """Documents of random ids, of which some targets are IGNORED."""
    generator = np.random.default_rng(5)
    inputs, targets = generator.integers(1, VOCAB, size=(2, sum(lengths)))
    targets[list(ignored)] = IGNORED
    num_targets = int((targets != IGNORED).sum())
    return PackedBatch(
        inputs=inputs,
        targets=targets,
        position_ids=np.array([position for length in lengths for position in range(length)]),
        cu_seqlens=np.array([0, *accumulate(lengths)], dtype=np.int32),
        max_seqlen=max(lengths),
        num_targets=num_targets,
        segment_doc=np.arange(len(lengths)),
        step_targets=num_targets,
        epoch=0,
        step=0,
    )


class Unmasked(Model):
    """Attention that sees the whole batch as one segment."""

    def forward(self, inputs_T, position_ids_T, cu_seqlens, max_seqlen):
        num_tokens = len(inputs_T)
        return super().forward(inputs_T, position_ids_T, torch.tensor([0, num_tokens], dtype=torch.int32), num_tokens)


class Alone(Model):
    """Attention that sees its own token only."""

    def forward(self, inputs_T, position_ids_T, cu_seqlens, max_seqlen):
        return super().forward(inputs_T, position_ids_T, torch.arange(len(inputs_T) + 1, dtype=torch.int32), 1)


class CountingFromTheBatch(Model):
    """Positions by the place in the batch, whatever the batch says."""

    def forward(self, inputs_T, position_ids_T, cu_seqlens, max_seqlen):
        return super().forward(inputs_T, torch.arange(len(inputs_T)), cu_seqlens, max_seqlen)


class Absolute(Model):
    """Logits that depend on the position itself, by a thousandth."""

    def forward(self, inputs_T, position_ids_T, cu_seqlens, max_seqlen):
        return super().forward(inputs_T, position_ids_T, cu_seqlens, max_seqlen) * (1 + 1e-3 * position_ids_T[:, None])


class Centred(Model):
    """Logits less their mean over the batch, of which padding is a part."""

    def forward(self, *batch):
        logits_TV = super().forward(*batch)
        return logits_TV - logits_TV.mean(dim=0)


class WrongUnderFlex(Model):
    """One backend off by a millionth."""

    def forward(self, *batch):
        return super().forward(*batch) * (1 + 1e-6 * (self.backend == "flex"))


class Loud(Model):
    """Logits that are far too sure of themselves before anything is learned."""

    def forward(self, *batch):
        return 20 * super().forward(*batch)


class Blind(Model):
    """A model that reads none of its inputs."""

    def forward(self, inputs_T, *rest):
        return super().forward(torch.zeros_like(inputs_T), *rest)


def mean_of_means(model, microbatches):
    """Every microbatch by its own number of targets: what a step must not be."""
    loss = torch.zeros((), dtype=torch.float64)
    for batch in microbatches:
        logits_TV = model(batch.inputs, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
        mean = torch.nn.functional.cross_entropy(logits_TV, batch.targets, ignore_index=IGNORED) / len(microbatches)
        mean.backward()
        loss += mean.detach()
    return loss


MODEL_LAWS = [packed_equals_separate, padded_equals_packed, positions_are_relative, loss_knows_no_microbatches]
lengths = st.lists(st.integers(1, 12), min_size=3, max_size=6).filter(lambda sizes: max(sizes) > 1)


@settings(max_examples=15)
@given(lengths, st.sampled_from(["rotary", "learned"]), st.booleans())
def test_a_sound_model_keeps_every_law(lengths, positions, has_ignored):
    model, batch = model_of(positions=positions), batch_of(lengths, ignored=[0] if has_ignored else [])
    before = {name: values.clone() for name, values in model.state_dict().items()}
    for law in MODEL_LAWS:
        assert law(model, batch) == [], law
    assert positions_restart(batch, EOS) == []
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("law", "kind", "needle"),
    [
        (packed_equals_separate, Unmasked, "logits: expected equal"),
        (packed_equals_separate, Centred, "logits: expected equal"),
        (padded_equals_packed, Centred, "loss: expected equal"),
        (positions_are_relative, Absolute, "logits at running positions: expected equal"),
        (positions_are_relative, Unmasked, "logits at running positions: expected equal"),
        (positions_are_relative, Alone, "attention without the mask: expected another result"),
    ],
)
def test_a_broken_model_breaks_its_law(law, kind, needle):
    (violation, *_) = law(model_of(kind), batch_of(LENGTHS))
    assert violation.startswith(needle)


def test_positions_of_the_batch_instead_of_the_segment_break_learned_ones():
    assert packed_equals_separate(model_of(CountingFromTheBatch, positions="learned"), batch_of(LENGTHS))


def test_a_batch_whose_positions_run_on_is_not_its_segments_alone():
    batch = replace(batch_of(LENGTHS), position_ids=np.arange(sum(LENGTHS)))
    assert packed_equals_separate(model_of(positions="learned"), batch)
    assert positions_restart(batch, EOS)[0] == "token 5: expected position 0, found 5"


def test_an_end_of_document_within_a_segment_is_noticed():
    batch = batch_of(LENGTHS)
    batch.inputs[5] = EOS  # the last of its segment: the next token begins one
    assert positions_restart(batch, EOS) == []
    batch.inputs[8] = EOS
    assert positions_restart(batch, EOS) == ["token 9: expected a new segment behind an EOS, found the same one"]


def test_a_mean_of_means_is_told_from_the_loss():
    violations = loss_knows_no_microbatches(model_of(), batch_of(LENGTHS), mean_of_means)
    assert [violation.partition(":")[0] for violation in violations] == ["loss", "gradients"]


def test_one_segment_cannot_be_divided_and_that_is_said():
    assert loss_knows_no_microbatches(model_of(), batch_of([7])) == ["expected segments that divide unevenly, found 1"]


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_backends_of_this_machine_agree(positions):
    assert backends_agree(model_of(positions=positions), batch_of(LENGTHS), CPU, backends_on(CPU)) == []


def test_a_backend_that_differs_is_named():
    (violation,) = backends_agree(model_of(WrongUnderFlex), batch_of(LENGTHS), CPU, backends_on(CPU))
    assert violation.startswith("flex: logits: expected equal")


@pytest.mark.parametrize("law", [*MODEL_LAWS, lambda model, batch: backends_agree(model, batch, CPU, ("sdpa",))])
def test_a_weight_that_is_no_number_breaks_every_law(law):
    model = model_of()
    with torch.no_grad():
        model.tokens.weight[0, 0] = float("nan")
    assert law(model, batch_of(LENGTHS))


@pytest.mark.parametrize(
    "changes", [{}, {"vocab_size": 5_000, "d_model": 256, "norm": "layernorm"}, {"positions": "learned"}]
)
def test_a_fresh_model_guesses(changes):
    assert first_loss_is_uniform(model_of(**changes)) == []
    assert first_loss_is_uniform(model_of(Loud, **changes))[0].startswith("random tokens: expected a first loss of")


def test_a_first_loss_far_from_guessing_is_a_violation():
    config = ModelConfig(**SHAPE)
    assert off_uniform("step 1", first_loss_of(config) + 0.05, config) == []
    for loss in (first_loss_of(config) + 0.2, first_loss_of(config) - 0.2, float("nan")):
        assert off_uniform("step 1", loss, config) != []


def test_a_few_tokens_are_learned_by_heart_and_the_model_stays():
    model, batch = model_of(d_model=32, d_ff=64), batch_of([40, 30, 50])
    before = model.tokens.weight.clone()
    assert one_pack_is_overfitted(model, batch) == []
    assert torch.equal(model.tokens.weight, before)
    first, last = overfitted(model, excerpt(batch, 32), num_steps=0)
    assert first == last
    (violation,) = one_pack_is_overfitted(model_of(Blind, d_model=32, d_ff=64), batch)
    assert violation.startswith("expected a loss below half of")


def test_padding_has_input_0_and_no_target():
    batch = padded(batch_of([2, 3]))
    assert batch.inputs.reshape(2, 3)[0, 2] == 0
    assert batch.targets.reshape(2, 3)[0, 2] == IGNORED
    assert (batch.cu_seqlens.tolist(), batch.position_ids.tolist(), batch.num_targets) == ([0, 3, 6], [0, 1, 2] * 2, 5)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(3, 80), st.integers(0, 30))
def test_an_excerpt_is_ends_of_segments_with_real_targets(lengths, max_tokens, overlap):
    firsts = np.cumsum([0, *lengths[:-1]])
    ignored = [
        at
        for first, length in zip(firsts, lengths, strict=True)
        for at in range(first, first + min(overlap, length - 1))
    ]
    batch = batch_of(lengths, ignored=ignored)
    short = excerpt(batch, max_tokens)
    sizes = np.diff(short.cu_seqlens)
    assert len(short.inputs) <= max_tokens
    assert sizes.min() >= 1
    assert sizes.max() <= max(max_tokens // 3, 1)
    assert len(sizes) >= min(3, len(short.inputs))
    assert short.num_targets == short.step_targets == (short.targets != IGNORED).sum() > 0
    pairs = set(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True))
    assert set(zip(short.inputs.tolist(), short.targets.tolist(), strict=True)) <= pairs
    assert positions_restart(short, EOS) == []


def test_batches_together_are_their_segments_in_order():
    one, other = batch_of(LENGTHS), batch_of([2, 6], ignored=[0])
    both = together([one, other])
    assert both.cu_seqlens.tolist() == [0, 5, 6, 15, 18, 20, 26]
    assert both.inputs.tolist() == [*one.inputs, *other.inputs]
    assert both.targets.tolist() == [*one.targets, *other.targets]
    assert both.step_targets == both.num_targets == 18 + 7
    assert positions_restart(both, EOS) == []


def test_the_tolerance_is_far_above_rounding_and_far_below_a_mistake():
    batch = batch_of(LENGTHS)
    arrays = [torch.from_numpy(array) for array in (batch.inputs, batch.position_ids, batch.cu_seqlens)]
    logits = [model_of(kind)(*arrays, batch.max_seqlen) for kind in (Model, Unmasked)]
    assert (logits[0] - logits[1]).abs().max() / logits[0].abs().max() > 1e6 * TOLERANCE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernels_of_a_gpu_agree_with_the_reference():
    device = torch.device("cuda")
    model = model_of(d_model=128, num_heads=2, d_ff=128)  # heads of 64: every kernel's
    assert backends_agree(model, batch_of(LENGTHS), device, backends_on(device)) == []

"""Preflight: each law holds for a sound model on any batch, and fails for a model or batch that is broken in one place."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import tiny_artifacts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.batch import IGNORED, PackedBatch, in_padded_rows
from training_io.errors import FormatError, InvariantBroken
from training_io.excerpt import excerpt, together
from training_io.model import Model, ModelConfig
from training_io.preflight import (
    TOLERANCE,
    backends_agree,
    backends_on,
    backends_with_gradients,
    check_before_training,
    first_loss_is_uniform,
    first_loss_of,
    loss_knows_no_microbatches,
    no_token_sees_another,
    off_uniform,
    one_pack_is_overfitted,
    overfitted,
    packed_equals_separate,
    padded_equals_packed,
    positions_are_relative,
    positions_restart,
)
from training_io.stream import StreamSpec, WindowSpec
from training_io.train import train
from training_io.train_config import TrainConfig
from training_io.train_job import TrainJob, run_job, train_on_ranks

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


class WrongBackwards(Model):
    """Fused attention with the right logits and gradients off by a millionth."""

    def forward(self, *batch):
        logits_TV = super().forward(*batch)
        off = 1e-6 * (not self.blocks[0].attention.exact)
        return logits_TV + off * (logits_TV - logits_TV.detach())


class WrongForTwo(Model):
    """Logits off by a thousandth when a batch has just two segments."""

    def forward(self, inputs_T, position_ids_T, cu_seqlens, max_seqlen):
        return super().forward(inputs_T, position_ids_T, cu_seqlens, max_seqlen) * (1 + 1e-3 * (len(cu_seqlens) == 3))


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


def test_a_segment_that_is_poked_changes_itself_alone():
    batch = batch_of(LENGTHS)
    assert no_token_sees_another(model_of(), batch) == []
    assert no_token_sees_another(model_of().float(), batch) == []
    # the segment of one token is not poked, and behind the last one there is nothing to leak into
    assert no_token_sees_another(model_of(Unmasked), batch) == [
        "segment [0, 5): expected its 5 tokens alone to change with it, found 5 of them and 13 of others",
        "segment [6, 15): expected its 9 tokens alone to change with it, found 9 of them and 3 of others",
    ]


def test_a_model_that_a_poke_does_not_change_is_noticed():
    (violation, *_) = no_token_sees_another(model_of(Blind), batch_of(LENGTHS))
    assert violation.endswith("found 0 of them and 0 of others")


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


def test_a_backend_whose_gradients_differ_is_named():
    assert backends_with_gradients(CPU) == ("sdpa",)
    (violation,) = backends_agree(model_of(WrongBackwards), batch_of(LENGTHS), CPU, backends_on(CPU))
    assert violation.startswith("sdpa: gradients: expected equal")


@pytest.mark.parametrize(
    "law", [*MODEL_LAWS, no_token_sees_another, lambda model, batch: backends_agree(model, batch, CPU, ("sdpa",))]
)
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


def documents(num_documents, vocab_size=VOCAB):
    generator = np.random.default_rng(6)
    return [generator.integers(1, vocab_size, size=generator.integers(1, 30)).tolist() for _ in range(num_documents)]


def specs_of(root, docs, layouts=("packs", "windows", "masked"), **plan):
    """Streams of the documents in packs, in windows of three rows, and in such windows cut at documents."""
    shards = tiny_artifacts.make_token_shards(root, {"train": docs}, token_dtype="uint16")
    windows = WindowSpec(shards_path=str(shards), batch_size=3, max_seq_len=64, accumulation=1, device="cpu")
    packs = StreamSpec(plan_path=str(tiny_artifacts.make_plan(root, shards, **plan)), device="cpu")
    specs = {"packs": packs, "windows": windows, "masked": replace(windows, document_mask=True)}
    return {layout: specs[layout] for layout in layouts}


def with_an_end_within(docs):
    """The same, with an end of document in the middle of every one that is long enough."""
    return [[*doc[: len(doc) // 2], EOS, *doc[len(doc) // 2 :]] if len(doc) > 3 else doc for doc in docs]


def job_of(spec, folder, steps=3):
    config = TrainConfig(steps=steps, learning_rate=0.01, checkpoint_every=1, device="cpu", num_threads=1)
    return TrainJob(spec=spec, validation=None, model_config=ModelConfig(**SHAPE), config=config, checkpoint_dir=folder)


def test_a_sound_run_passes_before_training_in_every_layout(tmp_path):
    for spec in specs_of(tmp_path, documents(60)).values():
        for vocab_size in (VOCAB, 300):
            check_before_training(spec, ModelConfig(**SHAPE | {"vocab_size": vocab_size}))


@pytest.mark.parametrize("docs", [[[7] * 3] * 4, [[7]] * 3, [list(range(1, 50))]])
@pytest.mark.parametrize("overlap", [0, 3])
def test_little_and_repeated_text_is_no_defect(tmp_path, docs, overlap):
    """What shows a mistake may be missing from a text; a run on it is not refused for that."""
    spec = specs_of(tmp_path, docs, ["packs"], overlap=overlap)["packs"]
    check_before_training(spec, ModelConfig(**SHAPE))


@pytest.mark.parametrize(
    ("kind", "vocab_size", "law"),
    [
        (Unmasked, VOCAB, "packed equals separate"),
        (Loud, 300, "the first loss is that of guessing"),
        (WrongForTwo, VOCAB, "the loss knows no microbatches"),
    ],
)
def test_a_broken_model_is_refused_before_training_by_the_name_of_its_law(tmp_path, kind, vocab_size, law):
    spec = specs_of(tmp_path, documents(60), ["windows"])["windows"]
    with pytest.raises(InvariantBroken, match=f"before training, the law that {law}: "):
        check_before_training(spec, ModelConfig(**SHAPE | {"vocab_size": vocab_size}), kind)


@pytest.mark.parametrize("layout", ["packs", "masked"])
def test_documents_with_an_end_within_are_refused_before_training(tmp_path, layout):
    spec = specs_of(tmp_path, with_an_end_within(documents(60)), [layout])[layout]
    with pytest.raises(FormatError, match="the law that positions restart: token "):
        run_job(job_of(spec, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    train(spec, ModelConfig(**SHAPE), job_of(spec, "").config, tmp_path / "run")
    assert run_job(job_of(spec, tmp_path / "run")).resumed_from == 3  # what goes on has begun already


def test_windows_without_a_mask_chose_not_to_restart_positions(tmp_path):
    check_before_training(
        specs_of(tmp_path, with_an_end_within(documents(60)), ["windows"])["windows"], ModelConfig(**SHAPE)
    )


def test_the_error_of_rank_0_before_training_ends_every_rank(tmp_path):
    spec = specs_of(tmp_path, with_an_end_within(documents(60)), ["packs"])["packs"]
    with pytest.raises(FormatError, match="the law that positions restart"):
        train_on_ranks(job_of(spec, tmp_path / "run"), 2)


def test_a_large_model_is_left_to_other_checks(tmp_path):
    spec = specs_of(tmp_path, documents(60), ["packs"])["packs"]
    wide = ModelConfig(**SHAPE | {"vocab_size": 1_250_000})
    check_before_training(spec, wide, Unmasked)
    with pytest.raises(InvariantBroken):
        check_before_training(spec, replace(wide, vocab_size=VOCAB), Unmasked)


@pytest.mark.parametrize("layout", ["packs", "windows"])
def test_looking_before_training_changes_no_loss_and_no_generator(tmp_path, layout):
    spec = specs_of(tmp_path, documents(60), [layout])[layout]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    checked = run_job(job_of(spec, tmp_path / "checked"))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]
    alone = train(spec, ModelConfig(**SHAPE), job_of(spec, "").config, tmp_path / "alone")
    assert (checked.losses, checked.gradient_norms) == (alone.losses, alone.gradient_norms)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernels_of_a_gpu_agree_with_the_reference():
    device = torch.device("cuda")
    model = model_of(d_model=128, num_heads=2, d_ff=128)  # heads of 64: every kernel's
    assert backends_agree(model, batch_of(LENGTHS), device, backends_on(device)) == []


def test_an_excerpt_of_long_segments_needs_padding():
    """Cut alike they would all be rows of one length, and padding could not be told from none."""
    batch = batch_of([90, 90, 90, 90])
    short = excerpt(batch, 192)
    assert len(in_padded_rows(short, short.max_seqlen).inputs) > len(short.inputs)
    assert len(short.inputs) <= 192

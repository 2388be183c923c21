"""Promise: no token sees another document, and the model learns."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from asset_checks.verdicts import Verdict, law
from pipeline_assets.stripes import Stage
from pipeline_assets.training import CHECKPOINT_FOLDER, CURVES_NAME, model_config
from resources.artifact_store import ArtifactRef
from resources.tables import read_json
from training_io.batch import PackedBatch
from training_io.manifest import load_manifest
from training_io.plan import load_plan
from training_io.sampler import Sampler
from training_io.segments import offsets_of
from training_io.windows import WindowLoader

if TYPE_CHECKING:
    from training_io.model import Model

MAX_POKED_SEGMENTS = 4
MAX_POKED_TOKENS = 1_024


def no_token_sees_another_document(
    stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef
) -> Verdict:
    """On a real microbatch, changing one segment's inputs changes that segment's logits and no other's."""
    windows = stage.recipe.training.windows
    if windows is not None and not windows.document_mask:
        return Verdict(
            expected="no token sees another document",
            found=f"the recipe chose windows of {windows.length:,} tokens without a document mask:"
            " tokens may see the documents before theirs",
            num_violations=1,
            is_choice=True,
        )
    import torch

    model = trained_model(stage, varlen_training_run, packing_plan)
    device = model.tokens.weight.device
    batch = _first_batch(stage, packing_plan)
    bounds = _first_segments(batch.cu_seqlens.tolist())
    segments = [(start, end) for start, end in pairwise(bounds) if end - start > 1]
    inputs = torch.from_numpy(batch.inputs[: bounds[-1]].copy()).to(device)
    positions = torch.from_numpy(batch.position_ids[: bounds[-1]].copy()).to(device)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    fixed = (positions, cu_seqlens, max(end - start for start, end in pairwise(bounds)))
    violations: list[dict[str, Any]] = []
    with torch.no_grad():
        before = model(inputs, *fixed)
        for start, end in segments:
            poked = inputs.clone()
            poked[start:end] = (poked[start:end] + 1) % model.config.vocab_size
            changed = (model(poked, *fixed) != before).any(dim=1)
            outside = int(changed[:start].sum() + changed[end:].sum())
            if outside or not bool(changed[start:end].all()):
                inside = int(changed[start:end].sum())
                violations.append({"segment": f"[{start:,}, {end:,})", "outside": outside, "inside": inside})
    return Verdict(
        expected="changing one segment changes its own logits only",
        found=f"{len(violations):,} of {len(segments):,} poked segments changed others, or not all of themselves"
        f" ({model.backend} on {device.type})",
        num_violations=len(violations),
        examples=violations,
    )


def _first_batch(stage: Stage, packing_plan: ArtifactRef) -> PackedBatch:
    """The first microbatch that the recipe trains on, packs or masked windows."""
    plan = load_plan(stage.folder(packing_plan), "train", allow_quarantined=True)
    windows = stage.recipe.training.windows
    if windows is None:
        return next(Sampler(plan))
    from training_io.stream import WindowSource

    paths = [plan.shards.path / name for name in plan.index.shard_files]
    loader = WindowLoader(paths, windows.batch_size, windows.length)
    offsets = offsets_of(plan.index.lengths)
    source = WindowSource(loader, "", accumulation=1, rank=0, world_size=1, document_offsets=offsets)
    return source.next_step()[0]


def _first_segments(bounds: list[int]) -> list[int]:
    """The boundaries of the first few segments: two at least, then as many as fit into a thousand tokens."""
    fitting = sum(bound <= MAX_POKED_TOKENS for bound in bounds)
    return bounds[: min(max(fitting, 3), MAX_POKED_SEGMENTS + 1)]


def trained_model(stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef) -> "Model":
    """The run's model with its final weights, with the attention it was trained with where this machine has it."""
    import torch

    from training_io.checkpoint import load_checkpoint
    from training_io.model import Model

    counts = varlen_training_run.counts
    is_on_gpu = counts["device"].startswith("cuda") and torch.cuda.is_available()
    plan = load_plan(stage.folder(packing_plan), "train", allow_quarantined=True)
    vocab_size = int(load_manifest(plan.shards.path).counts["vocab_size"])
    backend = counts["attention"] if is_on_gpu else "sdpa"
    model = Model(model_config(stage, vocab_size), torch.Generator().manual_seed(0), backend=backend)
    folder = stage.folder(varlen_training_run) / CHECKPOINT_FOLDER
    model.load_state_dict(load_checkpoint(folder).payload["model"])
    if backend == "varlen":
        model = model.to(torch.bfloat16)  # its kernel knows half precision only
    return model.to("cuda" if is_on_gpu else "cpu").eval()


def validation_loss_falls(stage: Stage, varlen_training_run: ArtifactRef) -> Verdict:
    """The loss on held-out packs is lower at the end than before the first step."""
    validation = read_json(stage.folder(varlen_training_run) / CURVES_NAME)["validation"]
    if not validation:
        return Verdict(expected="a lower validation loss", found="no validation documents", num_violations=1)
    first, last = validation[0][1], validation[-1][1]
    return Verdict(
        expected=f"a validation loss below the first one, {first:.3f}",
        found=f"{last:.3f} nats a token after step {validation[-1][0]:,}, {first - last:.3f} lower",
        num_violations=int(not last < first),
        examples=[{"step": step, "validation loss": loss} for step, loss in validation],
        numbers={"first_validation_loss": first, "last_validation_loss": last},
    )


CHECKS = [
    law(
        no_token_sees_another_document,
        blocking=True,
        description="Fails when a token's output depends on another document: attention or positions are wrong. Warns "
        "when the recipe chose windows without a document mask.",
    ),
    law(
        validation_loss_falls,
        blocking=False,
        description="Warns when training did not lower the loss on held-out text: look at the learning rate, the "
        "steps and the validation split.",
    ),
]

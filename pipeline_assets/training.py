"""training: the plan and the shards, through the GPU IO manager -> a trained model and its loss curves.

Promise: no token sees another document (unless the recipe chose windows without a mask), the loss is summed
cross-entropy over real targets, and a run that was stopped goes on exactly where it was. torch is imported when the
asset runs, never when the code location loads.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from pipeline_assets.report import asset_metadata, line_picture, picture_metadata
from pipeline_assets.stripes import Sealed, Stage, asset_spec, materialized
from pipeline_assets.transforms.utilisation import padded, padding_hours
from resources.artifact_store import WHOLE, ArtifactRef, locked
from resources.tables import write_json
from training_io.document_index import read_index
from training_io.gpu_io_manager import DeviceInput, device_type
from training_io.manifest import artifact_identity, load_manifest

if TYPE_CHECKING:
    from training_io.stream import StreamSpec, WindowSpec
    from training_io.train import Progress, TrainResult

TRAINING_VERSION = 1
UNFINISHED_FOLDER = "_training"
CURVES_NAME = "curves.json"
PICTURE_NAME = "loss.png"
CHECKPOINTS_FOLDER = "checkpoints"
CHECKPOINT_FOLDER = "checkpoint"


class TrainingOverrides(dg.Config):
    """Run-time values that the launchpad may set; an empty one keeps the recipe's value."""

    steps: int | None = Field(default=None, gt=0, lt=10**9, description="Optimizer steps to train for.")
    learning_rate: float | None = Field(default=None, gt=0, le=1, description="Peak of the learning rate.")


def build_training_run(
    stage: Stage, token_shards: DeviceInput, packing_plan: DeviceInput, overrides: TrainingOverrides
) -> Sealed:
    """Train for the recipe's steps from the newest checkpoint of this very run, if one was left."""
    settings = _settings(stage, packing_plan, overrides)
    source = packing_plan if stage.recipe.training.windows is None else token_shards
    inputs = {source.asset: {"identity": source.identity, "digest": source.digest}}
    identity = artifact_identity("varlen_training_run", WHOLE, inputs, settings, TRAINING_VERSION)
    unfinished = stage.store.root / UNFINISHED_FOLDER / identity
    measured: dict[str, float] = {}

    def write(folder: Path) -> dict[str, Any]:
        unfinished.mkdir(parents=True, exist_ok=True)
        with locked(unfinished):  # two runs of one identity take turns over its checkpoints
            result = _train(stage, token_shards, packing_plan, settings, unfinished / CHECKPOINTS_FOLDER)
            shutil.copytree(result.checkpoint, folder / CHECKPOINT_FOLDER)
        measured.update(seconds_of_training=result.seconds, resumed_from_step=result.resumed_from)
        if not result.resumed_from:
            measured.update(tokens_per_second=result.tokens / result.seconds)
            measured.update(hours_that_padding_would_add=_padding_hours(stage, token_shards, result))
        curves = {"train": list(result.losses), "validation": [list(point) for point in result.validation]}
        write_json(curves, folder / CURVES_NAME)
        (folder / PICTURE_NAME).write_bytes(_loss_picture(curves))
        return _counts(result)

    ref = stage.materialize(
        asset="varlen_training_run", inputs=inputs, parameters=settings, version=TRAINING_VERSION, write=write
    )
    if unfinished.exists():  # only what is sealed makes the checkpoints superfluous
        with locked(unfinished):
            shutil.rmtree(unfinished / CHECKPOINTS_FOLDER, ignore_errors=True)
    folder = stage.folder(ref)
    picture = (folder / PICTURE_NAME).read_bytes()
    metadata = asset_metadata(stage, ref) | {
        "loss_curve": picture_metadata(picture, "training and validation loss by step"),
        **measured,
    }
    return Sealed(ref=ref, metadata=metadata)


def _settings(stage: Stage, packing_plan: DeviceInput, overrides: TrainingOverrides) -> dict[str, Any]:
    """The recipe's training section with this run's values, and the device and dtype that `auto` stands for here."""
    training = stage.recipe.training
    device = device_type(packing_plan.device)
    automatic = "bfloat16" if device == "cuda" else "float32"
    return {
        **training.model_dump(mode="json"),
        "steps": overrides.steps or training.steps,
        "learning_rate": overrides.learning_rate or training.learning_rate,
        "dtype": automatic if training.dtype == "auto" else training.dtype,
        "device": device,
        "eval_microbatch_tokens": stage.recipe.packs.eval_microbatch_tokens,
    }


def stream_specs(
    stage: Stage, token_shards: DeviceInput, packing_plan: DeviceInput
) -> "dict[str, StreamSpec | WindowSpec]":
    """What to stream for training and for validation, in the recipe's layout."""
    from training_io.stream import StreamSpec, WindowSpec

    windows = stage.recipe.training.windows
    counts = load_manifest(packing_plan.folder).counts["splits"]
    splits = [split for split in ("train", "validation") if counts[split]["packs"]]
    if windows is None:
        return {
            split: StreamSpec(
                plan_path=str(packing_plan.folder),
                split=split,
                device=packing_plan.device,
                prefetch_depth=packing_plan.prefetch_depth,
            )
            for split in splits
        }
    eval_rows = max(1, stage.recipe.packs.eval_microbatch_tokens // windows.length)
    return {
        split: WindowSpec(
            shards_path=str(token_shards.folder),
            split=split,
            batch_size=windows.batch_size if split == "train" else eval_rows,
            max_seq_len=windows.length,
            accumulation=windows.accumulation if split == "train" else 1,
            document_mask=windows.document_mask,
            device=token_shards.device,
            prefetch_depth=token_shards.prefetch_depth,
        )
        for split in splits
    }


def _train(
    stage: Stage,
    token_shards: DeviceInput,
    packing_plan: DeviceInput,
    settings: dict[str, Any],
    checkpoint_dir: Path,
) -> "TrainResult":
    from training_io.train import TrainConfig, train

    training = stage.recipe.training
    specs = stream_specs(stage, token_shards, packing_plan)
    config = TrainConfig(
        steps=settings["steps"],
        learning_rate=settings["learning_rate"],
        warmup_steps=min(training.warmup_steps, settings["steps"]),  # the launchpad may shorten a run
        weight_decay=training.weight_decay,
        grad_clip=training.grad_clip,
        seed=training.seed,
        eval_every=training.eval_every,
        eval_steps=training.eval_microbatches,
        checkpoint_every=training.checkpoint_every,
        device=settings["device"],
        dtype=settings["dtype"],
        num_threads=training.num_threads,
    )

    def say(progress: "Progress") -> None:
        stage.say(
            f"varlen_training_run step {progress.step:,} of {progress.steps:,}: loss {progress.loss:.3f},"
            f" {progress.tokens_per_second:,.0f} tokens/s, {progress.eta_seconds:.0f} s left"
        )

    return train(
        specs["train"],
        model_config(stage, vocab_size=_vocabulary(token_shards)),
        config,
        checkpoint_dir,
        validation=specs.get("validation"),
        on_progress=say,
    )


def _padding_hours(stage: Stage, token_shards: DeviceInput, result: "TrainResult") -> float:
    """What this run would have taken longer on padded rows of its context, at the tokens a second that it measured."""
    lengths = read_index(token_shards.folder / "train_index").lengths
    utilisation = padded(lengths, _context(stage)).utilisation
    return padding_hours(result.tokens, result.tokens / result.seconds, utilisation)


def _context(stage: Stage) -> int:
    """The layout's longest segment."""
    windows = stage.recipe.training.windows
    return stage.recipe.packs.max_seq_len if windows is None else windows.length


def model_config(stage: Stage, vocab_size: int) -> Any:
    """The recipe's model for a vocabulary: its context is the layout's longest segment."""
    from training_io.model import ModelConfig

    model = stage.recipe.training.model
    return ModelConfig(vocab_size=vocab_size, max_positions=_context(stage), **model.model_dump())


def _vocabulary(token_shards: DeviceInput) -> int:
    return int(load_manifest(token_shards.folder).counts["vocab_size"])


def _counts(result: "TrainResult") -> dict[str, Any]:
    return {
        "steps": result.steps,
        "tokens": result.tokens,
        "parameters": result.num_parameters,
        "final_training_loss": result.losses[-1],
        **({"first_validation_loss": result.validation[0][1]} if result.validation else {}),
        **({"final_validation_loss": result.validation[-1][1]} if result.validation else {}),
        "attention": result.backend,
        "device": result.device,
    }


def _loss_picture(curves: dict[str, Any]) -> bytes:
    steps, losses = zip(*curves["validation"], strict=True) if curves["validation"] else ((), ())
    series = {
        "training": (list(range(1, len(curves["train"]) + 1)), curves["train"]),
        "validation": (list(steps), list(losses)),
    }
    return line_picture("Loss", "step", "nats a token", series)


@dg.asset(
    **{
        **asset_spec(
            "varlen_training_run",
            TRAINING_VERSION,
            {"torch"},
            "A small decoder trained on the packs (or windows) through the GPU IO manager, with loss curves. "
            "Promise: no token sees another document; loss = summed cross-entropy over real targets; resume is exact.",
        ),
        "ins": {
            name: dg.AssetIn(name, input_manager_key="gpu_io_manager") for name in ("token_shards", "packing_plan")
        },
    }
)
def varlen_training_run(
    context: dg.AssetExecutionContext, config: TrainingOverrides, token_shards: DeviceInput, packing_plan: DeviceInput
) -> dg.MaterializeResult[ArtifactRef]:
    return materialized(
        context, build_training_run, token_shards=token_shards, packing_plan=packing_plan, overrides=config
    )

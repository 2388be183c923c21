"""training: the plan and the shards, through the GPU IO manager -> a trained model and its loss curves.

Promise: no token sees another document (unless the recipe chose windows without a mask), the loss is summed
cross-entropy over real targets, and a run that was stopped goes on exactly where it was. torch is imported when the
asset runs, never when the code location loads.
"""

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from pipeline_assets.launch import TrainingOverrides, wrong_overrides
from pipeline_assets.ops import asset_spec, materialized
from pipeline_assets.parameters import parameters_that_matter
from pipeline_assets.pictures import line_picture
from pipeline_assets.references import Pipeline
from pipeline_assets.report import asset_metadata, files_metadata, pictures_metadata
from pipeline_assets.sections.training import Training
from pipeline_assets.stored_batches import CURVES_NAME
from pipeline_assets.stripes import Sealed, Stage
from pipeline_assets.transforms.utilisation import padded, padding_hours
from resources.artifact_store import WHOLE, ArtifactRef, locked
from resources.tables import write_json
from training_io.document_index import read_index
from training_io.errors import RecipeError
from training_io.gpu_io_manager import DeviceInput, device_type, why_cpu
from training_io.hashing import identity_of
from training_io.manifest import artifact_identity, load_manifest
from training_io.progress import progress_line

if TYPE_CHECKING:
    from training_io.progress import Progress, TrainResult
    from training_io.stream import StreamSpec, WindowSpec
    from training_io.train_job import TrainJob

TRAINING_VERSION = 4
UNFINISHED_FOLDER = "_training"
PICTURES = {"loss_curve": "loss by step", "gradient_norms": "gradient norm by step"}
SPEED = {"speed": "tokens a second by step"}  # measured, so beside the run's other files and not in the artifact
CHECKPOINTS_FOLDER = "checkpoints"
CHECKPOINT_FOLDER = "checkpoint"
EVENTS_FOLDER = "events"
BY_HAND_FOLDER = "by_hand"  # of runs without Dagster, which say another with --output
MAX_POOL_CURVES = 6  # in one picture, beside training and validation


def build_training_run(
    stage: Stage, token_shards: DeviceInput, packing_plan: DeviceInput, overrides: TrainingOverrides
) -> Sealed:
    """Train for the recipe's steps from the newest checkpoint of this very run, if one was left."""
    settings = _settings(stage, packing_plan, overrides)
    source = packing_plan if stage.recipe.training.windows is None else token_shards
    inputs = {source.asset: {"identity": source.identity, "digest": source.digest}}
    identity = artifact_identity("varlen_training_run", WHOLE, inputs, settings, TRAINING_VERSION)
    unfinished = stage.store.root / UNFINISHED_FOLDER / identity
    measured: dict[str, Any] = {}

    def write(folder: Path) -> dict[str, Any]:
        unfinished.mkdir(parents=True, exist_ok=True)
        with locked(unfinished):  # two runs of one identity take turns over its checkpoints
            result = _train(stage, _job(stage, token_shards, packing_plan, settings, unfinished))
            shutil.copytree(result.checkpoint, folder / CHECKPOINT_FOLDER)
        measured.update(_measured(stage, token_shards, result, unfinished))
        curves = _curves(result)
        write_json(curves, folder / CURVES_NAME)
        (folder / "loss_curve.png").write_bytes(_loss_picture(curves))
        (folder / "gradient_norms.png").write_bytes(_norm_picture(curves))
        return {**_counts(result), "vocab_size": _vocabulary(token_shards)}

    ref = stage.materialize(
        asset="varlen_training_run", inputs=inputs, parameters=settings, version=TRAINING_VERSION, write=write
    )
    if unfinished.exists():  # only what is sealed makes the checkpoints superfluous
        with locked(unfinished):
            if (unfinished / CHECKPOINTS_FOLDER).exists():
                shutil.rmtree(unfinished / CHECKPOINTS_FOLDER)
    folder, events = stage.folder(ref), unfinished / EVENTS_FOLDER
    files = pictures_metadata(folder, PICTURES) | pictures_metadata(unfinished, SPEED)
    files |= files_metadata(folder / CURVES_NAME)
    if events.is_dir():
        measured["event_files"] = dg.MetadataValue.path(str(events))
    return Sealed(ref=ref, metadata=asset_metadata(stage, ref) | files | measured)


def _settings(stage: Stage, packing_plan: DeviceInput, overrides: TrainingOverrides) -> dict[str, Any]:
    """The recipe's training section with this run's values, and what each `auto` of it stands for here."""
    if wrong := wrong_overrides(overrides.steps, overrides.learning_rate):
        raise RecipeError(" ".join(wrong))
    training = stage.recipe.training
    device = device_type(packing_plan.device)
    automatic = "bfloat16" if device == "cuda" else "float32"
    chosen = training.dtype if packing_plan.dtype == "auto" else packing_plan.dtype
    dtype = automatic if chosen == "auto" else chosen
    return {
        **training.model_dump(mode="json"),
        "steps": overrides.steps or training.steps,
        "learning_rate": overrides.learning_rate or training.learning_rate,
        "dtype": dtype,
        "device": device,
        "attention": _backend(device, dtype) if training.attention == "auto" else training.attention,
        "eval_microbatch_tokens": stage.recipe.packs.eval_microbatch_tokens,
    }


def _backend(device: str, dtype: str) -> str:
    """The attention that `auto` stands for; torch is asked only where a GPU had it loaded anyway."""
    if device == "cpu":
        return "sdpa"
    import torch

    from training_io.attention import choose_backend
    from training_io.train_config import DTYPES

    return choose_backend(torch.device(device), DTYPES[dtype])


def stream_specs(
    stage: Stage, token_shards: DeviceInput, packing_plan: DeviceInput
) -> "dict[str, StreamSpec | WindowSpec]":
    """What to stream for training and for validation, in the recipe's layout."""
    from training_io.evaluation import evaluation_windows
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
                constant_shape=stage.recipe.training.compile and split == "train",
            )
            for split in splits
        }
    trained = WindowSpec(
        shards_path=str(token_shards.folder),
        batch_size=windows.batch_size,
        max_seq_len=windows.length,
        accumulation=windows.accumulation,
        document_mask=windows.document_mask,
        device=token_shards.device,
        prefetch_depth=token_shards.prefetch_depth,
    )
    rows = eval_rows(stage.recipe.packs.eval_microbatch_tokens, windows.length)
    return {split: trained if split == "train" else evaluation_windows(trained, split, rows) for split in splits}


def eval_rows(eval_microbatch_tokens: int, length: int) -> int:
    """Rows of windows in a microbatch of evaluation, as the asset and the command take them.

    >>> eval_rows(1_024, 300), eval_rows(1_024, 2_048)
    (3, 1)
    """
    return max(1, eval_microbatch_tokens // length)


def _job(
    stage: Stage,
    token_shards: DeviceInput,
    packing_plan: DeviceInput,
    settings: Mapping[str, Any],
    unfinished: Path,
) -> "TrainJob":
    """What `python -m training_io.train` makes of its options, made of the recipe."""
    from training_io.train_config import TrainConfig
    from training_io.train_job import TrainJob

    training = stage.recipe.training
    specs = stream_specs(stage, token_shards, packing_plan)
    if "train" not in specs:
        raise RecipeError(
            "varlen_training_run: expected packs of the training split, found none: no document of it is short enough."
            f" Raise packs.max_seq_len, which is {stage.recipe.packs.max_seq_len:,}, or set"
            " packs.long_documents to cut."
        )
    return TrainJob(
        spec=specs["train"],
        validation=specs.get("validation"),
        model_config=model_config(stage, vocab_size=_vocabulary(token_shards)),
        config=TrainConfig(
            steps=settings["steps"],
            learning_rate=settings["learning_rate"],
            warmup_steps=min(training.warmup_steps, settings["steps"]),  # the launchpad may shorten a run
            weight_decay=training.weight_decay,
            grad_clip=training.grad_clip,
            seed=training.seed,
            eval_every=training.eval_every,
            eval_steps=training.eval_microbatches,
            checkpoint_every=training.checkpoint_every,
            device=settings["device"] if packing_plan.device == "auto" else packing_plan.device,
            dtype=settings["dtype"],
            attention_backend=settings["attention"],
            compile=training.compile,
            num_threads=training.num_threads,
        ),
        checkpoint_dir=unfinished / CHECKPOINTS_FOLDER,
        events_dir=unfinished / EVENTS_FOLDER,
        recipe_identity=identity_of(parameters_that_matter(stage.recipe, "varlen_training_run")),
    )


def training_options(pipeline: Pipeline, plan: Path | None = None) -> list[str]:
    """Options of `python -m training_io.train` for the recipe: on the plan given, else on the latest artifact.

    RecipeError where the recipe wants several ranks, which a launcher has to start; it says how.
    """
    training = pipeline.recipe.training
    windows = training.windows if plan is None else None
    if windows is None:
        data = {"--plan": plan or pipeline.store.open(pipeline.resolve("packing_plan"))[0]}
    else:
        data = {
            "--shards": pipeline.store.open(pipeline.resolve("token_shards"))[0],
            "--window-length": windows.length,
            "--batch-size": windows.batch_size,
            "--accumulation": windows.accumulation,
            "--eval-batch-size": eval_rows(pipeline.recipe.packs.eval_microbatch_tokens, windows.length),
        }
    values = {**data, **_loop_options(training), "--output": pipeline.store.root / UNFINISHED_FOLDER / BY_HAND_FOLDER}
    flags = {
        "--document-mask": windows is not None and windows.document_mask,
        "--compile": training.compile,
    }
    options = [
        *(text for name, value in values.items() for text in (name, str(value))),
        *(name for name, is_set in flags.items() if is_set),
    ]
    if training.num_ranks > 1:
        raise RecipeError(
            f"training.num_ranks: expected 1 to train in this process, found {training.num_ranks:,}. Start the ranks"
            f" with torchrun --nproc_per_node {training.num_ranks} -m training_io.train {shlex.join(options)}"
        )
    return options


def _loop_options(training: Training) -> dict[str, Any]:
    """What is trained and how, whatever it is trained on."""
    return {
        "--model": ",".join(f"{name}={value}" for name, value in training.model.model_dump().items()),
        "--steps": training.steps,
        "--learning-rate": training.learning_rate,
        "--warmup-steps": training.warmup_steps,
        "--weight-decay": training.weight_decay,
        "--grad-clip": training.grad_clip,
        "--seed": training.seed,
        "--eval-every": training.eval_every,
        "--eval-steps": training.eval_microbatches,
        "--checkpoint-every": training.checkpoint_every,
        "--dtype": training.dtype,
        "--attention": training.attention,
        "--num-threads": training.num_threads,
    }


def _train(stage: Stage, job: "TrainJob") -> "TrainResult":
    """Train as far as it goes; a run that a signal ended is saved, and is not sealed."""
    from training_io.train_job import train_on_ranks

    def tell(progress: "Progress") -> None:
        stage.say(f"varlen_training_run {progress_line(progress)}")

    result = train_on_ranks(job, stage.recipe.training.num_ranks, tell)
    if result.is_stopped:  # Dagster's handler has raised already, where Dagster handles signals
        raise dg.DagsterExecutionInterruptedError
    return result


def _measured(stage: Stage, token_shards: DeviceInput, result: "TrainResult", unfinished: Path) -> dict[str, Any]:
    """What a run took: it differs from run to run, so it is on the page and beside its events, not in the artifact."""
    measured: dict[str, Any] = {
        "seconds_of_training": result.seconds,
        "resumed_from_step": result.resumed_from,
        **{f"{kind}_hours": hours for kind, hours in result.device_hours.items()},
    }
    if (reason := why_cpu(token_shards.device)) is not None:
        measured["device_reason"] = reason
    if not result.resumed_from:
        measured["tokens_per_second"] = result.tokens / result.seconds
        measured["hours_that_padding_would_add"] = _padding_hours(stage, token_shards, result)
    if result.tokens_per_second:
        steps, rates = zip(*result.tokens_per_second, strict=True)
        picture = line_picture("Speed of training", "step", "tokens a second", {"training": (steps, rates)})
        (unfinished / "speed.png").write_bytes(picture)
    return measured


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


def _curves(result: "TrainResult") -> dict[str, Any]:
    """Every number by step that follows from data and settings."""
    by_pool = result.validation_by_pool
    return {
        "train": list(result.losses),
        "gradient_norms": list(result.gradient_norms),
        "validation": [list(point) for point in result.validation],
        "validation_by_pool": {pool: [list(point) for point in points] for pool, points in by_pool.items()},
    }


def _counts(result: "TrainResult") -> dict[str, Any]:
    return {
        "steps": result.steps,
        "tokens": result.tokens,
        "model_parameters": result.num_parameters,
        "final_training_loss": result.losses[-1],
        **({"first_validation_loss": result.validation[0][1]} if result.validation else {}),
        **({"final_validation_loss": result.validation[-1][1]} if result.validation else {}),
        **{f"final_validation_loss_of_{pool}": points[-1][1] for pool, points in result.validation_by_pool.items()},
        **{f"{name}_positions": number for name, number in asdict(result.positions).items()},
        "attention": result.backend,
        "device": result.device,
    }


def _loss_picture(curves: Mapping[str, Any]) -> bytes:
    """Training and validation by step, and validation by pool where there are several."""
    by_pool = list(curves["validation_by_pool"].items())
    held_out = {"validation": curves["validation"]}
    if len(by_pool) > 1:
        held_out |= {f"validation, {pool}": points for pool, points in by_pool[:MAX_POOL_CURVES]}
    series = {"training": (range(1, len(curves["train"]) + 1), curves["train"])}
    series |= {name: tuple(zip(*points, strict=True)) for name, points in held_out.items() if points}
    return line_picture("Loss by step", "step", "nats a token", series)


def _norm_picture(curves: Mapping[str, Any]) -> bytes:
    norms = curves["gradient_norms"]
    series = {"norm": (range(1, len(norms) + 1), norms)}
    return line_picture("Gradient norm, before clipping", "step", "L2 norm", series)


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

"""Train from the command line: `python -m training_io.train`.

In: a plan (or shards to read as windows), a model, numbers; from torchrun's environment, which rank this is. Out:
checkpoints, losses as JSON, progress on stdout. Promise: needs numpy and torch alone, and tensorboard for --events;
without --resume nothing that is there is touched; SIGTERM ends it behind a saved step with status 0 (torchrun, which
gets it first, ends with a status of its own). An error is one line on stderr with status 1;
output that cannot be written ends as in `training_io.command_line`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from training_io.attention import BACKENDS
from training_io.checkpoint import list_checkpoints
from training_io.command_line import complain, exit_status_of, say
from training_io.document_index import read_index
from training_io.errors import CorpusmillError, RecipeError
from training_io.evaluation import evaluation_windows
from training_io.manifest import open_artifact
from training_io.model import ModelConfig
from training_io.model_presets import MODEL_PRESETS
from training_io.plan import PLAN_NAME, load_plan, splits_of
from training_io.progress import TrainResult, progress_line
from training_io.ranks import joined, ranks_of_environment
from training_io.run import Spec
from training_io.staging import resolve_device
from training_io.stream import StreamSpec, WindowSpec
from training_io.train_config import DTYPES, TrainConfig
from training_io.train_job import TrainJob, run_job

CHECKPOINTS_FOLDER, EVENTS_FOLDER = "checkpoints", "events"
_DEFAULT_VALIDATION = "validation"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status_of(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        ranks = ranks_of_environment()
        job = _job_of(parsed)
        _check_report(parsed.json)
        _refuse_lost_work(job.checkpoint_dir, parsed.resume)
        if parsed.resume and ranks.rank == 0:
            kept = list_checkpoints(job.checkpoint_dir)
            say(f"resuming from {kept[-1]}" if kept else f"no checkpoint in {job.checkpoint_dir}: starting at step 0")
        with joined(ranks, parsed.device) as device:
            config = replace(job.config, device=device)
            result = run_job(replace(job, config=config), lambda progress: say(progress_line(progress)))
        if ranks.rank == 0:
            _report(result, parsed.json)
    except CorpusmillError as error:
        complain(f"{type(error).__name__}: {error}")
        return 1
    except OSError as error:
        complain(f"{type(error).__name__}: {error}. Check the folders, their disk and permissions.")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training_io.train",
        description="Train a decoder on a packing plan, or on windows over token shards. Under torchrun each process"
        " is a rank.",
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--plan", type=Path, metavar="DIR", help="packing_plan artifact to train on")
    data.add_argument("--shards", type=Path, metavar="DIR", help="token_shards artifact to train on in windows")
    parser.add_argument("--split", default="train", help="split to train on (train)")
    parser.add_argument("--validation", metavar="SPLIT", help="split to evaluate on (validation, if there)")
    parser.add_argument("--window-length", type=int, metavar="N", help="tokens of a window's row")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows of a microbatch of windows (8)")
    parser.add_argument("--accumulation", type=int, default=1, metavar="N", help="such microbatches a step (1)")
    parser.add_argument("--eval-batch-size", type=int, metavar="N", help="rows of evaluation's (as --batch-size)")
    parser.add_argument("--document-mask", action="store_true", help="keep the documents of a window apart")
    parser.add_argument(
        "--model",
        default="tiny",
        metavar=f"{'|'.join(MODEL_PRESETS)}|FIELDS",
        help="its shape by name, or by d_model=64,num_layers=2,…, or both (tiny)",
    )
    parser.add_argument("--steps", type=int, required=True, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=3e-4, metavar="RATE", help="at its peak (3e-4)")
    parser.add_argument("--warmup-steps", type=int, default=0, metavar="N", help="steps to the peak (0)")
    parser.add_argument("--weight-decay", type=float, default=0.1, metavar="RATE", help="of matrices (0.1)")
    parser.add_argument("--grad-clip", type=float, default=1.0, metavar="NORM", help="longest gradient (1.0)")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bfloat16 on GPUs")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--attention", choices=("auto", *BACKENDS), default="auto")
    parser.add_argument("--compile", action="store_true", help="one graph for all steps, with varlen or flex")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (0)")
    parser.add_argument("--num-threads", type=int, metavar="N", help="of PyTorch on the CPU")
    parser.add_argument("--eval-every", type=int, default=100, metavar="N", help="steps (100)")
    parser.add_argument("--eval-steps", type=int, default=8, metavar="N", help="validation steps each time (8)")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="N", help="steps (100)")
    parser.add_argument("--keep-last", type=int, default=2, metavar="N", help="newest checkpoints that stay (2)")
    parser.add_argument("--progress-every", type=int, default=10, metavar="N", help="steps (10)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where checkpoints go")
    parser.add_argument("--events", action="store_true", help="write TensorBoard event files there as well")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint there, if any, to the same steps"
    )
    parser.add_argument("--branch-from", type=Path, metavar="CHECKPOINT", help="begin from another run's checkpoint")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and all else that it came to")
    return parser


def _job_of(parsed: argparse.Namespace) -> TrainJob:
    device = resolve_device(parsed.device)
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    spec, validation, shards_path, context = (_packs if parsed.shards is None else _windows)(parsed)
    return TrainJob(
        spec=spec,
        validation=validation,
        model_config=_model_config(parsed.model, shards_path, context),
        config=TrainConfig(
            steps=parsed.steps,
            learning_rate=parsed.learning_rate,
            warmup_steps=parsed.warmup_steps,
            weight_decay=parsed.weight_decay,
            grad_clip=parsed.grad_clip,
            seed=parsed.seed,
            eval_every=parsed.eval_every,
            eval_steps=parsed.eval_steps,
            checkpoint_every=parsed.checkpoint_every,
            progress_every=parsed.progress_every,
            keep_last=parsed.keep_last,
            device=parsed.device,
            dtype=automatic if parsed.dtype == "auto" else parsed.dtype,
            attention_backend=parsed.attention,
            compile=parsed.compile,
            num_threads=parsed.num_threads,
        ),
        checkpoint_dir=parsed.output / CHECKPOINTS_FOLDER,
        events_dir=parsed.output / EVENTS_FOLDER if parsed.events else None,
        branch_from=parsed.branch_from,
    )


def _packs(parsed: argparse.Namespace) -> tuple[Spec, Spec | None, Path, int]:
    """Streams of training and validation, the shards' folder, and the longest segment."""
    plan = load_plan(parsed.plan, parsed.split)
    spec = StreamSpec(plan_path=str(parsed.plan), split=parsed.split, constant_shape=parsed.compile)
    artifact = parsed.plan.absolute().parent if (parsed.plan / PLAN_NAME).is_file() else parsed.plan
    filled = [split for split in splits_of(artifact) if load_plan(artifact, split).num_packs]
    split = _validation_split(parsed.validation, filled, artifact)
    validation = None if split is None else StreamSpec(plan_path=str(artifact), split=split)
    return spec, validation, plan.shards.path, plan.max_seq_len


def _windows(parsed: argparse.Namespace) -> tuple[Spec, Spec | None, Path, int]:
    """The same of windows; a split that has a target but fills no microbatch of evaluation is refused later."""
    if parsed.window_length is None:
        raise RecipeError("--shards: expected --window-length too, found none. Give the tokens of a row.")
    spec = WindowSpec(
        shards_path=str(parsed.shards),
        batch_size=parsed.batch_size,
        max_seq_len=parsed.window_length,
        accumulation=parsed.accumulation,
        document_mask=parsed.document_mask,
        split=parsed.split,
    )
    indexes = {path.name.removesuffix("_index"): read_index(path) for path in sorted(parsed.shards.glob("*_index"))}
    filled = [split for split, index in indexes.items() if index.lengths.max(initial=0) > 1]
    split = _validation_split(parsed.validation, filled, parsed.shards)
    rows = parsed.batch_size if parsed.eval_batch_size is None else parsed.eval_batch_size
    validation = None if split is None else evaluation_windows(spec, split, rows)
    return spec, validation, parsed.shards, parsed.window_length


def _validation_split(named: str | None, filled: Sequence[str], artifact: Path) -> str | None:
    """The split to evaluate on, of those that have a target; None where nobody named one and there is no such default.

    RecipeError for a named one that is not there, or is empty: a run without an evaluation is not what was asked for.
    """
    if named is None:
        return _DEFAULT_VALIDATION if _DEFAULT_VALIDATION in filled else None
    if named not in filled:
        raise RecipeError(
            f"--validation: expected a split with targets of {artifact}, {', '.join(filled) or 'which has none'}, found"
            f" {named}. Name one of them, or none."
        )
    return named


def _model_config(described: str, shards_path: Path, context: int) -> ModelConfig:
    """A preset, fields, or both, for the shards' vocabulary and the data's longest segment unless they say."""
    counts = open_artifact(shards_path).counts
    values: dict[str, Any] = {"max_positions": context}
    if "vocab_size" in counts:
        values["vocab_size"] = counts["vocab_size"]
    types = get_type_hints(ModelConfig)
    for part in described.split(","):
        name, equals, value = part.partition("=")
        if name in MODEL_PRESETS and not equals:
            values |= MODEL_PRESETS[name]
        elif name in types and equals:
            values[name] = _parsed_as(types[name], name, value)
        else:
            raise RecipeError(
                f"--model: expected {', '.join(MODEL_PRESETS)} or name=value of {', '.join(types)}, found {part!r}."
                " Write them with commas between."
            )
    missing = [field.name for field in fields(ModelConfig) if field.name not in values and field.default is MISSING]
    if missing:
        raise RecipeError(f"--model: expected every field without a default, found no {', '.join(missing)}. Add it.")
    return ModelConfig(**values)


def _parsed_as(kind: type, name: str, value: str) -> object:
    if kind is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind is int and value.isdecimal():
        return int(value)
    if kind is str:
        return value
    expected = "true or false" if kind is bool else "a whole number"
    raise RecipeError(f"--model: expected {name} to be {expected}, found {value!r}.")


def _check_report(path: Path | None) -> None:
    """RecipeError unless a file can be there when the run has ended."""
    if path is not None and not path.absolute().parent.is_dir():
        raise RecipeError(f"--json: expected a file in a folder that is there, found {path}. Make the folder first.")


def _refuse_lost_work(checkpoint_dir: Path, is_resuming: bool) -> None:
    found = list_checkpoints(checkpoint_dir)
    if found and not is_resuming:
        raise RecipeError(
            f"{checkpoint_dir}: expected no checkpoint of an earlier run, found {found[-1].name}."
            " Give --resume to go on from it, or another --output."
        )


def _report(result: TrainResult, json_path: Path | None) -> None:
    if json_path is not None:
        text = json.dumps(asdict(result), default=str, indent=1)
        json_path.write_text(text + "\n", encoding="utf-8")
    if result.is_stopped:
        say(f"stopped at step {result.steps:,}, saved in {result.checkpoint}; --resume goes on")
    else:
        say(f"{result.steps:,} steps done: loss {result.losses[-1]:.4f}, saved in {result.checkpoint}")

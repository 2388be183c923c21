"""What checks read of a training run: its model, and the batches that the recipe makes of its plan and shards.

In: a sealed run and the plan that it trained on. Out: models and batches on the host. The promise: nothing here judges.
Cost: loading the run's checkpoint, once for all checks of a process.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline_assets.stripes import Stage
from pipeline_assets.training import CHECKPOINT_FOLDER, model_config
from resources.artifact_store import ArtifactRef
from training_io.batch import PackedBatch
from training_io.hashing import identity_of
from training_io.manifest import load_manifest
from training_io.plan import Plan, load_plan
from training_io.sampler import Sampler
from training_io.segments import offsets_of
from training_io.window_source import WindowSource
from training_io.windows import WindowLoader

if TYPE_CHECKING:
    from training_io.checkpoint import Checkpoint
    from training_io.model import Model, ModelConfig
    from training_io.stream import StepSource

MAX_TOKENS = 192  # of an experiment: enough for three segments, and a run's checks take a second or two


@contextmanager
def experiment(
    stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef
) -> "Iterator[tuple[Model, PackedBatch]]":
    """The run's model in float64 on the CPU, and an excerpt of the first batches; without a mask, rows are segments.

    A small model on one thread.
    """
    from training_io.excerpt import excerpt, together
    from training_io.model import num_parameters
    from training_io.preflight import SMALL_PARAMETERS, on_one_thread

    config = _config_of(stage, packing_plan)
    with on_one_thread() if num_parameters(config) < SMALL_PARAMETERS else nullcontext():
        model = _wide_model(stage.folder(varlen_training_run) / CHECKPOINT_FOLDER, varlen_training_run.digest, config)
        source, batches = step_source(stage, plan_of(stage, packing_plan)), list[PackedBatch]()
        while sum(len(batch.inputs) for batch in batches) < MAX_TOKENS:  # a step of a short context has two tokens
            batches += source.next_step()
        yield model, excerpt(together(batches), MAX_TOKENS)


def trained_model(stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef) -> "Model":
    """The run's model with its final weights, with the attention it was trained with where this machine has it."""
    import torch

    from training_io.model import Model

    counts = varlen_training_run.counts
    is_on_gpu = counts["device"].startswith("cuda") and torch.cuda.is_available()
    backend = counts["attention"] if is_on_gpu else "sdpa"
    model = Model(_config_of(stage, packing_plan), torch.Generator().manual_seed(0), backend=backend)
    model.load_state_dict(checkpoint_of(stage, varlen_training_run).payload["model"])
    if backend == "varlen":
        model = model.to(torch.bfloat16)  # its kernel knows half precision only
    return model.to("cuda" if is_on_gpu else "cpu").eval()


@lru_cache(maxsize=1)  # one for all checks of a run; the digest tells a run from one that was rebuilt in its place
def _wide_model(checkpoint: Path, digest: str, config: "ModelConfig") -> "Model":
    import torch

    from training_io.checkpoint import load_checkpoint
    from training_io.model import Model

    model = Model(config, torch.Generator().manual_seed(0), backend="sdpa")
    model.load_state_dict(load_checkpoint(checkpoint).payload["model"])
    return model.double()


def _config_of(stage: Stage, packing_plan: ArtifactRef) -> "ModelConfig":
    shards = plan_of(stage, packing_plan).shards
    config: ModelConfig = model_config(stage, int(load_manifest(shards.path).counts["vocab_size"]))
    return config


def checkpoint_of(stage: Stage, varlen_training_run: ArtifactRef) -> "Checkpoint":
    """The run's last checkpoint."""
    from training_io.checkpoint import load_checkpoint

    return load_checkpoint(stage.folder(varlen_training_run) / CHECKPOINT_FOLDER)


def plan_of(stage: Stage, packing_plan: ArtifactRef) -> Plan:
    """The plan of the split that is trained on."""
    return load_plan(stage.folder(packing_plan), "train", allow_quarantined=True)


def first_batch(stage: Stage, packing_plan: ArtifactRef) -> PackedBatch:
    """The first microbatch that the recipe trains on, of packs or of windows."""
    return step_source(stage, plan_of(stage, packing_plan)).next_step()[0]


def step_source(stage: Stage, plan: Plan, identity: str = "") -> "StepSource":
    """Steps as the recipe's layout has them; windows with a mask are cut at documents."""
    windows = stage.recipe.training.windows
    if windows is None:
        return Sampler(plan)
    loader = WindowLoader(
        [plan.shards.path / name for name in plan.index.shard_files], windows.batch_size, windows.length
    )
    return WindowSource(
        loader,
        identity,
        accumulation=windows.accumulation,
        rank=0,
        world_size=1,
        document_offsets=offsets_of(plan.index.lengths) if windows.document_mask else None,
    )


def stream_identity(stage: Stage, plan: Plan) -> str:
    """What a state of the recipe's steps must say it is of: the plan, or the shards with the windows' shape."""
    windows = stage.recipe.training.windows
    if windows is None:
        return plan.identity
    manifest = load_manifest(plan.shards.path)
    return identity_of(
        {
            "shards": [manifest.identity, manifest.digest],
            "split": plan.split,
            "windows": [windows.batch_size, windows.length, windows.accumulation],
            **({"document_mask": True} if windows.document_mask else {}),
        }
    )


def inputs_of_step(stage: Stage, plan: Plan, number: int) -> np.ndarray[Any, Any]:
    """Inputs of a step of the run, counted from 0, taken from the shards without the sampler."""
    windows = stage.recipe.training.windows
    if windows is not None:
        size = windows.batch_size * windows.length
        num_batches = (plan.index.num_tokens - 1) // size
        firsts = [(number * windows.accumulation + i) % num_batches * size for i in range(windows.accumulation)]
        return np.concatenate([_tokens(plan, first, first + size) for first in firsts])
    epoch, step = divmod(number, plan.num_steps)
    documents = offsets_of(plan.index.lengths)
    inputs = []
    for pack in plan.step_packs(epoch, step).tolist():
        segments = plan.order[plan.pack_offsets[pack] : plan.pack_offsets[pack + 1]]
        for doc, start, end in zip(*plan.locate(segments), strict=True):
            inputs.append(_tokens(plan, documents[doc] + start, documents[doc] + end))
    return np.concatenate(inputs)


def _tokens(plan: Plan, start: int, end: int) -> np.ndarray[Any, Any]:
    """Tokens [start, end) of the split's shards read as one stream."""
    parts, first = [], 0
    for shard in plan.token_shards:
        parts.append(shard[max(start - first, 0) : max(end - first, 0)])
        first += len(shard)
    return np.concatenate(parts)

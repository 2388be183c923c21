"""The one door between Dagster and the device: an input manager that hands a downstream asset a stream, not a table.

In: the reference of a sealed token_shards or packing_plan artifact. Out: a small picklable description of it, of the
device and of how far to read ahead, from which each rank opens its own stream. Where there is no GPU the same
description opens plain CPU tensors. torch is not imported here: the code location loads this module.
"""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import dagster as dg
from pydantic import Field, model_validator

from training_io.errors import RecipeError

DEVICES = "auto|cpu|cuda(:[0-9]{1,3})?"
DTYPES = ("auto", "float32", "bfloat16")
CONFIG_PATH = "resources.gpu_io_manager.config."  # of these settings in a run's configuration
GPUS_OF_THE_DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU, whatever a process may see of them
MAX_PREFETCH_DEPTH = 16
DEFAULT_PREFETCH_DEPTH = 3
DEVICE_IN_WORDS = (
    "Where to train: auto (the GPU where there is one, else the CPU), cpu, cuda or cuda:<number>. Default: auto."
)
DTYPE_IN_WORDS = f"What to compute in: {', '.join(DTYPES)}; auto is the recipe's training.dtype. Default: auto."
PREFETCH_IN_WORDS = (
    f"How many steps are staged ahead of the one that trains: 1 to {MAX_PREFETCH_DEPTH}; more costs memory."
    f" Default: {DEFAULT_PREFETCH_DEPTH}."
)


class SealedArtifact(Protocol):
    """What is needed of a reference."""

    @property
    def asset(self) -> str:
        """The asset that made it."""

    @property
    def identity(self) -> str:
        """SHA-256 of what went into it."""

    @property
    def digest(self) -> str:
        """SHA-256 of its content."""

    @property
    def lineage(self) -> Mapping[str, str]:
        """Content digest of every asset that it comes from."""


class ArtifactFinder(Protocol):
    """Who knows which artifact a run is to read."""

    def find(self, context: dg.InputContext) -> tuple[SealedArtifact, Path]:
        """The upstream artifact and its folder, verified to be sealed and not quarantined."""


@dataclass(frozen=True, kw_only=True)
class DeviceInput:
    """An artifact to stream from, the device to stream to, what to compute in there, and how many steps to stage ahead.

    A dtype of `auto` leaves it to the recipe.
    """

    asset: str
    identity: str
    digest: str
    lineage: Mapping[str, str]
    folder: Path
    device: str
    dtype: str
    prefetch_depth: int


def without_empty(values: Any) -> Any:
    """Settings without those that were left empty: where there is a default Dagster admits null, and pydantic not."""
    return {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values


class GpuIOManager(dg.ConfigurableIOManager):
    """Gives `varlen_training_run` its token shards and its packing plan as streams on a device."""

    device: str = Field(default="auto", description=DEVICE_IN_WORDS)
    dtype: str = Field(default="auto", description=DTYPE_IN_WORDS)
    prefetch_depth: int = Field(default=DEFAULT_PREFETCH_DEPTH, description=PREFETCH_IN_WORDS)
    references: dg.ResourceDependency[dg.IOManager]
    _empty_is_default = model_validator(mode="before")(without_empty)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Nothing is ever written through it."""
        raise dg.DagsterInvariantViolationError(
            f"gpu_io_manager only loads inputs; give {context.asset_key.to_user_string()} another io_manager_key."
        )

    def load_input(self, context: dg.InputContext) -> DeviceInput:
        """The upstream artifact as a stream on the configured device; a failure for impossible settings.

        A device that is not here is refused before anything is looked up.
        """
        try:
            if wrong := wrong_settings(self.device, self.dtype, self.prefetch_depth):
                raise RecipeError(" ".join(wrong))
            reason = why_cpu(self.device)
        except RecipeError as error:
            raise dg.Failure(description=f"{type(error).__name__}: {error}", allow_retries=False) from error
        if reason is not None:
            context.log.info(f"gpu_io_manager: {reason}")
        finder: ArtifactFinder = self.references  # type: ignore[assignment] # any IO manager that can find
        artifact, folder = finder.find(context)
        return DeviceInput(
            asset=artifact.asset,
            identity=artifact.identity,
            digest=artifact.digest,
            lineage=artifact.lineage,
            folder=folder,
            device=self.device,
            dtype=self.dtype,
            prefetch_depth=self.prefetch_depth,
        )


def wrong_settings(device: str, dtype: str, prefetch_depth: int, path: str = CONFIG_PATH) -> list[str]:
    """A sentence for each setting that no machine could follow; whether the device is here is not asked.

    `path` is what stands before a setting's name in the run's configuration.
    """
    depths = f"1 to {MAX_PREFETCH_DEPTH} steps"
    settings = (
        ("device", device, re.fullmatch(DEVICES, device), "auto, cpu, cuda or cuda:<number>"),
        ("dtype", dtype, dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        ("prefetch_depth", prefetch_depth, 1 <= prefetch_depth <= MAX_PREFETCH_DEPTH, depths),
    )
    return [
        f"{path}{name}: expected {expected}, found {value!r}. Correct {name} in the run's configuration."
        for name, value, is_possible, expected in settings
        if not is_possible
    ]


def absent_device(device: str, path: str) -> list[str]:
    """A sentence for a well-formed device that is surely not on this machine, as far as is known without torch.

    Nothing is said where only torch knows: of a driver that lists no GPUs (AMD's, or within WSL), and of GPUs that the
    driver has and CUDA_VISIBLE_DEVICES hides.
    """
    kind, _, number = device.partition(":")
    num_gpus = _most_gpus()
    if kind != "cuda" or num_gpus is None or int(number or 0) < num_gpus:
        return []
    has = f"{num_gpus:,}, counted from cuda:0" if num_gpus else "none"
    return [
        f"{path}device: expected auto, cpu or a GPU of this machine, which has {has},"
        f" found {device!r}. Correct device in the run's configuration."
    ]


def _most_gpus() -> int | None:
    """How many GPUs this machine has at most, None where only torch could say."""
    if not may_have_gpu():
        return 0
    try:
        return len(list(GPUS_OF_THE_DRIVER.iterdir()))
    except OSError:  # a driver that has no such folder, or one that may not be read
        return None


def device_type(device: str) -> str:
    """What a device setting stands for here, "cpu" or "cuda"; RecipeError for a device that is not here.

    torch takes two seconds to load and is asked only where it could find a GPU.
    """
    if device == "cpu" or (device == "auto" and not may_have_gpu()):
        return "cpu"
    from training_io.staging import resolve_device

    return resolve_device(device).type


def why_cpu(device: str) -> str | None:
    """Why a device setting means the CPU here, in a sentence; None where it means a GPU. Errors are device_type()'s."""
    if device_type(device) != "cpu":
        return None
    if device == "cpu":
        return "training on the CPU, since device is cpu."
    if not may_have_gpu():
        return "training on the CPU: no GPU driver was found on this machine."
    return "training on the CPU: a GPU driver was found, but torch sees no device that it can use."


def may_have_gpu() -> bool:
    """Whether a GPU's driver is here: NVIDIA's library, or AMD's device file (torch calls both "cuda")."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True

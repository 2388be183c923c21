"""The one door between Dagster and the device: an input manager that hands a downstream asset a stream, not a table.

In: the reference of a sealed token_shards or packing_plan artifact. Out: a small picklable description of it, of the
device and of how far to read ahead, from which each rank opens its own stream. Where there is no GPU the same
description opens plain CPU tensors. torch is not imported here: the code location loads this module.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import dagster as dg

from training_io.errors import RecipeError

DEVICES = ("auto", "cpu", "cuda")


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
    """An artifact to stream from, the device to stream to, and how many steps to stage ahead."""

    asset: str
    identity: str
    digest: str
    lineage: Mapping[str, str]
    folder: Path
    device: str
    prefetch_depth: int


class GpuIOManager(dg.ConfigurableIOManager):
    """Gives `varlen_training_run` its token shards and its packing plan as streams on a device.

    `device` is auto (the GPU where there is one), cpu or cuda; `prefetch_depth` is 1 to 16 steps.
    """

    device: str = "auto"
    prefetch_depth: int = 3
    references: dg.ResourceDependency[dg.IOManager]

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Nothing is ever written through it."""
        raise dg.DagsterInvariantViolationError(
            f"gpu_io_manager only loads inputs; give {context.asset_key.to_user_string()} another io_manager_key."
        )

    def load_input(self, context: dg.InputContext) -> DeviceInput:
        """The upstream artifact as a stream on the configured device; RecipeError for impossible settings."""
        if self.device not in DEVICES:
            raise RecipeError(f"gpu_io_manager.device: expected one of {', '.join(DEVICES)}, found {self.device!r}.")
        if not 1 <= self.prefetch_depth <= 16:
            raise RecipeError(f"gpu_io_manager.prefetch_depth: expected 1 to 16, found {self.prefetch_depth:,}.")
        finder: ArtifactFinder = self.references  # type: ignore[assignment] # any IO manager that can find
        artifact, folder = finder.find(context)
        return DeviceInput(
            asset=artifact.asset,
            identity=artifact.identity,
            digest=artifact.digest,
            lineage=artifact.lineage,
            folder=folder,
            device=self.device,
            prefetch_depth=self.prefetch_depth,
        )


def device_type(device: str) -> str:
    """What a device setting stands for here, "cpu" or "cuda"; RecipeError for a device that is not here.

    torch takes two seconds to load and is asked only where it could find a GPU.
    """
    if device == "cpu" or (device == "auto" and not may_have_gpu()):
        return "cpu"
    from training_io.staging import resolve_device

    return resolve_device(device).type


def may_have_gpu() -> bool:
    """Whether a GPU's driver is here: NVIDIA's library, or AMD's device file (torch calls both "cuda")."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True

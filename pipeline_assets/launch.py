"""What a person may set when a run is launched, within which limits, and what a wrong value is answered with.

The job `train` refuses a wrong value when it is launched, before there is a run. Where the same values are set as an
asset's configuration, Dagster starts the run first, and the training step fails with the same sentence.
"""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field, model_validator

from training_io.gpu_io_manager import (
    DEFAULT_PREFETCH_DEPTH,
    DEVICE_IN_WORDS,
    DTYPE_IN_WORDS,
    PREFETCH_IN_WORDS,
    without_empty,
    wrong_settings,
)
from training_io.limits import MAX_STEPS

MAX_LEARNING_RATE = 1.0
STEPS_IN_WORDS = (
    f"Optimizer steps to train for: 1 to {MAX_STEPS:,}. Default: 0, which keeps the recipe's training.steps."
)
RATE_IN_WORDS = (
    f"Peak of the learning rate: above 0, at most {MAX_LEARNING_RATE:g}. Default: 0, which keeps the recipe's"
    " training.learning_rate."
)


class TrainingOverrides(dg.Config):
    """Values for this run alone; 0 keeps the recipe's."""

    # Not None: the launchpad leaves what has no other default out of what it offers to edit.
    steps: int = Field(default=0, description=STEPS_IN_WORDS)
    learning_rate: float = Field(default=0.0, description=RATE_IN_WORDS)
    _empty_is_default = model_validator(mode="before")(without_empty)

    # `wrong_overrides` has the limits: pydantic's would be a failure of Dagster's machinery, in pydantic's words.


class TrainChoices(dg.Config):
    """What the job `train` may be launched with: values for this run, and where it computes."""

    steps: int = Field(default=0, description=STEPS_IN_WORDS)
    learning_rate: float = Field(default=0.0, description=RATE_IN_WORDS)
    device: str = Field(default="auto", description=DEVICE_IN_WORDS)
    dtype: str = Field(default="auto", description=DTYPE_IN_WORDS)
    prefetch_depth: int = Field(default=DEFAULT_PREFETCH_DEPTH, description=PREFETCH_IN_WORDS)
    _empty_is_default = model_validator(mode="before")(without_empty)


def wrong_overrides(steps: int, learning_rate: float) -> list[str]:
    """A sentence for each number that is neither 0 nor within its limits.

    A truth value is none: Python counts with it, so that `true` would be a learning rate of 1.

    >>> wrong_overrides(steps=0, learning_rate=0.5)
    []
    """
    wrong = []
    if isinstance(steps, bool) or not 0 <= steps <= MAX_STEPS:
        wrong.append(
            f"steps: expected 1 to {MAX_STEPS:,}, or 0 for the recipe's, found {_as_typed(steps)}."
            " Correct steps in the run's configuration."
        )
    if isinstance(learning_rate, bool) or not 0 <= learning_rate <= MAX_LEARNING_RATE:  # neither is NaN
        wrong.append(
            f"learning_rate: expected above 0 and at most {MAX_LEARNING_RATE:g}, or 0 for the recipe's, found"
            f" {_as_typed(learning_rate)}. Correct learning_rate in the run's configuration."
        )
    return wrong


def _as_typed(value: float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _refuse(wrong: list[str]) -> None:
    if wrong:  # Dagster shows its own errors as they are, and wraps all others in words of its own
        raise dg.DagsterInvalidDefinitionError(" ".join(wrong)) from None


@dg.config_mapping(config_schema=TrainChoices.to_fields_dict(), receive_processed_config_values=False)
def train_config(values: Mapping[str, Any]) -> Any:
    """The training step's and the GPU IO manager's configuration; refused at launch where a value cannot be.

    Dagster takes true for a number, and gives a mapping that asks for processed values a 1.0 in its place.
    """
    if isinstance(rate := values["learning_rate"], bool):
        _refuse(wrong_overrides(0, rate))
    return _chosen_config.resolve_from_unvalidated_config(values)


@dg.config_mapping
def _chosen_config(choices: TrainChoices) -> dg.RunConfig:
    _refuse(
        [
            *wrong_overrides(choices.steps, choices.learning_rate),
            *wrong_settings(choices.device, choices.dtype, choices.prefetch_depth),
        ]
    )
    overrides = TrainingOverrides(steps=choices.steps, learning_rate=choices.learning_rate)
    settings = {"device": choices.device, "dtype": choices.dtype, "prefetch_depth": choices.prefetch_depth}
    return dg.RunConfig(ops={"varlen_training_run": overrides}, resources={"gpu_io_manager": {"config": settings}})

"""What a person may set when a run is launched, within which limits, and what a wrong value is answered with.

The job `train` refuses a wrong value when it is launched, before there is a run, and a GPU that the launching machine,
which is the one that trains, surely has not. Where the same values are set as an asset's configuration, Dagster starts
the run first, and the training step fails with the same sentence.
"""

import dagster as dg
from pydantic import Field, model_validator

from training_io.gpu_io_manager import (
    DEFAULT_PREFETCH_DEPTH,
    DEVICE_IN_WORDS,
    DTYPE_IN_WORDS,
    PREFETCH_IN_WORDS,
    absent_device,
    without_empty,
    wrong_settings,
)
from training_io.limits import MAX_STEPS

CONFIG_PATH = "ops.varlen_training_run.config."  # of the overrides in a run's configuration
LEARNING_RATE_LIMIT = 1.0  # not reached: Dagster makes a `true` of the launchpad 1.0
STEPS_IN_WORDS = (
    f"Optimizer steps to train for: 1 to {MAX_STEPS:,}. Default: 0, which keeps the recipe's training.steps."
)
RATE_IN_WORDS = (
    f"Peak of the learning rate: above 0 and below {LEARNING_RATE_LIMIT:g}. Default: 0, which keeps the recipe's"
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


def wrong_overrides(steps: int, learning_rate: float, path: str = CONFIG_PATH) -> list[str]:
    """A sentence for each number that is neither 0 nor within its limits.

    `path` is what stands before a number's name in the run's configuration.

    >>> wrong_overrides(steps=0, learning_rate=0.5)
    []
    """
    wrong = []
    if not 0 <= steps <= MAX_STEPS:
        wrong.append(
            f"{path}steps: expected 1 to {MAX_STEPS:,}, or 0 for the recipe's, found {steps:,}."
            " Correct steps in the run's configuration."
        )
    if not 0 <= learning_rate < LEARNING_RATE_LIMIT:  # neither is NaN
        wrong.append(
            f"{path}learning_rate: expected above 0 and below {LEARNING_RATE_LIMIT:g}, or 0 for the recipe's, found"
            f" {learning_rate}. Correct learning_rate in the run's configuration."
        )
    return wrong


@dg.config_mapping
def train_config(choices: TrainChoices) -> dg.RunConfig:
    """The training step's and the GPU IO manager's configuration; refused at launch where a value cannot be."""
    wrong = [
        *wrong_overrides(choices.steps, choices.learning_rate, path=""),
        *wrong_settings(choices.device, choices.dtype, choices.prefetch_depth, path=""),
    ]
    wrong = wrong or absent_device(choices.device, path="")
    if wrong:  # Dagster shows its own errors as they are, and wraps all others in words of its own
        raise dg.DagsterInvalidDefinitionError(" ".join(wrong)) from None
    overrides = TrainingOverrides(steps=choices.steps, learning_rate=choices.learning_rate)
    settings = {"device": choices.device, "dtype": choices.dtype, "prefetch_depth": choices.prefetch_depth}
    return dg.RunConfig(ops={"varlen_training_run": overrides}, resources={"gpu_io_manager": {"config": settings}})

"""The loss of a flat batch: a sum, and the count that somebody divides by later.

A mean per microbatch, document or rank weighs tokens unequally as soon as these differ in size, so nothing here
divides. The denominator of a step is the number of its real targets over all microbatches and ranks, known from the
plan before the step begins.

Shape letters: T tokens, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from training_io.batch import IGNORED


def sum_cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, int]:
    """Sum of -log softmax(logits)[target] over the targets that are not IGNORED, in nats, and how many these are.

    The count waits for the device; a batch knows it without (its num_targets).
    """
    return summed_cross_entropy(logits_TV, targets_T), int((targets_T != IGNORED).sum())


def summed_cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """The sum alone: a scalar in float32, or in float64 for float64 logits.

    No targets, and none that is not IGNORED, give a zero that is still in the graph.
    """
    wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return cross_entropy(wide_TV, targets_T, ignore_index=IGNORED, reduction="sum")

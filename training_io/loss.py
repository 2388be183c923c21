"""The loss of a flat batch: a sum, and the count that somebody divides by later.

A mean per microbatch, document or rank weighs tokens unequally as soon as these differ in size, so nothing here
divides. The denominator of a step is the number of its real targets over all microbatches and ranks, known from the
plan before the step begins.

Shape letters: T tokens, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def sum_cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, int]:
    """Sum of -log softmax(logits)[target] over the tokens, in nats, and how many there are.

    The sum is a scalar in float32, or in float64 for float64 logits; no tokens give a zero that is still in the graph.
    """
    wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return cross_entropy(wide_TV, targets_T, reduction="sum"), len(targets_T)

"""Is attention right on this device? What benchmarks/gpu.py settles before it times anything.

In: a device, a dtype, attention backends. Out: verdicts with the number found and its limit. Parity: outputs and
gradients in the dtype against the plain formula in float64, on the same rounded inputs. Finite: segments of one token.
Isolation: poking one segment leaves every other segment's outputs as they were, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from training_io.attention import attend

LENGTHS = (1, 700, 1, 129, 128, 64, 1, 1_025)  # across tiles, at their edges, and of one token
NUM_HEADS, NUM_KV_HEADS, HEAD_WIDTH = 4, 2, 64

# Of the largest magnitude. bfloat16 rounds by 2^-9; a forward pass rounds weights and outputs, a backward pass also the
# weights' gradients, and sums group heads. A token that sees another segment is off by a tenth and more.
OUTPUT_LIMIT = 2.0**-6
GRADIENT_LIMIT = 2.0**-5


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One question about one backend: passed where found is at most limit (NaN is not)."""

    name: str
    backend: str
    found: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether found is within the limit."""
        return self.found <= self.limit


def verdicts_of(backends: Sequence[str], device: torch.device, dtype: torch.dtype) -> list[Verdict]:
    """All verdicts, backend by backend."""
    return [verdict for backend in backends for verdict in _verdicts(backend, device, dtype)]


def _verdicts(backend: str, device: torch.device, dtype: torch.dtype) -> list[Verdict]:
    tensors = heads(LENGTHS, device, dtype)
    found = outputs_and_gradients(tensors, LENGTHS, backend)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = outputs_and_gradients(wide, LENGTHS, "sdpa", exact=True)
    errors = [relative_error(ours, reference) for ours, reference in zip(found, expected, strict=True)]
    ones = (1,) * 64
    alone = outputs_and_gradients(heads(ones, device, dtype), ones, backend)
    return [
        Verdict(name="parity of outputs", backend=backend, found=errors[0], limit=OUTPUT_LIMIT),
        Verdict(name="parity of gradients", backend=backend, found=max(errors[1:]), limit=GRADIENT_LIMIT),
        Verdict(name="one-token segments, numbers not finite", backend=backend, found=num_not_finite(alone), limit=0),
        Verdict(
            name="isolation, outputs changed elsewhere", backend=backend, found=num_leaks(backend, tensors), limit=0
        ),
    ]


def heads(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of segments, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), num, HEAD_WIDTH) for num in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor.to(device, dtype).requires_grad_() for tensor in drawn]


def outputs_and_gradients(
    tensors: Sequence[Tensor], lengths: Sequence[int], backend: str, *, exact: bool = False
) -> list[Tensor]:
    """Attention inside the segments, and the three gradients of a fixed weighted sum of it."""
    q, k, v = tensors
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
    out = attend(q, k, v, cu_seqlens, max(lengths), backend, exact=exact)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].device, torch.bfloat16)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], weights.to(out.dtype))]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def num_not_finite(tensors: Sequence[Tensor]) -> int:
    """Numbers that are NaN or infinite."""
    return sum(int((~tensor.isfinite()).sum()) for tensor in tensors)


@torch.no_grad()
def num_leaks(backend: str, tensors: Sequence[Tensor]) -> int:
    """Outputs outside the second segment that differ after its queries, keys and values were changed.

    That the change shows inside the segment is asserted: a poke that nobody feels proves nothing.
    """
    start, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    cu_seqlens = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=tensors[0].device)
    before = attend(*tensors, cu_seqlens, max(LENGTHS), backend)
    poked = [tensor.clone() for tensor in tensors]
    for tensor in poked:
        tensor[start:end] += 1
    is_other = attend(*poked, cu_seqlens, max(LENGTHS), backend) != before
    assert bool(is_other[start:end].any()), backend
    return int(is_other.sum() - is_other[start:end].sum())

"""Causal attention inside each segment of a flat batch, by one of three backends.

In: queries, keys and values of all tokens of a microbatch, one row a token, and the segments' boundaries. Out: one row
a token. Promise: no token sees another segment or a later token; the backends agree within rounding. Cost: the sum of
the squared segment lengths; no backend here builds a mask of T x T tokens.

Shape letters: T tokens, S segments, L tokens of a segment, N query heads, H head width. Keys and values may have fewer
heads; query heads are then a multiple of them (grouped-query attention).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from training_io.errors import RecipeError

BLOCK_TOKENS = 128  # FlexAttention's tile: its kernels skip whole tiles

_HALF = (torch.bfloat16, torch.float16)


def attend(
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    backend: str = "auto",
    *,
    exact: bool = False,
) -> Tensor:
    """Softmax(q k^T / sqrt(H)) v, causal and inside each segment: [T, N, H] -> [T, N, H].

    cu_seqlens is int32[S + 1] on the tensors' device, from 0 to T, and may repeat its end; max_seqlen its longest step,
    or a longer one, a Python int, so that the CPU never waits for the device to learn it. With `exact` sdpa computes by
    PyTorch's plain formula and no fused kernel. RecipeError for a backend that is unknown or cannot run here, and for
    `exact` with another than sdpa.
    """
    if q_TNH.shape[1] % k_TNH.shape[1]:
        raise RecipeError(
            f"attention heads: expected query heads in a multiple of key heads, found {q_TNH.shape[1]:,} and"
            f" {k_TNH.shape[1]:,}. Change num_heads or num_kv_heads."
        )
    check_backend(backend)
    if backend == "auto":
        backend = "sdpa" if exact else choose_backend(q_TNH.device, q_TNH.dtype)
    if exact and backend != "sdpa":
        raise RecipeError(
            f"exact attention: expected backend sdpa (the others have fused kernels alone), found {backend}."
            " Choose sdpa, or do without exact."
        )
    if not len(q_TNH):  # kernels refuse it; the sums keep all three in the graph, so that their weights get a gradient
        return q_TNH + k_TNH.sum() + v_TNH.sum()
    if not exact:
        return BACKENDS[backend](q_TNH, k_TNH, v_TNH, cu_seqlens, max_seqlen)
    with sdpa_kernel(SDPBackend.MATH):
        return attend_sdpa(q_TNH, k_TNH, v_TNH, cu_seqlens, max_seqlen)


def choose_backend(device: torch.device, dtype: torch.dtype) -> str:
    """What `auto` means: varlen on CUDA in half precision (its kernel knows no other), else sdpa."""
    return "varlen" if device.type == "cuda" and dtype in _HALF else "sdpa"


def check_device(backend: str, device: torch.device) -> None:
    """RecipeError unless a backend of BACKENDS can train on the device."""
    if device.type == "cuda" or backend == "sdpa":
        return
    # somebody may have registered a kernel for the CPU
    if backend == "varlen" and torch._C._dispatch_has_kernel_for_dispatch_key("torch_attn::_varlen_attn", "CPU"):
        return
    raise RecipeError(
        f"attention backend {backend}: expected CUDA for training (PyTorch has no such kernel elsewhere), found"
        f" {device}. Choose sdpa."
    )


def check_backend(backend: str) -> None:
    """RecipeError unless the backend is `auto` or one of BACKENDS."""
    known = ("auto", *BACKENDS)
    if backend not in known:
        raise RecipeError(
            f"attention backend: expected one of {', '.join(known)}, found {backend!r}. Change the recipe."
        )


def attend_sdpa(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """The reference: scaled-dot-product attention on one segment after another; any device, any float dtype.

    Segments of one length, as rows of windows are, go through one call.
    """
    lengths = [length for length in cu_seqlens.diff().tolist() if length]  # a constant shape ends in empty ones
    is_grouped = q_TNH.shape[1] != k_TNH.shape[1]
    if len(set(lengths)) == 1:
        q_SNLH, k_SNLH, v_SNLH = (
            x_TNH.reshape(len(lengths), -1, *x_TNH.shape[1:]).transpose(1, 2) for x_TNH in (q_TNH, k_TNH, v_TNH)
        )
        out_SNLH = scaled_dot_product_attention(q_SNLH, k_SNLH, v_SNLH, is_causal=True, enable_gqa=is_grouped)
        return out_SNLH.transpose(1, 2).flatten(0, 1)
    # split, not slices: a slice's gradient is as long as the whole batch, so S slices would cost S x T
    q_segments, k_segments, v_segments = (torch.split(x_TNH, lengths) for x_TNH in (q_TNH, k_TNH, v_TNH))
    outputs = [
        scaled_dot_product_attention(
            _heads_first(q), _heads_first(k), _heads_first(v), is_causal=True, enable_gqa=is_grouped
        )
        for q, k, v in zip(q_segments, k_segments, v_segments, strict=True)
    ]
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)


def attend_varlen(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """PyTorch's variable-length kernel (Flash Attention) with a causal window."""
    if q_TNH.is_cuda and q_TNH.dtype not in _HALF:
        raise RecipeError(
            f"attention backend varlen: expected bfloat16 or float16 on {q_TNH.device}, found {q_TNH.dtype}."
            " Train in bfloat16 or choose flex or sdpa."
        )
    out_TNH = varlen_attn(
        q_TNH,
        k_TNH,
        v_TNH,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        window_size=(-1, 0),
        enable_gqa=q_TNH.shape[1] != k_TNH.shape[1],
    )
    assert isinstance(out_TNH, Tensor)
    return out_TNH


def attend_flex(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """FlexAttention with a BlockMask made from the boundaries; compiled on CUDA, forward only on the CPU."""
    if not q_TNH.is_cuda and torch.is_grad_enabled() and any(x.requires_grad for x in (q_TNH, k_TNH, v_TNH)):
        check_device("flex", q_TNH.device)
    out_1NTH = _flex_on(q_TNH.device.type)(
        _heads_first(q_TNH),
        _heads_first(k_TNH),
        _heads_first(v_TNH),
        block_mask=segment_block_mask(cu_seqlens, len(q_TNH)),
        enable_gqa=q_TNH.shape[1] != k_TNH.shape[1],
    )
    assert isinstance(out_1NTH, Tensor)
    return out_1NTH.squeeze(0).transpose(0, 1)


def segment_block_mask(cu_seqlens: Tensor, num_tokens: int) -> BlockMask:
    """Which tiles of BLOCK_TOKENS x BLOCK_TOKENS hold an allowed pair, and which hold nothing else.

    Segments are contiguous, so a row of tiles needs the tiles from its first token's segment start up to the diagonal;
    those that begin at or after its last token's segment start, and before the diagonal, are full. Memory and work are
    T + (T / BLOCK_TOKENS)^2, never T^2; nothing waits for the device.
    """
    device = cu_seqlens.device
    starts_T = segment_starts(cu_seqlens, num_tokens)
    row_start = torch.arange(0, num_tokens, BLOCK_TOKENS, device=device)
    row_last = (row_start + BLOCK_TOKENS - 1).clamp(max=num_tokens - 1)
    row = torch.arange(len(row_start), device=device)
    first = starts_T[row_start] // BLOCK_TOKENS
    full_first = ((starts_T[row_last] + BLOCK_TOKENS - 1) // BLOCK_TOKENS).minimum(row)
    num_left = full_first - first  # partial tiles left of the full ones; the diagonal is one more
    partial = torch.where(row < num_left[:, None], first[:, None] + row, row[:, None])
    full = (full_first[:, None] + row).clamp(max=len(row) - 1)

    def allowed(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return (k_index <= q_index) & (k_index >= starts_T[q_index])

    return BlockMask.from_kv_blocks(
        (num_left + 1).int()[None, None],
        partial.int()[None, None],
        (row - full_first).int()[None, None],
        full.int()[None, None],
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=allowed,
        seq_lengths=(num_tokens, num_tokens),
    )


def segment_starts(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """First token of each token's own segment: int32[S + 1] -> int64[T]."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    segment_T = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    return cu_seqlens[segment_T].long()


BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]] = {
    "varlen": attend_varlen,
    "flex": attend_flex,
    "sdpa": attend_sdpa,
}


def _heads_first(x_TNH: Tensor) -> Tensor:
    return x_TNH.transpose(0, 1).unsqueeze(0)


def _flex_on(device_type: str) -> Callable[..., Any]:
    if device_type == "cuda" and not torch.compiler.is_compiling():
        return _compiled_flex()
    return flex_attention  # a model that is compiled whole compiles it too


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    # dynamic: the number of tokens differs from batch to batch and must not compile anew each time
    return torch.compile(flex_attention, dynamic=True)

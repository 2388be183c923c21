"""A compact decoder that reads flat batches.

In: token ids and positions of all segments of a microbatch, one row a token, with the segments' boundaries. Out: one
row of logits a token. Promise: a segment's logits do not depend on what else is in the batch; the weights depend on the
configuration and the generator alone, and PyTorch's global generator is neither read nor moved.

Shape letters: T tokens, D model width, N heads, H head width, F feed-forward width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from training_io.attention import attend, check_backend
from training_io.errors import RecipeError
from training_io.limits import MAX_LAYERS, MAX_WIDTH
from training_io.model_presets import MODEL_PRESETS

INIT_STD = 0.02  # GPT-2
ROTARY_BASE = 10_000.0  # RoFormer
NORM_EPS = 1e-5
NORMS = ("rmsnorm", "layernorm")
_MOST = {
    "vocab_size": 2**32,
    "d_model": MAX_WIDTH,
    "num_layers": MAX_LAYERS,
    "num_heads": MAX_WIDTH,
    "num_kv_heads": MAX_WIDTH,
    "d_ff": MAX_WIDTH,
}
POSITIONS = ("rotary", "learned")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the decoder; all of it belongs to a checkpoint's identity.

    `max_positions` is the length of the learned position table; rotary positions have none and no limit. A context of
    one token predicts without reading any other, so two is the least.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    d_ff: int
    max_positions: int
    norm: str = "rmsnorm"
    positions: str = "rotary"
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        """RecipeError for a shape that cannot be built."""
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise RecipeError(f"model.{name}: expected 1 to {most:,}, found {getattr(self, name):,}.")
        if self.max_positions < 2:
            raise RecipeError(f"model.max_positions: expected at least 2, found {self.max_positions:,}.")
        _check_multiple("d_model", self.d_model, "num_heads", self.num_heads)
        _check_multiple("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        _check_choice("norm", self.norm, NORMS)
        _check_choice("positions", self.positions, POSITIONS)
        if self.positions == "rotary" and self.head_width % 2:
            raise RecipeError(
                f"model: expected an even d_model / num_heads (rotary positions turn pairs of numbers), found"
                f" {self.d_model:,} / {self.num_heads:,} = {self.head_width:,}. Change one, or use learned positions."
            )

    @property
    def head_width(self) -> int:
        """Numbers in one head's query."""
        return self.d_model // self.num_heads


def preset(name: str, vocab_size: int, max_positions: int) -> ModelConfig:
    """The configuration of a named shape, for a vocabulary and a longest segment; RecipeError for an unknown name.

    >>> num_parameters(preset("124m", vocab_size=50_257, max_positions=1_024))
    123551232
    """
    _check_choice("preset", name, tuple(MODEL_PRESETS))
    shape = MODEL_PRESETS[name]
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=shape["d_model"],
        num_layers=shape["num_layers"],
        num_heads=shape["num_heads"],
        num_kv_heads=shape["num_kv_heads"],
        d_ff=shape["d_ff"],
        max_positions=max_positions,
    )


class Attention(nn.Module):
    """Grouped-query self-attention inside each segment."""

    def __init__(self, config: ModelConfig, backend: str, exact: bool) -> None:
        super().__init__()
        kv_width = config.num_kv_heads * config.head_width
        self.head_width = config.head_width
        self.backend = backend
        self.exact = exact
        self.query = nn.Linear(config.d_model, config.d_model, bias=False)
        self.key = nn.Linear(config.d_model, kv_width, bias=False)
        self.value = nn.Linear(config.d_model, kv_width, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_TD: Tensor, rotation: tuple[Tensor, Tensor] | None, cu_seqlens: Tensor, longest: int) -> Tensor:
        """[T, D] -> [T, D]."""
        q_TNH, k_TNH, v_TNH = (
            project(x_TD).unflatten(1, (-1, self.head_width)) for project in (self.query, self.key, self.value)
        )
        if rotation is not None:
            q_TNH, k_TNH = rotate(q_TNH, *rotation), rotate(k_TNH, *rotation)
        x_TNH = attend(q_TNH, k_TNH, v_TNH, cu_seqlens, longest, self.backend, exact=self.exact)
        out: Tensor = self.out(x_TNH.flatten(1))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, GLU Variants Improve Transformer)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        out: Tensor = self.down(functional.silu(self.gate(x_TD)) * self.up(x_TD))
        return out


class Block(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig, backend: str, exact: bool) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, backend, exact)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = SwiGLU(config)

    def forward(self, x_TD: Tensor, rotation: tuple[Tensor, Tensor] | None, cu_seqlens: Tensor, longest: int) -> Tensor:
        """[T, D] -> [T, D]."""
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), rotation, cu_seqlens, longest)
        out: Tensor = x_TD + self.feed_forward(self.feed_forward_norm(x_TD))
        return out


class Model(nn.Module):
    """The decoder; weights come from the given generator, on the CPU, whatever device the model goes to.

    `backend` and `exact` are attend()'s.
    """

    def __init__(
        self, config: ModelConfig, generator: torch.Generator, *, backend: str = "auto", exact: bool = False
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.config = config
        self.backend = backend
        with torch.device("meta"):  # nn.Linear would draw its weights from the global generator
            self.tokens = nn.Embedding(config.vocab_size, config.d_model)
            self.positions = (
                nn.Embedding(config.max_positions, config.d_model) if config.positions == "learned" else None
            )
            self.blocks = nn.ModuleList(Block(config, backend, exact) for _ in range(config.num_layers))
            self.norm = _norm(config)
            self.head = None if config.tied_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.to_empty(device="cpu")
        self._draw_weights(generator)

    def forward(self, inputs_T: Tensor, position_ids_T: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Logits of every token: [T], [T] int64 -> [T, V]; RecipeError past the end of the learned positions."""
        check_context(self.config, max_seqlen)
        x_TD = self.tokens(inputs_T)
        rotation = None
        if self.positions is not None:
            x_TD = x_TD + self.positions(position_ids_T)
        else:
            rotation = rotary_angles(position_ids_T, self.config.head_width, x_TD.dtype)
        for block in self.blocks:
            x_TD = block(x_TD, rotation, cu_seqlens, max_seqlen)
        weight_VD = self.tokens.weight if self.head is None else self.head.weight
        return functional.linear(self.norm(x_TD), weight_VD)

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator) -> None:
        """GPT-2's: normal, 0.02 wide; what writes into the residual stream is narrower by sqrt(2 layers)."""
        residual_std = INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                std = residual_std if name.endswith(("attention.out.weight", "down.weight")) else INIT_STD
                parameter.normal_(0.0, std, generator=generator)


def rotary_angles(position_ids_T: Tensor, head_width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x base^(-2i / H): int64[T] -> two [T, 1, H / 2] (Su et al., RoFormer).

    Taken in float64: in float32 an angle at position 100,000 is off by several thousandths.
    """
    exponents = torch.arange(0, head_width, 2, device=position_ids_T.device, dtype=torch.float64) / head_width
    angles = position_ids_T[:, None, None] * ROTARY_BASE**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + H / 2) of every head by the token's angles; the dtype stays."""
    first, second = x_TNH.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_TNH.dtype)


def num_parameters(config: ModelConfig) -> int:
    """Trainable numbers of the model, a tied table counted once.

    >>> num_parameters(ModelConfig(vocab_size=8, d_model=4, num_layers=1, num_heads=2, num_kv_heads=1, d_ff=8,
    ...                            max_positions=16))
    188
    """
    width, norm_size = config.d_model, config.d_model * (2 if config.norm == "layernorm" else 1)
    attention = width * (2 * width + 2 * config.num_kv_heads * config.head_width)
    block = attention + 3 * width * config.d_ff + 2 * norm_size
    learned = config.max_positions * width if config.positions == "learned" else 0
    tables = config.vocab_size * width * (1 if config.tied_embeddings else 2)
    return tables + learned + config.num_layers * block + norm_size


def check_context(config: ModelConfig, max_seqlen: int) -> None:
    """RecipeError when a segment is longer than the learned position table."""
    if config.positions == "learned" and max_seqlen > config.max_positions:
        raise RecipeError(
            f"context: expected segments of at most {config.max_positions:,} tokens (the model's learned positions),"
            f" found {max_seqlen:,}. Lower max_seq_len, raise max_positions, or use rotary positions."
        )


def _norm(config: ModelConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.d_model, eps=NORM_EPS)


def _check_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise RecipeError(
            f"model.{name}: expected a multiple of {divisor_name} = {divisor:,}, found {value:,}. Change either."
        )


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RecipeError(f"model.{name}: expected one of {', '.join(known)}, found {value!r}.")

"""The shape of the decoder, by its numbers or by the name of a preset."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline_assets.sections.section import Section
from training_io.limits import MAX_LAYERS, MAX_WIDTH
from training_io.model_presets import MODEL_PRESETS

Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]


class ModelShape(Section):
    """The decoder to train: its numbers, or `preset` for those of a named shape."""

    d_model: Width
    num_layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)]
    num_heads: Width
    num_kv_heads: Width
    d_ff: Width
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    positions: Literal["rotary", "learned"] = "rotary"

    @model_validator(mode="before")
    @classmethod
    def _numbers_of_a_preset(cls, shape: Any) -> Any:
        """`preset: 124m` stands for the numbers of that shape, of which the other keys change some."""
        if not isinstance(shape, Mapping) or "preset" not in shape:
            return shape
        name, others = shape["preset"], {key: value for key, value in shape.items() if key != "preset"}
        if name not in list(MODEL_PRESETS):
            raise ValueError(f"expected a preset among {', '.join(MODEL_PRESETS)}, found {name!r}")
        return {**MODEL_PRESETS[name], **others}

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "ModelShape":
        if self.d_model % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "expected num_heads to divide d_model and num_kv_heads to divide num_heads, found"
                f" d_model={self.d_model:,}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            )
        if self.positions == "rotary" and self.d_model // self.num_heads % 2:
            raise ValueError(
                "expected an even d_model / num_heads for rotary positions, found"
                f" {self.d_model:,} / {self.num_heads} = {self.d_model // self.num_heads}"
            )
        return self

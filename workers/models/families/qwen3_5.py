"""Qwen3.5 and its mixture of experts, with a vision tower or text only: a hybrid of two attentions.

Owns what the hybrid changes: every fourth layer has keys and values, the others a recurrent state
a sequence, and those run packed. Knows no slots. Invariant: K/V and states are sized by the layers
that exist, under the model's own layer numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)

from workers.kv.linear_state import LinearShape
from workers.kv.pool import KVShape
from workers.models.families.base import ModelAdapter, TextAdapter
from workers.models.families.vision import QwenVisionAdapter
from workers.models.gated_delta_net import pack_linear_layers


class _HybridAdapter(ModelAdapter):
    """Full attention in some layers, a gated delta net in the others."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        pack_linear_layers(self.text_model)

    def _layers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.config.layer_types) if layer == kind)

    @property
    def kv_shape(self) -> KVShape:
        """See `ModelAdapter`: of the full-attention layers only."""
        return replace(super().kv_shape, layer_ids=self._layers_of("full_attention"))

    @property
    def linear_shape(self) -> LinearShape:
        """See `ModelAdapter`."""
        config = self.config
        key_width = config.linear_num_key_heads * config.linear_key_head_dim
        value_width = config.linear_num_value_heads * config.linear_value_head_dim
        return LinearShape(
            layer_ids=self._layers_of("linear_attention"),
            conv_rows=config.linear_conv_kernel_dim - 1,
            conv_dim=2 * key_width + value_width,
            num_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            dtype=self.dtype,
        )


class Qwen35Adapter(_HybridAdapter, QwenVisionAdapter):
    """`Qwen3_5ForConditionalGeneration`."""

    splits_videos: ClassVar[bool] = True

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen3_5ForConditionalGeneration


class Qwen35MoeAdapter(Qwen35Adapter):
    """`Qwen3_5MoeForConditionalGeneration`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen3_5MoeForConditionalGeneration


class Qwen35TextAdapter(_HybridAdapter, TextAdapter):
    """`Qwen3_5ForCausalLM`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen3_5ForCausalLM


class Qwen35MoeTextAdapter(Qwen35TextAdapter):
    """`Qwen3_5MoeForCausalLM`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen3_5MoeForCausalLM

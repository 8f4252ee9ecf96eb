"""Qwen2 and Qwen2.5 text checkpoints, dense and mixture of experts: biased q/k/v."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2ForCausalLM, Qwen2MoeForCausalLM

from workers.models.families.base import TextAdapter


class Qwen2Adapter(TextAdapter):
    """`Qwen2ForCausalLM`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen2ForCausalLM


class Qwen2MoeAdapter(TextAdapter):
    """`Qwen2MoeForCausalLM`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen2MoeForCausalLM

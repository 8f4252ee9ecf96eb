"""Qwen3 text checkpoints, dense and mixture of experts: linear positions, normed q and k."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from workers.models.families.base import TextAdapter


class Qwen3Adapter(TextAdapter):
    """`Qwen3ForCausalLM`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen3ForCausalLM


class Qwen3MoeAdapter(TextAdapter):
    """`Qwen3MoeForCausalLM`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen3MoeForCausalLM

"""Llama checkpoints (SmolLM2 among them): text, linear positions."""

from __future__ import annotations

from typing import Any

from transformers import LlamaForCausalLM

from workers.models.families.base import TextAdapter


class LlamaAdapter(TextAdapter):
    """`LlamaForCausalLM`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return LlamaForCausalLM

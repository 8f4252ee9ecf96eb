"""Gemma 3 text checkpoints: most layers see a sliding window only, and have their own rope.

Owns what must be refused and the cap on the logits. The scale of the embeddings is in the
library's embedding module, which `ModelAdapter.embed` calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM

from workers.errors import ModelLoadError
from workers.models.families.base import TextAdapter


class Gemma3TextAdapter(TextAdapter):
    """`Gemma3ForCausalLM`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        for name in ("use_bidirectional_attention", "attn_logit_softcapping"):
            if getattr(self.config, name):
                raise ModelLoadError(f"gemma3_text: {name} is not supported")

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Gemma3ForCausalLM

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head and the cap.  # [R, hidden] -> [R, V]."""
        out = super().logits(hidden)
        cap: float | None = self.config.final_logit_softcapping
        return out if cap is None else cap * torch.tanh(out / cap)

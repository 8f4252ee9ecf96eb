"""Qwen3-VL and its mixture of experts: deepstack features, interleaved rope, time stamps in text.

Owns the packing of deepstack features: the embedding that stands in the prompt and what the first
layers add to their output lie side by side in one tensor, one cache entry an image. Invariant: a
step's deepstack rows are the rows its visual tokens are in, chunk by chunk.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration

from workers.models.families.base import StackInput, VisualRows
from workers.models.families.vision import QwenVisionAdapter


class Qwen3VLAdapter(QwenVisionAdapter):
    """`Qwen3VLForConditionalGeneration`."""

    splits_videos: ClassVar[bool] = True

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen3VLForConditionalGeneration

    def _features(self, output: Any) -> Tensor:
        """Put the embedding and every deepstack level side by side.

        Returns:
            # [num_tokens, hidden * (1 + levels)]
        """
        levels = [level[0] for level in output.deepstack_features]
        return torch.cat([output.pooler_output[0], *levels], dim=1)

    def place(self, embeddings: Tensor, visual: VisualRows) -> Tensor:
        """See `ModelAdapter`: only the first columns are embeddings.  # [T, hidden]."""
        own = visual.features[:, : embeddings.shape[1]]
        return embeddings.index_copy(0, visual.rows, own)

    def stack_keywords(self, step: StackInput) -> dict[str, Any]:
        """Give the deepstack levels of this step's visual rows."""
        if step.visual is None:
            return {}
        num_tokens, hidden_size = step.embeddings.shape
        mask = torch.zeros((1, num_tokens), dtype=torch.bool, device=step.embeddings.device)
        mask[0, step.visual.rows] = True
        _, *levels = step.visual.features.split(hidden_size, dim=1)
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": levels}


class Qwen3VLMoeAdapter(Qwen3VLAdapter):
    """`Qwen3VLMoeForConditionalGeneration`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen3VLMoeForConditionalGeneration

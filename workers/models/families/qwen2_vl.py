"""Qwen2-VL: images and videos through one vision tower, sectioned rope."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2VLForConditionalGeneration

from workers.models.families.vision import QwenVisionAdapter


class Qwen2VLAdapter(QwenVisionAdapter):
    """`Qwen2VLForConditionalGeneration`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen2VLForConditionalGeneration

"""Qwen2.5-VL: a windowed vision tower, sectioned rope, videos on a time axis in seconds."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2_5_VLForConditionalGeneration

from workers.models.families.vision import QwenVisionAdapter


class Qwen25VLAdapter(QwenVisionAdapter):
    """`Qwen2_5_VLForConditionalGeneration`."""

    @classmethod
    def model_class(cls) -> Any:
        """See `CheckpointAdapter`."""
        return Qwen2_5_VLForConditionalGeneration

"""Qwen2.5-VL: images through a windowed vision tower, sectioned three-axis rope.

Owns the prompt's rope table, taken from the library's own index function, and the vision tower.
Invariant: `get_rope_index` is pure (it reads the config only), so tables of concurrent requests
never meet; an image is encoded alone, so its embedding does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

from workers.batch_info import RopeLayout, RopeTable
from workers.contracts import MediaInput
from workers.models.families.base import ModelAdapter
from workers.models.paged import ATTENTION_NAME

# Values of mm_token_type_ids.
_TEXT, _IMAGE = 0, 1


class Qwen25VLAdapter(ModelAdapter):
    """`Qwen2_5_VLForConditionalGeneration`."""

    rope_layout: ClassVar[RopeLayout] = RopeLayout.MROPE
    takes_images: ClassVar[bool] = True

    @classmethod
    def model_class(cls) -> Any:
        """See `ModelAdapter`."""
        return Qwen2_5_VLForConditionalGeneration

    @classmethod
    def attention_setting(cls) -> str | dict[str, str]:
        """See `ModelAdapter`: a plain string would reach the vision tower too."""
        return {"": "sdpa", "text_config": ATTENTION_NAME, "vision_config": "sdpa"}

    @property
    def text_model(self) -> nn.Module:
        """See `ModelAdapter`."""
        stack: nn.Module = self._model.model.language_model
        return stack

    def position_ids(self, rope_positions: Tensor) -> Tensor:
        """Return three axes of one row.  # [3, T] -> [3, 1, T]."""
        return rope_positions.unsqueeze(1)

    def rope_table(
        self, prompt_ids: Sequence[int], media: Sequence[MediaInput]
    ) -> RopeTable | None:
        """Return the whole prompt's positions; None for text, where the delta is 0."""
        if not media:
            return None
        # Where images stand is known from the request, not from ids: text may hold a pad id.
        kinds = torch.full((1, len(prompt_ids)), _TEXT, dtype=torch.int32)
        for image in media:
            kinds[0, image.start : image.end] = _IMAGE
        positions, delta = self._model.model.get_rope_index(
            torch.tensor([list(prompt_ids)]),
            mm_token_type_ids=kinds,
            image_grid_thw=torch.tensor([image.grid_thw for image in media]),
        )
        return RopeTable(prompt=positions[:, 0].to(torch.int64), delta=int(delta[0, 0]))

    def embed_media(self, media: MediaInput) -> Tensor:
        """See `ModelAdapter`."""
        device = self._model.device
        features = self._model.model.get_image_features(
            torch.from_numpy(media.pixel_values).to(device, self.dtype),
            torch.tensor([media.grid_thw], device=device),
            return_dict=True,
        ).pooler_output
        embedding: Tensor = features[0]
        return embedding

"""What the Qwen vision-language families share: a vision tower and three-axis rope.

Owns the prompt's rope table, taken from the library's own index function, and the call of the
vision tower. Knows no batch and no cache. Invariant: `get_rope_index` is pure (it reads the config
only), so tables of concurrent requests never meet; an image or video is encoded alone, so its
embedding does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from workers.batch_info import RopeLayout, RopeTable
from workers.contracts import MediaInput, VideoInput
from workers.models.families.base import CheckpointAdapter
from workers.models.paged import ATTENTION_NAME

# Values of mm_token_type_ids.
_TEXT, _IMAGE, _VIDEO = 0, 1, 2


class QwenVisionAdapter(CheckpointAdapter):
    """A text stack beside a vision tower, both inside `model.model`."""

    rope_layout: ClassVar[RopeLayout] = RopeLayout.MROPE
    takes_images: ClassVar[bool] = True
    takes_videos: ClassVar[bool] = True

    @classmethod
    def attention_setting(cls) -> str | dict[str, str]:
        """See `CheckpointAdapter`: a plain string would reach the vision tower too."""
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
        # With one more token, as a model might answer: its position tells how the answer goes on.
        # NOTE: not the library's own delta, the largest position + 1. After a video that is longer
        # in time than in space neither the index function nor `generate` goes on from there, and
        # the answer would change its positions when it becomes a later turn's prompt.
        ids = torch.tensor([[*prompt_ids, prompt_ids[0]]])
        # Where images stand is known from the request, not from ids: text may hold a pad id.
        kinds = torch.full_like(ids, _TEXT, dtype=torch.int32)
        for item in media:
            for start, end in item.runs:
                kinds[0, start:end] = _VIDEO if isinstance(item, VideoInput) else _IMAGE
        videos = [item for item in media if isinstance(item, VideoInput)]
        images = [item for item in media if not isinstance(item, VideoInput)]
        positions, _ = self._model.model.get_rope_index(
            ids,
            mm_token_type_ids=kinds,
            image_grid_thw=_grids(images),
            video_grid_thw=_grids(videos),
            # Read by the families whose time axis is in seconds. Float32, as the library's
            # processors hand it over.
            second_per_grid_ts=torch.tensor([v.seconds_per_grid for v in videos]),
        )
        table = positions[:, 0].to(torch.int64)
        return RopeTable(table[:, :-1], delta=int(table[0, -1]) - len(prompt_ids))

    def embed_media(self, media: MediaInput) -> Tensor:
        """See `ModelAdapter`."""
        device = self._model.device
        core = self._model.model
        is_video = isinstance(media, VideoInput)
        encode = core.get_video_features if is_video else core.get_image_features
        output = encode(
            torch.from_numpy(media.pixel_values).to(device, self.dtype),
            torch.tensor([media.grid_thw], device=device),
            return_dict=True,
        )
        return self._features(output)

    def _features(self, output: Any) -> Tensor:
        """Take one item's features out of the vision tower's output.

        Returns:
            # [num_tokens, feature width]
        """
        embedding: Tensor = output.pooler_output[0]
        return embedding


def _grids(media: Sequence[MediaInput]) -> Tensor | None:
    """Grids in the prompt's order.  # [n, 3] int64."""
    return torch.tensor([item.grid_thw for item in media]) if media else None

"""Wraps the model's image processor: a picture becomes patches and a grid.

Owns the processor of one checkpoint, how many placeholder tokens an image takes, and the hash
that keys caches. Knows no URLs and no prompts. Invariant: two images have the same hash only if
pixels after processing, grid and processor settings are all equal.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor

from workers.errors import InvalidRequest, ModelLoadError


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """An image as the vision tower wants it."""

    pixel_values: np.ndarray  # [t*h*w, channels*temporal*patch*patch] float32
    grid_thw: tuple[int, int, int]
    content_hash: bytes
    # Placeholder tokens in the prompt.
    num_tokens: int


class ImageProcessor:
    """The image processor of one checkpoint."""

    def __init__(self, processor: Any) -> None:
        if not hasattr(processor, "merge_size"):
            name = type(processor).__name__
            raise ModelLoadError(f"{name}: only processors that make patch grids are supported")
        self._processor = processor
        self._merge_area = int(processor.merge_size) ** 2
        settings = json.dumps(processor.to_dict(), sort_keys=True, default=str)
        self._settings_hash = hashlib.sha256(settings.encode()).digest()

    @classmethod
    def load(cls, path: str, revision: str | None) -> Self:
        """Load from a directory or hub id.

        The Pillow backend is asked for by name: all ingress processes must produce the same
        pixels, whether torchvision is installed beside them or not.
        """
        processor = AutoImageProcessor.from_pretrained(
            path, revision=revision, trust_remote_code=False, backend="pil"
        )
        return cls(processor)

    def process(self, image: Image.Image, param: str) -> ProcessedImage:
        """Resize and cut into patches; `param` names the image in errors.

        Raises:
            InvalidRequest: The model's processor refuses the image (for example its shape).
        """
        try:
            features = self._processor(images=[image], return_tensors="np")
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param) from error
        pixels = np.ascontiguousarray(features["pixel_values"], dtype=np.float32)
        t, h, w = (int(n) for n in features["image_grid_thw"][0])
        digest = hashlib.sha256(self._settings_hash)
        digest.update(repr(((t, h, w), pixels.shape)).encode())
        digest.update(pixels.data)
        return ProcessedImage(pixels, (t, h, w), digest.digest(), t * h * w // self._merge_area)

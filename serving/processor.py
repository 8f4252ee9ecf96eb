"""Wraps the model's image and video processors: pictures become patches and a grid.

Owns the processors of one checkpoint, how many placeholder tokens an image or video takes, and the
hash that keys caches. Knows no URLs and no prompts. Invariant: two images have the same hash only
if pixels after processing, grid and processor settings are all equal; two videos only if their
frame rates are, too.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoVideoProcessor

from serving.errors import UnsupportedParameter
from serving.videos import LAYOUTS, VideoLayout
from workers.errors import InvalidRequest, ModelLoadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """An image as the vision tower wants it."""

    pixel_values: np.ndarray  # [t*h*w, channels*temporal*patch*patch] float32
    grid_thw: tuple[int, int, int]
    content_hash: bytes
    # Placeholder tokens in the prompt.
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedVideo:
    """A video as the vision tower wants it."""

    pixel_values: np.ndarray  # [t*h*w, channels*temporal*patch*patch] float32
    grid_thw: tuple[int, int, int]
    content_hash: bytes
    # Placeholder tokens in the prompt, over all its runs.
    num_tokens: int
    # Time between two steps of the grid.
    seconds_per_grid: float


class ImageProcessor:
    """The image processor of one checkpoint."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._merge_area = _merge_area(processor)
        self._settings_hash = _settings_hash(processor)

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
        pixels, grid = _patches(features["pixel_values"], features["image_grid_thw"])
        key = _content_hash(self._settings_hash, pixels, grid)
        return ProcessedImage(pixels, grid, key, math.prod(grid) // self._merge_area)


class VideoProcessor:
    """The video processor of one checkpoint."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._merge_area = _merge_area(processor)
        self._settings_hash = _settings_hash(processor)
        # Frames that become one step of the grid.
        self.frames_per_step = int(processor.temporal_patch_size)

    @classmethod
    def load(cls, path: str, revision: str | None) -> Self:
        """Load from a directory or hub id.

        Raises:
            ModelLoadError: torchvision, which the library needs for it, cannot be imported, or the
                checkpoint has no video processor.
        """
        try:
            importlib.import_module("torchvision")
        except ModuleNotFoundError as error:
            raise ModelLoadError("video needs torchvision, which is not installed") from error
        except (ImportError, RuntimeError, OSError) as error:  # built for another torch
            reason = _first_line(error)
            raise ModelLoadError(
                f"video needs torchvision, which does not import beside this torch: {reason}"
            ) from error
        try:
            processor = AutoVideoProcessor.from_pretrained(
                path, revision=revision, trust_remote_code=False
            )
        except (ImportError, RuntimeError, OSError, ValueError) as error:
            reason = _first_line(error)
            raise ModelLoadError(f"the model's video processor does not load: {reason}") from error
        return cls(processor)

    def process(self, frames: np.ndarray, fps: float, param: str) -> ProcessedVideo:
        """Resize and cut into patches; every frame is used.

        Args:
            frames: The video.  # [F, height, width, 3] uint8
            fps: Frames a second.
            param: Names the video in errors.

        Raises:
            InvalidRequest: The model's processor refuses the video (for example its shape).
        """
        try:
            features = self._processor(
                videos=[frames],
                do_sample_frames=False,
                input_data_format="channels_last",
                return_tensors="pt",
            )
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param) from error
        pixels, grid = _patches(features["pixel_values_videos"], features["video_grid_thw"])
        return ProcessedVideo(
            pixel_values=pixels,
            grid_thw=grid,
            content_hash=_content_hash(self._settings_hash, pixels, grid, fps),
            num_tokens=math.prod(grid) // self._merge_area,
            seconds_per_grid=self.frames_per_step / fps,
        )


@dataclass(frozen=True, slots=True, eq=False)
class VideoSupport:
    """What an ingress needs for the videos of its model."""

    layout: VideoLayout
    # None = cannot be loaded here.
    processor: VideoProcessor | None
    # Why not.
    problem: str = ""

    def require(self, param: str) -> VideoProcessor:
        """Return the processor.

        Raises:
            UnsupportedParameter: There is none in this installation.
        """
        if self.processor is None:
            raise UnsupportedParameter(f"{param}: {self.problem}", param)
        return self.processor


def load_videos(model_type: str, path: str, revision: str | None) -> VideoSupport | None:
    """Load what videos need; None for a family without them.

    An installation that cannot process videos serves all else, and says why in a refusal.
    """
    layout = LAYOUTS.get(model_type)
    if layout is None:
        return None
    try:
        return VideoSupport(layout, VideoProcessor.load(path, revision))
    except ModelLoadError as error:
        logger.warning("videos are refused: %s", error)
        return VideoSupport(layout, None, str(error))


def _merge_area(processor: Any) -> int:
    if not hasattr(processor, "merge_size"):
        name = type(processor).__name__
        raise ModelLoadError(f"{name}: only processors that make patch grids are supported")
    return int(processor.merge_size) ** 2


def _settings_hash(processor: Any) -> bytes:
    settings = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(settings.encode()).digest()


def _patches(pixels: Any, grids: Any) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return what a processor made of a single image or video."""
    t, h, w = (int(n) for n in grids[0])
    return np.ascontiguousarray(pixels, dtype=np.float32), (t, h, w)


def _content_hash(
    settings_hash: bytes, pixels: np.ndarray, grid: tuple[int, int, int], *more: float
) -> bytes:
    digest = hashlib.sha256(settings_hash)
    digest.update(repr((grid, pixels.shape, *more)).encode())
    digest.update(pixels.data)
    return digest.digest()


def _first_line(error: Exception) -> str:
    # The library's own are paragraphs of advice.
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

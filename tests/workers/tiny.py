"""Tiny random checkpoints of every family on disk, and requests for them.

The models themselves are drawn in `tiny_families`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.workers.tiny_families import (
    EOS,
    FAMILIES,
    HYBRIDS,
    IMAGE_PAD,
    MERGE,
    PATCH,
    SPLIT_VIDEO_FAMILIES,
    VIDEO_FAMILIES,
    VIDEO_PAD,
    VISION_END,
    VISION_FAMILIES,
    VISION_START,
    VOCAB,
)
from workers.contracts import (
    GenerationRequest,
    ImageInput,
    MediaInput,
    SamplingParams,
    VideoInput,
)
from workers.models.nextn import NextNHead

__all__ = [
    "EOS",
    "FAMILIES",
    "HYBRIDS",
    "SPLIT_VIDEO_FAMILIES",
    "VIDEO_FAMILIES",
    "VISION_FAMILIES",
    "VOCAB",
]

PATCH_DIM = 3 * 2 * PATCH * PATCH


class Video(NamedTuple):
    """A video in a prompt: steps of its grid, height and width in merged patches."""

    steps: int
    height: int
    width: int
    seconds_per_grid: float = 1.0


# Tokens of text, (height, width) of an image, or a video.
Part = int | tuple[int, int] | Video


def save(path: Path, family: str, seed: int, *, noise: float = 0.0, **changes: Any) -> str:
    """Write a checkpoint of random weights, with noise on top, and return its directory."""
    model = FAMILIES[family](seed, **changes).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn_like(weight)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    if family in HYBRIDS:
        _add_head(path, model)
    return str(path)


def _add_head(path: Path, model: Any) -> None:
    """Add a random NEXTN head to a checkpoint, named as real checkpoints name its tensors."""
    head = NextNHead(getattr(model.model, "language_model", model.model))
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(0.0, 0.2)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"mtp.{name}": weight for name, weight in head.state_dict().items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _pixels(seed: int, grid: tuple[int, int, int]) -> tuple[np.ndarray, bytes]:
    """Return random pixels of a grid and their hash."""
    rng = np.random.default_rng(seed)
    pixels = rng.standard_normal((grid[0] * grid[1] * grid[2], PATCH_DIM), dtype=np.float32)
    return pixels, hashlib.sha256(pixels.tobytes() + repr(grid).encode()).digest()


def image(seed: int, height: int, width: int, start: int) -> ImageInput:
    """Return a random image of `height` x `width` merged patches whose pads begin at `start`."""
    grid = (1, height * MERGE, width * MERGE)
    pixels, key = _pixels(seed, grid)
    return ImageInput(pixels, grid, key, start, height * width)


def video(seed: int, shape: Video, starts: Sequence[int]) -> VideoInput:
    """Return a random video whose runs of pads begin at `starts`."""
    grid = (shape.steps, shape.height * MERGE, shape.width * MERGE)
    pixels, key = _pixels(seed, grid)
    num_tokens = shape.steps * shape.height * shape.width
    return VideoInput(pixels, grid, key, tuple(starts), num_tokens, shape.seconds_per_grid)


def prompt(
    seed: int, parts: Sequence[Part], *, split_videos: bool = False
) -> tuple[list[int], list[MediaInput]]:
    """Build a prompt of text, images and videos, in order.

    Args:
        seed: Of the text and the pixels.
        parts: What it is made of.
        split_videos: Give each step of a video its own run, after two tokens of time stamp.
    """
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    media: list[MediaInput] = []

    def pads(token_id: int, count: int) -> int:
        """Append a framed run and return where its pads begin."""
        ids.extend([VISION_START, *[token_id] * count, VISION_END])
        return len(ids) - 1 - count

    for number, part in enumerate(parts):
        own_seed = 1000 * seed + number
        if isinstance(part, int):
            ids += rng.integers(2, 140, part).tolist()
        elif not isinstance(part, Video):
            media.append(image(own_seed, *part, start=pads(IMAGE_PAD, part[0] * part[1])))
        elif not split_videos:
            start = pads(VIDEO_PAD, part.steps * part.height * part.width)
            media.append(video(own_seed, part, [start]))
        else:
            starts = []
            for _ in range(part.steps):
                ids += rng.integers(2, 140, 2).tolist()
                starts.append(pads(VIDEO_PAD, part.height * part.width))
            media.append(video(own_seed, part, starts))
    return ids, media


def prompt_for(family: str, seed: int, parts: Sequence[Part]) -> tuple[list[int], list[MediaInput]]:
    """Build a prompt with videos as the family takes them."""
    return prompt(seed, parts, split_videos=family in SPLIT_VIDEO_FAMILIES)


def request(
    request_id: str,
    ids: list[int],
    media: Sequence[MediaInput] | None = None,
    *,
    emitted: tuple[int, ...] = (),
    **sampling: Any,
) -> GenerationRequest:
    """Return a request; greedy and 12 tokens unless told otherwise."""
    params = {"seed": 1, "temperature": 0.0, "max_tokens": 12, **sampling}
    media = media or ()
    return GenerationRequest(
        request_id,
        tuple(ids),
        SamplingParams(**params),
        tuple(item for item in media if isinstance(item, ImageInput)),
        emitted,
        tuple(item for item in media if isinstance(item, VideoInput)),
    )


def mixed_requests(count: int = 6) -> list[GenerationRequest]:
    """Return greedy and sampled requests, every other one with an image."""
    requests = []
    for seed in range(count):
        ids, images = prompt(seed, [5, (2, 3), 4] if seed % 2 else [6 + 3 * seed])
        requests.append(
            request(f"r{seed}", ids, images, temperature=seed % 3 / 2, seed=seed, ignore_eos=True)
        )
    return requests

"""Puts as many placeholders into a prompt as its images and videos have tokens.

Owns the counting: where each run begins and how long it is. Knows no pixels, no text and no
template. Invariant: every image and video has its placeholders, in order, and every placeholder
its image or video.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from workers.contracts import ImageInput, VideoInput
from workers.errors import InvalidRequest

if TYPE_CHECKING:  # loads transformers
    from serving.processor import ProcessedImage, ProcessedVideo


class PlacedVideo(NamedTuple):
    """A video and the ids that stand for it, with a single placeholder for each run."""

    video: ProcessedVideo
    ids: Sequence[int]


class ExpandedPrompt(NamedTuple):
    """A prompt as the engine wants it."""

    ids: tuple[int, ...]
    images: tuple[ImageInput, ...]
    videos: tuple[VideoInput, ...]


def expand(
    ids: Sequence[int],
    images: Sequence[ProcessedImage],
    videos: Sequence[PlacedVideo],
    image_token_id: int | None,
    video_token_id: int | None,
) -> ExpandedPrompt:
    """Replace the single placeholder of each image and video.

    Raises:
        InvalidRequest: There are more or fewer placeholders than images, or videos.
    """
    _check_count("images", ids, image_token_id, len(images))
    _check_count("videos", ids, video_token_id, len(videos))
    expanded: list[int] = []
    placed_images: list[ImageInput] = []
    placed_videos: list[VideoInput] = []
    for token_id in ids:
        if token_id == image_token_id:
            image = images[len(placed_images)]
            placed_images.append(_place_image(image, len(expanded)))
            expanded.extend([token_id] * image.num_tokens)
        elif token_id == video_token_id:
            video, video_ids = videos[len(placed_videos)]
            starts = _extend_with_runs(expanded, video_ids, token_id, video.num_tokens)
            placed_videos.append(_place_video(video, starts))
        else:
            expanded.append(token_id)
    return ExpandedPrompt(tuple(expanded), tuple(placed_images), tuple(placed_videos))


def _check_count(what: str, ids: Sequence[int], pad_id: int | None, num_supplied: int) -> None:
    num_pads = 0 if pad_id is None else sum(token_id == pad_id for token_id in ids)
    if num_pads != num_supplied:
        raise InvalidRequest(f"{num_supplied} {what} supplied, {num_pads} placeholders found")


def _extend_with_runs(
    expanded: list[int], video_ids: Sequence[int], pad_id: int, num_tokens: int
) -> tuple[int, ...]:
    """Append a video's ids with its runs at their length; return where they begin."""
    run_len = num_tokens // sum(token_id == pad_id for token_id in video_ids)
    starts = []
    for token_id in video_ids:
        if token_id == pad_id:
            starts.append(len(expanded))
        expanded.extend([token_id] * (run_len if token_id == pad_id else 1))
    return tuple(starts)


def _place_image(image: ProcessedImage, start: int) -> ImageInput:
    return ImageInput(
        pixel_values=image.pixel_values,
        grid_thw=image.grid_thw,
        content_hash=image.content_hash,
        start=start,
        num_tokens=image.num_tokens,
    )


def _place_video(video: ProcessedVideo, starts: tuple[int, ...]) -> VideoInput:
    return VideoInput(
        pixel_values=video.pixel_values,
        grid_thw=video.grid_thw,
        content_hash=video.content_hash,
        starts=starts,
        num_tokens=video.num_tokens,
        seconds_per_grid=video.seconds_per_grid,
    )

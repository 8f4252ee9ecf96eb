"""From frames in a request to what stands for a video in its prompt.

Owns which families take videos and how their prompts lay them out, the time of each step, and the
stacking of frames. Knows no URLs (`images` decodes each frame, within the same limits) and no
model. Invariant: a request with a video either has all of it or is refused with the part's name.

    one run:     <pad> * all tokens
    timed runs:  for each step of the grid: time stamp, start, <pad> * the step's tokens, end
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
from PIL import Image

from workers.errors import InvalidRequest


class VideoLayout(Enum):
    """How placeholders stand in the prompt."""

    ONE_RUN = "one run"
    TIMED_RUNS = "timed runs"


# model_type in config.json -> layout; a family that is not here takes no videos.
LAYOUTS = {
    "qwen2_vl": VideoLayout.ONE_RUN,
    "qwen2_5_vl": VideoLayout.ONE_RUN,
    "qwen3_vl": VideoLayout.TIMED_RUNS,
    "qwen3_vl_moe": VideoLayout.TIMED_RUNS,
    "qwen3_5": VideoLayout.TIMED_RUNS,
    "qwen3_5_moe": VideoLayout.TIMED_RUNS,
}


class FoundVideo(NamedTuple):
    """A video in a body."""

    frames: Sequence[str]  # URLs
    fps: float
    # Its place, as errors name it.
    param: str


def stack_frames(frames: Sequence[Image.Image], param: str) -> np.ndarray:
    """Return the frames of a video as one array.  # [F, height, width, 3] uint8.

    Raises:
        InvalidRequest: They differ in size.
    """
    for number, frame in enumerate(frames):
        if frame.size != frames[0].size:
            name = f"{param}[{number}]"
            sizes = [f"{f.width}x{f.height}" for f in (frame, frames[0])]
            raise InvalidRequest(f"{name}: the frame is {sizes[0]}, the first one {sizes[1]}", name)
    return np.stack([np.asarray(frame) for frame in frames])


def time_stamps(num_frames: int, fps: float, frames_per_step: int) -> list[float]:
    """Return the time of each step of the grid, in seconds: between its first and last frame.

    What a last step lacks is filled with the last frame, as the processor does.
    """
    last = num_frames - 1
    starts = range(0, num_frames, frames_per_step)
    return [(first + min(first + frames_per_step - 1, last)) / 2 / fps for first in starts]


def placeholder_text(layout: VideoLayout, pad: str, stamps: Sequence[float]) -> str:
    """Return what stands for the pad that the template wrote, with one pad for each run.

    The start and end that the template puts around it stay, also around timed runs.
    """
    if layout is VideoLayout.ONE_RUN:
        return pad
    return "".join(f"<{t:.1f} seconds><|vision_start|>{pad}<|vision_end|>" for t in stamps)

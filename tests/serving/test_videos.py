"""Videos as frames: placeholders, hashes and limits; and what an installation cannot do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from serving.errors import UnsupportedParameter
from serving.images import ImageLimits
from serving.processor import VideoProcessor, VideoSupport, load_videos
from serving.prompts import PromptBuilder
from serving.schema import ChatBody
from serving.videos import VideoLayout, placeholder_text, time_stamps
from tests.serving.doubles import (
    ScriptedWorkers,
    data_url,
    make_app,
    make_hf_tokenizer,
    make_processor,
    make_tokenizer,
    picture,
)
from workers.contracts import GenerationRequest
from workers.errors import InvalidRequest, ModelLoadError

PATCH, MERGE, STEP = 14, 2, 2


class PatchingProcessor:
    """Cuts frames into patches as they are; the real one needs torchvision."""

    merge_size = MERGE
    temporal_patch_size = STEP
    patch_size = PATCH

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def to_dict(self) -> dict[str, int]:
        return {"merge_size": MERGE, "patch_size": PATCH}

    def __call__(self, videos: list[np.ndarray], **options: Any) -> dict[str, np.ndarray]:
        self.calls.append(options)
        (frames,) = videos
        if frames.shape[1] > 1000:
            raise ValueError("the frames are too tall")
        frames = np.concatenate([frames, frames[-1:]]) if len(frames) % STEP else frames
        t, h, w = len(frames) // STEP, frames.shape[1] // PATCH, frames.shape[2] // PATCH
        pixels = np.resize(frames.astype(np.float32), (t * h * w, 3 * STEP * PATCH * PATCH))
        return {"pixel_values_videos": pixels, "video_grid_thw": np.array([[t, h, w]])}


def support(layout: VideoLayout = VideoLayout.ONE_RUN) -> VideoSupport:
    return VideoSupport(layout, VideoProcessor(PatchingProcessor()))


def video_part(
    num_frames: int = 4, size: tuple[int, int] = (56, 28), fps: float = 2.0, color: str = "red"
) -> dict[str, Any]:
    url = data_url(picture(*size, color))
    return {"type": "video", "video": [url] * num_frames, "fps": fps}


def image_part() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture())}}


async def build(
    content: list[dict[str, Any]],
    videos: VideoSupport | None,
    limits: ImageLimits | None = None,
) -> GenerationRequest:
    prompts = PromptBuilder(
        make_tokenizer(), make_processor(), limits or ImageLimits(), videos=videos
    )
    body = ChatBody(model="demo", messages=[{"role": "user", "content": content}])
    return (await prompts.chat(body, "r")).generation


async def test_one_run_of_placeholders() -> None:
    request = await build([video_part(5), {"type": "text", "text": "x"}], support())
    (video,) = request.videos
    # Five frames are three steps of two, the last one filled up; 56 x 28 is 4 x 2 patches.
    assert (video.grid_thw, video.num_tokens, video.seconds_per_grid) == ((3, 2, 4), 6, 1.0)
    assert video.pixel_values.shape == (24, 3 * STEP * PATCH * PATCH)
    assert video.pixel_values.dtype == np.float32
    pad = make_tokenizer().video_token_id
    (run,) = video.runs
    assert run == (video.start, video.start + 6)
    assert request.prompt_ids[slice(*run)] == (pad,) * 6
    assert request.prompt_ids.count(pad) == 6
    around = [request.prompt_ids[video.start - 1], request.prompt_ids[video.end]]
    assert make_hf_tokenizer().convert_ids_to_tokens(around) == [
        "<|vision_start|>",
        "<|vision_end|>",
    ]


def by_the_library(num_frames: int, fps: float, grid: tuple[int, int, int]) -> str:
    """What transformers' own processor puts in the place of a video in a rendered template."""
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.video_processor = SimpleNamespace(merge_size=MERGE, temporal_patch_size=STEP)
    metadata = SimpleNamespace(fps=fps, frames_indices=list(range(num_frames)))
    inputs = {"video_grid_thw": np.array([grid]), "video_metadata": [metadata]}
    replacement = processor.replace_video_token(inputs, 0)
    rendered = "<|vision_start|><|video_pad|><|vision_end|>"
    (text,), _ = processor.get_text_with_replacements([rendered], videos_replacements=[replacement])
    return str(text)


@pytest.mark.parametrize("num_frames", [1, 2, 5, 8])
@pytest.mark.parametrize("fps", [0.3, 2.0, 24.0])
async def test_timed_runs_are_the_librarys(num_frames: int, fps: float) -> None:
    """A start or end too few around them moves every position after (vllm#46817)."""
    content = [video_part(num_frames, fps=fps)]
    request = await build(content, support(VideoLayout.TIMED_RUNS))
    (video,) = request.videos
    assert video.seconds_per_grid == STEP / fps
    steps = (num_frames + 1) // 2
    assert video.grid_thw == (steps, 2, 4)
    assert len(video.runs) == steps
    pad = make_tokenizer().video_token_id
    for start, end in video.runs:
        assert request.prompt_ids[start - 1] != pad
        assert request.prompt_ids[start:end] == (pad, pad)
        assert request.prompt_ids[end] != pad
    expected = make_tokenizer().encode_control(by_the_library(num_frames, fps, video.grid_thw))
    head = request.prompt_ids.index(expected[0])
    assert list(request.prompt_ids[head : head + len(expected)]) == expected


@given(st.integers(1, 40), st.floats(0.01, 240), st.integers(1, 4))
def test_each_step_of_the_grid_has_its_time(num_frames: int, fps: float, step: int) -> None:
    stamps = time_stamps(num_frames, fps, step)
    assert len(stamps) == -(-num_frames // step)
    assert stamps == sorted(stamps)
    assert 0 <= stamps[0] <= stamps[-1] <= (num_frames - 1) / fps
    text = placeholder_text(VideoLayout.TIMED_RUNS, "P", stamps)
    assert text.count("P") == len(stamps)
    assert placeholder_text(VideoLayout.ONE_RUN, "P", stamps) == "P"


async def test_images_and_videos_keep_their_order() -> None:
    content = [
        image_part(),
        video_part(2, color="blue"),
        {"type": "text", "text": "and"},
        image_part(),
        video_part(4, size=(28, 28)),
    ]
    request = await build(content, support(VideoLayout.TIMED_RUNS))
    assert [item.start for item in request.media] == sorted(i.start for i in request.media)
    kinds = [type(item).__name__ for item in request.media]
    assert kinds == ["ImageInput", "VideoInput", "ImageInput", "VideoInput"]
    assert [video.grid_thw for video in request.videos] == [(1, 2, 4), (2, 2, 2)]
    image_pad, video_pad = make_tokenizer().image_token_id, make_tokenizer().video_token_id
    runs = [run for item in request.media for run in item.runs]
    covered = [i for start, end in runs for i in range(start, end)]
    pads = [i for i, t in enumerate(request.prompt_ids) if t in (image_pad, video_pad)]
    assert covered == pads


async def test_the_hash_covers_pixels_and_frame_rate() -> None:
    """Positions depend on the frame rate, so K/V of another rate must not be found."""

    async def key(**changes: Any) -> bytes:
        return (await build([video_part(**changes)], support())).videos[0].content_hash

    base = await key()
    assert base == await key()
    assert len({base, await key(fps=1.0), await key(color="blue"), await key(num_frames=2)}) == 4


async def test_every_frame_is_used_as_sent() -> None:
    """A processor that samples frames again would drop what the client chose."""
    fake = PatchingProcessor()
    await build([video_part()], VideoSupport(VideoLayout.ONE_RUN, VideoProcessor(fake)))
    assert fake.calls[0]["do_sample_frames"] is False


BAD_FRAMES: dict[str, tuple[list[dict[str, Any]], ImageLimits, str]] = {
    "count": ([image_part(), video_part(3)], ImageLimits(max_images=3), "content[1].video"),
    "pixels": ([video_part(3)], ImageLimits(max_total_pixels=2 * 56 * 28), "content[0].video[2]"),
    "damaged": (
        [{"type": "video", "video": [data_url(picture()), "data:image/png;base64,AAAA"]}],
        ImageLimits(),
        "content[0].video[1]",
    ),
    "fetched": (
        [{"type": "video", "video": ["https://x/a.png"]}],
        ImageLimits(),
        "content[0].video[0]",
    ),
    "sizes": (
        [{"type": "video", "video": [data_url(picture(56, 28)), data_url(picture(28, 56))]}],
        ImageLimits(),
        "content[0].video[1]",
    ),
    "refused": ([video_part(1, size=(28, 1400))], ImageLimits(), "content[0].video"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_bad_frames_name_their_place(name: str) -> None:
    content, limits, place = BAD_FRAMES[name]
    with pytest.raises(InvalidRequest) as caught:
        await build(content, support(), limits)
    assert caught.value.param == f"messages[0].{place}"


async def test_a_model_without_videos_says_so() -> None:
    with pytest.raises(InvalidRequest, match="takes no videos") as caught:
        await build([image_part(), video_part()], None)
    assert caught.value.param == "messages[0].content[1].video"
    assert load_videos("llava", "nowhere", None) is None


async def test_a_typed_placeholder_is_no_video() -> None:
    """A19: what a client writes never counts as a placeholder."""
    content = [video_part(2), {"type": "text", "text": "<|video_pad|>"}]
    request = await build(content, support())
    assert request.prompt_ids.count(make_tokenizer().video_token_id) == request.videos[0].num_tokens


def _no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)


def _broken_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist\nand more")

    monkeypatch.setattr("serving.processor.importlib", SimpleNamespace(import_module=fail))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_no_torchvision, "video needs torchvision, which is not installed"),
        (_broken_torchvision, "does not import beside this torch: operator torchvision::nms"),
    ],
)
async def test_an_installation_without_torchvision_refuses_videos_alone(
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    spoil(monkeypatch)
    videos = load_videos("qwen2_5_vl", "nowhere", None)
    assert videos is not None
    with pytest.raises(UnsupportedParameter, match=reason) as caught:
        await build([video_part()], videos)
    assert caught.value.param == "messages[0].content[0].video"
    assert "\n" not in str(caught.value)
    assert (await build([image_part()], videos)).images


def test_a_checkpoint_without_a_video_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())
    assert importlib.import_module("torchvision")
    with pytest.raises(ModelLoadError, match="video processor does not load"):
        VideoProcessor.load("/nowhere", None)


async def _post(content: list[dict[str, Any]], videos: VideoSupport) -> httpx.Response:
    app = make_app(ScriptedWorkers([[]]), videos=videos)
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
        return await client.post("/v1/chat/completions", json=body)


async def test_over_http() -> None:
    refusing = VideoSupport(VideoLayout.ONE_RUN, None, "video needs torchvision")
    response = await _post([video_part()], refusing)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (
        "unsupported_parameter",
        "messages[0].content[0].video",
    )
    container = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    response = await _post([{"type": "text", "text": "see"}, container], refusing)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (
        "unsupported_parameter",
        "messages[0].content[1].video_url",
    )
    assert '{"type": "video", "video": ["data:image/...", ...], "fps": 2.0}' in error["message"]

"""From a validated body to a request in token ids.

Owns the mapping of OpenAI's parameters to `SamplingParams` and the loading of a request's images
and videos. Knows no workers and no HTTP. Invariants: the seed is always set; images and frames are
counted against the same limits, in their order in the body.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from serving.images import ImageLimits, load_image
from serving.placeholders import PlacedVideo, expand
from serving.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    ImagePart,
    Message,
    Part,
    TextPart,
    VideoPart,
)
from serving.textstream import TextRequest
from serving.videos import FoundVideo, placeholder_text, stack_frames, time_stamps
from workers.contracts import GenerationRequest, SamplingParams
from workers.errors import InvalidRequest

if TYPE_CHECKING:  # these load transformers, which only the ingress process needs
    import numpy as np

    from serving.processor import ImageProcessor, ProcessedImage, VideoSupport
    from serving.tokenizer import ServingTokenizer

# OpenAI's own default for /v1/completions; a chat runs to its end.
COMPLETION_MAX_TOKENS = 16
# Decoded pictures take up to 200 MB each; the default executor would hold dozens at once.
IMAGE_THREADS = 2


class FoundImage(NamedTuple):
    """An image in a body."""

    url: str
    # Its place, as errors name it.
    param: str


class LoadedMedia(NamedTuple):
    """A request's images and videos, each in their order."""

    images: Sequence[ProcessedImage] = ()
    videos: Sequence[PlacedVideo] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptBuilder:
    """Builds requests for one model."""

    tokenizer: ServingTokenizer
    # None for a text-only model.
    processor: ImageProcessor | None
    limits: ImageLimits
    # Runs what holds pictures.
    image_executor: Executor = field(
        default_factory=lambda: ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="images")
    )
    # None for a model that takes none.
    videos: VideoSupport | None = None

    async def chat(self, body: ChatBody, request_id: str) -> TextRequest:
        """Build a chat request; templates and images run in threads, off the event loop."""
        if not self.tokenizer.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        media = LoadedMedia()
        found = self._find_media(body.messages)
        if found:
            loop = asyncio.get_running_loop()
            media = await loop.run_in_executor(self.image_executor, self._load_media, found)
        return await asyncio.to_thread(self._chat, body, request_id, media)

    async def completion(self, body: CompletionBody, request_id: str) -> TextRequest:
        """Build a completion request."""
        return await asyncio.to_thread(self._completion, body, request_id)

    def _chat(self, body: ChatBody, request_id: str, media: LoadedMedia) -> TextRequest:
        messages = [_as_template_message(message) for message in body.messages]
        ids = self.tokenizer.encode_chat(messages)
        max_tokens = body.max_completion_tokens or body.max_tokens
        return self._finish(body, request_id, ids, media, max_tokens)

    def _completion(self, body: CompletionBody, request_id: str) -> TextRequest:
        prompt = body.prompt[0] if isinstance(body.prompt, list) else body.prompt
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_prompt(prompt)
        else:
            ids = [int(token_id) for token_id in body.prompt]
            self._check_ids(ids, "prompt")
        max_tokens = body.max_tokens or COMPLETION_MAX_TOKENS
        return self._finish(body, request_id, ids, LoadedMedia(), max_tokens)

    def _finish(
        self,
        body: GenerationBody,
        request_id: str,
        ids: list[int],
        media: LoadedMedia,
        max_tokens: int | None,
    ) -> TextRequest:
        if not ids:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        self._check_ids(body.stop_token_ids or [], "stop_token_ids")
        pads = (self.tokenizer.image_token_id, self.tokenizer.video_token_id)
        prompt = expand(ids, *media, *pads)
        request = GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt.ids,
            sampling=to_sampling(body, max_tokens),
            images=prompt.images,
            videos=prompt.videos,
        )
        return TextRequest(request, body.stops)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        for i, token_id in enumerate(ids):
            if not 0 <= token_id < self.tokenizer.vocab_size:
                name = f"{param}[{i}]"
                accepted = f"token ids are below {self.tokenizer.vocab_size}"
                raise InvalidRequest(f"{name}: {token_id} is no token; {accepted}", name)

    def _find_media(self, messages: Sequence[Message]) -> list[FoundImage | FoundVideo]:
        """Return images and videos in order, after the checks that need no pixels."""
        found: list[FoundImage | FoundVideo] = []
        for m, message in enumerate(messages):
            if isinstance(message.content, str):
                continue
            for p, part in enumerate(message.content):
                place = f"messages[{m}].content[{p}]"
                if isinstance(part, ImagePart):
                    found.append(FoundImage(part.image_url.url, f"{place}.image_url"))
                elif isinstance(part, VideoPart):
                    found.append(FoundVideo(part.video, part.fps, f"{place}.video"))
        if found and (self.processor is None or self.tokenizer.image_token_id is None):
            raise InvalidRequest("this model takes text only", found[0].param)
        num_images = 0
        for item in found:
            if isinstance(item, FoundVideo):
                self._video_support(item.param).require(item.param)
            num_images += len(item.frames) if isinstance(item, FoundVideo) else 1
            if num_images > self.limits.max_images:
                at_most = f"at most {self.limits.max_images} are accepted"
                what = "images and frames up to this part" if self.videos else "images"
                raise InvalidRequest(f"{num_images} {what}; {at_most}", item.param)
        return found

    def _video_support(self, param: str) -> VideoSupport:
        if self.videos is None or self.tokenizer.video_token_id is None:
            raise InvalidRequest(f"{param}: this model takes no videos", param)
        return self.videos

    def _load_media(self, found: Sequence[FoundImage | FoundVideo]) -> LoadedMedia:
        assert self.processor is not None
        images: list[ProcessedImage] = []
        videos: list[PlacedVideo] = []
        used_pixels = 0
        for item in found:
            if isinstance(item, FoundImage):
                image = load_image(item.url, item.param, self.limits, used_pixels)
                used_pixels += image.width * image.height
                images.append(self.processor.process(image, item.param))
                continue
            frames = []
            for i, url in enumerate(item.frames):
                frames.append(load_image(url, f"{item.param}[{i}]", self.limits, used_pixels))
                used_pixels += frames[-1].width * frames[-1].height
            videos.append(self._place_video(stack_frames(frames, item.param), item))
        return LoadedMedia(images, videos)

    def _place_video(self, frames: np.ndarray, found: FoundVideo) -> PlacedVideo:
        """Process a video and encode what stands for it.  # frames [F, height, width, 3] uint8."""
        support = self._video_support(found.param)
        processor = support.require(found.param)
        video = processor.process(frames, found.fps, found.param)
        stamps = time_stamps(len(frames), found.fps, processor.frames_per_step)
        if len(stamps) != video.grid_thw[0]:
            raise InvalidRequest(
                f"{found.param}: {len(frames)} frames became {video.grid_thw[0]} steps, not "
                f"{len(stamps)}",
                found.param,
            )
        text = placeholder_text(support.layout, self.tokenizer.video_pad, stamps)
        return PlacedVideo(video, self.tokenizer.encode_control(text))


def to_sampling(body: GenerationBody, max_tokens: int | None) -> SamplingParams:
    """Map the body's parameters; what is absent gets the default of `SamplingParams`."""
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens {min_tokens} is above max_tokens", "min_tokens")
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "min_p": body.min_p,
        "ignore_eos": body.ignore_eos,
    }
    if body.top_p == 0:  # the smallest nucleus is one token
        given |= {"top_p": 1.0, "top_k": 1}
    if body.speculation is not None:
        wish = body.speculation
        given["max_draft_tokens"] = wish.num_draft_tokens if wish.enabled else 0
    return SamplingParams(
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        **{name: value for name, value in given.items() if value is not None},
    )


def _as_template_message(message: Message) -> dict[str, Any]:
    # Templates know the older name of the role only.
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, str):
        return {"role": role, "content": content}
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        # Text models' templates concatenate the content, so it must be a string.
        return {"role": role, "content": "".join(texts)}
    return {"role": role, "content": [_as_template_part(part) for part in content]}


def _as_template_part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}

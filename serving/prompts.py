"""From a validated body to a request in token ids.

Owns the making of requests and the loading of their images and videos. Knows no workers and no
HTTP. Invariants: what leaves here holds tokens of the vocabulary only; images and frames are
counted against the same limits, in their order in the body.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from serving.calling import tool_use
from serving.counters import IngressCounters
from serving.fetch import FetchLimits, ImageFetcher
from serving.images import ImageLimits, is_data_url, load_image
from serving.messages import ImagePart, Message, VideoPart
from serving.parameters import check_id, grammar_of, to_sampling
from serving.placeholders import PlacedVideo, expand
from serving.schema import ChatBody, CompletionBody, GenerationBody
from serving.textstream import Echo, TextRequest, token_offsets
from serving.turns import template_messages
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
    # Fetches nothing unless it was made to.
    fetcher: ImageFetcher = field(default_factory=lambda: ImageFetcher(FetchLimits(), 0))
    counters: IngressCounters = field(default_factory=IngressCounters)

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold images."""
        return self.processor is not None and self.tokenizer.image_token_id is not None

    @property
    def takes_videos(self) -> bool:
        """Whether messages may hold videos, in this installation."""
        has_processor = self.videos is not None and self.videos.processor is not None
        return self.takes_images and has_processor and self.tokenizer.video_token_id is not None

    async def chat(
        self, body: ChatBody, request_id: str, *, add_generation_prompt: bool = True
    ) -> TextRequest:
        """Build a chat request; templates and images run in threads, off the event loop.

        Args:
            body: What was asked.
            request_id: Its name.
            add_generation_prompt: Whether the prompt ends where the answer begins.
        """
        if not self.tokenizer.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        media = LoadedMedia()
        found = self._find_media(body.messages)
        if found:
            start_s = time.perf_counter()
            loop = asyncio.get_running_loop()
            fetched = await self._fetch(found)
            media = await loop.run_in_executor(
                self.image_executor, self._load_media, found, fetched
            )
            self.counters.images_loaded(_sources(found), time.perf_counter() - start_s)
        return await asyncio.to_thread(self._chat, body, request_id, media, add_generation_prompt)

    async def completions(self, body: CompletionBody, request_id: str) -> tuple[TextRequest, ...]:
        """Build a completion's requests, one for each prompt."""
        return await asyncio.to_thread(self._completions, body, request_id)

    def _chat(
        self, body: ChatBody, request_id: str, media: LoadedMedia, add_generation_prompt: bool
    ) -> TextRequest:
        use = tool_use(body, self.tokenizer)
        ids = self.tokenizer.encode_chat(
            template_messages(body.messages), add_generation_prompt, use.described if use else ()
        )
        max_tokens = body.max_completion_tokens or body.max_tokens
        grammar = use.rules.grammar() if use and use.rules.binds else grammar_of(body)
        sampling = to_sampling(body, max_tokens, grammar)
        return TextRequest(
            self._request(body, request_id, ids, media, sampling),
            body.stops,
            new_parser=use.new_parser if use else None,
            is_single_call=use is not None and use.rules.is_single,
        )

    def _completions(self, body: CompletionBody, request_id: str) -> tuple[TextRequest, ...]:
        max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        grammar = grammar_of(body)
        requests = []
        for i, prompt in enumerate(body.prompts):
            if isinstance(prompt, str):
                ids = self.tokenizer.encode_prompt(prompt)
            else:
                ids = prompt
                self.check_ids(ids, f"prompt[{i}]" if len(body.prompts) > 1 else "prompt")
            sampling = to_sampling(body, max_tokens, grammar)
            request = self._request(body, request_id, ids, LoadedMedia(), sampling)
            echo = self._echo(prompt, ids, body.logprobs is not None) if body.echo else None
            requests.append(TextRequest(request, body.stops, echo, is_score=body.max_tokens == 0))
        return tuple(requests)

    def _echo(self, prompt: str | list[int], ids: Sequence[int], has_offsets: bool) -> Echo:
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids)
        return Echo(text, token_offsets(ids, self.tokenizer, len(text)) if has_offsets else None)

    def _request(
        self,
        body: GenerationBody,
        request_id: str,
        ids: Sequence[int],
        media: LoadedMedia,
        sampling: SamplingParams,
    ) -> GenerationRequest:
        if not ids:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        self.check_ids(body.stop_token_ids or [], "stop_token_ids")
        for key in body.logit_bias or {}:
            check_id(int(key), f"logit_bias.{key}", self.tokenizer.vocab_size)
        pads = (self.tokenizer.image_token_id, self.tokenizer.video_token_id)
        prompt = expand(ids, *media, *pads)
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt.ids,
            sampling=sampling,
            images=prompt.images,
            videos=prompt.videos,
        )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuse what is no token, by its place."""
        for i, token_id in enumerate(ids):
            check_id(token_id, f"{param}[{i}]", self.tokenizer.vocab_size)

    def _find_media(self, messages: Sequence[Message]) -> list[FoundImage | FoundVideo]:
        """Return images and videos in order, after the checks that need no pixels."""
        found: list[FoundImage | FoundVideo] = []
        for m, message in enumerate(messages):
            if message.content is None or isinstance(message.content, str):
                continue
            for p, part in enumerate(message.content):
                place = f"messages[{m}].content[{p}]"
                if isinstance(part, ImagePart):
                    found.append(FoundImage(part.image_url.url, f"{place}.image_url"))
                elif isinstance(part, VideoPart):
                    found.append(FoundVideo(part.video, part.fps, f"{place}.video"))
        if found and not self.takes_images:
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

    async def _fetch(self, found: Sequence[FoundImage | FoundVideo]) -> dict[str, bytes]:
        """Return what stands behind each URL that is no `data:` URL, all asked for at once."""
        places: dict[str, str] = {}
        for item in found:
            if isinstance(item, FoundImage):
                places.setdefault(item.url, item.param)
            else:
                for i, url in enumerate(item.frames):
                    places.setdefault(url, f"{item.param}[{i}]")
        wanted = {url: place for url, place in places.items() if not is_data_url(url)}
        jobs = (self.fetcher.fetch(url, place) for url, place in wanted.items())
        results = await asyncio.gather(*jobs, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):  # the first in the body's order
                raise result
        return dict(zip(wanted, results, strict=True))  # type: ignore[arg-type]

    def _load_media(
        self, found: Sequence[FoundImage | FoundVideo], fetched: Mapping[str, bytes]
    ) -> LoadedMedia:
        assert self.processor is not None
        images: list[ProcessedImage] = []
        videos: list[PlacedVideo] = []
        used_pixels = 0
        for item in found:
            if isinstance(item, FoundImage):
                source = fetched.get(item.url, item.url)
                image = load_image(source, item.param, self.limits, used_pixels)
                used_pixels += image.width * image.height
                images.append(self.processor.process(image, item.param))
                continue
            frames = []
            for i, url in enumerate(item.frames):
                source, place = fetched.get(url, url), f"{item.param}[{i}]"
                frames.append(load_image(source, place, self.limits, used_pixels))
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


def _sources(found: Sequence[FoundImage | FoundVideo]) -> Counter[str]:
    """Count images and frames by where they come from."""
    sources: Counter[str] = Counter()
    for item in found:
        urls = (item.url,) if isinstance(item, FoundImage) else item.frames
        sources.update("data" if is_data_url(url) else "url" for url in urls)
    return sources

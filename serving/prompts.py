"""From a validated body to a request in token ids.

Owns the mapping of OpenAI's parameters to `SamplingParams`, the loading of a request's images
and the expansion of their placeholders. Knows no workers and no HTTP. Invariants: the seed is
always set; every image has its placeholders, and every placeholder its image.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from serving.errors import UnsupportedParameter
from serving.images import ImageLimits, load_image
from serving.schema import ChatBody, CompletionBody, GenerationBody, ImagePart, Message
from serving.textstream import TextRequest
from workers.contracts import GenerationRequest, ImageInput, SamplingParams
from workers.errors import InvalidRequest

if TYPE_CHECKING:  # these load transformers, which only the ingress process needs
    from serving.processor import ImageProcessor, ProcessedImage
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

    async def chat(self, body: ChatBody, request_id: str) -> TextRequest:
        """Build a chat request; templates and images run in threads, off the event loop."""
        if not self.tokenizer.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        images: list[ProcessedImage] = []
        found = self._find_images(body.messages)
        if found:
            loop = asyncio.get_running_loop()
            images = await loop.run_in_executor(self.image_executor, self._load_images, found)
        return await asyncio.to_thread(self._chat, body, request_id, images)

    async def completion(self, body: CompletionBody, request_id: str) -> TextRequest:
        """Build a completion request."""
        return await asyncio.to_thread(self._completion, body, request_id)

    def _chat(self, body: ChatBody, request_id: str, images: list[ProcessedImage]) -> TextRequest:
        messages = [_as_template_message(message) for message in body.messages]
        ids = self.tokenizer.encode_chat(messages)
        max_tokens = body.max_completion_tokens or body.max_tokens
        return self._finish(body, request_id, ids, images, max_tokens)

    def _completion(self, body: CompletionBody, request_id: str) -> TextRequest:
        prompt = body.prompt[0] if isinstance(body.prompt, list) else body.prompt
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_prompt(prompt)
        else:
            ids = [int(token_id) for token_id in body.prompt]
            self._check_ids(ids, "prompt")
        max_tokens = body.max_tokens or COMPLETION_MAX_TOKENS
        return self._finish(body, request_id, ids, [], max_tokens)

    def _finish(
        self,
        body: GenerationBody,
        request_id: str,
        ids: list[int],
        images: list[ProcessedImage],
        max_tokens: int | None,
    ) -> TextRequest:
        if not ids:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        self._check_ids(body.stop_token_ids or [], "stop_token_ids")
        if self.tokenizer.video_token_id in ids:
            raise UnsupportedParameter("the prompt has a video placeholder; video is not supported")
        expanded, inputs = expand_images(ids, images, self.tokenizer.image_token_id)
        request = GenerationRequest(
            request_id=request_id,
            prompt_ids=expanded,
            sampling=to_sampling(body, max_tokens),
            images=inputs,
        )
        return TextRequest(request, body.stops)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        for i, token_id in enumerate(ids):
            if not 0 <= token_id < self.tokenizer.vocab_size:
                name = f"{param}[{i}]"
                accepted = f"token ids are below {self.tokenizer.vocab_size}"
                raise InvalidRequest(f"{name}: {token_id} is no token; {accepted}", name)

    def _find_images(self, messages: Sequence[Message]) -> list[FoundImage]:
        found = [
            FoundImage(part.image_url.url, f"messages[{m}].content[{p}].image_url")
            for m, message in enumerate(messages)
            if isinstance(message.content, list)
            for p, part in enumerate(message.content)
            if isinstance(part, ImagePart)
        ]
        if found and (self.processor is None or self.tokenizer.image_token_id is None):
            raise InvalidRequest("this model takes text only", found[0].param)
        if len(found) > self.limits.max_images:
            at_most = f"{len(found)} images; at most {self.limits.max_images} are accepted"
            raise InvalidRequest(at_most, found[self.limits.max_images].param)
        return found

    def _load_images(self, found: Sequence[FoundImage]) -> list[ProcessedImage]:
        assert self.processor is not None
        processed: list[ProcessedImage] = []
        used_pixels = 0
        for url, param in found:
            image = load_image(url, param, self.limits, used_pixels)
            used_pixels += image.width * image.height
            processed.append(self.processor.process(image, param))
        return processed


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


def expand_images(
    ids: Sequence[int], images: Sequence[ProcessedImage], image_token_id: int | None
) -> tuple[tuple[int, ...], tuple[ImageInput, ...]]:
    """Replace each image's single placeholder by as many as the image has tokens."""
    num_placeholders = 0 if image_token_id is None else sum(i == image_token_id for i in ids)
    if num_placeholders != len(images):
        raise InvalidRequest(
            f"{len(images)} images supplied, {num_placeholders} placeholders found"
        )
    expanded: list[int] = []
    inputs: list[ImageInput] = []
    for token_id in ids:
        if token_id != image_token_id:
            expanded.append(token_id)
            continue
        image = images[len(inputs)]
        inputs.append(
            ImageInput(
                pixel_values=image.pixel_values,
                grid_thw=image.grid_thw,
                content_hash=image.content_hash,
                start=len(expanded),
                num_tokens=image.num_tokens,
            )
        )
        expanded.extend([token_id] * image.num_tokens)
    return tuple(expanded), tuple(inputs)


def _as_template_message(message: Message) -> dict[str, Any]:
    # Templates know the older name of the role only.
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not any(isinstance(part, ImagePart) for part in content):
        # Text models' templates concatenate the content, so it must be a string.
        texts = [part.text for part in content if not isinstance(part, ImagePart)]
        return {"role": role, "content": "".join(texts)}
    parts = [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for part in content
    ]
    return {"role": role, "content": parts}

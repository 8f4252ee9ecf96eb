"""Test doubles of the text plane: a small tokenizer, an image processor, scripted workers."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from serving.api import Services, build_api
from serving.images import ImageLimits
from serving.processor import ImageProcessor, VideoSupport
from serving.prompts import PromptBuilder
from serving.relay import Relay
from serving.tokenizer import ServingTokenizer
from workers.contracts import (
    FinishReason,
    GenerationRequest,
    TokenDelta,
)
from workers.errors import WorkerLost

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
            "<|image_pad|>", "<|video_pad|>")  # fmt: skip
TEMPLATE = """\
{%- for m in messages -%}
{%- if m['role'] == 'system' and not loop.first -%}
{{- raise_exception('system must come first') -}}
{%- endif -%}
<|im_start|>{{ m['role'] }}\n
{%- if m['content'] is string -%}{{- m['content'] -}}
{%- else -%}{%- for part in m['content'] -%}
{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}<|im_end|>\n
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}
"""
CORPUS = ("the quick brown fox jumps over the lazy dog", "hello world hello there", "stop here now",
          "a red circle above a blue square", "中文字符 中文", "😀😀 emoji")  # fmt: skip


@functools.cache
def make_hf_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: characters beyond ASCII are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


@functools.cache
def make_tokenizer() -> ServingTokenizer:
    hf = make_hf_tokenizer()
    ids = {name: hf.convert_tokens_to_ids(name) for name in SPECIALS}
    return ServingTokenizer(hf, ids["<|image_pad|>"], ids["<|video_pad|>"])


@functools.cache
def make_text_tokenizer() -> ServingTokenizer:
    return ServingTokenizer(make_hf_tokenizer())


@functools.cache
def make_processor() -> ImageProcessor:
    processor = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    )
    return ImageProcessor(processor)


def encode(text: str) -> list[int]:
    return make_tokenizer().encode_prompt(text)


def data_url(image: Image.Image, file_format: str = "PNG", **options: object) -> str:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    payload = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{file_format.lower()};base64,{payload}"


def picture(width: int = 60, height: int = 40, color: str = "red") -> Image.Image:
    return Image.new("RGB", (width, height), color)


def deltas_of(
    ids: Sequence[int],
    sizes: Sequence[int] = (),
    finish: FinishReason | None = FinishReason.STOP,
    request_id: str = "r",
) -> list[TokenDelta]:
    """Cut ids into deltas of the given sizes (the last size repeats)."""
    deltas: list[TokenDelta] = []
    start, turn = 0, 0
    while start < len(ids):
        size = sizes[min(turn, len(sizes) - 1)] if sizes else 1
        chunk = tuple(ids[start : start + size])
        deltas.append(TokenDelta(request_id, start, chunk))
        start, turn = start + size, turn + 1
    if deltas and finish is not None:
        last = deltas[-1]
        deltas[-1] = TokenDelta(request_id, last.start, last.token_ids, finish)
    elif finish is not None:
        deltas.append(TokenDelta(request_id, 0, (), finish))
    return deltas


Script = list[TokenDelta | Exception]


@dataclass
class ScriptedWorkers:
    """A WorkerClient that plays one script per call of `generate`; the last one repeats."""

    scripts: list[Script]
    delay_s: float = 0.0
    requests: list[GenerationRequest] = field(default_factory=list)
    num_open: int = 0
    num_closed_early: int = 0
    # Deltas that were taken, over all calls.
    num_taken: int = 0
    is_healthy: bool = True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        self.num_open += 1
        finished = False
        try:
            for item in script:
                await asyncio.sleep(self.delay_s)
                if isinstance(item, Exception):
                    finished = True
                    raise item
                self.num_taken += 1
                finished = item.finish_reason is not None
                yield item
        finally:
            self.num_open -= 1
            self.num_closed_early += not finished

    async def wait_taken(self, num_deltas: int) -> None:
        while self.num_taken < num_deltas:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def check_health(self) -> None:
        if not self.is_healthy:
            raise WorkerLost("no worker is ready")


def make_services(
    workers: ScriptedWorkers,
    *,
    vision: bool = True,
    max_replays: int = 2,
    max_body_bytes: int = 2_000_000,
    limits: ImageLimits | None = None,
    videos: VideoSupport | None = None,
) -> Services:
    tokenizer = make_tokenizer() if vision else make_text_tokenizer()
    prompts = PromptBuilder(
        tokenizer, make_processor() if vision else None, limits or ImageLimits(), videos=videos
    )

    async def metrics() -> str:
        return "# TYPE specserve_up gauge\nspecserve_up 1\n"

    return Services(
        model_id="demo", prompts=prompts, workers=workers,
        relay=Relay(workers, max_replays, backoff_s=0),
        metrics=metrics, max_body_bytes=max_body_bytes,
    )  # fmt: skip


def make_app(workers: ScriptedWorkers, **options: object) -> Callable[..., object]:
    return build_api(make_services(workers, **options))  # type: ignore[arg-type]

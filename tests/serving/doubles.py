"""Test doubles of the text plane: a small tokenizer, an image processor, scripted workers."""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import io
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from serving.api import COUNTED, Services, build_api
from serving.counters import IngressCounters
from serving.fetch import ImageFetcher
from serving.images import ImageLimits
from serving.processor import ImageProcessor, VideoSupport
from serving.prompts import PromptBuilder
from serving.relay import Relay
from serving.tokenizer import ServingTokenizer
from workers.contracts import (
    FinishReason,
    GenerationRequest,
    TokenDelta,
    TokenLogprob,
    WorkerInfo,
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
# As Hermes does.
TOOL_TEMPLATE = """\
{%- if tools -%}<|im_start|>system\nTools:{%- for tool in tools %} {{ tool | tojson }}{% endfor %}
Call with <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>\n{%- endif -%}
{%- for m in messages -%}
<|im_start|>{{ m['role'] }}\n{{ m['content'] }}
{%- for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}<|im_end|>\n
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}
"""  # noqa: E501
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
def make_tool_tokenizer() -> ServingTokenizer:
    """One whose model calls tools, and takes text only."""
    hf = copy.deepcopy(make_hf_tokenizer())
    hf.chat_template = TOOL_TEMPLATE
    return ServingTokenizer(hf)


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
    # Nothing is played before it is set.
    gate: asyncio.Event | None = None
    # Times `info` was called.
    num_asked: int = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        self.num_open += 1
        finished = False
        try:
            if self.gate is not None:
                await self.gate.wait()
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

    async def info(self) -> WorkerInfo:
        self.num_asked += 1
        if not self.is_healthy:
            raise WorkerLost("no worker is ready")
        return WorkerInfo(
            worker_id="w", model_id="demo", target="/models/t", draft=None, method="none",
            attention_backend="none", max_sequence_len=4096, num_blocks=64, block_size=16,
            device="cpu", dtype="float32",
        )  # fmt: skip

    async def check_health(self) -> None:
        if not self.is_healthy:
            raise WorkerLost("no worker is ready")


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    """Return numbers that tell the token: itself the likeliest but one."""
    top = [(token_id + 1, -0.25 - token_id / 1000), (token_id, -0.5 - token_id / 1000)]
    top += [(token_id + i, -1.0 * i - token_id / 1000) for i in range(2, num_top)]
    return TokenLogprob(token_id, -0.5 - token_id / 1000, tuple(top[:num_top]))


@dataclass
class FaithfulWorkers(ScriptedWorkers):
    """Workers that give each request what it asks for, of the same tokens in deltas of one size.

    The last token is a stop.
    """

    ids: Sequence[int] = ()
    size: int = 1

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        sampling = request.sampling
        ids = list(self.ids[: sampling.max_tokens])
        finish = FinishReason.STOP if len(ids) == len(self.ids) else FinishReason.LENGTH
        script: Script = []
        for delta in deltas_of(ids, (self.size,), finish, request.request_id):
            scores = prompt_scores = None
            if (num_top := sampling.num_logprobs) is not None:
                scores = tuple(logprob_of(i, num_top) for i in delta.token_ids)
            if (num_top := sampling.num_prompt_logprobs) is not None and delta.start == 0:
                rest = [logprob_of(i, num_top) for i in request.prompt_ids[1:]]
                prompt_scores = (None, *rest)
            end = delta.start + len(delta.token_ids)
            script.append(
                replace(
                    delta, logprobs=scores, prompt_logprobs=prompt_scores, num_cached_tokens=1,
                    num_draft_tokens=2 * end, num_accepted_tokens=end, num_steps=end,
                )
            )  # fmt: skip
        self.scripts = [script]
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta


def make_services(
    workers: ScriptedWorkers,
    *,
    vision: bool = True,
    tools: bool = False,
    max_replays: int = 2,
    max_body_bytes: int = 2_000_000,
    limits: ImageLimits | None = None,
    videos: VideoSupport | None = None,
    fetcher: ImageFetcher | None = None,
    **options: Any,
) -> Services:
    tokenizer = make_tokenizer() if vision else make_text_tokenizer()
    if tools:
        tokenizer, vision = make_tool_tokenizer(), False
    counters = IngressCounters(COUNTED)
    prompts = PromptBuilder(
        tokenizer, make_processor() if vision else None, limits or ImageLimits(), videos=videos,
        counters=counters, **({} if fetcher is None else {"fetcher": fetcher}),
    )  # fmt: skip

    async def metrics() -> str:
        return "# TYPE specserve_up gauge\nspecserve_up 1\n"

    return Services(
        model_id="demo", prompts=prompts, workers=workers,
        relay=Relay(workers, max_replays, backoff_s=0, counters=counters), counters=counters,
        metrics=metrics, max_body_bytes=max_body_bytes, **options,
    )  # fmt: skip


def make_app(workers: ScriptedWorkers, **options: object) -> Callable[..., object]:
    return build_api(make_services(workers, **options))  # type: ignore[arg-type]

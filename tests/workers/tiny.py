"""Tiny random checkpoints of every family, and requests for them.

Weights are drawn wide (initializer_range 0.2), so that logits differ by far more than float32
rounding: an equality test then finds bugs, not ties.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from workers.contracts import GenerationRequest, ImageInput, SamplingParams

VOCAB = 160
IMAGE_PAD, VISION_START, VISION_END = 150, 151, 152
EOS = 1
PATCH, MERGE = 4, 2
PATCH_DIM = 3 * 2 * PATCH * PATCH

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


def _llama(seed: int, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**_TEXT, **changes}))


def _qwen2(seed: int, **changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**_TEXT, **changes}))


def _qwen2_5_vl(seed: int, **changes: Any) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(seed)
    text = {**_TEXT, **changes}
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    sections = [head_dim // 2 - 2 * (head_dim // 6), head_dim // 6, head_dim // 6]
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": sections,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [1],
            "out_hidden_size": text["hidden_size"],
            "initializer_range": 0.2,
        },
        image_token_id=IMAGE_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2_5_vl": _qwen2_5_vl,
}
VISION_FAMILIES = frozenset({"qwen2_5_vl"})


def save(path: Path, family: str, seed: int, *, noise: float = 0.0, **changes: Any) -> str:
    """Write a checkpoint of random weights, with noise on top, and return its directory."""
    model = FAMILIES[family](seed, **changes).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn_like(weight)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    return str(path)


def image(seed: int, height: int, width: int, start: int) -> ImageInput:
    """Return a random image of `height` x `width` merged patches whose pads begin at `start`."""
    grid = (1, height * MERGE, width * MERGE)
    rng = np.random.default_rng(seed)
    pixels = rng.standard_normal((grid[1] * grid[2], PATCH_DIM), dtype=np.float32)
    key = hashlib.sha256(pixels.tobytes() + repr(grid).encode()).digest()
    return ImageInput(pixels, grid, key, start, height * width)


def prompt(seed: int, parts: list[int | tuple[int, int]]) -> tuple[list[int], list[ImageInput]]:
    """Build a prompt of text lengths and (height, width) images, in order."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    images: list[ImageInput] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids += rng.integers(2, 140, part).tolist()
            continue
        ids.append(VISION_START)
        images.append(image(1000 * seed + number, *part, start=len(ids)))
        ids += [IMAGE_PAD] * images[-1].num_tokens
        ids.append(VISION_END)
    return ids, images


def request(
    request_id: str,
    ids: list[int],
    images: list[ImageInput] | None = None,
    *,
    emitted: tuple[int, ...] = (),
    **sampling: Any,
) -> GenerationRequest:
    """Return a request; greedy and 12 tokens unless told otherwise."""
    params = {"seed": 1, "temperature": 0.0, "max_tokens": 12, **sampling}
    return GenerationRequest(
        request_id, tuple(ids), SamplingParams(**params), tuple(images or ()), emitted
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

"""What the library itself says: greedy continuations, logits and positions of whole sequences."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from workers.contracts import GenerationRequest, MediaInput
from workers.models.families import ADAPTERS


@cache
def load(path: str) -> Any:
    """Load a checkpoint with the library's own attention."""
    from transformers import AutoConfig

    model_class = ADAPTERS[AutoConfig.from_pretrained(path).model_type].model_class()
    return model_class.from_pretrained(path, dtype=torch.float32).eval()


def _inputs(model: Any, request: GenerationRequest, ids: Sequence[int]) -> dict[str, Tensor]:
    inputs = {"input_ids": torch.tensor([list(ids)])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if request.media:
        inputs["mm_token_type_ids"] = _kinds(request, len(ids))
    if request.images:
        inputs["pixel_values"] = _pixels(request.images)
        inputs["image_grid_thw"] = _grids(request.images)
    if request.videos:
        inputs["pixel_values_videos"] = _pixels(request.videos)
        inputs["video_grid_thw"] = _grids(request.videos)
        if "second_per_grid_ts" in inspect.signature(model.forward).parameters:
            inputs["second_per_grid_ts"] = _seconds(request)
    return inputs


def _pixels(media: Sequence[MediaInput]) -> Tensor:
    return torch.cat([torch.from_numpy(item.pixel_values) for item in media])


def _grids(media: Sequence[MediaInput]) -> Tensor:
    return torch.tensor([item.grid_thw for item in media])


def _seconds(request: GenerationRequest) -> Tensor:
    return torch.tensor([video.seconds_per_grid for video in request.videos])


def _kinds(request: GenerationRequest, length: int) -> Tensor:
    kinds = torch.zeros((1, length), dtype=torch.int32)
    for item in request.media:
        for start, end in item.runs:
            kinds[0, start:end] = 2 if item in request.videos else 1
    return kinds


def generate(path: str, request: GenerationRequest) -> list[int]:
    """Return the library's greedy continuation."""
    model = load(path)
    assert request.sampling.max_tokens is not None
    out = model.generate(
        **_inputs(model, request, request.prompt_ids),
        max_new_tokens=request.sampling.max_tokens,
        do_sample=False,
    )
    return out[0, len(request.prompt_ids) :].tolist()


def prompt_logits(path: str, request: GenerationRequest) -> Tensor:
    """Return the logits after every token of the prompt.  # [P, V] float32."""
    return _all_logits(path, request, request.prompt_ids)


def logits(path: str, request: GenerationRequest, emitted: Sequence[int] = ()) -> Tensor:
    """Return the logits after the prompt and `emitted`.  # [V] float32."""
    return _all_logits(path, request, [*request.prompt_ids, *emitted])[-1]


def _all_logits(path: str, request: GenerationRequest, ids: Sequence[int]) -> Tensor:
    model = load(path)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    with torch.inference_mode():
        out = model(**_inputs(model, request, ids), use_cache=False)
    return out.logits[0].float()


def positions(path: str, request: GenerationRequest, ids: Sequence[int]) -> Tensor:
    """Return the library's rope positions of a whole sequence, emitted tokens included.

    Returns:
        # [3, len(ids)] int64
    """
    model = load(path)
    if not hasattr(model.model, "get_rope_index"):
        return torch.arange(len(ids)).expand(3, -1)
    table, _ = model.model.get_rope_index(
        torch.tensor([list(ids)]),
        mm_token_type_ids=_kinds(request, len(ids)),
        image_grid_thw=_grids(request.images) if request.images else None,
        video_grid_thw=_grids(request.videos) if request.videos else None,
        second_per_grid_ts=_seconds(request),
    )
    return table[:, 0]


def describe_difference(
    path: str, request: GenerationRequest, ours: Sequence[int], plain: Sequence[int]
) -> str:
    """Say where two continuations part and how close the two tokens were for the target."""
    at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), None)
    if at is None:
        return f"{request.request_id}: lengths {len(ours)} and {len(plain)}, no token differs"
    row = logits(path, request, plain[:at])
    gap = (row[plain[at]] - row[ours[at]]).item()
    return (
        f"{request.request_id}: token {at} is {ours[at]}, plain decoding gives {plain[at]}; "
        f"logit gap {gap:.2e} at temperature {request.sampling.temperature}"
    )

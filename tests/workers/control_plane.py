"""Factories for scheduler and block-manager tests: no torch, no models."""

from __future__ import annotations

from typing import Any

from workers.config import SchedulerConfig
from workers.contracts import GenerationRequest, ImageInput, SamplingParams
from workers.kv.block_manager import BlockManager
from workers.scheduler import Scheduler
from workers.sequence import Sequence


def make_sequence(
    tokens: list[int] | int,
    *,
    name: str = "r",
    max_tokens: int = 64,
    images: tuple[ImageInput, ...] = (),
    needs_draft_kv: bool = False,
    max_draft_tokens: int | None = None,
) -> Sequence:
    """Return a waiting sequence; a number means that many distinct tokens."""
    ids = list(range(100, 100 + tokens)) if isinstance(tokens, int) else tokens
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, max_draft_tokens=max_draft_tokens)
    request = GenerationRequest(name, tuple(ids), sampling, images)
    return Sequence(request, frozenset({1}), len(ids) + max_tokens, needs_draft_kv=needs_draft_kv)


def make_scheduler(num_blocks: int = 64, max_model_len: int = 1024, **config: Any) -> Scheduler:
    """Return a scheduler over a fresh pool of blocks of 16."""
    blocks = BlockManager(num_blocks, 16, prefix_caching=config.pop("prefix_caching", True))
    return Scheduler(SchedulerConfig(**config), blocks, max_model_len)

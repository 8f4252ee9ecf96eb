"""The drafting methods by name.

Owns the table from `speculation.method` to what builds its drafter, in two phases: load (so that
the K/V it needs can be counted) and place (once the number of blocks is known). Adding a method is
a file beside this one, a line in `METHODS`, its name in `workers.config.METHODS` and a row in the
losslessness test. Invariant: no code outside this package asks for a method's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.kv.pool import KVShape
from workers.models.loader import LoadedModel, check_pair, load_model
from workers.models.runner import ModelRunner
from workers.spec.draft_model import DraftModelDrafter
from workers.spec.drafter import Drafter


class DrafterSource(Protocol):
    """A drafter that is loaded but has no K/V yet."""

    @property
    def kv_shape(self) -> KVShape | None:
        """What it stores in the worker's blocks; None = nothing."""
        ...

    def place(self, num_blocks: int) -> Drafter:
        """Allocate its K/V and return the drafter."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _DraftModelSource:
    config: EngineConfig
    target: LoadedModel
    draft: LoadedModel
    device: torch.device

    @property
    def kv_shape(self) -> KVShape:
        return self.draft.adapter.kv_shape

    def place(self, num_blocks: int) -> Drafter:
        config = self.config
        runner = ModelRunner(
            self.draft.adapter,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            device=self.device,
            attention_backend=config.attention_backend,
            image_cache_bytes=config.cache.image_cache_bytes,
        )
        num_ids = min(self.target.num_ids, self.draft.num_ids)
        # What the target ran in the step, and two tokens for each sequence that drafts.
        room = config.scheduler.max_step_tokens + 2 * config.scheduler.max_running
        return DraftModelDrafter(runner, num_ids, max_extend_tokens=room)


def _load_draft_model(
    config: EngineConfig, target: LoadedModel, device: torch.device
) -> DrafterSource:
    if config.speculation.draft is None:
        raise ConfigError("speculation.draft", None, "method draft_model needs a draft model")
    draft = load_model(config.speculation.draft, device)
    check_pair(target, draft)
    return _DraftModelSource(config, target, draft, device)


METHODS: dict[str, Callable[[EngineConfig, LoadedModel, torch.device], DrafterSource]] = {
    "draft_model": _load_draft_model,
}


def load_drafter(
    config: EngineConfig, target: LoadedModel, device: torch.device
) -> DrafterSource | None:
    """Load what `speculation.method` names; None for plain decoding."""
    if config.speculation.method == "none":
        return None
    return METHODS[config.speculation.method](config, target, device)

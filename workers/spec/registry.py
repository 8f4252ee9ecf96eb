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
from workers.models.nextn import NextNAdapter, load_nextn
from workers.models.runner import ImageCache, ModelRunner
from workers.spec.draft_model import DraftModelDrafter
from workers.spec.drafter import Drafter
from workers.spec.hybrid_draft import DraftSlots, HybridDraftModelDrafter
from workers.spec.nextn import NextNDrafter
from workers.spec.ngram import NgramDrafter
from workers.spec.token_map import TokenMap


class DrafterSource(Protocol):
    """A drafter that is loaded but has no K/V yet."""

    @property
    def kv_shape(self) -> KVShape | None:
        """What it stores in the worker's blocks; None = nothing."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state that each running sequence needs for it."""
        ...

    def place(self, target: ModelRunner) -> Drafter:
        """Allocate its K/V beside the target's and return the drafter."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _DraftModelSource:
    config: EngineConfig
    target: LoadedModel
    draft: LoadedModel

    @property
    def kv_shape(self) -> KVShape:
        return self.draft.adapter.kv_shape

    @property
    def state_bytes(self) -> int:
        linear = self.draft.adapter.linear_shape
        return 0 if linear is None else 2 * linear.state_bytes

    def place(self, target: ModelRunner) -> Drafter:
        config = self.config
        slots = DraftSlots(config.scheduler.max_running)
        runner = ModelRunner(
            self.draft.adapter,
            num_blocks=target.limits.num_blocks,
            block_size=target.limits.block_size,
            device=target.device,
            attention_backend=config.attention_backend,
            num_state_slots=slots.num_slots,
            image_cache=ImageCache(config.cache.image_cache_bytes),
        )
        num_ids = min(self.target.num_ids, self.draft.num_ids)
        token_map = TokenMap(self.draft.num_ids, self.draft.filler_id)
        room = _extend_room(config)
        if runner.states is None:
            return DraftModelDrafter(runner, num_ids, room, token_map)
        return HybridDraftModelDrafter(runner, num_ids, room, token_map, slots)


@dataclass(frozen=True, slots=True, eq=False)
class _NextNSource:
    config: EngineConfig
    head: NextNAdapter
    num_ids: int
    state_bytes: int = 0

    @property
    def kv_shape(self) -> KVShape:
        return self.head.kv_shape

    def place(self, target: ModelRunner) -> Drafter:
        runner = ModelRunner(
            self.head,
            num_blocks=target.limits.num_blocks,
            block_size=target.limits.block_size,
            device=target.device,
            attention_backend=self.config.attention_backend,
            image_cache=target.image_cache,
        )
        return NextNDrafter(runner, self.num_ids, _extend_room(self.config))


def _extend_room(config: EngineConfig) -> int:
    """Tokens of one draft-extend: the target's step, and two for each sequence that drafts."""
    return config.scheduler.max_step_tokens + 2 * config.scheduler.max_running


def _load_draft_model(
    config: EngineConfig, target: LoadedModel, device: torch.device
) -> DrafterSource:
    if config.speculation.draft is None:
        raise ConfigError("speculation.draft", None, "method draft_model needs a draft model")
    draft = load_model(config.speculation.draft, device)
    check_pair(target, draft)
    return _DraftModelSource(config, target, draft)


def _load_nextn(
    config: EngineConfig,
    target: LoadedModel,
    device: torch.device,  # noqa: ARG001 - the target's
) -> DrafterSource:
    return _NextNSource(config, load_nextn(config.target, target.adapter), target.num_ids)


@dataclass(frozen=True, slots=True)
class _NgramSource:
    ngram_max: int
    ngram_min: int
    kv_shape: KVShape | None = None
    state_bytes: int = 0

    def place(self, target: ModelRunner) -> Drafter:  # noqa: ARG002 - stores nothing in blocks
        return NgramDrafter(self.ngram_max, self.ngram_min)


def _load_ngram(
    config: EngineConfig,
    target: LoadedModel,  # noqa: ARG001 - any target; the engine checks the ids
    device: torch.device,  # noqa: ARG001
) -> DrafterSource:
    return _NgramSource(config.speculation.ngram_max, config.speculation.ngram_min)


METHODS: dict[str, Callable[[EngineConfig, LoadedModel, torch.device], DrafterSource]] = {
    "draft_model": _load_draft_model,
    "nextn": _load_nextn,
    "ngram": _load_ngram,
}


def load_drafter(
    config: EngineConfig, target: LoadedModel, device: torch.device
) -> DrafterSource | None:
    """Load what `speculation.method` names; None for plain decoding."""
    if config.speculation.method == "none":
        return None
    return METHODS[config.speculation.method](config, target, device)

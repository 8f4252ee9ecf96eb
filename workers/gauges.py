"""What is true of an engine at this moment, and what its parts have counted themselves.

Owns the reading of them into a meter. Knows no step. Called on the engine's thread, when somebody
wants to know. Invariant: reading changes nothing but the meter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.kv.block_manager import BlockManager
from workers.models.runner import ImageCache
from workers.scheduler import Scheduler
from workers.spec.breaker import Breaker, BreakerState
from workers.telemetry import series
from workers.telemetry.meter import Meter

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Drafts:
    """What there is to know of drafting."""

    # The drafter's name.
    name: str
    breaker: Breaker
    # Returns how many drafts a sequence may carry.
    limit: Callable[[], int]


class Gauges:
    """Reads an engine's parts."""

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        images: ImageCache,
        device: torch.device,
        drafts: Drafts | None,
    ) -> None:
        self._scheduler = scheduler
        self._blocks = blocks
        self._images = images
        self._device = device
        self._drafts = drafts
        # The parts go on counting where a meter begins anew.
        self._start = self._counted()

    def read(self, meter: Meter) -> None:
        """Set everything as of now."""
        scheduler, blocks, states = self._scheduler, self._blocks, self._blocks.states
        meter.set(series.RUNNING, len(scheduler.running))
        meter.set(series.WAITING, len(scheduler.waiting))
        meter.set(series.BLOCKS, blocks.num_blocks)
        meter.set(series.FREE_BLOCKS, blocks.num_free)
        meter.set(series.CACHED_BLOCKS, blocks.num_cached)
        meter.set(series.STATE_SLOTS, 0 if states is None else states.num_slots)
        meter.set(series.FREE_STATE_SLOTS, 0 if states is None else states.num_free)
        meter.set(series.IMAGE_BYTES, self._images.num_bytes)
        for family, count, start in zip(_COUNTED, self._counted(), self._start, strict=True):
            meter.set(family, count - start)
        meter.set(series.MEMORY_BYTES, _resident_bytes(), "host")
        if self._device.type == "cuda":
            meter.set(series.MEMORY_BYTES, torch.cuda.memory_reserved(self._device), "device")
        self._read_drafts(meter)

    def _read_drafts(self, meter: Meter) -> None:
        drafts = self._drafts
        if drafts is None:
            meter.set(series.DRAFT_LIMIT, 0, "none")
            return
        meter.set(series.DRAFT_LIMIT, drafts.limit(), drafts.name)
        for state in BreakerState:
            meter.set(series.BREAKER_STATE, drafts.breaker.state is state, str(state))

    def _counted(self) -> tuple[float, ...]:
        """Return what the parts have counted, in the order of `_COUNTED`."""
        breaker = None if self._drafts is None else self._drafts.breaker
        return (
            self._scheduler.num_preemptions,
            self._scheduler.num_queried_tokens,
            self._scheduler.num_cached_tokens,
            self._images.num_queries,
            self._images.num_hits,
            0 if breaker is None else breaker.num_opened,
            0.0 if breaker is None else breaker.open_s,
        )


_COUNTED = (
    series.PREEMPTIONS, series.PREFIX_QUERIES, series.PREFIX_HITS, series.IMAGE_QUERIES,
    series.IMAGE_HITS, series.BREAKER_OPENED, series.DISABLED_SECONDS,
)  # fmt: skip


def _resident_bytes() -> int:
    """Return the memory of this process; 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0

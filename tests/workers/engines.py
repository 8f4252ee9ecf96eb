"""Engines over tiny checkpoints, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from workers.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from workers.contracts import FinishReason, GenerationRequest
from workers.engine import Engine
from workers.factory import build_engine


def make_config(target: str, draft: str | None = None, **changes: Any) -> EngineConfig:
    """Return settings: plain without `draft` or a `method`, else speculation with it.

    Keyword arguments go to whichever part of the settings has a field of that name.
    """
    parts: dict[str, dict[str, Any]] = {}
    for kind in (CacheConfig, SchedulerConfig, SpeculationConfig):
        names = kind.__dataclass_fields__
        parts[kind.__name__] = {k: changes.pop(k) for k in list(changes) if k in names}
    speculation = parts["SpeculationConfig"]
    if draft is not None:
        speculation |= {"method": "draft_model", "draft": ModelConfig(draft)}
    return EngineConfig(
        model_id="tiny",
        target=ModelConfig(target),
        cache=CacheConfig(**{"num_blocks": 256, **parts["CacheConfig"]}),
        scheduler=SchedulerConfig(**parts["SchedulerConfig"]),
        speculation=SpeculationConfig(**speculation),
        device="cpu",
        attention_backend="sdpa",
        **changes,
    )


def make_engine(target: str, draft: str | None = None, **changes: Any) -> Engine:
    """Return a warm engine on the CPU."""
    return build_engine(make_config(target, draft, **changes))


class Outcome:
    """What clients of one run received."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.failures: dict[str, Exception] = {}
        self.num_deltas: dict[str, int] = {}

    def take(self, engine: Engine) -> None:
        """Run one step and record what it delivers."""
        result = engine.step()
        for delta in result.deltas:
            ids = self.token_ids.setdefault(delta.request_id, [])
            assert delta.start == len(ids), "a delta does not follow the one before it"
            assert delta.request_id not in self.reasons, "a delta after the terminal one"
            ids.extend(delta.token_ids)
            self.num_deltas[delta.request_id] = self.num_deltas.get(delta.request_id, 0) + 1
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason
        for request_id, error in result.failures.items():
            assert request_id not in self.failures
            self.failures[request_id] = error


def run(
    engine: Engine, requests: Iterable[GenerationRequest], *, per_step: int | None = None
) -> Outcome:
    """Run requests to their ends; with `per_step` they arrive that many at a time.

    Also checks that the block books balance after every step and at the end.
    """
    waiting = list(requests)
    outcome = Outcome()
    num_steps = 0
    while waiting or engine.has_work:
        arrivals = len(waiting) if per_step is None else per_step
        for request in waiting[:arrivals]:
            engine.add(request)
        waiting = waiting[arrivals:]
        outcome.take(engine)
        engine.blocks.check_integrity(engine.scheduler.running)
        num_steps += 1
        assert num_steps < 5000, "the engine does not come to an end"
    assert engine.blocks.num_free == engine.blocks.num_blocks, "blocks leaked"
    return outcome


def growing_batches(
    requests: list[GenerationRequest], largest: int = 8
) -> Iterator[list[GenerationRequest]]:
    """Split requests into batches of 1, 2, ... `largest`."""
    first = 0
    for size in range(1, largest + 1):
        yield requests[first : first + size]
        first += size

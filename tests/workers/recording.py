"""Records every forward pass of an engine, with the sequence each span belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from workers.batch_info import ForwardBatch, ForwardMode
from workers.engine import Engine
from workers.models.runner import ModelRunner, StepOutput


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """One sequence's part of one forward pass."""

    mode: ForwardMode
    is_target: bool
    request_id: str
    seq_positions: Tensor  # [n] int64
    rope_positions: Tensor  # [n] or [3, n] int64
    slots: Tensor  # [n] int64
    block_table: tuple[int, ...]


def record(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[RecordedSpan]:
    """Return a list that fills while the engine runs; prompts must not share blocks."""
    spans: list[RecordedSpan] = []
    runners: list[ModelRunner] = [engine._runner]
    if engine._drafting.drafter is not None:
        runners.append(engine._drafting.drafter._runner)  # type: ignore[attr-defined]
    for runner in runners:
        forward = runner.forward

        def recording(
            batch: ForwardBatch,
            *args: Any,
            forward: Callable[..., StepOutput] = forward,
            is_target: bool = runner is engine._runner,
            **kwargs: Any,
        ) -> StepOutput:
            spans.extend(_spans(engine, batch, is_target))
            return forward(batch, *args, **kwargs)

        monkeypatch.setattr(runner, "forward", recording)
    return spans


def _spans(engine: Engine, batch: ForwardBatch, is_target: bool) -> Iterator[RecordedSpan]:
    owners = {seq.block_table[0]: seq for seq in engine.scheduler.running}
    first = 0
    for row, q_len in enumerate(batch.attention.q_lens):
        seq = owners[int(batch.attention.block_table[row, 0])]
        part = slice(first, first + q_len)
        yield RecordedSpan(
            mode=batch.mode,
            is_target=is_target,
            request_id=seq.request_id,
            seq_positions=batch.seq_positions[part].clone(),
            rope_positions=batch.rope_positions[..., part].clone(),
            slots=batch.attention.slot_mapping[part].clone(),
            block_table=tuple(seq.block_table),
        )
        first += q_len

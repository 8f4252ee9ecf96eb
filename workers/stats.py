"""What the engine counts about itself, as plain data.

Owns the counters behind `EngineStats` and what each of them means. Knows no metrics library: the
exporter reads snapshots. Written on the engine's thread only. Invariant: acceptance never counts
the bonus token; what a stop trims from an accepted block is accepted, and counted as trimmed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from workers.contracts import EngineStats

if TYPE_CHECKING:
    from workers.errors import RequestError
    from workers.kv.block_manager import BlockManager
    from workers.scheduler import ScheduledSequence, Scheduler
    from workers.sequence import Sequence
    from workers.spec.breaker import Breaker


class StatsRecorder:
    """Counts since the engine was made."""

    def __init__(self, num_positions: int) -> None:
        self._admitted = 0
        # Known keys exist from the start, so that a first event is an increase from 0.
        self._finished = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self._refused: Counter[str] = Counter()
        self._spec_failures: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._target_steps = 0
        self._target_failures = 0
        self._sampled_rows = 0
        self._trimmed_tokens = 0
        self._draft_rounds = 0
        self._draft_tokens = 0
        self._accepted_per_position = [0] * num_positions
        self._target_time_s = 0.0
        self._draft_time_s = 0.0

    def admitted(self, seq: Sequence) -> None:
        """Count an accepted request."""
        self._admitted += 1
        self._prompt_tokens += seq.prompt_len

    def refused(self, error: RequestError) -> None:
        """Count a request that was turned away."""
        self._refused[type(error).__name__] += 1

    def finished(self, reason: str) -> None:
        """Count the one terminal event of a request."""
        self._finished[str(reason)] += 1

    def target_step(self, seconds: float) -> None:
        """Count one forward pass of the target, sampling included."""
        self._target_steps += 1
        self._target_time_s += seconds

    def target_failed(self) -> None:
        """Count a target failure that was narrowed down to one request."""
        self._target_failures += 1

    def draft_step(self, seconds: float) -> None:
        """Count the time a drafter took after a step."""
        self._draft_time_s += seconds

    def committed(self, item: ScheduledSequence, num_accepted: int, num_appended: int) -> None:
        """Count what a sequence got out of a step, and keep its own totals."""
        seq = item.seq
        self._sampled_rows += 1
        self._generated_tokens += num_appended
        self._trimmed_tokens += num_accepted + 1 - num_appended
        if item.num_draft_tokens:
            self._draft_rounds += 1
            self._draft_tokens += item.num_draft_tokens
            seq.num_draft_tokens += item.num_draft_tokens
            seq.num_accepted_tokens += num_accepted
            for position in range(num_accepted):
                self._accepted_per_position[position] += 1

    def spec_failed(self, stage: str, reason: str) -> None:
        """Count a failure that cost drafts."""
        self._spec_failures[f"{stage}:{reason}"] += 1

    def snapshot(
        self, scheduler: Scheduler, blocks: BlockManager, breaker: Breaker | None
    ) -> EngineStats:
        """Return everything as of now."""
        return EngineStats(
            admitted=self._admitted,
            finished=dict(self._finished),
            refused=dict(self._refused),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            generated_tokens=self._generated_tokens,
            target_steps=self._target_steps,
            sampled_rows=self._sampled_rows,
            trimmed_tokens=self._trimmed_tokens,
            draft_rounds=self._draft_rounds,
            draft_tokens=self._draft_tokens,
            accepted_tokens=sum(self._accepted_per_position),
            accepted_per_position=tuple(self._accepted_per_position),
            spec_failures=dict(self._spec_failures),
            breaker_state="" if breaker is None else str(breaker.state),
            breaker_opened=0 if breaker is None else breaker.num_opened,
            target_failures=self._target_failures,
            target_time_s=self._target_time_s,
            draft_time_s=self._draft_time_s,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free,
        )

"""What a worker has done lately, in one line of its log.

Owns the line and when it is due. Knows no engine and no clock: it is shown snapshots. Invariant:
the numbers of all lines together are those of the counters, so a log and a dashboard never tell
two stories.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from workers.telemetry import series
from workers.telemetry.meter import Snapshot, total

logger = logging.getLogger(__name__)

_COUNTED = {
    "tokens": series.GENERATED_TOKENS,
    "prompt_tokens": series.PROMPT_TOKENS,
    "drafts": series.DRAFTS,
    "draft_tokens": series.DRAFT_TOKENS,
    "accepted_tokens": series.ACCEPTED_TOKENS,
    "failures": series.FAILURES,
}


@dataclass(frozen=True, slots=True)
class _Seen:
    counts: dict[str, float]
    at_s: float


class ActivityLog:
    """Writes a line every so often, where there was something to do."""

    def __init__(self, interval_s: float) -> None:
        """Prepare.

        Args:
            interval_s: Between two lines; 0 = never.
        """
        self._interval_s = interval_s
        self._last: _Seen | None = None

    def show(self, snapshot: Snapshot, now_s: float, *, is_last: bool = False) -> None:
        """Write a line, if it is due."""
        if not self._interval_s:
            return
        counts = {name: total(snapshot, family) for name, family in _COUNTED.items()}
        last = self._last
        if last is None:
            last = self._last = _Seen(dict.fromkeys(counts, 0.0), now_s)
        seconds = now_s - last.at_s
        if seconds < self._interval_s and not is_last:
            return
        if counts != last.counts:
            self._write({k: counts[k] - last.counts[k] for k in counts}, seconds, snapshot)
        self._last = _Seen(counts, now_s)

    @staticmethod
    def _write(new: dict[str, float], seconds: float, snapshot: Snapshot) -> None:
        num_blocks = total(snapshot, series.BLOCKS)
        held = num_blocks - total(snapshot, series.FREE_BLOCKS)
        logger.info(
            "%d tokens (%.1f/s), %d of prompts; %d running, %d waiting; K/V %.0f%% held;"
            " %d of %d drafts accepted (%.2f), length %.2f; %d draft failures",
            new["tokens"],
            new["tokens"] / seconds if seconds else 0.0,
            new["prompt_tokens"],
            total(snapshot, series.RUNNING),
            total(snapshot, series.WAITING),
            100 * held / num_blocks if num_blocks else 0.0,
            new["accepted_tokens"],
            new["draft_tokens"],
            new["accepted_tokens"] / new["draft_tokens"] if new["draft_tokens"] else 0.0,
            1 + new["accepted_tokens"] / new["drafts"] if new["drafts"] else 1.0,
            new["failures"],
            # As fields of their own where lines are JSON.
            extra={f"new_{name}": int(count) for name, count in new.items()},
        )

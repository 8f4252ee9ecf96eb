"""What a drafter is, for the engine.

Owns the seam: tasks in, draft ids out. Knows no scheduler and no engine. A drafter may raise
anything and return anything: the engine treats every failure as a step without drafts. Invariant:
drafts never decide output, only how fast it comes; they carry ids and no probabilities, since
verification samples every position itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftTask:
    """A sequence that was part of the step, and how many drafts it may carry into the next."""

    seq: Sequence
    # 0 = keep the drafter's K/V up with the sequence, draft nothing.
    num_drafts: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft ids, one list a task, each at most as long as asked."""

    draft_ids: list[list[int]]
    # "stage:reason" of tasks that lost their drafts without the others losing theirs.
    failures: list[str] = field(default_factory=list)


class DraftFailure(Exception):
    """Drafting failed for the whole step."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(stage, reason)
        self.stage, self.reason = stage, reason

    @property
    def key(self) -> str:
        """How statistics name it."""
        return f"{self.stage}:{self.reason}"


class Drafter(Protocol):
    """Proposes the next tokens of sequences."""

    # Its name in the settings and in metrics.
    name: str
    # Whether it keeps K/V in the worker's blocks.
    needs_kv: bool

    def propose(self, tasks: Seq[DraftTask]) -> Proposal:
        """Draft for each task; also sees sequences that get no drafts this time.

        Raises:
            DraftFailure: Nothing was drafted; the K/V it vouches for is unchanged.
        """
        ...

"""What a drafter is, for the engine.

Owns the seam: tasks in, draft ids out. Knows no scheduler and no engine. A drafter may raise
anything and return anything: the engine treats every failure as a step without drafts. Invariant:
drafts never decide output, only how fast it comes; they carry ids and no probabilities, since
verification samples every position itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from workers.sequence import Sequence

if TYPE_CHECKING:  # a drafter without a model needs no torch
    from torch import Tensor


class DraftStage(StrEnum):
    """Where drafting can fail."""

    PROPOSE = "propose"
    DRAFT_EXTEND = "draft_extend"
    DRAFT_DECODE = "draft_decode"
    # The target's step failed with the drafts and not without them.
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class DraftTask:
    """A sequence that was part of the step, and how many drafts it may carry into the next."""

    seq: Sequence
    # 0 = keep the drafter's K/V up with the sequence, draft nothing.
    num_drafts: int
    # For drafters with `needs_hidden`: the target's output for the step's tokens that stand, the
    # last of them token `num_computed_tokens - 1`.  # [n, hidden]
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftFailure:
    """Something went wrong, and cost drafts only."""

    stage: DraftStage
    # Name of an exception's type, or what was wrong with the result.
    reason: str
    # The task that it is pinned on; None = the drafter itself.
    task: int | None = None
    # Whether that task's draft K/V is not to be trusted any more.
    is_distrusted: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft ids, one list a task, each at most as long as asked."""

    draft_ids: list[list[int]]
    failures: list[DraftFailure] = field(default_factory=list)
    # Where the time went, of what can be told apart. On a GPU, work that is queued counts where it
    # is waited for.
    seconds: dict[DraftStage, float] = field(default_factory=dict)


class Drafter(Protocol):
    """Proposes the next tokens of sequences."""

    # Its name in the settings and in metrics.
    name: str
    # Whether it keeps K/V in the worker's blocks.
    needs_kv: bool
    # Whether it runs on the target's output, and reads the token after the one it writes K/V for.
    needs_hidden: bool
    # Sequences of this length or longer get no drafts.
    max_sequence_len: int

    def propose(self, tasks: Seq[DraftTask]) -> Proposal:
        """Draft for each task; also sees sequences that get no drafts this time.

        A failure it can pin on some tasks is reported in the proposal; what it raises costs
        every task its drafts. Either way the K/V it vouches for in a sequence is valid.
        """
        ...

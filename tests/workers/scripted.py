"""A drafter that is right exactly as often as a test wants it to be."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from tests.workers import tiny
from workers.engine import Engine
from workers.sequence import Sequence
from workers.spec.drafter import DraftTask, Proposal

# (request id, tokens emitted so far) -> drafts, and how many of them are right.
Script = Callable[[str, int], tuple[int, int]]


class ScriptedDrafter:
    """Knows what the target will say, and errs on purpose."""

    name = "scripted"
    needs_kv = False
    needs_hidden = False
    max_sequence_len = 1 << 20

    def __init__(self, script: Script, answers: dict[str, list[int]]) -> None:
        self._script = script
        self._answers = answers

    def propose(self, tasks: Seq[DraftTask]) -> Proposal:
        return Proposal([self._drafts(task.seq, task.num_drafts) for task in tasks])

    def _drafts(self, seq: Sequence, limit: int) -> list[int]:
        num_drafts, num_right = self._script(seq.request_id, seq.num_emitted)
        answer = self._answers[seq.request_id][seq.num_emitted :]
        drafts = answer[: min(num_drafts, limit)]
        if num_right < len(drafts):
            drafts[num_right] = (drafts[num_right] + 1) % tiny.VOCAB
        return drafts


def end_wait(engine: Engine) -> None:
    """Let an open breaker try again now, as when its wait is over."""
    engine._breaker._until_s = 0.0


def script(engine: Engine, wanted: Script, answers: dict[str, list[int]]) -> None:
    """Let an engine that was built without speculation draft by a script."""
    drafter = ScriptedDrafter(wanted, answers)
    engine._drafting.drafter = drafter
    engine._admission._drafter = drafter

"""The drafter's part of a step, and the walls around it.

Owns what happens to a failure of drafting: it is counted, pinned on a sequence or on the drafter,
and costs drafts only. Knows no queue, no target and no tensor. The engine calls it after each
target step. Invariants: nothing a drafter does or returns reaches a request, but for the loss of
the device; a sequence that makes drafting fail on its own loses its drafts, and nobody else's; a
drafter that keeps failing is not called until the breaker lets it try again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.config import SpeculationConfig
from workers.kv.block_manager import BlockManager
from workers.models.device import is_device_lost
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.spec.breaker import Breaker, BreakerState
from workers.spec.drafter import Drafter, DraftStage, DraftTask
from workers.stats import StatsRecorder
from workers.target import Outcome

logger = logging.getLogger(__name__)

# A sequence that made drafting fail this often on its own is left alone.
MAX_FAILURES = 3


@dataclass(slots=True)
class _Verdict:
    """How one stage of a step went: whose drafts failed, and whose did not."""

    failed: list[Sequence] = field(default_factory=list)
    went_well: list[Sequence] = field(default_factory=list)
    # Whether something failed that nobody was named for.
    is_unnamed: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether it was the stage that failed, and not a sequence among others."""
        return self.is_unnamed or bool(self.failed and not self.went_well)

    def charge(self) -> None:
        """Hold failures against sequences where others went well, or there was no other."""
        if not self.went_well and len(self.failed) > 1:
            return
        for seq in self.failed:
            seq.num_draft_failures += 1
            if seq.num_draft_failures >= MAX_FAILURES:
                logger.warning("request %s gets no drafts any more", seq.request_id)
                seq.may_draft = False
                seq.drop_drafts()


class Drafting:
    """Runs a drafter after each step."""

    def __init__(
        self,
        drafter: Drafter | None,
        breaker: Breaker,
        config: SpeculationConfig,
        num_ids: int,
        scheduler: Scheduler,
        blocks: BlockManager,
    ) -> None:
        """Put the parts together.

        Args:
            drafter: What drafts; None = nothing does.
            breaker: Says whether it may.
            config: The settings.
            num_ids: Ids that are tokens.
            scheduler: Says how many drafts a sequence may carry.
            blocks: Where K/V that is not to be trusted is withdrawn.
        """
        self.drafter = drafter
        self._breaker = breaker
        self._config = config
        self._num_ids = num_ids
        self._scheduler = scheduler
        self._blocks = blocks

    def limit(self) -> int:
        """Return how many drafts a sequence may carry as of now."""
        is_off = self.drafter is None or self._breaker.state is BreakerState.OPEN
        return 0 if is_off else self._config.num_draft_tokens

    def follow(self, outcomes: Seq[Outcome], recorder: StatsRecorder) -> None:
        """Draft for the next step; whatever goes wrong costs that step its drafts."""
        if self.drafter is None:
            return
        verified = _verified(outcomes)
        verified.charge()
        live = [outcome for outcome in outcomes if not outcome.item.seq.is_finished]
        is_open = self._breaker.state is BreakerState.OPEN
        for outcome in live:
            seq = outcome.item.seq
            is_left_out = is_open or seq.num_draft_failures >= MAX_FAILURES
            if is_left_out and outcome.item.samples and _wants(seq):
                recorder.fell_back(seq)
        if is_open:
            return
        live = [outcome for outcome in live if outcome.item.seq.may_draft]
        tasks = [DraftTask(o.item.seq, self._num_drafts(o.item.seq), o.hidden) for o in live]
        proposed = self._timed(self.drafter, tasks, recorder) if tasks else _Verdict()
        proposed.charge()
        if verified.is_failure or proposed.is_failure:
            before = self._breaker.num_opened
            self._breaker.failed()
            if self._breaker.num_opened > before:
                logger.error("drafting keeps failing, and is left off for a while")
        elif verified.went_well:
            self._breaker.succeeded()

    def _timed(self, drafter: Drafter, tasks: Seq[DraftTask], recorder: StatsRecorder) -> _Verdict:
        """Propose; what took too long has failed, though its drafts are good."""
        start_s = time.perf_counter()
        verdict = self._propose(drafter, tasks, recorder)
        seconds = time.perf_counter() - start_s
        recorder.draft_step(seconds)
        if seconds > self._config.breaker.slow_s:
            logger.warning("drafting took %.1f s", seconds)
            recorder.spec_failed(DraftStage.PROPOSE, "slow")
            verdict.is_unnamed = True
        return verdict

    def _propose(
        self, drafter: Drafter, tasks: Seq[DraftTask], recorder: StatsRecorder
    ) -> _Verdict:
        """Let the drafter propose, and take what it says with care."""
        verdict = _Verdict()
        try:
            proposal = drafter.propose(tasks)
            for task, draft_ids in zip(tasks, proposal.draft_ids, strict=True):
                task.seq.draft_ids, is_right = self._checked(task, draft_ids)
                if not is_right:
                    recorder.spec_failed(DraftStage.PROPOSE, "id_out_of_range")
                    verdict.failed.append(task.seq)
            for stage, seconds in proposal.seconds.items():
                recorder.draft_step(seconds, stage)
        except Exception as error:  # the named boundary of draft failures
            if is_device_lost(error):
                raise
            return _without_drafts(tasks, error, recorder)
        for failure in proposal.failures:
            logger.warning("drafting failed in %s: %s", failure.stage, failure.reason)
            recorder.spec_failed(failure.stage, failure.reason)
            if failure.task is None:
                verdict.is_unnamed = True
                continue
            seq = tasks[failure.task].seq
            verdict.failed.append(seq)
            if failure.is_distrusted:
                self._distrust(seq)
        drafted = [task.seq for task in tasks if task.seq.draft_ids]
        verdict.went_well = [seq for seq in drafted if seq not in verdict.failed]
        for task in tasks if proposal.failures else ():
            if task.num_drafts > 0 and not task.seq.draft_ids:
                recorder.fell_back(task.seq)
        return verdict

    def _distrust(self, seq: Sequence) -> None:
        """After non-finite draft logits, trust none of the sequence's draft K/V, cached or not."""
        seq.drop_drafts()
        # Blocks that others read as well are not written again; such a sequence stays without.
        if self._blocks.withdraw(seq):
            seq.num_draft_computed_tokens = 0

    def _num_drafts(self, seq: Sequence) -> int:
        if seq.num_uncomputed != 1:
            return 0  # still inside its prompt
        return self._scheduler.plan_drafts(seq, self._config.num_draft_tokens)

    def _checked(self, task: DraftTask, draft_ids: Seq[int]) -> tuple[list[int], bool]:
        """Cut drafts at what was asked, and at the first that is no token or not legal.

        Returns:
            What is left, and whether all were tokens.
        """
        kept: list[int] = []
        wanted = draft_ids[: task.num_drafts]
        for token_id in wanted:
            if not (isinstance(token_id, int) and 0 <= token_id < self._num_ids):
                break
            kept.append(token_id)
        is_right = len(kept) == len(wanted)
        grammar = task.seq.grammar
        return kept if grammar is None else kept[: grammar.num_legal(kept)], is_right


def _wants(seq: Sequence) -> bool:
    """Whether a sequence would draft if all were well; before a last token there is nothing to."""
    return seq.request.sampling.max_draft_tokens != 0 and seq.num_left > 1


def _verified(outcomes: Seq[Outcome]) -> _Verdict:
    verdict = _Verdict()
    for outcome in outcomes:
        if outcome.draft_failure is not None:
            verdict.failed.append(outcome.item.seq)
        elif outcome.item.num_draft_tokens:
            verdict.went_well.append(outcome.item.seq)
    return verdict


def _without_drafts(tasks: Seq[DraftTask], error: Exception, recorder: StatsRecorder) -> _Verdict:
    """Let all go on without drafts, since the drafter raised."""
    logger.warning("drafting failed, the next step decodes plainly: %r", error)
    recorder.spec_failed(DraftStage.PROPOSE, type(error).__name__)
    for task in tasks:
        task.seq.drop_drafts()
        if task.num_drafts > 0:
            recorder.fell_back(task.seq)
    lone = [task.seq for task in tasks] if len(tasks) == 1 else []
    return _Verdict(failed=lone, is_unnamed=True)

"""What runs next: continuous batching without phases.

Owns the queue, the running list and the policy: decode rows first, then prompt chunks under a
token budget, then admission; preemption by recompute, youngest first. Knows no tensors, no
drafter and no clock: how much of prompts fits into a step's time it is told. Called by the
engine, on its thread.

Invariants: every row that only needs one token is in every step (unless the pool itself is
exhausted, when the oldest still is); what was accepted by `add` leaves through exactly one of
finish, abort or failure; sequences hold blocks only while running.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.config import SchedulerConfig
from workers.contracts import FinishReason
from workers.errors import QueueFull, RequestTooLong
from workers.kv.block_manager import BlockManager
from workers.sequence import Sequence, SequenceStatus

# Of the budget for prompts, one part in so many is for the oldest of them.
OLDEST_SHARE = 4
# A prompt is long when it has more than this part of a step's tokens.
LONG_SHARE = 4
# Short prompts that may overtake long ones at once.
MAX_OVERTAKING = 4


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: a prompt chunk, or one token and its drafts."""

    seq: Sequence
    # Tokens to run from `seq.num_computed_tokens` on, drafts included.
    num_new_tokens: int
    num_draft_tokens: int = 0

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that a next one is sampled."""
        reached = self.seq.num_computed_tokens + self.num_new_tokens - self.num_draft_tokens
        return reached == self.seq.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as decided on the CPU."""

    scheduled: tuple[ScheduledSequence, ...]
    # Of prompts, or of what is computed again.
    num_prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that it runs, drafts included."""
        return sum(item.num_new_tokens for item in self.scheduled)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that it verifies."""
        return sum(item.num_draft_tokens for item in self.scheduled)

    @property
    def has_decodes(self) -> bool:
        """Whether some sequence has nothing to run but its last token."""
        return self.num_tokens > self.num_prompt_tokens


class Scheduler:
    """Decides steps and applies their results to the sequences."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, max_model_len: int) -> None:
        self._config = config
        self._blocks = blocks
        limits = (config.max_sequence_len or max_model_len, max_model_len, blocks.num_slots)
        # Within this length a request always fits when it is alone.
        self.max_sequence_len = min(limits)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        # Prompt tokens looked up and found in the prefix cache, over all first admissions.
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0
        self._num_stalled_passes = 0
        # Tokens between kept states of a model with linear attention; 0 = none are kept.
        self._state_interval = 0 if blocks.states is None else blocks.states.interval

    @property
    def has_work(self) -> bool:
        """Whether any accepted request is not over."""
        return bool(self.waiting or self.running)

    def sequence_limit(self, prompt_len: int, max_tokens: int | None) -> int:
        """Return prompt plus emitted tokens at most for a request, or refuse it.

        Raises:
            RequestTooLong: It can never fit the context or the pool.
        """
        limit = self.max_sequence_len
        if prompt_len >= limit:
            raise RequestTooLong(
                f"the prompt has {prompt_len} tokens; with one to generate this model holds "
                f"{limit} at most"
            )
        if max_tokens is not None and prompt_len + max_tokens > limit:
            raise RequestTooLong(
                f"the prompt has {prompt_len} tokens and {max_tokens} were asked for; this model "
                f"holds {limit} at most",
                "max_tokens",
            )
        return limit if max_tokens is None else prompt_len + max_tokens

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFull: The queue is at its limit.
        """
        # A burst on an idle worker may fill the running places too.
        room = self._config.max_waiting + self._config.max_running - len(self.running)
        if len(self.waiting) >= room:
            raise QueueFull(f"{len(self.waiting)} requests are waiting; try again later")
        self.waiting.append(seq)

    def schedule(self, max_prompt_tokens: int | None = None) -> Batch:
        """Decide the next step; blocks for it are allocated, drafts that do not fit dropped.

        Args:
            max_prompt_tokens: Of all prompts together, in a step where others decode.
        """
        scheduled: dict[Sequence, ScheduledSequence] = {}
        num_preemptions = self.num_preemptions
        budget = self._schedule_decodes(scheduled)
        if scheduled and max_prompt_tokens is not None:
            budget = min(budget, max_prompt_tokens)
        prompts = [seq for seq in self.running if seq.num_uncomputed > 1]
        if self.num_preemptions == num_preemptions:  # else the victim would come straight back
            self._admit(prompts, budget)
        num_prompt_tokens = self._schedule_prompts(prompts, budget, scheduled)
        self._num_stalled_passes = 0 if scheduled else self._num_stalled_passes + self.has_work
        return Batch(tuple(scheduled.values()), num_prompt_tokens)

    def take_stalled(self) -> Sequence | None:
        """Return the head of the work, removed, after too many passes without progress."""
        if self._num_stalled_passes <= self._config.max_stalled_passes:
            return None
        self._num_stalled_passes = 0
        head = self.running[0] if self.running else self.waiting[0]
        self.remove(head)
        return head

    def commit(self, item: ScheduledSequence, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Apply a step's result: append sampled tokens in order, up to the first that ends it.

        Args:
            item: What was scheduled.
            token_ids: Accepted drafts and the bonus token; empty for an inner prompt chunk.

        Returns:
            The tokens that became part of the sequence.
        """
        seq = item.seq
        num_finalised = item.num_new_tokens - item.num_draft_tokens
        appended: list[int] = []
        reason: FinishReason | None = None
        for token_id in token_ids:
            appended.append(token_id)
            reason = seq.append(token_id)
            if reason is not None:
                break
        # The last appended token has no K/V yet; the ones before it were drafts that were run.
        seq.num_computed_tokens += num_finalised + max(len(appended) - 1, 0)
        seq.draft_ids = []
        if reason is not None:
            self.finish(seq, reason)
        return tuple(appended)

    def plan_drafts(self, seq: Sequence, max_drafts: int) -> int:
        """Return how many drafts the sequence may carry into its next step, blocks reserved.

        Drafting never preempts: with a short pool there are fewer drafts, and what was reserved
        for them is taken back before a sequence is preempted.
        """
        wanted = seq.request.sampling.max_draft_tokens
        limit = max_drafts if wanted is None else min(max_drafts, wanted)
        # The step also emits a bonus token, for which the sequence needs room.
        limit = min(limit, seq.num_left - 1)
        if self._state_interval:
            # A step that ran past a checkpoint's place would leave none there.
            done = seq.num_computed_tokens % self._state_interval
            limit = min(limit, self._state_interval - done - 1)
        while limit > 0 and not self._blocks.grow(seq, seq.num_tokens + limit):
            limit -= 1
        return max(limit, 0)

    def publish(self, seq: Sequence) -> None:
        """Offer what every model of the worker has computed to the prefix cache."""
        computed = seq.num_computed_tokens
        if seq.needs_draft_kv:
            computed = min(computed, seq.num_draft_computed_tokens)
        self._blocks.publish(seq, computed)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence with a reason and free its blocks."""
        if seq.status is SequenceStatus.RUNNING:
            self.publish(seq)
        self.remove(seq)
        seq.finish_reason = reason

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, whatever it is doing, and free its blocks."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._blocks.free(seq)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED

    def _schedule_decodes(self, scheduled: dict[Sequence, ScheduledSequence]) -> int:
        rows = [seq for seq in self.running if seq.num_uncomputed == 1]
        budget = self._config.max_step_tokens
        spare = budget - len(rows)
        if self.waiting or len(rows) < len(self.running):
            spare //= 2  # drafts must not crowd out the prompts
        for seq in rows:
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted for a row before it
            num_drafts = min(len(seq.draft_ids), spare)
            if not self._blocks.grow(seq, seq.num_tokens + num_drafts):
                num_drafts = 0
                if not self._make_room(seq, seq.num_tokens, scheduled):
                    continue
            seq.draft_ids = seq.draft_ids[:num_drafts]
            spare -= num_drafts
            scheduled[seq] = ScheduledSequence(seq, 1 + num_drafts, num_drafts)
            budget -= 1 + num_drafts
        return budget

    def _admit(self, prompts: list[Sequence], budget: int) -> None:
        """Let waiting sequences in, to the end of the prompts that this step works on."""
        while self.waiting and len(self.running) < self._config.max_running and budget > 0:
            seq = self._next_waiting(prompts, budget)
            if seq is None or not self._blocks.admit(seq):
                break
            self.waiting.remove(seq)
            self.running.append(seq)
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = min(seq.num_computed_tokens, seq.prompt_len)
                self.num_cached_tokens += seq.num_cached_tokens
                self.num_queried_tokens += seq.prompt_len
            seq.status = SequenceStatus.RUNNING
            prompts.append(seq)

    def _next_waiting(self, prompts: Seq[Sequence], budget: int) -> Sequence | None:
        """Return who comes in next: the head while there is room in the step.

        Beyond that, a long prompt leaves the door open for a few short ones, and short ones for
        one that is long.
        """
        head = self.waiting[0]
        if sum(self._chunk_len(seq, budget) for seq in prompts) < budget:
            return head
        num_long = sum(map(self._is_long, prompts))
        if num_long == 0:
            return head if self._is_long(head) else None
        if len(prompts) - num_long >= MAX_OVERTAKING:
            return None
        return next((seq for seq in self.waiting if not self._is_long(seq)), None)

    def _is_long(self, seq: Sequence) -> bool:
        return seq.num_tokens > self._config.max_step_tokens // LONG_SHARE

    def _schedule_prompts(
        self, prompts: Seq[Sequence], budget: int, scheduled: dict[Sequence, ScheduledSequence]
    ) -> int:
        """Share the budget among prompts: the shortest first, and a part for the oldest.

        So a short one does not wait for a long one's end, nor a long one for all short ones.
        """
        left, kept = budget, max(budget // OLDEST_SHARE, 1)
        for seq in sorted(prompts, key=lambda seq: seq.num_uncomputed):
            if seq is prompts[0]:
                kept = 0
            num_new = self._chunk_len(seq, left - kept)
            if num_new > 0:
                scheduled[seq] = ScheduledSequence(seq, num_new)
                left -= num_new
        return budget - left

    def _chunk_len(self, seq: Sequence, budget: int) -> int:
        """Return how many known tokens the sequence runs; a chunk ends where a state is kept."""
        num_new = min(seq.num_uncomputed, self._config.max_chunk_tokens, budget)
        if self._state_interval:
            end = seq.num_computed_tokens + num_new
            aligned = end - end % self._state_interval
            if aligned > seq.num_computed_tokens:
                return aligned - seq.num_computed_tokens
        return num_new

    def _make_room(
        self, seq: Sequence, num_tokens: int, scheduled: dict[Sequence, ScheduledSequence]
    ) -> bool:
        """Take blocks from sequences that are not in this step yet, the youngest first.

        Their drafts go before anyone is preempted.
        """
        others = [s for s in self.running if s is not seq and s not in scheduled]
        for other in others:
            other.drop_drafts()
            self._blocks.shrink(other, other.num_tokens)
        while not self._blocks.grow(seq, num_tokens):
            victims = [s for s in others if s.status is SequenceStatus.RUNNING]
            if not victims:
                return False
            self._preempt(victims[-1])
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._blocks.free(seq)
        seq.reset()
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

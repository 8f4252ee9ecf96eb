"""One worker's engine: accepts requests, and `step()` moves all of them on.

Owns the order of a step: schedule, run the target, commit, tell the clients, draft. Synchronous,
single-threaded; threads and asyncio live one file up. Knows no HTTP, no Ray, no text, no tensor.

Invariant: every accepted request ends in exactly one terminal event, a delta with a finish reason
or a failure; a failing drafter costs speed only; a failing target step is narrowed down to the
request that causes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workers.admission import Admission
from workers.config import EngineConfig
from workers.contracts import FinishReason, GenerationRequest, TokenDelta, WorkerInfo
from workers.costs import StepCosts
from workers.drafting import Drafting
from workers.errors import GenerationFailed, InvalidRequest, RequestError
from workers.gauges import Drafts, Gauges
from workers.kv.block_manager import BlockManager
from workers.kv.state_slots import StateSlots
from workers.models.runner import ModelRunner
from workers.pacing import Pacer
from workers.sampling.grammar import GrammarCompiler
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.spec.breaker import Breaker
from workers.spec.drafter import Drafter, DraftStage
from workers.stats import EngineStats, StatsRecorder
from workers.target import Outcome, Target

logger = logging.getLogger(__name__)

# Blocks that are told of: 8 bytes each, to every ingress, every few seconds.
MAX_PUBLISHED = 4096


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step has to tell the clients."""

    deltas: list[TokenDelta] = field(default_factory=list)
    # request id -> why it ended without a finish reason
    failures: dict[str, RequestError] = field(default_factory=dict)


class Engine:
    """The target, its drafter and the state of all requests of one worker."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        num_ids: int,
        drafter: Drafter | None = None,
        states: StateSlots | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            config: The settings.
            runner: The target.
            num_ids: Ids that are tokens.
            drafter: None = plain decoding.
            states: For a target with linear attention, as many slots as the runner's.
            grammars: None = requests with a grammar are refused.
        """
        self.config = config
        self._runner = runner
        keep_hidden = drafter is not None and drafter.needs_hidden
        self._target = Target(runner, num_ids, keep_hidden)
        self.blocks = BlockManager(
            runner.limits.num_blocks,
            runner.limits.block_size,
            config.cache.prefix_caching,
            states=states,
            lookahead=int(keep_hidden),
        )
        self.scheduler = Scheduler(config.scheduler, self.blocks, runner.adapter.max_positions)
        self._breaker = Breaker(config.speculation.breaker)
        self._admission = Admission(
            runner.adapter, num_ids, self.scheduler, drafter, self._breaker, grammars
        )
        self._drafting = Drafting(
            drafter, self._breaker, config.speculation, num_ids, self.scheduler, self.blocks
        )
        self._pacer = Pacer(config.scheduler.max_step_ms / 1000 or None)
        self._sequences: dict[str, Sequence] = {}
        self.recorder = self._new_recorder(None)
        # Told of every sequence that ended, and how; None = it failed.
        self.on_end: Callable[[Sequence, FinishReason | None], None] = lambda *_: None

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self.scheduler.has_work

    def info(self, worker_id: str) -> WorkerInfo:
        """Describe the worker."""
        speculation = self.config.speculation
        states = self._runner.states
        return WorkerInfo(
            worker_id=worker_id,
            model_id=self.config.model_id,
            target=self.config.target.path,
            draft=speculation.draft.path if speculation.draft else None,
            method="none" if self._drafting.drafter is None else self._drafting.drafter.name,
            attention_backend=self._runner.backend.name,
            max_sequence_len=self.scheduler.max_sequence_len,
            num_blocks=self.blocks.num_blocks,
            block_size=self.blocks.block_size,
            device=str(self._runner.device),
            dtype=str(self._runner.adapter.dtype).removeprefix("torch."),
            state_bytes=0 if states is None else states.shape.state_bytes,
        )

    def routing_stats(self) -> dict[str, Any]:
        """Return what a router may know: the prefixes that are found here."""
        return {
            "block_size": self.blocks.block_size,
            "lookahead": self.blocks.lookahead,
            "prefixes": self.blocks.published(MAX_PUBLISHED),
        }

    def stats(self) -> EngineStats:
        """Return counters and gauges as of now."""
        self._gauges.read(self.recorder.meter)
        return EngineStats(self.recorder.meter.snapshot())

    def forget_statistics(self) -> None:
        """Count from zero again (after a warm-up); what steps cost stays known."""
        self.recorder = self._new_recorder(self.recorder.costs)

    def _new_recorder(self, costs: StepCosts | None) -> StatsRecorder:
        drafter = self._drafting.drafter
        self._gauges = Gauges(
            self.scheduler, self.blocks, self._runner.image_cache, self._runner.device,
            None if drafter is None else Drafts(drafter.name, self._breaker, self._drafting.limit),
        )  # fmt: skip
        num_positions = self.config.speculation.num_draft_tokens
        return StatsRecorder("none" if drafter is None else drafter.name, num_positions, costs)

    def prepare(self, request: GenerationRequest) -> None:
        """Do what may take long for a request, on any thread, so that `add` need not.

        Raises:
            RequestError: It cannot be served.
        """
        self._admission.grammar(request)

    def add(self, request: GenerationRequest) -> None:
        """Accept a request.

        Raises:
            RequestError: It is wrong, too long, or the queue is full; nothing is kept of it.
        """
        try:
            if request.request_id in self._sequences:
                raise InvalidRequest(f"request id {request.request_id} is already running")
            seq = self._admission.sequence(request)
            self.scheduler.add(seq)
        except RequestError as error:
            self.recorder.refused(error)
            raise
        self._sequences[request.request_id] = seq
        self.recorder.admitted(seq)

    def abort(self, request_id: str) -> None:
        """End a request without a delta; its blocks are free when this returns."""
        seq = self._sequences.pop(request_id, None)
        if seq is not None:
            self.scheduler.finish(seq, FinishReason.ABORT)
            self._ended(seq, FinishReason.ABORT)

    def step(self) -> StepResult:
        """Run one step for every sequence that is scheduled."""
        result = StepResult()
        started_s = time.perf_counter()
        batch = self.scheduler.schedule(self._pacer.num_tokens)
        stalled = self.scheduler.take_stalled()
        if stalled is not None:
            self._fail(stalled, "the scheduler made no progress with this request", result)
        if not batch.scheduled:
            return result
        start = time.perf_counter()
        for item in batch.scheduled:
            if item.seq.times.started_s is None:
                item.seq.times.started_s = start
        outcomes = self._target.run(batch.scheduled, self.recorder.bisected)
        if self.blocks.states is not None:
            for item in batch.scheduled:
                self.blocks.states.written(item.seq)
        self.recorder.target_step(batch, time.perf_counter() - start)
        for outcome in outcomes:
            self._settle(outcome, result)
        self._drafting.follow(outcomes, self.recorder)
        for item in batch.scheduled:
            if not item.seq.is_finished:
                self.scheduler.publish(item.seq)
                self._keep_state(item.seq)
        seconds = time.perf_counter() - started_s
        self.recorder.step(batch, seconds, sum(len(d.token_ids) for d in result.deltas))
        self._pacer.observe(seconds, batch.num_prompt_tokens, has_decodes=batch.has_decodes)
        return result

    def _keep_state(self, seq: Sequence) -> None:
        """Copy the sequence's recurrent state where a later request may start from it."""
        slot = self.blocks.checkpoint(seq)
        if slot is not None and self._runner.states is not None:
            self._runner.states.copy(seq.state_slot, slot)

    def _settle(self, outcome: Outcome, result: StepResult) -> None:
        """Apply what a sequence got out of the target's step, and tell its client."""
        item, seq = outcome.item, outcome.item.seq
        if outcome.draft_failure is not None:
            self.recorder.spec_failed(DraftStage.VERIFY, outcome.draft_failure)
        if outcome.error is not None:
            self.recorder.target_failed()
            self.blocks.withdraw(seq)
            self._fail(seq, outcome.error, result)
            return
        if seq.prompt_logprobs is not None:
            # Run again after a preemption, a chunk brings some that are there already.
            known = len(seq.prompt_logprobs) - item.seq.num_computed_tokens - 1
            seq.prompt_logprobs += outcome.prompt_logprobs[known:]
        start = seq.num_emitted
        appended = self.scheduler.commit(item, outcome.token_ids)
        if not appended:
            return
        seq.times.last_token_s = time.perf_counter()
        if seq.times.first_token_s is None:
            seq.times.first_token_s = seq.times.last_token_s
        seq.num_steps += 1
        if outcome.draft_failure is not None:
            self.recorder.fell_back(seq)
        self.recorder.committed(item, len(outcome.token_ids) - 1, len(appended))
        result.deltas.append(
            TokenDelta(
                request_id=seq.request_id,
                start=start,
                token_ids=appended,
                finish_reason=seq.finish_reason,
                num_cached_tokens=seq.num_cached_tokens or 0,
                num_draft_tokens=seq.num_draft_tokens,
                num_accepted_tokens=seq.num_accepted_tokens,
                num_steps=seq.num_steps,
                num_fallbacks=seq.num_fallbacks,
                logprobs=outcome.logprobs and outcome.logprobs[: len(appended)],
                prompt_logprobs=seq.take_prompt_logprobs(),
            )
        )
        if seq.finish_reason is not None:
            del self._sequences[seq.request_id]
            self._ended(seq, seq.finish_reason)

    def _fail(self, seq: Sequence, message: str, result: StepResult) -> None:
        logger.warning("request %s: %s", seq.request_id, message)
        self.scheduler.remove(seq)
        self._sequences.pop(seq.request_id, None)
        self._ended(seq, None)
        result.failures[seq.request_id] = GenerationFailed(message)

    def _ended(self, seq: Sequence, reason: FinishReason | None) -> None:
        self.recorder.finished(seq, reason)
        self.on_end(seq, reason)

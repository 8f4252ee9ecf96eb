"""What the engine counts about itself.

Owns when each series of a worker changes, and the view of a snapshot by name that logs and tests
read. Knows no metrics library: the exporter reads snapshots. Written on the engine's thread only.
Invariant: acceptance never counts the bonus token; what a stop trims from an accepted block is
accepted, and counted as trimmed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.contracts import FinishReason, WorkerInfo
from workers.costs import StepCosts
from workers.telemetry import series
from workers.telemetry.meter import Family, Meter, Snapshot, by_label, total

if TYPE_CHECKING:
    from workers.errors import RequestError
    from workers.scheduler import Batch, ScheduledSequence
    from workers.sequence import Sequence

# Failures that are known by name: their series exist before they happen.
KNOWN_FAILURES = (
    ("propose", "slow"),
    ("propose", "id_out_of_range"),
    ("propose", "RuntimeError"),
    ("draft_extend", "RuntimeError"),
    ("draft_decode", "RuntimeError"),
    ("draft_decode", "non_finite"),
    ("verify", "RuntimeError"),
)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine's series, by name."""

    snapshot: Snapshot = field(default_factory=dict)

    def total(self, family: Family, **labels: str) -> int:
        """Return a counter's or gauge's sum over its series with these label values."""
        return int(total(self.snapshot, family, **labels))

    @property
    def admitted(self) -> int:
        """Requests."""
        return self.total(series.ADMITTED)

    @property
    def finished(self) -> dict[str, int]:
        """Finish reason, or "error" -> requests."""
        return {k: int(v) for k, v in by_label(self.snapshot, series.FINISHED).items()}

    @property
    def refused(self) -> dict[str, int]:
        """Name of an error -> requests."""
        return {k: int(v) for k, v in by_label(self.snapshot, series.REFUSED).items() if v}

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return self.total(series.RUNNING)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self.total(series.WAITING)

    @property
    def preemptions(self) -> int:
        """Times that a request lost its blocks."""
        return self.total(series.PREEMPTIONS)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.total(series.PREFIX_HITS)

    @property
    def generated_tokens(self) -> int:
        """Tokens emitted."""
        return self.total(series.GENERATED_TOKENS)

    @property
    def target_steps(self) -> int:
        """Steps of the target."""
        return self.total(series.TARGET_STEPS)

    @property
    def sampled_rows(self) -> int:
        """Steps of one sequence that emitted tokens."""
        return self.total(series.SEQUENCE_STEPS)

    @property
    def trimmed_tokens(self) -> int:
        """Tokens that stops cut off."""
        return self.total(series.TRIMMED_TOKENS)

    @property
    def draft_rounds(self) -> int:
        """Verifications of one sequence with drafts."""
        return self.total(series.DRAFTS)

    @property
    def draft_tokens(self) -> int:
        """Drafts verified."""
        return self.total(series.DRAFT_TOKENS)

    @property
    def accepted_tokens(self) -> int:
        """Drafts accepted."""
        return self.total(series.ACCEPTED_TOKENS)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """[i] = verifications in which draft i (from 0) was accepted."""
        positions = {key[2] for key in self.snapshot.get(series.ACCEPTED_AT.name, {})}
        return tuple(
            self.total(series.ACCEPTED_AT, position=position)
            for position in sorted(positions, key=int)
        )

    @property
    def spec_failures(self) -> dict[str, int]:
        """Stage and reason, joined by a colon -> failures."""
        failures = self.snapshot.get(series.FAILURES.name, {})
        return {
            f"{stage}:{reason}": int(count)
            for (_, stage, reason), count in failures.items()
            if not isinstance(count, list) and count
        }

    @property
    def fallback_steps(self) -> int:
        """Steps of one sequence that a failure left without drafts."""
        return self.total(series.FALLBACK_STEPS)

    @property
    def breaker_state(self) -> str:
        """Whether steps draft: closed, open or half_open; empty without a drafter."""
        states = by_label(self.snapshot, series.BREAKER_STATE)
        return next((state for state, is_on in states.items() if is_on), "")

    @property
    def breaker_opened(self) -> int:
        """Times that drafting was left off."""
        return self.total(series.BREAKER_OPENED)

    @property
    def num_blocks(self) -> int:
        """K/V blocks in all."""
        return self.total(series.BLOCKS)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self.total(series.FREE_BLOCKS)


class StatsRecorder:
    """Counts since it was made."""

    def __init__(self, drafter: str, num_positions: int, costs: StepCosts | None = None) -> None:
        """Let every series exist.

        Args:
            drafter: Name of the method.
            num_positions: Drafts that a sequence may carry at most.
            costs: What is known of steps already.
        """
        self.meter = Meter(series.FAMILIES)
        self.costs = StepCosts() if costs is None else costs
        self._drafter = drafter
        self._touch(num_positions)

    def _touch(self, num_positions: int) -> None:
        meter, drafter = self.meter, self._drafter
        by_both = (
            series.DRAFTS, series.DRAFT_TOKENS, series.ACCEPTED_TOKENS, series.EMITTED_TOKENS,
            series.SPEC_TRIMMED_TOKENS, series.ACCEPTANCE_LENGTH, series.DRAFT_LENGTH,
            series.FALLBACK_STEPS,
        )  # fmt: skip
        for modality in series.MODALITIES:
            for family in by_both:
                meter.touch(family, drafter, modality)
            for position in range(num_positions):
                meter.touch(series.ACCEPTED_AT, drafter, modality, str(position))
            meter.touch(series.REQUEST_PROMPT, modality)
        for stage in ("propose", "draft_extend", "draft_decode"):
            meter.touch(series.DRAFT_SECONDS, drafter, stage)
        for failure in KNOWN_FAILURES:
            meter.touch(series.FAILURES, drafter, *failure)
        for reason in series.FINISH_REASONS:
            meter.touch(series.FINISHED, reason)
        for reason in series.REFUSALS:
            meter.touch(series.REFUSED, reason)
        for kind in series.STEP_KINDS:
            meter.touch(series.TARGET_SECONDS, kind)

    def introduce(self, info: WorkerInfo) -> None:
        """Say what runs, and since when."""
        values = (info.worker_id, info.target, info.draft or "", info.method,
                  info.attention_backend, info.device, info.dtype)  # fmt: skip
        self.meter.set(series.WORKER_INFO, 1, *values)
        self.meter.set(series.STARTED, time.time())

    def admitted(self, seq: Sequence) -> None:
        """Count an accepted request."""
        self.meter.add(series.ADMITTED)
        self.meter.add(series.PROMPT_TOKENS, seq.prompt_len)

    def refused(self, error: RequestError) -> None:
        """Count a request that was turned away."""
        self.meter.add(series.REFUSED, 1, type(error).__name__)

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Count the one terminal event of a request; without a reason, it failed."""
        meter, times = self.meter, seq.times
        meter.add(series.FINISHED, 1, "error" if reason is None else str(reason))
        meter.observe(series.REQUEST_PROMPT, seq.prompt_len, seq.modality)
        num_generated = seq.num_emitted - len(seq.request.emitted_ids)
        meter.observe(series.REQUEST_GENERATED, num_generated)
        if times.started_s is not None:
            meter.observe(series.QUEUE_SECONDS, times.started_s - times.added_s)
        if times.started_s is not None and times.first_token_s is not None:
            meter.observe(series.PREFILL_SECONDS, times.first_token_s - times.started_s)
            meter.observe(series.DECODE_SECONDS, times.last_token_s - times.first_token_s)

    def target_step(self, batch: Batch, seconds: float) -> None:
        """Count one step of the target, sampling included."""
        meter = self.meter
        meter.add(series.TARGET_STEPS)
        meter.observe(series.TARGET_SECONDS, seconds, _kind(batch))
        meter.observe(series.STEP_TOKENS_RUN, batch.num_tokens)
        meter.observe(series.STEP_SEQUENCES, len(batch.scheduled))
        if not batch.num_prompt_tokens:
            self.costs.observe(batch.num_tokens, seconds)

    def bisected(self) -> None:
        """Count a step that is cut in halves."""
        self.meter.add(series.BISECTIONS)

    def target_failed(self) -> None:
        """Count a target failure that was narrowed down to one request."""
        self.meter.add(series.TARGET_FAILURES)

    def draft_step(self, seconds: float, stage: str = "propose") -> None:
        """Count the time a drafter took after a step, or a part of it."""
        self.meter.observe(series.DRAFT_SECONDS, seconds, self._drafter, stage)

    def committed(self, item: ScheduledSequence, num_accepted: int, num_appended: int) -> None:
        """Count what a sequence got out of a step, and keep its own totals."""
        meter, seq = self.meter, item.seq
        by = (self._drafter, seq.modality)
        num_trimmed = num_accepted + 1 - num_appended
        meter.add(series.SEQUENCE_STEPS)
        meter.add(series.GENERATED_TOKENS, num_appended)
        meter.add(series.TRIMMED_TOKENS, num_trimmed)
        if item.num_new_tokens == 1 + item.num_draft_tokens:
            meter.observe(series.DRAFT_LENGTH, item.num_draft_tokens, *by)
        if not item.num_draft_tokens:
            return
        meter.add(series.DRAFTS, 1, *by)
        meter.add(series.DRAFT_TOKENS, item.num_draft_tokens, *by)
        meter.add(series.ACCEPTED_TOKENS, num_accepted, *by)
        meter.add(series.EMITTED_TOKENS, num_appended, *by)
        meter.add(series.SPEC_TRIMMED_TOKENS, num_trimmed, *by)
        meter.observe(series.ACCEPTANCE_LENGTH, num_accepted + 1, *by)
        seq.num_draft_tokens += item.num_draft_tokens
        seq.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            meter.add(series.ACCEPTED_AT, 1, *by, str(position))

    def step(self, batch: Batch, seconds: float, num_emitted: int) -> None:
        """Compare a step with plain decoding, if it verified drafts and ran no prompt.

        Args:
            batch: What ran.
            seconds: What it took, drafting included.
            num_emitted: Tokens that it gave.
        """
        if batch.num_prompt_tokens or not batch.num_draft_tokens:
            return
        num_sequences = len(batch.scheduled)
        plain_s = self.costs.estimate(num_sequences)
        if plain_s is not None:
            self.meter.add(series.SPEC_SECONDS, seconds)
            self.meter.add(series.PLAIN_SECONDS, plain_s * num_emitted / num_sequences)

    def spec_failed(self, stage: str, reason: str) -> None:
        """Count a failure that cost drafts."""
        self.meter.add(series.FAILURES, 1, self._drafter, str(stage), reason)

    def fell_back(self, seq: Sequence) -> None:
        """Count a step of a sequence that a failure leaves without drafts."""
        seq.num_fallbacks += 1
        self.meter.add(series.FALLBACK_STEPS, 1, self._drafter, seq.modality)


def _kind(batch: Batch) -> str:
    if batch.num_prompt_tokens:
        return "extend"
    return "verify" if batch.num_draft_tokens else "decode"

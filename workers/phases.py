"""The phases of a request on this worker, as spans: waiting, reading the prompt, decoding.

Owns their names and attributes. Knows no engine: it is told of sequences that ended. Called on the
engine's thread. Invariant: a request that is not traced costs a comparison.
"""

from __future__ import annotations

from workers.contracts import FinishReason
from workers.sequence import Sequence
from workers.telemetry.tracing import Tracing


class PhaseSpans:
    """Makes the spans of sequences that ended."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def ended(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Record a sequence's phases, as far as it came; without a reason, it failed."""
        traceparent, times = seq.request.traceparent, seq.times
        if not traceparent or not self._tracing.is_on or times.started_s is None:
            return
        self._tracing.record(
            "queue", traceparent, times.added_s, times.started_s,
            {"specserve.prompt_tokens": seq.prompt_len, "specserve.modality": seq.modality},
        )  # fmt: skip
        if times.first_token_s is None:
            return
        self._tracing.record(
            "prefill", traceparent, times.started_s, times.first_token_s,
            {"specserve.cached_tokens": seq.num_cached_tokens or 0},
        )  # fmt: skip
        self._tracing.record(
            "decode", traceparent, times.first_token_s, times.last_token_s,
            {
                "specserve.tokens": seq.num_emitted - len(seq.request.emitted_ids),
                "specserve.steps": seq.num_steps,
                "specserve.draft_tokens": seq.num_draft_tokens,
                "specserve.accepted_tokens": seq.num_accepted_tokens,
                "specserve.fallback_steps": seq.num_fallbacks,
                "specserve.finish_reason": "error" if reason is None else str(reason),
            },
        )  # fmt: skip

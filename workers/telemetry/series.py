"""Every series that a worker counts.

Owns their names, labels and meaning. Knows nothing of how they are counted. Invariant: a label has
a bounded set of values: no request, user, prompt or text of an error is ever one.

Identities, tested on a live scrape:
    requests_admitted == sum(requests_finished) + requests_running + requests_waiting
    generated_tokens == spec_accepted_tokens + sequence_steps - trimmed_tokens
    spec_emitted_tokens == spec_accepted_tokens + spec_drafts - spec_trimmed_tokens
    sum over position(spec_accepted_tokens_per_position) == spec_accepted_tokens
The first one holds where no worker was killed: what a killed one had in work was admitted there and
never ends; the ingresses count those streams as interrupted.
"""

from __future__ import annotations

from workers.telemetry.buckets import (
    DRAFT_LENGTHS,
    REQUEST_SECONDS,
    STEP_SECONDS,
    STEP_TOKENS,
    TOKENS,
)
from workers.telemetry.meter import counter, gauge, histogram

# Values of labels.
MODALITIES = ("text", "image")
FINISH_REASONS = ("stop", "length", "abort", "error")
REFUSALS = ("InvalidRequest", "RequestTooLong", "QueueFull")
BREAKER_STATES = ("closed", "open", "half_open")
STEP_KINDS = ("extend", "decode", "verify")
INFO = ("replica", "target", "draft", "method", "attention_backend", "device", "dtype")

# --- Speculation -------------------------------------------------------------------------------
_BY = ("drafter", "modality")
DRAFTS = counter(
    "spec_drafts", "Verifications of one sequence that had drafts.", *_BY, is_per_worker=True
)
DRAFT_TOKENS = counter("spec_draft_tokens", "Draft tokens verified.", *_BY, is_per_worker=True)
ACCEPTED_TOKENS = counter(
    "spec_accepted_tokens", "Draft tokens accepted; the bonus token is not one.", *_BY,
    is_per_worker=True,
)  # fmt: skip
EMITTED_TOKENS = counter(
    "spec_emitted_tokens",
    "Tokens that verifications with drafts emitted: accepted and bonus, less what a stop cut off.",
    *_BY,
)
SPEC_TRIMMED_TOKENS = counter(
    "spec_trimmed_tokens", "Tokens of verifications with drafts that a stop cut off.", *_BY
)
ACCEPTED_AT = counter(
    "spec_accepted_tokens_per_position",
    "Draft tokens accepted at a position of the draft, from 0.",
    *_BY, "position",
)  # fmt: skip
ACCEPTANCE_LENGTH = histogram(
    "spec_acceptance_length", "Tokens that a verification gave: accepted drafts and the bonus.",
    DRAFT_LENGTHS, *_BY,
)  # fmt: skip
DRAFT_LENGTH = histogram(
    "spec_draft_length", "Drafts that a decoding sequence carried into a step; 0 for none.",
    DRAFT_LENGTHS, *_BY,
)  # fmt: skip
DRAFT_LIMIT = gauge(
    "spec_draft_length_limit", "Drafts that a sequence may carry now; 0 while drafting is off.",
    "drafter", is_per_worker=True,
)  # fmt: skip
DRAFT_SECONDS = histogram(
    "spec_draft_seconds",
    "Time of drafting after a step: the whole of it (propose), and a model's two parts of it.",
    STEP_SECONDS, "drafter", "stage",
)  # fmt: skip
FAILURES = counter(
    "spec_failures", "Failures that cost a step its drafts; the requests went on.",
    "drafter", "stage", "reason", is_per_worker=True,
)  # fmt: skip
FALLBACK_STEPS = counter(
    "spec_fallback_steps",
    "Steps of one sequence without drafts, since drafting failed or was left off.",
    *_BY, is_per_worker=True,
)  # fmt: skip
BREAKER_STATE = gauge(
    "spec_breaker_state", "1 for the state of the drafter's circuit breaker.", "state",
    is_per_worker=True,
)  # fmt: skip
BREAKER_OPENED = counter(
    "spec_breaker_opened", "Times that drafting was left off for a while.", is_per_worker=True
)
DISABLED_SECONDS = counter(
    "spec_disabled_seconds", "Time for which drafting was left off.", is_per_worker=True
)
SPEC_SECONDS = counter(
    "spec_seconds", "Time of steps that only verified and decoded, drafting included.",
    is_per_worker=True,
)  # fmt: skip
PLAIN_SECONDS = counter(
    "spec_plain_seconds",
    "Time that plain decoding would have taken for their tokens, by the measured cost of its steps;"
    " over spec_seconds it is the speed-up.",
    is_per_worker=True,
)  # fmt: skip

# --- Requests ----------------------------------------------------------------------------------
ADMITTED = counter("requests_admitted", "Requests accepted by the engine.", is_per_worker=True)
FINISHED = counter("requests_finished", "Requests ended.", "finish_reason", is_per_worker=True)
REFUSED = counter("requests_refused", "Requests that the engine did not accept.", "reason")
RUNNING = gauge("requests_running", "Requests that hold blocks.", is_per_worker=True)
WAITING = gauge("requests_waiting", "Requests in the queue.", is_per_worker=True)
PREEMPTIONS = counter(
    "preemptions", "Times that a request lost its blocks, to be computed again.", is_per_worker=True
)
QUEUE_SECONDS = histogram(
    "queue_seconds", "From a request's arrival at the engine to its first step.", REQUEST_SECONDS
)
PREFILL_SECONDS = histogram(
    "prefill_seconds", "From a request's first step to its first token.", REQUEST_SECONDS
)
DECODE_SECONDS = histogram(
    "decode_seconds", "From a request's first token to its last.", REQUEST_SECONDS
)
REQUEST_PROMPT = histogram(
    "request_prompt_tokens", "Prompt tokens of requests that ended.", TOKENS, "modality"
)
REQUEST_GENERATED = histogram(
    "request_generated_tokens", "Tokens that a request got from a worker until it ended.", TOKENS
)

# --- Tokens and steps --------------------------------------------------------------------------
PROMPT_TOKENS = counter("prompt_tokens", "Prompt tokens of admitted requests.", is_per_worker=True)
GENERATED_TOKENS = counter("generated_tokens", "Tokens emitted.", is_per_worker=True)
SEQUENCE_STEPS = counter(
    "sequence_steps", "Steps of one sequence that emitted tokens, drafts or not.",
    is_per_worker=True,
)  # fmt: skip
TRIMMED_TOKENS = counter(
    "trimmed_tokens", "Tokens cut off by a stop within what one step gave.", is_per_worker=True
)
TARGET_STEPS = counter("target_steps", "Steps of the target model.", is_per_worker=True)
TARGET_SECONDS = histogram(
    "target_step_seconds",
    "Time of a step of the target, sampling included: with prompts (extend), with drafts and no"
    " prompt (verify), with neither (decode).",
    STEP_SECONDS, "kind",
)  # fmt: skip
STEP_TOKENS_RUN = histogram("step_tokens", "Tokens that a step of the target ran.", STEP_TOKENS)
STEP_SEQUENCES = histogram("step_sequences", "Sequences in a step of the target.", STEP_TOKENS)
TARGET_FAILURES = counter(
    "target_failures", "Steps of the target that failed for a request.", is_per_worker=True
)
BISECTIONS = counter("target_bisections", "Steps cut in halves to find the request that fails.")

# --- Memory ------------------------------------------------------------------------------------
BLOCKS = gauge("kv_blocks", "K/V blocks in all.", is_per_worker=True)
FREE_BLOCKS = gauge(
    "kv_blocks_free", "K/V blocks that no request holds, cached ones included.", is_per_worker=True
)
CACHED_BLOCKS = gauge(
    "kv_blocks_cached", "K/V blocks that a later request can find.", is_per_worker=True
)
STATE_SLOTS = gauge(
    "state_slots", "Slots of recurrent state, of models with linear attention.", is_per_worker=True
)
FREE_STATE_SLOTS = gauge(
    "state_slots_free", "Slots of recurrent state that nothing is kept in.", is_per_worker=True
)
PREFIX_QUERIES = counter(
    "prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache.", is_per_worker=True
)
PREFIX_HITS = counter(
    "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", is_per_worker=True
)
IMAGE_QUERIES = counter("image_cache_queries", "Images and videos that a step needed.")
IMAGE_HITS = counter("image_cache_hits", "Of them, those whose embedding was there.")
IMAGE_BYTES = gauge("image_cache_bytes", "Embeddings of images that are kept.", is_per_worker=True)
MEMORY_BYTES = gauge(
    "worker_memory_bytes", "Memory of the process (host), and of torch on a GPU (device).",
    "memory", is_per_worker=True,
)  # fmt: skip

# --- The worker --------------------------------------------------------------------------------
WORKER_INFO = gauge("worker_info", "1 for what a worker runs.", *INFO, is_per_worker=True)
STARTED = gauge(
    "worker_start_time_seconds", "When the engine was ready, since the epoch.", is_per_worker=True
)

SPECULATION = (
    DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS, EMITTED_TOKENS, SPEC_TRIMMED_TOKENS, ACCEPTED_AT,
    ACCEPTANCE_LENGTH, DRAFT_LENGTH, DRAFT_LIMIT, DRAFT_SECONDS, FAILURES, FALLBACK_STEPS,
    BREAKER_STATE, BREAKER_OPENED, DISABLED_SECONDS, SPEC_SECONDS, PLAIN_SECONDS,
)  # fmt: skip
REQUESTS = (
    ADMITTED, FINISHED, REFUSED, RUNNING, WAITING, PREEMPTIONS, QUEUE_SECONDS, PREFILL_SECONDS,
    DECODE_SECONDS, REQUEST_PROMPT, REQUEST_GENERATED,
)  # fmt: skip
STEPS = (
    PROMPT_TOKENS, GENERATED_TOKENS, SEQUENCE_STEPS, TRIMMED_TOKENS, TARGET_STEPS, TARGET_SECONDS,
    STEP_TOKENS_RUN, STEP_SEQUENCES, TARGET_FAILURES, BISECTIONS,
)  # fmt: skip
MEMORY = (
    BLOCKS, FREE_BLOCKS, CACHED_BLOCKS, STATE_SLOTS, FREE_STATE_SLOTS, PREFIX_QUERIES, PREFIX_HITS,
    IMAGE_QUERIES, IMAGE_HITS, IMAGE_BYTES, MEMORY_BYTES,
)  # fmt: skip
WORKER = (WORKER_INFO, STARTED)
FAMILIES = (*SPECULATION, *REQUESTS, *STEPS, *MEMORY, *WORKER)

"""Every series that an ingress counts.

Owns their names, labels and meaning. Knows nothing of how they are counted. All ingresses of a
model are shown as one. Invariant: a label has a bounded set of values.

Identity, tested on a live scrape: streams_started == sum(streams_finished) + streams_open. A stream
is one answer: a request with `n: 3` has three.
"""

from __future__ import annotations

from workers.telemetry.buckets import REQUEST_SECONDS, TOKEN_SECONDS
from workers.telemetry.meter import counter, gauge, histogram

# What became of a stream, for its client.
OUTCOMES = ("stop", "length", "tool_calls", "abort", "timeout", "refused", "error", "lost")
DECISIONS = ("prefix", "queue")
IMAGE_SOURCES = ("data", "url")

HTTP_REQUESTS = counter(
    "http_requests", "HTTP requests by what was answered; 499: the client went first.",
    "route", "method", "status",
)  # fmt: skip
HTTP_SECONDS = histogram(
    "http_request_seconds", "From a request's arrival to the end of its answer.",
    REQUEST_SECONDS, "route",
)  # fmt: skip
HTTP_OPEN = gauge("http_requests_open", "HTTP requests that are being answered.")

STARTED = counter("streams_started", "Answers that were begun.", "modality")
FINISHED = counter("streams_finished", "Answers by what became of them.", "outcome")
OPEN = gauge("streams_open", "Answers in the making.")
FIRST_TOKEN_SECONDS = histogram(
    "time_to_first_token_seconds",
    "From a request's arrival to an answer's first token; once for each that has one.",
    REQUEST_SECONDS, "modality",
)  # fmt: skip
TOKEN_SECONDS_BETWEEN = histogram(
    "inter_token_seconds",
    "Between two tokens of an answer; n tokens that come at once after t are n times t/n.",
    TOKEN_SECONDS,
)  # fmt: skip
STREAM_SECONDS = histogram(
    "stream_seconds", "From a request's arrival to an answer's end.", REQUEST_SECONDS, "modality"
)

INTERRUPTED = counter("streams_interrupted", "Times that a stream lost its worker.")
RESUMED = counter("streams_resumed", "Replays that went on with a stream.")
LOST = counter("streams_lost", "Streams that no worker could finish.")
REPLAYED_TOKENS = counter("replayed_tokens", "Tokens sent along with replays.")
RESUME_SECONDS = histogram(
    "stream_resume_seconds", "From a worker's loss to the next delta.", REQUEST_SECONDS
)
TIMED_OUT = counter("requests_timed_out", "Requests that were not finished in their time.")

ROUTED = counter(
    "routed_requests",
    "Requests sent to a worker: to the one with least to do, prefixes considered, or to the"
    " shorter of two queues.",
    "decision",
)  # fmt: skip
IMAGES = counter("images", "Images of requests, frames of videos included.", "source")
IMAGE_SECONDS = histogram(
    "image_seconds", "Time to fetch, decode and prepare a request's images.", REQUEST_SECONDS
)

FAMILIES = (
    HTTP_REQUESTS, HTTP_SECONDS, HTTP_OPEN, STARTED, FINISHED, OPEN, FIRST_TOKEN_SECONDS,
    TOKEN_SECONDS_BETWEEN, STREAM_SECONDS, INTERRUPTED, RESUMED, LOST, REPLAYED_TOKENS,
    RESUME_SECONDS, TIMED_OUT, ROUTED, IMAGES, IMAGE_SECONDS,
)  # fmt: skip

"""What clients see: the board to look at first."""

from __future__ import annotations

from deploy.grafana.panels import Chart, Heat, Number, Query, Row
from deploy.grafana.queries import buckets, increase, mean, quantile, rate, ratio, total
from deploy.metrics.families import UP
from serving import series as ingress
from workers.telemetry import series as worker
from workers.telemetry.meter import Family

UID, TITLE = "specserve-serving", "specserve / Serving overview"
DESCRIPTION = "Requests, streams and latency as clients see them, and what stands in their way."
_FAILED = "error|lost"


def quantiles(family: Family) -> tuple[Query, ...]:
    """Return the quantiles that matter to people who wait."""
    return tuple(Query(quantile(share, family), f"p{100 * share:g}") for share in (0.5, 0.95, 0.99))


HEALTH = Row(
    "Health",
    (
        Number(
            "Workers", "Workers that report. Below the number of replicas: some are starting, dead"
            " or hanging.", "none", (Query(total(UP), "reporting"),), decimals=0,
        ),
        Number(
            "Missing workers", "Workers that should report and have been silent for 10 seconds."
            " Above 0 for minutes: Ray cannot replace them.", "none",
            (Query(f"count({total(UP, 'model', 'worker')} == 0) or vector(0)", "missing"),),
            ((1, "red"),), 0,
        ),
        Number(
            "Failed streams", "Share of the answers that ended with an error of ours. More than"
            " 0.1 % uses up the error budget.", "percentunit",
            (Query(ratio(rate(ingress.FINISHED, outcome=_FAILED), rate(ingress.FINISHED)),
                   "failed"),),
            ((0.001, "orange"), (0.01, "red")), 3,
        ),
        Number(
            "Streams lost, 1 h", "Streams that no worker could finish. Each was an error for"
            " somebody.", "none", (Query(increase(ingress.LOST, window="1h"), "lost"),),
            ((1, "red"),), 0,
        ),
        Number(
            "Draft failures, 1 h", "Failures that cost steps their drafts; requests went on. More"
            " than a few: see the Speculation board.", "none",
            (Query(increase(worker.FAILURES, window="1h"), "failures"),), ((10, "orange"),), 0,
        ),
        Number(
            "Breakers open", "Workers that have left drafting off for a while since it kept"
            " failing.", "none", (Query(total(worker.BREAKER_STATE, state="open"), "open"),),
            ((1, "orange"),), 0,
        ),
    ),
    width=4, height=4,
)  # fmt: skip
TRAFFIC = Row(
    "Traffic",
    (
        Chart(
            "HTTP requests by status", "Answers a second. 429: the queue is full; 499: the client"
            " went first; 5xx: ours.", "reqps",
            (Query(rate(ingress.HTTP_REQUESTS, "status"), "{{status}}"),), is_stacked=True,
        ),
        Chart(
            "HTTP requests by route", "Answers a second.", "reqps",
            (Query(rate(ingress.HTTP_REQUESTS, "route"), "{{route}}"),), is_stacked=True,
        ),
        Chart(
            "In the making", "HTTP requests that are being answered, and answers in the making: a"
            " request with n choices has n.", "none",
            (Query(total(ingress.HTTP_OPEN), "requests"), Query(total(ingress.OPEN), "answers")),
        ),
        Chart(
            "Streams by outcome", "What became of answers. lost and error are ours; abort is the"
            " client's; timeout is the request's own limit or the server's.", "reqps",
            (Query(rate(ingress.FINISHED, "outcome"), "{{outcome}}"),), is_stacked=True,
        ),
        Chart(
            "Streams that lost a worker", "interrupted: a worker died under a stream. resumed: it"
            " went on elsewhere, unseen by the client. lost: it could not.", "none",
            (
                Query(increase(ingress.INTERRUPTED), "interrupted"),
                Query(increase(ingress.RESUMED), "resumed"),
                Query(increase(ingress.LOST), "lost"),
                Query(increase(ingress.TIMED_OUT), "timed out"),
            ),
        ),
        Chart(
            "Refused by the engine", "Requests that a worker did not accept. QueueFull means too"
            " few workers.", "reqps", (Query(rate(worker.REFUSED, "reason"), "{{reason}}"),),
        ),
    ),
)  # fmt: skip
LATENCY = Row(
    "Latency",
    (
        Chart(
            "Time to first token", "From a request's arrival to its first token. Much above queue"
            " and prefill: the ingress is busy.", "s", quantiles(ingress.FIRST_TOKEN_SECONDS),
        ),
        Chart(
            "Between tokens", "n tokens that come at once after t seconds count as n times t/n.",
            "s", quantiles(ingress.TOKEN_SECONDS_BETWEEN),
        ),
        Chart("End to end", "From a request's arrival to its answer's end.", "s",
              quantiles(ingress.STREAM_SECONDS)),
        Chart("Queue", "From arrival at a worker to the first step. Grows when workers are full.",
              "s", quantiles(worker.QUEUE_SECONDS)),
        Chart("Prefill", "From the first step to the first token. Grows with uncached prompts.",
              "s", quantiles(worker.PREFILL_SECONDS)),
        Chart("Decode", "From the first token to the last.", "s", quantiles(worker.DECODE_SECONDS)),
        Heat(
            "Time to first token, all", "How many requests had which time: two bands are two kinds"
            " of requests.", "s",
            (Query(buckets(ingress.FIRST_TOKEN_SECONDS), "{{le}}"),),
        ),
        Chart(
            "Resumed after", "From a worker's loss to the next token of its streams.", "s",
            (Query(f"{mean(ingress.RESUME_SECONDS)} or vector(0)", "mean"),),
        ),
        Chart(
            "Time to first token, by modality", "Medians of requests with images and without.",
            "s", (Query(quantile(0.5, ingress.FIRST_TOKEN_SECONDS, "modality"), "{{modality}}"),),
        ),
    ),
)  # fmt: skip
WORK = Row(
    "Work",
    (
        Chart(
            "Tokens", "Generated, and read from prompts.", "suffix: tok/s",
            (
                Query(rate(worker.GENERATED_TOKENS), "generated"),
                Query(rate(worker.PROMPT_TOKENS), "prompts"),
            ),
        ),
        Chart(
            "Requests at the workers", "Running ones hold K/V; waiting ones do not fit yet.",
            "none",
            (Query(total(worker.RUNNING), "running"), Query(total(worker.WAITING), "waiting")),
            is_stacked=True,
        ),
        Chart(
            "Routing", "Why a request went where it went: to the worker with least to do for it,"
            " known prefixes considered, or to the shorter of two queues.", "reqps",
            (Query(rate(ingress.ROUTED, "decision"), "{{decision}}"),),
        ),
        Chart("Prompt lengths", "Of requests that ended.", "suffix: tok",
              quantiles(worker.REQUEST_PROMPT)),
        Chart("Answer lengths", "Of requests that ended.", "suffix: tok",
              quantiles(worker.REQUEST_GENERATED)),
        Chart(
            "Images", "Loaded for requests, frames of videos included: sent along, or fetched.",
            "suffix: images/s", (Query(rate(ingress.IMAGES, "source"), "{{source}}"),),
        ),
        Chart("Image loading", "Fetching, decoding and preparing a request's images.", "s",
              quantiles(ingress.IMAGE_SECONDS)),
        Chart(
            "HTTP answers", "Time of whole answers by route; of streams, to their end.", "s",
            (Query(quantile(0.95, ingress.HTTP_SECONDS, "route"), "{{route}} p95"),),
        ),
        Chart("Replayed tokens", "Sent along with replays, and read again by the new worker.",
              "suffix: tok/s", (Query(rate(ingress.REPLAYED_TOKENS), "replayed"),)),
    ),
)  # fmt: skip
ROWS = (HEALTH, TRAFFIC, LATENCY, WORK)

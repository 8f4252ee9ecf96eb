"""Each worker: what it runs, what it does, and what its memory holds."""

from __future__ import annotations

from deploy.grafana.panels import Chart, Facts, Query, Row
from deploy.grafana.queries import increase, mean, quantile, rate, ratio, series, total
from deploy.metrics.families import UP
from workers.telemetry import series as worker
from workers.telemetry.meter import Family

UID, TITLE = "specserve-workers", "specserve / Workers and KV"
DESCRIPTION = "What each worker runs and does, its K/V memory and its caches."
_NAME = "worker {{worker}}"


def _share(blocks: Family) -> str:
    return ratio(total(blocks, "worker"), total(worker.BLOCKS, "worker"))


STATE = Row(
    "State",
    (
        Facts(
            "What runs", "One line a worker that reports. A worker keeps its number when its"
            " process is replaced.", "none", (Query(series(worker.WORKER_INFO)),),
            ("Time", "Value", "__name__", "instance", "job"),
        ),
        Chart("Reporting", "1 while a worker reports; 0 while it is missing.", "none",
              (Query(total(UP, "worker"), _NAME),), top=1),
        Chart(
            "Running for", "Since the engine was ready. Back to 0 again and again: the worker keeps"
            " dying.", "s", (Query(f"time() - {series(worker.STARTED)}", _NAME),),
        ),
    ),
)  # fmt: skip
WORK = Row(
    "Work",
    (
        Chart("Running requests", "Requests that hold K/V.", "none",
              (Query(total(worker.RUNNING, "worker"), _NAME),), is_stacked=True),
        Chart(
            "Waiting requests", "Requests that do not fit yet. Uneven for long: routing does not"
            " know of the work.", "none", (Query(total(worker.WAITING, "worker"), _NAME),),
            is_stacked=True,
        ),
        Chart("Tokens", "Generated.", "suffix: tok/s",
              (Query(rate(worker.GENERATED_TOKENS, "worker"), _NAME),), is_stacked=True),
        Chart(
            "Steps", "Of the target. 0 while requests run: the worker is stuck.", "suffix: steps/s",
            (Query(rate(worker.TARGET_STEPS, "worker"), _NAME),),
        ),
        Chart("Sequences in a step", "Mean of all workers.", "none",
              (Query(mean(worker.STEP_SEQUENCES), "sequences"),)),
        Chart("Tokens in a step", "Mean and 99 % of all workers; prompts make steps long.",
              "suffix: tok",
              (Query(mean(worker.STEP_TOKENS_RUN), "mean"),
               Query(quantile(0.99, worker.STEP_TOKENS_RUN), "p99"))),
        Chart("Step time", "99 % of the target's steps were shorter.", "s",
              (Query(quantile(0.99, worker.TARGET_SECONDS, "kind"), "{{kind}}"),)),
        Chart("Finished requests", "By reason. error: a step of the target failed for it.", "reqps",
              (Query(rate(worker.FINISHED, "finish_reason"), "{{finish_reason}}"),),
              is_stacked=True),
        Chart(
            "Target failures", "Steps that failed for one request, and steps cut in halves to find"
            " it. Above 0: see the worker's log.", "none",
            (Query(increase(worker.TARGET_FAILURES), "failures"),
             Query(increase(worker.BISECTIONS), "bisections")),
        ),
    ),
)  # fmt: skip
MEMORY = Row(
    "K/V memory and caches",
    (
        Chart(
            "K/V held", "Share of the blocks that requests hold. Near 1 with requests waiting:"
            " memory is what is missing.", "percentunit",
            (Query(f"1 - {_share(worker.FREE_BLOCKS)}", _NAME),),
            ((0.9, "orange"), (0.97, "red")), top=1,
        ),
        Chart("K/V kept for reuse", "Share of the blocks that a later request can find.",
              "percentunit",
              (Query(_share(worker.CACHED_BLOCKS), _NAME),), top=1),
        Chart("Preemptions", "Requests that lost their blocks and are computed again. Above 0 for"
              " long: let fewer run.", "none",
              (Query(increase(worker.PREEMPTIONS, "worker"), _NAME),)),
        Chart(
            "Prefix cache", "Share of the looked-up prompt tokens that were found. Low with"
            " conversations: they are routed apart, or evicted.", "percentunit",
            (Query(ratio(rate(worker.PREFIX_HITS, "worker"), rate(worker.PREFIX_QUERIES, "worker")),
                   _NAME),), top=1,
        ),
        Chart("Image cache", "Share of the needed image embeddings that were there.", "percentunit",
              (Query(ratio(rate(worker.IMAGE_HITS), rate(worker.IMAGE_QUERIES)), "found"),), top=1),
        Chart("Image cache size", "Embeddings that are kept.", "bytes",
              (Query(total(worker.IMAGE_BYTES, "worker"), _NAME),)),
        Chart(
            "Recurrent states", "Slots in use, of models with linear attention; 0 for others.",
            "none",
            (Query(f"{total(worker.STATE_SLOTS, 'worker')}"
                   f" - {total(worker.FREE_STATE_SLOTS, 'worker')}", _NAME),),
        ),
        Chart("Memory", "Of the process, and of torch on a GPU. Growing for days: a leak.", "bytes",
              (Query(total(worker.MEMORY_BYTES, "worker", "memory"), "{{memory}}, " + _NAME),)),
    ),
)  # fmt: skip
ROWS = (STATE, WORK, MEMORY)

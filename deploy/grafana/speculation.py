"""Whether speculation pays, and what keeps it from it."""

from __future__ import annotations

from deploy.grafana.panels import Chart, Heat, Number, Query, Row
from deploy.grafana.queries import buckets, increase, mean, quantile, rate, ratio, series, total
from workers.telemetry import series as worker

UID, TITLE = "specserve-speculation", "specserve / Speculation"
DESCRIPTION = "Acceptance, draft lengths, cost and gain, failures and fallbacks of speculation."


def acceptance(*by: str) -> str:
    """Return the share of draft tokens that were accepted; the bonus is no draft."""
    return ratio(rate(worker.ACCEPTED_TOKENS, *by), rate(worker.DRAFT_TOKENS, *by))


def length(*by: str) -> str:
    """Return the tokens that a verification gave; the bonus is one of them."""
    accepted = rate(worker.ACCEPTED_TOKENS, *by)
    return f"1 + ({ratio(accepted, rate(worker.DRAFTS, *by))})"


_LOW = ((0.0, "red"), (0.2, "orange"), (0.4, "green"))
_SPEED_UP = ratio(rate(worker.PLAIN_SECONDS), rate(worker.SPEC_SECONDS))
NOW = Row(
    "Now",
    (
        Number(
            "Acceptance", "Accepted of the verified draft tokens. Below 0.2 a draft model rarely"
            " pays; a sudden fall means that draft and target no longer fit.", "percentunit",
            (Query(acceptance(), "accepted"),), _LOW,
        ),
        Number(
            "Tokens per verification", "Accepted drafts and the bonus, of verifications that had"
            " drafts. 1 = all drafts were wrong.", "none", (Query(length(), "tokens"),),
        ),
        Number(
            "Tokens per step", "Of one sequence, drafts or not. 1 is plain decoding.", "none",
            (Query(ratio(rate(worker.GENERATED_TOKENS), rate(worker.SEQUENCE_STEPS)), "tokens"),),
        ),
        Number(
            "Speed-up", "Time that plain decoding would have taken over the time it took, by the"
            " measured cost of plain steps. Below 1: speculation costs more than it gives.", "none",
            (Query(_SPEED_UP, "times"),), ((0.0, "red"), (0.97, "orange"), (1.0, "green")),
        ),
        Number(
            "Draft length", "Drafts that a sequence may carry now; 0 while a breaker is open.",
            "none", (Query(f"avg ({series(worker.DRAFT_LIMIT)})", "drafts"),),
            ((0, "orange"), (0.5, "green")), 1,
        ),
        Number(
            "Steps without drafts", "Share of sequences' steps that a failure or an open breaker"
            " left without drafts.", "percentunit",
            (Query(ratio(rate(worker.FALLBACK_STEPS), rate(worker.SEQUENCE_STEPS)), "fallbacks"),),
            ((0.05, "orange"), (0.5, "red")),
        ),
    ),
    width=4, height=4,
)  # fmt: skip
ACCEPTANCE = Row(
    "Acceptance",
    (
        Chart(
            "By position", "Share of the verifications in which the draft at a position was"
            " accepted. It falls with the position: where it is near 0, drafts are too long.",
            "percentunit",
            (Query(
                f"({rate(worker.ACCEPTED_AT, 'position')} / on () group_left ()"
                f" {rate(worker.DRAFTS)}) >= 0", "position {{position}}",
            ),), top=1,
        ),
        Chart(
            "By modality", "Of requests with images and without. A gap means that the draft does"
            " not see what the target sees.", "percentunit",
            (Query(acceptance("modality"), "{{modality}}"),), top=1,
        ),
        Chart("By drafter", "Of each method.", "percentunit",
              (Query(acceptance("drafter"), "{{drafter}}"),), top=1),
        Chart(
            "By worker", "One that differs from the others serves other requests, or is broken.",
            "percentunit", (Query(acceptance("worker"), "worker {{worker}}"),), top=1,
        ),
        Chart("Tokens per verification", "Accepted drafts and the bonus.", "none",
              (Query(length("modality"), "{{modality}}"),), bottom=1),
        Heat(
            "Tokens of a verification", "How many verifications gave how many tokens.", "none",
            (Query(buckets(worker.ACCEPTANCE_LENGTH), "{{le}}"),),
        ),
    ),
)  # fmt: skip
COST = Row(
    "Cost and gain",
    (
        Chart(
            "Speed-up", "Estimated, of steps that verified drafts and ran no prompt. Below 1 for"
            " long: draft less, or not at all.", "none",
            (Query(ratio(rate(worker.PLAIN_SECONDS, "worker"), rate(worker.SPEC_SECONDS, "worker")),
                   "worker {{worker}}"),),
            ((0, "red"), (1, "green")),
        ),
        Chart(
            "Draft tokens", "Verified, accepted, and emitted by verifications with drafts. The gap"
            " between the first two is work for nothing.", "suffix: tok/s",
            (
                Query(rate(worker.DRAFT_TOKENS), "verified"),
                Query(rate(worker.ACCEPTED_TOKENS), "accepted"),
                Query(rate(worker.EMITTED_TOKENS), "emitted"),
                Query(rate(worker.SPEC_TRIMMED_TOKENS), "cut off by a stop"),
            ),
        ),
        Chart(
            "Draft length", "Drafts that a decoding sequence carried on average, and may carry.",
            "none",
            (
                Query(mean(worker.DRAFT_LENGTH, "modality"), "{{modality}}"),
                Query(f"avg ({series(worker.DRAFT_LIMIT)})", "limit"),
            ),
        ),
        Chart(
            "Steps of the target", "Mean time: with prompts (extend), with drafts (verify), with"
            " neither (decode). verify much above decode eats the gain.", "s",
            (Query(mean(worker.TARGET_SECONDS, "kind"), "{{kind}}"),),
        ),
        Chart(
            "Drafting", "Mean time after a step: all of it (propose), and a model's two parts.",
            "s",
            (Query(mean(worker.DRAFT_SECONDS, "stage"), "{{stage}}"),),
        ),
        Chart(
            "Share of drafting", "Of the time of all steps.", "percentunit",
            (Query(
                ratio(
                    rate(worker.DRAFT_SECONDS, ending="_sum", stage="propose"),
                    f"({rate(worker.DRAFT_SECONDS, ending='_sum', stage='propose')}"
                    f" + {rate(worker.TARGET_SECONDS, ending='_sum')})",
                ), "drafting",
            ),), top=1,
        ),
    ),
)  # fmt: skip
FAILURES = Row(
    "Failures",
    (
        Chart(
            "Draft failures", "By stage and reason. Requests went on without drafts.", "none",
            (Query(increase(worker.FAILURES, "stage", "reason"), "{{stage}}: {{reason}}"),),
        ),
        Chart(
            "Steps without drafts", "Steps of one sequence that a failure or an open breaker left"
            " without drafts.", "suffix: steps/s",
            (Query(rate(worker.FALLBACK_STEPS, "modality"), "{{modality}}"),),
        ),
        Chart(
            "Breaker", "Workers in each state. open: drafting is left off; half_open: it is tried"
            " again.", "none",
            (Query(total(worker.BREAKER_STATE, "state"), "{{state}}"),), is_stacked=True,
        ),
        Chart("Breaker openings", "Times that drafting was left off.", "none",
              (Query(increase(worker.BREAKER_OPENED, "worker"), "worker {{worker}}"),)),
        Chart(
            "Drafting left off", "Share of the time.", "percentunit",
            (Query(rate(worker.DISABLED_SECONDS, "worker"), "worker {{worker}}"),), top=1,
        ),
        Chart("Slow drafting", "99 % of the times after a step were shorter.", "s",
              (Query(quantile(0.99, worker.DRAFT_SECONDS, "stage"), "{{stage}}"),)),
    ),
)  # fmt: skip
ROWS = (NOW, ACCEPTANCE, COST, FAILURES)

"""The README's table of metrics, made of the families that the code counts.

Owns its form and its place between two marks. Knows no values. Invariant: what is exported is in
the table and nothing else; `python -m deploy.metrics --check` finds a README that is out of date.
"""

from __future__ import annotations

from collections.abc import Iterator

import serving.series
import workers.telemetry.series as worker
from deploy.metrics.families import EXPORTER, exported_name, labels_of
from workers.telemetry.meter import Family

BEGIN = "<!-- metrics: made by `make generate` -->"
END = "<!-- metrics: end -->"
GROUPS: tuple[tuple[str, tuple[Family, ...]], ...] = (
    ("Speculation", worker.SPECULATION),
    ("Requests at the workers", worker.REQUESTS),
    ("Tokens and steps", worker.STEPS),
    ("Memory and caches", worker.MEMORY),
    ("Workers and the exporter", (*worker.WORKER, *EXPORTER)),
    ("HTTP and streams, counted by the ingress", serving.series.FAMILIES),
)


def table() -> str:
    """Return the table as Markdown, in parts that are folded."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for title, families in GROUPS:
        yield f"<details><summary>{title} ({len(families)})</summary>"
        yield ""
        yield "| metric | type | labels | meaning |"
        yield "|---|---|---|---|"
        for family in families:
            labels = ", ".join(f"`{label}`" for label in labels_of(family))
            yield f"| `{exported_name(family)}` | {family.kind} | {labels} | {family.help} |"
        yield ""
        yield "</details>"


def with_table(text: str) -> str:
    """Return a document with its table as it should be.

    Raises:
        ValueError: It has no place for one.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"

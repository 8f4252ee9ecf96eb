"""Every series that a scrape shows.

Owns the exporter's own series and the list of all. Knows no values. Invariant: what is not here is
not exported, and the README's table is made of it.
"""

from __future__ import annotations

import serving.series
import workers.telemetry.series
from workers.contracts import Role
from workers.telemetry.meter import Family, Kind, gauge

PREFIX = "specserve_"
UP = gauge(
    "worker_up",
    "1 while a worker reports; 0 when it has been silent for longer than it should.",
    is_per_worker=True,
)
BUILD = gauge("build_info", "1 for the version that runs.", "version", "python", "ray")

OF_ROLE = {Role.WORKER: workers.telemetry.series.FAMILIES, Role.INGRESS: serving.series.FAMILIES}
EXPORTER = (UP, BUILD)


def labels_of(family: Family) -> tuple[str, ...]:
    """Return a family's labels as they are exported."""
    if family is BUILD:
        return family.labels
    return ("model", *(("worker",) if family.is_per_worker else ()), *family.labels)


def exported_name(family: Family) -> str:
    """Return the name that queries use; a histogram's has three endings more."""
    ending = "_total" if family.kind is Kind.COUNTER else ""
    return f"{PREFIX}{family.name}{ending}"

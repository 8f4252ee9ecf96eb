"""Keeps what all processes have counted, while they come and go.

Owns slots: a worker is shown under the number of its slot and not under a name of its own, so that
a replacement goes on with the series of the one that it replaces. Knows no Ray, no Prometheus and
no clock: it is told the time. Invariants: no counter and no histogram of a slot ever falls, whoever
comes, goes, or reports late; gauges are those of a process that has reported lately; slots are as
many as there were processes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from deploy.metrics.families import OF_ROLE
from workers.contracts import Report, Role
from workers.telemetry.meter import Family, Kind, Labels, Snapshot, Value, copied, minus, plus

# Silent for so long, a process is gone or stuck, and its slot free for another. A process reports
# every 3 seconds (`workers.telemetry.reporter.HEARTBEAT_S`).
GONE_S = 10.0
# For so long, a worker that fell silent is shown as missing.
MISSED_S = 300.0
# Processes that gave up their slot and may still come back: those whose network was cut.
MAX_FORMER = 64

Key = tuple[Role, str]


@dataclass(frozen=True, slots=True)
class Slot:
    """One series of processes, each in the place of the one before."""

    # Name of the present one, and the number of its latest report.
    source: str
    number: int
    # What it has counted; gauges are among it.
    snapshot: Snapshot
    # What those before it had counted, less what it had already counted where it was before.
    base: Snapshot = field(default_factory=dict)
    heard_s: float = 0.0
    # It said that it ends.
    is_over: bool = False

    def is_heard(self, now_s: float) -> bool:
        """Whether the process has reported lately."""
        return not self.is_over and now_s - self.heard_s < GONE_S

    def is_missed(self, now_s: float) -> bool:
        """Whether the process should report and does not."""
        return not self.is_over and GONE_S <= now_s - self.heard_s < MISSED_S

    def total(self, family: Family) -> dict[Labels, Value]:
        """Return what the slot's processes have counted together."""
        return _sum(self.snapshot.get(family.name, {}), self.base.get(family.name, {}))


@dataclass(frozen=True, slots=True)
class Entry:
    """A slot and its place."""

    key: Key
    number: int
    slot: Slot


class Ledger:
    """All slots, by role and model."""

    def __init__(self) -> None:
        self._slots: dict[Key, list[Slot]] = {}
        # Source -> what it had counted when it lost its slot; the latest last.
        self._former: dict[str, Snapshot] = {}
        # When slots were added to others that were there.
        self._additions: dict[Key, list[float]] = {}

    def slots(self, role: Role) -> Iterator[tuple[str, int, Slot]]:
        """Yield model, number and slot of every process of a role, present or past."""
        for (slot_role, model_id), slots in sorted(self._slots.items()):
            if slot_role is role:
                for number, slot in enumerate(slots):
                    yield model_id, number, slot

    def is_missed(self, role: Role, model_id: str, number: int, now_s: float) -> bool:
        """Whether a slot's process should report and does not, nor another in its place.

        A replacement that is quicker than its predecessor's death is certain gets a slot of its
        own; each addition accounts for one slot that fell silent just before it.
        """
        key = (role, model_id)
        additions = list(self._additions.get(key, ()))
        for place, slot in enumerate(self._slots[key]):
            if not slot.is_missed(now_s):
                continue
            end_s = slot.heard_s + GONE_S
            found = next((at_s for at_s in additions if slot.heard_s < at_s < end_s), None)
            if found is not None:
                additions.remove(found)
            if place == number:
                return found is None
        return False

    def plan(self, report: Report, now_s: float) -> Entry | None:
        """Return where a report goes, and change nothing; None for one that was overtaken."""
        key = (report.role, report.model_id)
        slots = self._slots.get(key, [])
        snapshot = fitting(report.snapshot, report.role)
        slot = Slot(report.source, report.number, snapshot, {}, now_s, report.is_last)
        for number, present in enumerate(slots):
            if present.source == report.source:
                is_new = report.number > present.number
                return Entry(key, number, replace(slot, base=present.base)) if is_new else None
        back = self._former.get(report.source, {})
        base = {name: {k: minus(v) for k, v in series.items()} for name, series in back.items()}
        for number, present in enumerate(slots):
            if not present.is_heard(now_s):
                base = add(base, add(present.base, _lasting(present.snapshot, report.role)))
                return Entry(key, number, replace(slot, base=base))
        return Entry(key, len(slots), replace(slot, base=base))

    def commit(self, entry: Entry) -> None:
        """Put a slot in its place.

        Raises:
            ValueError: Those before it are not there.
        """
        slots = self._slots.setdefault(entry.key, [])
        if entry.number > len(slots):
            raise ValueError(f"slot {entry.number} of {entry.key} comes after {len(slots)}")
        if entry.number == len(slots):
            if slots:
                self._additions.setdefault(entry.key, []).append(entry.slot.heard_s)
            slots.append(entry.slot)
        present, slots[entry.number] = slots[entry.number], entry.slot
        self._former.pop(entry.slot.source, None)
        if present.source != entry.slot.source:
            self._former[present.source] = _lasting(present.snapshot, entry.key[0])
            while len(self._former) > MAX_FORMER:
                del self._former[next(iter(self._former))]


def add(one: Snapshot, other: Snapshot) -> Snapshot:
    """Return the sums of two snapshots."""
    names = {**one, **other}
    return {name: _sum(one.get(name, {}), other.get(name, {})) for name in names}


def _sum(one: Mapping[Labels, Value], other: Mapping[Labels, Value]) -> dict[Labels, Value]:
    total = copied(one)
    for labels, value in other.items():
        total[labels] = plus(total[labels], value) if labels in total else value
    return total


def fitting(snapshot: Snapshot, role: Role) -> Snapshot:
    """Leave out what is not of our families: a process of another version may have sent it."""
    return {
        family.name: {
            labels: value
            for labels, value in snapshot.get(family.name, {}).items()
            if len(labels) == len(family.labels) and _fits(value, family)
        }
        for family in OF_ROLE[role]
    }


def _fits(value: Value, family: Family) -> bool:
    if family.kind is Kind.HISTOGRAM:
        return isinstance(value, list) and len(value) == len(family.buckets) + 2
    return not isinstance(value, list)


def _lasting(snapshot: Snapshot, role: Role) -> Snapshot:
    """Return counters and histograms."""
    lasting = {family.name for family in OF_ROLE[role] if family.kind is not Kind.GAUGE}
    return {name: series for name, series in snapshot.items() if name in lasting}

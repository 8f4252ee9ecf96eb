"""Keeps a ledger's slots where they outlive the exporter.

Owns their form, which is JSON, and where it is put: the key-value store of Ray's control plane,
which lives as long as the cluster. Knows no series. Invariant: what cannot be read, because another
version has written it, is left out and said, and nothing else is lost with it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Protocol

from deploy.metrics.ledger import Entry, Ledger, Slot, fitting
from workers.contracts import Role
from workers.telemetry.meter import Labels, Snapshot, Value

logger = logging.getLogger(__name__)

# Of the form; another one's slots are left alone.
VERSION = 1


class Store(Protocol):
    """Names and their bytes."""

    def put(self, name: str, value: bytes) -> None:
        """Keep bytes in place of those of the same name."""
        ...

    def items(self) -> dict[str, bytes]:
        """Return all that is kept."""
        ...


class RayStore:
    """A `Store` of one application in Ray's control plane."""

    def __init__(self, app_name: str) -> None:
        """Choose the place; the application's name tells it from others on the cluster."""
        self._namespace = f"specserve/{app_name}/metrics/{VERSION}".encode()

    def put(self, name: str, value: bytes) -> None:
        """Keep bytes; this takes a call over the network."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_put(name.encode(), value, namespace=self._namespace)

    def items(self) -> dict[str, bytes]:
        """Return all that is kept."""
        from ray.experimental import internal_kv

        found = {}
        for name in internal_kv._internal_kv_list(b"", namespace=self._namespace):
            value = internal_kv._internal_kv_get(name, namespace=self._namespace)
            if value is not None:
                found[name.decode()] = value
        return found


def save(store: Store, entry: Entry) -> None:
    """Keep a slot."""
    (role, model_id), slot = entry.key, entry.slot
    fields = {
        "role": role, "model": model_id, "slot": entry.number, "source": slot.source,
        "number": slot.number, "is_over": slot.is_over,
        "snapshot": _written(slot.snapshot), "base": _written(slot.base),
    }  # fmt: skip
    store.put(f"{role}/{model_id}/{entry.number:06d}", json.dumps(fields).encode())


def load(store: Store, now_s: float) -> Ledger:
    """Return the ledger that was kept, with all its processes as if they had reported just now."""
    ledger = Ledger()
    for name, value in sorted(store.items().items()):
        try:
            fields = json.loads(value)
            role = Role(fields["role"])
            slot = Slot(
                fields["source"], fields["number"], _read(fields["snapshot"]),
                _read(fields["base"]), now_s, fields["is_over"],
            )  # fmt: skip
            slot = replace(
                slot, snapshot=fitting(slot.snapshot, role), base=fitting(slot.base, role)
            )
            ledger.commit(Entry((role, fields["model"]), fields["slot"], slot))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("the counters of %s cannot be read, and begin anew: %r", name, error)
    return ledger


def _written(snapshot: Snapshot) -> dict[str, list[tuple[Labels, Value]]]:
    return {name: list(series.items()) for name, series in snapshot.items() if series}


def _read(written: dict[str, list[tuple[list[str], Value]]]) -> Snapshot:
    return {
        name: {tuple(labels): value for labels, value in series} for name, series in written.items()
    }

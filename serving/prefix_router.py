"""Serve's router for the workers: asks `affinity` where a request should go.

Owns the translation between Serve's replicas and requests and names. Knows no policy. Runs in each
ingress, on Serve's own event loop. Invariants: it only ranks; which replica takes a request is
decided by Serve's rejection protocol, so limits hold whatever is thought here. A request that is
being sent counts as work where it was told to go, so that those that come together do not all go
one way.

NOTE: Serve's id of a request is the same for all calls that one HTTP request makes, such as those
of its choices. By default Serve gives a replica to the call with the id, and the others of one id
wait for ever; here it goes to the very call that it was chosen for.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from serving.affinity import Affinity, Load
from serving.counters import ROUTED
from workers.contracts import GenerationRequest

if TYPE_CHECKING:
    from ray.serve._private.common import ReplicaID, RequestMetadata
    from ray.serve._private.replica_result import ReplicaResult

# After which a request that was never sent is forgotten.
MAX_SENDING_S = 10.0


class _Sending(NamedTuple):
    """A request that was told where to go."""

    name: int
    load: Load
    since_s: float


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray is not typed for us
    """Ranks replicas by work left and known prefix; without a prefix, two at random."""

    def initialize_state(self, prefix_weight: float = 1.0) -> None:
        """Prepare; Serve calls this once, with the settings' values."""
        self._affinity: Affinity[ReplicaID] = Affinity(prefix_weight)
        self._names = itertools.count()
        # Keyed by the identity of Serve's request, the oldest first.
        self._sending: dict[int, _Sending] = {}
        # Replica and Serve's id -> the calls of that id that it runs.
        self._running: defaultdict[tuple[ReplicaID, str], list[int]] = defaultdict(list)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, of which Serve tries one after the other."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        self._affinity.update({key: r.routing_stats for key, r in replicas.items()})
        names = list(replicas)
        load = None if pending_request is None else self._load(pending_request)
        if pending_request is None or load is None or not self._affinity.knows(names, load):
            # Serve takes the one with the shorter queue, which it asks for.
            chosen = random.sample(names, min(2, len(names)))
            return [[replicas[name] for name in chosen]]
        ranked = self._affinity.rank(names, load)
        self._send(pending_request, ranked[0], load)
        return [[replicas[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Take note of where a request went."""
        super().on_request_routed(pending_request, replica_id, result)
        sending = self._forget(id(pending_request))
        ROUTED["queue" if sending is None else "prefix"] += 1
        load = self._load(pending_request) if sending is None else sending.load
        if load is not None:
            name = next(self._names)
            self._affinity.started(name, replica_id, load)
            self._running[replica_id, pending_request.metadata.internal_request_id].append(name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Take note that a request is over, or that a replica did not take it."""
        super().on_request_completed(replica_id, internal_request_id)
        names = self._running.get((replica_id, internal_request_id))
        if names:
            self._affinity.ended(names.pop())
            if not names:
                del self._running[replica_id, internal_request_id]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget what a replica ran."""
        super().on_replica_actor_died(replica_id)
        for key in [key for key in self._running if key[0] == replica_id]:
            for name in self._running.pop(key):
                self._affinity.ended(name)

    def _get_pending_request_matching_metadata(
        self, request_metadata: RequestMetadata | None = None
    ) -> PendingRequest | None:
        """Return the call that a replica was chosen for; the metadata are its own object."""
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None

    def _send(self, pending: PendingRequest, replica_id: ReplicaID, load: Load) -> None:
        """Count a request where it was told to go, until it is there or has been given up."""
        self._forget(id(pending))  # an earlier try's
        now_s = time.monotonic()
        while self._sending:
            key, oldest = next(iter(self._sending.items()))
            if now_s - oldest.since_s < MAX_SENDING_S:
                break
            self._forget(key)
        name = next(self._names)
        self._affinity.started(name, replica_id, load)
        self._sending[id(pending)] = _Sending(name, load, now_s)

    def _forget(self, key: int) -> _Sending | None:
        sending = self._sending.pop(key, None)
        if sending is not None:
            self._affinity.ended(sending.name)
        return sending

    def _load(self, pending: PendingRequest) -> Load | None:
        """Return a request as work; None for what is no generation."""
        request = pending.args[0] if pending.args else None
        return self._affinity.load_of(request) if isinstance(request, GenerationRequest) else None

"""Serve's router for the workers: asks `affinity` where a request should go.

Owns the translation between Serve's replicas and names. Knows no policy. Runs in each ingress, on
Serve's own event loop. Invariant: it only ranks; which replica takes a request is decided by
Serve's rejection protocol, so limits hold whatever is thought here.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serving.affinity import Affinity, Load
from workers.contracts import GenerationRequest

if TYPE_CHECKING:
    from ray.serve._private.common import ReplicaID
    from ray.serve._private.replica_result import ReplicaResult

# Requests whose work is remembered while they are routed.
MAX_PENDING = 4096


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed for us
    """Ranks replicas by work left and known prefix; without a prefix, two at random."""

    def initialize_state(self, prefix_weight: float = 1.0) -> None:
        """Prepare; Serve calls this once, with the settings' values."""
        self._affinity: Affinity[ReplicaID] = Affinity(prefix_weight)
        self._loads: dict[str, Load] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, of which Serve tries one after the other."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        self._affinity.update({key: r.routing_stats for key, r in replicas.items()})
        load = self._load(pending_request)
        names = list(replicas)
        if load is None or not self._affinity.knows(names, load):
            # Serve takes the one with the shorter queue, which it asks for.
            chosen = random.sample(names, min(2, len(names)))
            return [[replicas[name] for name in chosen]]
        return [[replicas[name]] for name in self._affinity.rank(names, load)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Take note of where a request went."""
        super().on_request_routed(pending_request, replica_id, result)
        load = self._load(pending_request)
        name = pending_request.metadata.internal_request_id
        self._loads.pop(name, None)
        if load is not None:
            self._affinity.started(name, replica_id, load)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Take note that a request is over."""
        super().on_request_completed(replica_id, internal_request_id)
        self._affinity.ended(internal_request_id)

    def _load(self, pending_request: PendingRequest | None) -> Load | None:
        """Return a request as work, computed once for all tries; None for what is no generation."""
        if pending_request is None or not pending_request.args:
            return None
        request = pending_request.args[0]
        if not isinstance(request, GenerationRequest):
            return None
        name = pending_request.metadata.internal_request_id
        if name not in self._loads:
            while len(self._loads) >= MAX_PENDING:  # of those that were given up
                del self._loads[next(iter(self._loads))]
            self._loads[name] = self._affinity.load_of(request)
        return self._loads[name]

"""Which worker should run a request: the one that has least to do for it.

Owns what is known of the workers' prefixes and of their work, and the choice. Knows no Ray and no
text. Invariants: a worker that is gone is forgotten; memory is bounded, whatever comes; what is not
known makes a choice worse and never wrong, since a prefix costs time, and no token.

The cost of a worker is the tokens it still has to compute for others, as far as this process knows,
less those of the request that it has computed already. So a known prefix draws a request exactly as
far as it saves work, and a busy worker sends it away.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from workers.contracts import GenerationRequest
from workers.prefix import SHORT_BYTES, short_names

Worker = TypeVar("Worker", bound=Hashable)

# Leading blocks of a prompt that are compared.
MAX_BLOCKS = 512
# Blocks whose last worker is remembered.
MAX_REMEMBERED = 65_536
# What an answer is expected to cost, in tokens of prompts.
ANSWER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Load:
    """One request as work."""

    names: Sequence[bytes]
    num_tokens: int

    def cost(self, num_cached: int) -> int:
        """Return the tokens to compute where so many are known."""
        return max(self.num_tokens - num_cached, 0) + ANSWER_TOKENS


class _Report(NamedTuple):
    """What a worker published, and the same as names."""

    report: bytes
    names: frozenset[bytes]


_NOTHING = _Report(b"", frozenset())


class Affinity(Generic[Worker]):
    """What one process knows of the workers."""

    def __init__(self, prefix_weight: float = 1.0, rng: random.Random | None = None) -> None:
        """Start knowing nothing.

        Args:
            prefix_weight: How much a cached token counts against one of work; 0 = only work counts.
            rng: Chooses among equals.
        """
        self._prefix_weight = prefix_weight
        self._rng = rng or random.Random()
        # As the workers' caches are made; None until one said so.
        self._layout: tuple[int, int] | None = None
        self._published: dict[Worker, _Report] = {}
        # Block -> where the last request with it went: the freshest news, and only ours.
        self._remembered: OrderedDict[bytes, Worker] = OrderedDict()
        # Of requests that run: name -> its worker and its cost.
        self._running: dict[Hashable, tuple[Worker, int]] = {}
        self._outstanding: Counter[Worker] = Counter()

    def load_of(self, request: GenerationRequest) -> Load:
        """Return what a request is as work."""
        num_tokens = len(request.prompt_ids) + len(request.emitted_ids)
        if self._layout is None or not self._prefix_weight:
            return Load((), num_tokens)
        return Load(short_names(request, *self._layout, MAX_BLOCKS), num_tokens)

    def update(self, stats: Mapping[Worker, Mapping[str, Any]]) -> None:
        """Take what the workers that there are have published, and forget the others."""
        before, self._published = self._published, {}
        for worker, published in stats.items():
            if not published:  # nothing before its first report
                continue
            self._layout = (published["block_size"], published["lookahead"])
            report, known = published["prefixes"], before.get(worker)
            # This runs for each request, and a report is the same for seconds.
            if known is None or known.report != report:
                known = _Report(report, _split(report))
            self._published[worker] = known
        for worker in [worker for worker in self._outstanding if worker not in stats]:
            del self._outstanding[worker]
        gone = {name for name, (worker, _) in self._running.items() if worker not in stats}
        for name in gone:
            del self._running[name]

    def num_cached(self, worker: Worker, load: Load) -> int:
        """Return the leading tokens of a request that a worker is thought to know."""
        published = self._published.get(worker, _NOTHING).names
        count = 0
        for name in load.names:
            if name not in published and self._remembered.get(name) != worker:
                break
            count += 1
        return count * (self._layout[0] if self._layout else 0)

    def rank(self, workers: Sequence[Worker], load: Load) -> list[Worker]:
        """Return the workers, the cheapest first; equals in random order."""
        order = list(workers)
        self._rng.shuffle(order)
        return sorted(order, key=lambda worker: self._cost(worker, load))

    def knows(self, workers: Sequence[Worker], load: Load) -> bool:
        """Whether any of the workers is thought to know a part of the request."""
        return any(self.num_cached(worker, load) for worker in workers)

    def started(self, name: Hashable, worker: Worker, load: Load) -> None:
        """Take note of where a request went."""
        cost = load.cost(self.num_cached(worker, load))
        self._running[name] = (worker, cost)
        self._outstanding[worker] += cost
        for block in load.names:
            self._remembered[block] = worker
            self._remembered.move_to_end(block)
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def ended(self, name: Hashable) -> None:
        """Take note that a request is over; one that is not known changes nothing."""
        worker, cost = self._running.pop(name, (None, 0))
        if worker is not None and worker in self._outstanding:
            self._outstanding[worker] -= cost

    def _cost(self, worker: Worker, load: Load) -> float:
        cached = min(self.num_cached(worker, load), load.num_tokens)
        return self._outstanding[worker] - self._prefix_weight * cached


def _split(prefixes: bytes) -> frozenset[bytes]:
    starts = range(0, len(prefixes), SHORT_BYTES)
    return frozenset(prefixes[start : start + SHORT_BYTES] for start in starts)

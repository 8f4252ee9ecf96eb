"""Which worker a request goes to: known prefixes draw it, work sends it away."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import affinity
from serving.affinity import Affinity
from workers.contracts import GenerationRequest, ImageInput, SamplingParams
from workers.kv.block_manager import BlockManager
from workers.prefix import SHORT_BYTES, short_names
from workers.sequence import Sequence

BLOCK = 16
WORKERS = ("a", "b", "c")


def request_of(num_tokens: int, salt: int = 0, name: str = "r") -> GenerationRequest:
    ids = tuple(salt * 1000 + i for i in range(num_tokens))
    return GenerationRequest(name, ids, SamplingParams(seed=1))


def stats_of(*requests: GenerationRequest) -> dict[str, Any]:
    names = [name for r in requests for name in short_names(r, BLOCK, 0, 10_000)]
    return {"block_size": BLOCK, "lookahead": 0, "prefixes": b"".join(names)}


def known(**published: dict[str, Any]) -> Affinity[str]:
    made: Affinity[str] = Affinity(rng=random.Random(1))
    made.update({name: published.get(name, {}) for name in WORKERS} | published)
    return made


def image(start: int, digest: bytes) -> ImageInput:
    return ImageInput(np.zeros((4, 4), np.float32), (1, 4, 4), digest * 32, start, 4)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("emitted", [(), (5, 6, 7)])
def test_both_planes_name_blocks_alike(lookahead: int, emitted: tuple[int, ...]) -> None:
    """A router that named them otherwise would never find a prefix, and nothing would fail."""
    base = request_of(70)
    shown = replace(base, images=(image(20, b"x"),))
    other = replace(base, images=(image(20, b"y"),))
    moved = replace(base, images=(image(21, b"x"),))
    names = []
    for request in (base, shown, other, moved):
        request = replace(request, emitted_ids=emitted)
        blocks = BlockManager(32, BLOCK, lookahead=lookahead)
        seq = Sequence(request, frozenset(), max_len=100)
        assert blocks.admit(seq)
        blocks.publish(seq, 64)
        names.append(short_names(request, BLOCK, lookahead, 100))
        published = blocks.published(100)
        cut = [published[i : i + SHORT_BYTES] for i in range(0, len(published), SHORT_BYTES)]
        assert cut[::-1] == names[-1][:4]
        assert blocks.published(2) == published[: 2 * SHORT_BYTES]
    assert len({tuple(each) for each in names}) == 4
    assert {each[0] for each in names} == {names[0][0]}  # before the image they are the same


def test_a_known_prefix_draws_a_request() -> None:
    request = request_of(200)
    knowing = known(b=stats_of(request_of(100)))
    load = knowing.load_of(request)
    assert knowing.num_cached("b", load) == 96
    assert knowing.knows(WORKERS, load)
    assert knowing.rank(WORKERS, load)[0] == "b"
    assert not knowing.knows(("a", "c"), load)


def test_the_longest_prefix_wins() -> None:
    request = request_of(200)
    knowing = known(a=stats_of(request_of(60)), b=stats_of(request_of(150)))
    assert knowing.rank(WORKERS, knowing.load_of(request))[:2] == ["b", "a"]


def test_a_prefix_with_a_hole_ends_there() -> None:
    request = request_of(200)
    names = short_names(request, BLOCK, 0, 100)
    stats = stats_of() | {"prefixes": b"".join(names[:2] + names[3:])}
    knowing = known(a=stats)
    assert knowing.num_cached("a", knowing.load_of(request)) == 2 * BLOCK


def test_a_busy_worker_sends_requests_away() -> None:
    request = request_of(200)
    knowing = known(b=stats_of(request))
    load = knowing.load_of(request)
    for number in range(2):  # other prompts that it computes already
        knowing.started(str(number), "b", knowing.load_of(request_of(500, 7 + number)))
    assert knowing.rank(WORKERS, load)[-1] == "b"
    for number in range(2):
        knowing.ended(str(number))
    assert knowing.rank(WORKERS, load)[0] == "b"


def test_the_next_turn_follows_the_first_before_any_worker_reported_it() -> None:
    """Reports are seconds old: the second turn of a conversation went to another worker."""
    knowing = known(a=stats_of())
    first = request_of(64)
    knowing.started("1", "c", knowing.load_of(first))
    knowing.ended("1")
    load = knowing.load_of(request_of(128))
    assert knowing.num_cached("c", load) == 48
    assert knowing.rank(WORKERS, load)[0] == "c"


def test_a_worker_that_is_gone_is_forgotten() -> None:
    request = request_of(200)
    knowing = known(b=stats_of(request))
    load = knowing.load_of(request)
    knowing.started("1", "b", load)
    knowing.update({"a": {}, "c": {}})
    assert not knowing.knows(("a", "c"), load)
    assert knowing.rank(("a", "c"), load)[0] in ("a", "c")
    knowing.ended("1")
    knowing.update({"b": {}})  # one of that name is a new one
    assert knowing._outstanding["b"] == 0


def test_a_weight_of_zero_looks_at_work_alone() -> None:
    made: Affinity[str] = Affinity(prefix_weight=0)
    made.update({"a": {}, "b": stats_of(request_of(200))})
    load = made.load_of(request_of(200))
    assert load.names == ()
    made.started("1", "b", load)
    assert made.rank(("a", "b"), load) == ["a", "b"]


def test_equals_are_chosen_at_random() -> None:
    """All ingresses would send everything to the worker whose name comes first."""
    knowing = known()
    load = knowing.load_of(request_of(10))
    firsts = Counter(knowing.rank(WORKERS, load)[0] for _ in range(600))
    assert all(count > 130 for count in firsts.values())


def test_many_at_once_do_not_all_go_to_one() -> None:
    """The reports say the same to all that come meanwhile."""
    request = request_of(200)
    knowing = known(b=stats_of(request))
    gone_to: Counter[str] = Counter()
    for number in range(60):
        load = knowing.load_of(request)
        worker = knowing.rank(WORKERS, load)[0]
        knowing.started(str(number), worker, load)
        gone_to[worker] += 1
    assert set(gone_to) == set(WORKERS)
    assert min(gone_to.values()) >= 10


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_REMEMBERED", 100)
    knowing = known(a=stats_of())
    for number in range(50):
        knowing.started(str(number), "a", knowing.load_of(request_of(200, number)))
        knowing.ended(str(number))
    assert len(knowing._remembered) == 100
    assert knowing._running == {}
    assert sum(knowing._outstanding.values()) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "end", "die", "come"]),
            st.sampled_from("abcd"), st.integers(0, 9), st.integers(1, 300),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_any_events_leave_the_books_right(events: list[tuple[str, str, int, int]]) -> None:
    knowing: Affinity[str] = Affinity()
    alive = {"a", "b"}
    knowing.update({worker: stats_of() for worker in alive})
    running: dict[str, str] = {}
    for what, worker, number, size in events:
        if what == "start" and worker in alive and str(number) not in running:
            load = knowing.load_of(request_of(size, number))
            assert set(knowing.rank(sorted(alive), load)) == alive
            knowing.started(str(number), worker, load)
            running[str(number)] = worker
        elif what == "end":
            knowing.ended(str(number))
            running.pop(str(number), None)
        elif what in ("die", "come"):
            alive = alive | {worker} if what == "come" else alive - {worker}
            knowing.update({each: stats_of() for each in alive})
            running = {name: where for name, where in running.items() if where in alive}
        assert {n: w for n, (w, _) in knowing._running.items()} == running
        for each in alive:
            costs = [cost for where, cost in knowing._running.values() if where == each]
            assert knowing._outstanding[each] == sum(costs)

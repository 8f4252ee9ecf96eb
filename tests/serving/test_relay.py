"""A lost worker is invisible: contiguous tokens, each once, exactly one end (E9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import series
from serving.errors import StreamLost
from serving.relay import Relay, WorkerWatch
from tests.serving.doubles import Script, ScriptedWorkers, deltas_of
from workers.contracts import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from workers.errors import GenerationFailed, QueueFull, WorkerLost

IDS = list(range(100, 112))
REQUEST = GenerationRequest("r", (1, 2), SamplingParams(seed=7))


async def run(relay: Relay) -> list[TokenDelta]:
    return [delta async for delta in relay.run(REQUEST)]


def ids_of(deltas: list[TokenDelta]) -> list[int]:
    return [i for delta in deltas for i in delta.token_ids]


def resumed(num_emitted: int, size: int = 1) -> list[TokenDelta]:
    """What a worker sends that was given `num_emitted` tokens."""
    return [
        TokenDelta("r", d.start + num_emitted, d.token_ids, d.finish_reason)
        for d in deltas_of(IDS[num_emitted:], (size,))
    ]


def counts(relay: Relay) -> tuple[float, ...]:
    families = (series.INTERRUPTED, series.RESUMED, series.LOST)
    return tuple(relay.counters.value(family) for family in families)


async def test_a_lost_worker_is_replayed_with_what_the_client_has() -> None:
    workers = ScriptedWorkers([[*deltas_of(IDS, (2,))[:2], WorkerLost("died")], [*resumed(4, 3)]])
    relay = Relay(workers, max_replays=2, backoff_s=0)
    deltas = await run(relay)
    assert ids_of(deltas) == IDS
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.STOP]
    assert workers.requests[1].emitted_ids == tuple(IDS[:4])
    assert workers.requests[1].sampling == REQUEST.sampling
    # The first worker may live on, out of reach, and may even be the one that is picked again.
    assert counts(relay) == (1, 1, 0)
    assert relay.counters.value(series.REPLAYED_TOKENS) == 4


async def test_tokens_the_client_has_are_dropped() -> None:
    """An unreachable worker may have run: the replay may overlap what was delivered."""
    workers = ScriptedWorkers(
        [[*deltas_of(IDS, (5,))[:1], WorkerLost("gone")], [*deltas_of(IDS, (4,))]]
    )
    assert ids_of(await run(Relay(workers, max_replays=1, backoff_s=0))) == IDS


@pytest.mark.parametrize(
    "cut",
    [
        [*deltas_of(IDS, (3,))[:2]],
        [*deltas_of(IDS, (3,))[:2], TokenDelta("r", 6, (), FinishReason.ABORT)],
        [*deltas_of(IDS, (3,))[:2], TokenDelta("r", 9, (1,))],
    ],
    ids=["no end", "aborted by the worker", "a gap"],
)
async def test_a_broken_stream_counts_as_a_lost_worker(cut: list[TokenDelta]) -> None:
    workers = ScriptedWorkers([[*cut], [*resumed(6)]])
    assert ids_of(await run(Relay(workers, max_replays=1, backoff_s=0))) == IDS


async def test_replays_are_bounded() -> None:
    """A request that kills every worker it touches fails alone, before it has killed all."""
    workers = ScriptedWorkers([[WorkerLost("died")]])
    relay = Relay(workers, max_replays=3, backoff_s=0)
    with pytest.raises(StreamLost):
        await run(relay)
    assert len(workers.requests) == 4
    assert relay.counters.value(series.LOST) == 1
    assert workers.num_open == 0


@pytest.mark.parametrize("error", [QueueFull("full"), GenerationFailed("nan")])
async def test_an_error_of_the_request_is_not_replayed(error: Exception) -> None:
    workers = ScriptedWorkers([[*deltas_of(IDS)[:1], error]])
    with pytest.raises(type(error)):
        await run(Relay(workers, max_replays=3, backoff_s=0))
    assert len(workers.requests) == 1


async def test_closing_closes_the_worker_stream() -> None:
    workers = ScriptedWorkers([[*deltas_of(IDS)]])
    stream = Relay(workers, max_replays=3, backoff_s=0).run(REQUEST)
    await anext(stream)
    assert workers.num_open == 1
    await stream.aclose()
    assert (workers.num_open, workers.num_closed_early, len(workers.requests)) == (0, 1, 1)


@given(
    cuts=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(0, 3)), max_size=4)
)
@settings(deadline=None)
async def test_any_deaths_give_the_same_tokens(cuts: list[tuple[int, int, int]]) -> None:
    class Dying(ScriptedWorkers):
        async def generate(self, request: GenerationRequest):  # type: ignore[no-untyped-def]
            turn = len(self.requests)
            self.requests.append(request)
            if turn == len(cuts):
                for delta in resumed(len(request.emitted_ids), 2):
                    yield delta
                return
            num_deltas, size, overlap = cuts[turn]
            begin = max(0, len(request.emitted_ids) - overlap)
            for delta in resumed(begin, size)[:num_deltas]:
                if delta.finish_reason is None:
                    yield delta
            raise WorkerLost("died")

    assert ids_of(await run(Relay(Dying([]), max_replays=len(cuts), backoff_s=0))) == IDS


async def test_a_replay_that_meets_a_full_queue_is_tried_again() -> None:
    """A loaded worker died, the next one's queue was full, and a running stream was given up."""
    parts = [[*deltas_of(IDS, (2,))[:2], WorkerLost("died")], [QueueFull("busy")], resumed(4, 3)]
    relay = Relay(ScriptedWorkers(parts), max_replays=2, backoff_s=0)
    assert ids_of(await run(relay)) == IDS
    assert relay.counters.value(series.INTERRUPTED) == 2


async def test_a_full_queue_before_the_first_token_is_the_clients_to_retry() -> None:
    workers = ScriptedWorkers([[QueueFull("busy")]])
    with pytest.raises(QueueFull):
        await run(Relay(workers, max_replays=3, backoff_s=0))
    assert len(workers.requests) == 1


def counted(deltas: list[TokenDelta]) -> list[TokenDelta]:
    return [
        replace(
            delta, num_draft_tokens=5 * i, num_accepted_tokens=3 * i, num_steps=i, num_fallbacks=i,
            prompt_logprobs=(None, TokenLogprob(2, -1.0)),
        )
        for i, delta in enumerate(deltas, 1)
    ]  # fmt: skip


async def test_totals_do_not_fall_when_a_worker_is_lost() -> None:
    """Each worker counts from zero, and clients are shown what all of them did."""
    scripts: list[Script] = [
        [*counted(deltas_of(IDS, (2,)))[:2], WorkerLost("died")],
        [WorkerLost("at once")],
        [*counted(resumed(4, 3))[:1], WorkerLost("died")],
        [*counted(resumed(7, 5))],
    ]
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, num_prompt_logprobs=0))
    workers = ScriptedWorkers(scripts)
    relay = Relay(workers, max_replays=3, backoff_s=0)
    deltas = [delta async for delta in relay.run(request)]
    assert ids_of(deltas) == IDS
    assert [d.num_steps for d in deltas] == [1, 2, 3, 4]
    assert [d.num_fallbacks for d in deltas] == [1, 2, 3, 4]
    assert [d.num_draft_tokens for d in deltas] == [5, 10, 15, 20]
    assert [d.num_accepted_tokens for d in deltas] == [3, 6, 9, 12]
    # The prompt is scored for the client once, and no worker does it again for nothing.
    assert [d.prompt_logprobs is not None for d in deltas] == [True, False, False, False]
    asked = [r.sampling.num_prompt_logprobs for r in workers.requests]
    assert asked == [0, None, None, None]


async def test_a_prompt_is_scored_by_the_worker_that_begins() -> None:
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, num_prompt_logprobs=3))
    workers = ScriptedWorkers([[WorkerLost("at once")], [*counted(deltas_of(IDS))]])
    deltas = [delta async for delta in Relay(workers, 1, backoff_s=0).run(request)]
    assert deltas[0].prompt_logprobs is not None
    assert [r.sampling.num_prompt_logprobs for r in workers.requests] == [3, 3]


async def test_logprobs_of_tokens_the_client_has_are_dropped() -> None:
    def scored(deltas: list[TokenDelta]) -> list[TokenDelta]:
        return [
            replace(d, logprobs=tuple(TokenLogprob(i, -i / 100) for i in d.token_ids))
            for d in deltas
        ]

    workers = ScriptedWorkers(
        [[*scored(deltas_of(IDS, (5,)))[:1], WorkerLost("gone")], [*scored(deltas_of(IDS, (4,)))]]
    )
    deltas = await run(Relay(workers, max_replays=1, backoff_s=0))
    scores = [score for delta in deltas for score in delta.logprobs or ()]
    assert [score.token_id for score in scores] == IDS


class _Absent(ScriptedWorkers):
    """No worker is there: requests wait, as Serve lets them."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        async for delta in super().generate(request):
            yield delta
        self.is_healthy = False
        self.gate = asyncio.Event()
        raise WorkerLost("died")


async def test_e9_a_stream_whose_last_worker_died_ends() -> None:
    """E9: the client waited for ever, as Serve lets requests wait where there is no replica."""
    workers = _Absent([deltas_of(IDS, (2,), None)[:2]])
    relay = Relay(workers, max_replays=3, backoff_s=0, worker_wait_s=0.1, look_s=0.02)
    got: list[TokenDelta] = []

    async def take() -> None:
        async for delta in relay.run(REQUEST):
            got.append(delta)  # noqa: PERF401 - also those before the error

    with pytest.raises(StreamLost):
        await take()
    assert ids_of(got) == IDS[:4]
    assert (workers.num_open, len(workers.requests)) == (0, 2)
    assert counts(relay) == (1, 0, 1)


async def test_a_request_that_finds_no_worker_is_refused_in_time() -> None:
    workers = ScriptedWorkers([deltas_of(IDS)], is_healthy=False, gate=asyncio.Event())
    relay = Relay(workers, max_replays=3, backoff_s=0, worker_wait_s=0.1, look_s=0.02)
    with pytest.raises(WorkerLost, match=r"no worker for 0\.1 s"):
        await run(relay)
    assert (workers.num_open, len(workers.requests)) == (0, 1)
    assert counts(relay) == (0, 0, 0)


async def test_a_worker_that_comes_back_in_time_is_used() -> None:
    workers = ScriptedWorkers([deltas_of(IDS)], is_healthy=False, gate=asyncio.Event())
    relay = Relay(workers, max_replays=3, backoff_s=0, worker_wait_s=30, look_s=0.01)
    task = asyncio.ensure_future(run(relay))
    await asyncio.sleep(0.1)
    workers.is_healthy = True
    workers.gate.set()  # type: ignore[union-attr]
    assert ids_of(await task) == IDS


async def test_a_long_queue_is_no_missing_worker() -> None:
    """Waiting behind others is what queues are for, however long."""
    workers = ScriptedWorkers([deltas_of(IDS)], gate=asyncio.Event())
    relay = Relay(workers, max_replays=3, backoff_s=0, worker_wait_s=0.02, look_s=0.01)
    task = asyncio.ensure_future(run(relay))
    await asyncio.sleep(0.2)
    assert not task.done()
    workers.gate.set()  # type: ignore[union-attr]
    assert ids_of(await task) == IDS


async def test_many_that_wait_ask_once() -> None:
    """Each of hundreds of waiting requests broadcast to every worker."""
    num_asked = 0

    class Counting(ScriptedWorkers):
        async def check_health(self) -> None:
            nonlocal num_asked
            num_asked += 1
            await asyncio.sleep(0.05)

    watch = WorkerWatch(Counting([]), wait_s=1)
    await asyncio.gather(*(watch.check() for _ in range(100)))
    assert num_asked == 1

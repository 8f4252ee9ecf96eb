"""The engine's thread seen from asyncio: streams, aborts, and the death of the thread."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.workers import tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from workers.contracts import GenerationRequest
from workers.engine import Engine
from workers.engine_loop import EngineLoop
from workers.errors import GenerationFailed, InvalidRequest, RequestTooLong, WorkerLost
from workers.stats import EngineStats


@pytest.fixture
def loops() -> Iterator[Callable[..., EngineLoop]]:
    """Return a factory of engine loops that are closed after the test."""
    made: list[EngineLoop] = []

    def make(engine: Engine, **settings: Any) -> EngineLoop:
        made.append(EngineLoop(engine, **settings))
        return made[-1]

    yield make
    for loop in made:
        loop.close()


async def _collect(loop: EngineLoop, request: GenerationRequest) -> list[int]:
    return [token_id async for delta in loop.generate(request) for token_id in delta.token_ids]


def _request(name: str, seed: int = 0, **sampling: object) -> GenerationRequest:
    ids, images = tiny.prompt(seed, [6, (2, 3), 4] if seed % 2 else [12 + seed])
    return tiny.request(name, ids, images, ignore_eos=True, **sampling)


async def _until(condition: Callable[[], bool], timeout_s: float = 5.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "the condition never came"
        await asyncio.sleep(0.005)
    return time.monotonic() - start


async def _until_stats(loop: EngineLoop, condition: Callable[[EngineStats], bool]) -> None:
    start = time.monotonic()
    while not condition(await loop.stats()):
        assert time.monotonic() - start < 5, "the condition never came"
        await asyncio.sleep(0.005)


async def test_concurrent_streams_equal_a_synchronous_run(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    path = checkpoints("qwen2_5_vl")
    requests = [_request(str(n), n, temperature=n % 2) for n in range(8)]
    expected = run(make_engine(path), requests).token_ids
    loop = loops(make_engine(path, path))
    streams = await asyncio.gather(*(_collect(loop, r) for r in requests))
    assert {r.request_id: ids for r, ids in zip(requests, streams, strict=True)} == expected
    assert (await loop.stats()).finished["length"] == 8


async def test_c21_a_closed_stream_frees_its_blocks(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    """C21: generation ran on after the client had gone."""
    path = checkpoints("llama")
    loop = loops(make_engine(path, path, num_blocks=64))
    stream = loop.generate(_request("r", max_tokens=900))
    async for _ in stream:
        break
    assert (await loop.stats()).num_free_blocks < 64
    await stream.aclose()
    await _until_stats(loop, lambda stats: stats.num_free_blocks == 64)
    assert (await loop.stats()).finished["abort"] == 1


async def test_d9_random_cancellations_leave_every_block(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    """C21, D9: cancelled while queued, prefilling and decoding, 200 times."""
    path = checkpoints("qwen2_5_vl")
    loop = loops(make_engine(path, path, num_blocks=64, max_running=6, max_chunk_tokens=8))
    rng = random.Random(1)
    cancelled = 0

    async def one(number: int) -> None:
        nonlocal cancelled
        task = asyncio.ensure_future(
            _collect(loop, _request(f"n{number}", number % 4, max_tokens=60))
        )
        try:
            await asyncio.wait_for(task, rng.random() * 0.08)
        except TimeoutError:
            cancelled += 1

    for first in range(0, 400, 20):
        await asyncio.gather(*(one(first + n) for n in range(20)))
        if cancelled >= 200:
            break
    assert cancelled >= 200
    await _until_stats(loop, lambda stats: stats.num_free_blocks == 64)
    stats = await loop.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.admitted == sum(stats.finished.values())
    assert loop._streams == {}


async def test_refusals_reach_their_own_stream(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    loop = loops(make_engine(checkpoints("llama")))
    running = asyncio.ensure_future(_collect(loop, _request("good", max_tokens=200)))
    with pytest.raises(RequestTooLong):
        await _collect(loop, tiny.request("long", [2] * 2000))
    with pytest.raises(InvalidRequest):
        await _collect(loop, tiny.request("bad", [tiny.VOCAB]))
    assert len(await running) == 200


async def test_a_dead_engine_ends_every_stream_and_fails_health(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    """E8: the engine died and health said 200 for ever."""
    engine = make_engine(checkpoints("llama"))
    deaths: list[str] = []
    loop = loops(engine, on_death=lambda: deaths.append("died"))
    loop.check_health()
    release = threading.Event()

    def broken() -> None:
        release.wait(5)
        raise MemoryError("the engine is broken")

    engine.scheduler.schedule = broken  # type: ignore[method-assign, assignment]
    streams = [asyncio.ensure_future(_collect(loop, _request(str(n)))) for n in range(3)]
    await asyncio.sleep(0.05)
    release.set()
    for outcome in await asyncio.gather(*streams, return_exceptions=True):
        assert isinstance(outcome, WorkerLost)
    with pytest.raises(WorkerLost, match="broken"):
        loop.check_health()
    with pytest.raises(WorkerLost):
        await _collect(loop, _request("late"))
    await _until(lambda: deaths == ["died"])  # the worker's process ends, and is replaced


async def test_d14_a_step_that_does_not_end_fails_health(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    """D14: nothing moved until a restart, and health said ok."""
    engine = make_engine(checkpoints("llama"))
    loop = loops(engine, stall_timeout_s=0.05)
    release = threading.Event()
    step = engine.step
    engine.step = lambda: (release.wait(5), step())[1]  # type: ignore[method-assign]
    stream = asyncio.ensure_future(_collect(loop, _request("r")))
    await _until(lambda: _is_lost(loop))
    release.set()
    assert len(await stream) == 12
    loop.check_health()


async def test_a_command_that_does_not_end_fails_health(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    """The engine's thread was stuck before its first step, and health said ok."""
    engine = make_engine(checkpoints("llama"))
    loop = loops(engine, stall_timeout_s=0.05)
    release = threading.Event()
    add = engine.add
    engine.add = lambda request: (release.wait(5), add(request))[1]  # type: ignore[method-assign]
    stream = asyncio.ensure_future(_collect(loop, _request("r")))
    await _until(lambda: _is_lost(loop))
    release.set()
    assert len(await stream) == 12
    await asyncio.sleep(0.1)
    loop.check_health()  # having nothing to do is no stall


async def test_e7_health_answers_while_the_engine_is_busy(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    """E7: with many requests the check timed out, and healthy workers were replaced."""
    loop = loops(make_engine(checkpoints("llama"), max_running=8, max_waiting=1000))
    streams = [
        asyncio.ensure_future(_collect(loop, _request(str(n), 2 * (n % 4)))) for n in range(200)
    ]
    num_checks = 0
    while not all(stream.done() for stream in streams):
        loop.check_health()
        num_checks += 1
        await asyncio.sleep(0)
    assert {len(ids) for ids in await asyncio.gather(*streams)} == {12}
    assert num_checks > 100


def _is_lost(loop: EngineLoop) -> bool:
    try:
        loop.check_health()
    except WorkerLost:
        return True
    return False


async def test_closing_ends_open_streams(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    deaths: list[str] = []
    loop = loops(make_engine(checkpoints("llama")), on_death=lambda: deaths.append("died"))
    stream = asyncio.ensure_future(_collect(loop, _request("r", max_tokens=900)))
    await _until_stats(loop, lambda stats: stats.generated_tokens > 0)
    await asyncio.to_thread(loop.close)
    with pytest.raises(WorkerLost):
        await stream
    assert deaths == []


async def test_a_request_that_cannot_be_prepared_is_its_own_failure(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A surprise of the library in one request's rope table ended the engine for everybody."""
    engine = make_engine(checkpoints("qwen2_5_vl"))
    loop = loops(engine)
    running = asyncio.ensure_future(_collect(loop, _request("good", max_tokens=100)))

    def surprise(*_: object) -> None:
        raise IndexError("the library changed its mind")

    await _until_stats(loop, lambda stats: stats.generated_tokens > 0)
    monkeypatch.setattr(engine._runner.adapter, "rope_table", surprise)
    with pytest.raises(GenerationFailed, match="changed its mind"):
        await _collect(loop, _request("bad"))
    assert len(await running) == 100
    loop.check_health()


async def test_a_request_id_that_comes_again_gets_its_own_tokens(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    """A replay on the same worker received the late deltas of the run before it."""
    path = checkpoints("llama")
    engine = make_engine(path, path)
    other = tiny.request("r", tiny.prompt(9, [9])[0], max_tokens=8, ignore_eos=True)
    expected = run(make_engine(path), [other]).token_ids["r"]
    loop = loops(engine)
    for _ in range(20):
        stream = loop.generate(_request("r", max_tokens=300))
        async for _ in stream:
            break
        closing = asyncio.ensure_future(stream.aclose())
        assert await _collect(loop, other) == expected
        await closing
    await _until_stats(loop, lambda stats: stats.num_running == 0)


async def test_a_stream_that_comes_too_late_is_refused(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    """A stream registered while the thread was ending waited for ever."""
    loop = loops(make_engine(checkpoints("llama")))
    await asyncio.to_thread(loop.close)
    with pytest.raises(WorkerLost, match="closed"):
        await asyncio.wait_for(_collect(loop, _request("late")), 5)


async def test_a_lost_device_ends_the_worker(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop]
) -> None:
    """E8: the ingress must replay the streams elsewhere, and Serve replace the worker."""
    engine = make_engine(checkpoints("llama"))
    loop = loops(engine)

    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine._runner.forward = lost  # type: ignore[method-assign, assignment]
    with pytest.raises(WorkerLost, match="CUDA error"):
        await _collect(loop, _request("r"))
    with pytest.raises(WorkerLost):
        loop.check_health()


async def test_a_grammar_is_compiled_off_the_engines_thread(
    checkpoints: Checkpoints, loops: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request's large schema must not hold up everybody's next token."""
    engine = make_engine("deploy/demo/models/target")
    loop = loops(engine)
    compiled: list[str] = []
    prepare = engine.prepare

    def watched(request: GenerationRequest) -> None:
        compiled.append(threading.current_thread().name)
        prepare(request)

    monkeypatch.setattr(engine, "prepare", watched)
    grammar = LLMatcher.grammar_from_regex("(ab){3}")
    ids = await _collect(loop, tiny.request("r", [5, 6], max_tokens=20, grammar=grammar))
    assert len(ids) > 1
    with pytest.raises(InvalidRequest):
        await _collect(loop, tiny.request("bad", [5, 6], grammar="start: ("))
    await _collect(loop, tiny.request("free", [5, 6]))
    assert len(compiled) == 2
    assert "engine" not in compiled
    assert (await loop.stats()).admitted == 2

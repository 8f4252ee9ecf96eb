"""What the engine takes, refuses, gives back and counts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.workers import tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from tests.workers.tiny import mixed_requests
from workers.contracts import GenerationRequest
from workers.errors import InvalidRequest, RequestTooLong


def test_d9_two_hundred_random_aborts_leave_every_block(pair: tuple[str, str]) -> None:
    """D9: aborts on odd paths leaked slots or left half-computed K/V in the prefix cache."""
    path, draft = pair
    rng = random.Random(0)
    engine = make_engine(path, draft, num_blocks=48, max_chunk_tokens=8)
    live: list[str] = []
    aborted = 0
    number = 0
    while aborted < 200:
        if len(live) < 6:
            ids, images = tiny.prompt(number % 5, [9, (2, 3), 8] if number % 2 else [25])
            engine.add(tiny.request(f"n{number}", ids, images, max_tokens=30, ignore_eos=True))
            live.append(f"n{number}")
            number += 1
        result = engine.step()
        over = {d.request_id for d in result.deltas if d.finish_reason is not None}
        live = [name for name in live if name not in over]
        if live and rng.random() < 0.7:
            victim = live.pop(rng.randrange(len(live)))
            engine.abort(victim)
            aborted += 1
        engine.blocks.check_integrity(engine.scheduler.running)
    for name in live:
        engine.abort(name)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    stats = engine.stats()
    assert stats.finished["abort"] >= 200
    assert stats.admitted == sum(stats.finished.values())
    clean = run(make_engine(path), mixed_requests()).token_ids
    assert run(engine, mixed_requests()).token_ids == clean


def test_aborting_twice_or_the_unknown_is_nothing(pair: tuple[str, str]) -> None:
    engine = make_engine(*pair)
    engine.abort("nobody")
    engine.add(tiny.request("r", [2, 3, 4]))
    engine.abort("r")
    engine.abort("r")
    assert engine.stats().finished["abort"] == 1
    assert not engine.has_work


def _bad(**changes: Any) -> GenerationRequest:
    ids, images = tiny.prompt(1, [5, (2, 3), 4])
    base: dict[str, Any] = {"ids": ids, "images": images, **changes}
    return tiny.request("bad", base.pop("ids"), base.pop("images"), **base)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (_bad(ids=[], images=[]), InvalidRequest),
        (_bad(ids=[2, tiny.VOCAB], images=[]), InvalidRequest),
        (_bad(ids=[2, -1], images=[]), InvalidRequest),
        (_bad(stop_token_ids=(tiny.VOCAB,)), InvalidRequest),
        (_bad(images=[tiny.image(1, 2, 3, start=20)]), InvalidRequest),
        (_bad(images=[tiny.image(1, 2, 3, start=2), tiny.image(2, 2, 3, start=4)]), InvalidRequest),
        (_bad(ids=[2] * 1024, images=[]), RequestTooLong),
        (_bad(max_tokens=1020), RequestTooLong),
        (_bad(images=[replace(tiny.image(1, 2, 3, start=6), grid_thw=(1, 3, 8))]), InvalidRequest),
        (_bad(images=[replace(tiny.image(1, 2, 3, start=6), grid_thw=(1, 4, 0))]), InvalidRequest),
        (_bad(images=[replace(tiny.image(1, 2, 3, start=6), num_tokens=5)]), InvalidRequest),
        (_bad(temperature=float("nan")), InvalidRequest),
        (_bad(temperature=float("inf")), InvalidRequest),
        (_bad(top_p=0.0), InvalidRequest),
        (_bad(top_k=-1), InvalidRequest),
        (_bad(min_p=1.5), InvalidRequest),
        (_bad(seed=2**63), InvalidRequest),
        (_bad(max_tokens=0), InvalidRequest),
        (_bad(max_draft_tokens=-1), InvalidRequest),
    ],
)
def test_a_bad_request_is_refused_and_the_others_keep_running(
    checkpoints: Checkpoints, request_: GenerationRequest, error: type[Exception]
) -> None:
    path = checkpoints("qwen2_5_vl")
    engine = make_engine(path)
    good = mixed_requests(2)
    engine.add(good[0])
    with pytest.raises(error):
        engine.add(request_)
    assert len(run(engine, good[1:]).token_ids["r1"]) == 12
    assert sum(engine.stats().refused.values()) == 1
    assert engine.stats().admitted == 2


def test_a_text_model_refuses_images(checkpoints: Checkpoints) -> None:
    with pytest.raises(InvalidRequest, match="no images"):
        make_engine(checkpoints("llama")).add(_bad())


def test_f1_statistics_add_up(pair: tuple[str, str]) -> None:
    """F1, F4: acceptance over 1, finish reasons that never counted."""
    engine = make_engine(*pair, num_draft_tokens=3)
    outcome = run(engine, mixed_requests())
    stats = engine.stats()
    assert sum(stats.accepted_per_position) == stats.accepted_tokens <= stats.draft_tokens
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
    assert stats.generated_tokens == sum(map(len, outcome.token_ids.values()))
    assert stats.sampled_rows == sum(outcome.num_deltas.values())
    assert stats.generated_tokens == stats.accepted_tokens + stats.sampled_rows
    assert stats.admitted == sum(stats.finished.values()) == 6
    assert stats.num_running == stats.num_waiting == 0


def test_what_a_stop_trims_is_counted(checkpoints: Checkpoints) -> None:
    """Emitted = accepted + one for each sampled row - trimmed, also when a stop cuts a block."""
    path = checkpoints("llama")
    ids, _ = tiny.prompt(5, [12])
    engine = make_engine(path, path, num_draft_tokens=5)
    free = run(engine, [tiny.request("r", ids, ignore_eos=True)]).token_ids["r"]
    stop = next(t for n, t in enumerate(free) if n % 6 in (2, 3, 4) and t not in free[:n])
    engine.forget_statistics()
    run(engine, [tiny.request("r", ids, ignore_eos=True, stop_token_ids=(stop,))])
    stats = engine.stats()
    assert stats.trimmed_tokens > 0
    emitted = stats.accepted_tokens + stats.sampled_rows - stats.trimmed_tokens
    assert stats.generated_tokens == emitted == free.index(stop) + 1


@pytest.mark.parametrize(("length", "max_tokens", "draft_context"), [(100, 1, 1024), (300, 8, 64)])
def test_speculation_does_not_cost_the_prefix_cache(
    checkpoints: Checkpoints, length: int, max_tokens: int, draft_context: int
) -> None:
    """Requests that cannot draft waited for draft K/V that never came: nothing was cached."""
    path = checkpoints("llama")
    draft = checkpoints("llama", max_position_embeddings=draft_context)
    engine = make_engine(path, draft)
    ids, _ = tiny.prompt(2, [length])
    for name in "ab":
        run(engine, [tiny.request(name, ids, max_tokens=max_tokens, ignore_eos=True)])
    assert engine.stats().cached_tokens == (length - 1) // 16 * 16

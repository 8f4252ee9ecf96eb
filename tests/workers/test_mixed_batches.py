"""Image and text requests that meet in one batch, and where an image request ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers import tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import Outcome, make_engine, run
from workers.contracts import FinishReason, GenerationRequest

METHODS: list[dict[str, Any]] = [{}, {"method": "ngram", "ngram_min": 1}, {"method": "nextn"}]


def _request(family: str, name: str, parts: list[tiny.Part], **sampling: Any) -> GenerationRequest:
    ids, media = tiny.prompt_for(family, sum(map(ord, name)), parts)
    return tiny.request(name, ids, media, **{"max_tokens": 20, "ignore_eos": True, **sampling})


@pytest.mark.parametrize("family", sorted(tiny.VISION_FAMILIES))
def test_a3_requests_join_one_that_decodes(checkpoints: Checkpoints, family: str) -> None:
    """A3: while one decoded and another prefilled, decode rows had empty positions.

    Image request 1 decodes, then image request 2 and text request 3 join it, in chunks.
    """
    path = checkpoints(family)
    first = _request(family, "first", [4, (3, 2), 5])
    others = [
        _request(family, "second", [(2, 4), 9, (2, 2), 3], temperature=1.0),
        _request(family, "third", [31]),
    ]
    alone = make_engine(path, prefix_caching=False)
    expected = {r.request_id: run(alone, [r]).token_ids[r.request_id] for r in [first, *others]}
    for changes in METHODS:
        if changes.get("method") == "nextn" and family not in tiny.HYBRIDS:
            continue
        engine = make_engine(path, max_chunk_tokens=8, **changes)
        outcome = Outcome()
        engine.add(first)
        while len(outcome.token_ids.get("first", [])) < 3:
            outcome.take(engine)
        for request in others:
            engine.add(request)
        while engine.has_work:
            outcome.take(engine)
        assert outcome.failures == {}
        assert outcome.token_ids == expected
        assert engine.stats().spec_failures == {}


@pytest.mark.parametrize("family", sorted(tiny.VISION_FAMILIES))
def test_a23_an_image_request_ends_at_the_context_limit(
    checkpoints: Checkpoints, family: str
) -> None:
    """A23: a context shift under mrope gave broken text; here it stops with `length`, exactly."""
    path = checkpoints(family)
    request = _request(family, "r", [4, (3, 2), 5], max_tokens=None)
    plain = run(make_engine(path, max_sequence_len=40), [request])
    for changes in METHODS:
        if changes.get("method") == "nextn" and family not in tiny.HYBRIDS:
            continue
        outcome = run(make_engine(path, max_sequence_len=40, **changes), [request])
        assert outcome.reasons["r"] is FinishReason.LENGTH
        assert len(request.prompt_ids) + len(outcome.token_ids["r"]) == 40
        assert outcome.token_ids == plain.token_ids


@pytest.mark.parametrize("cache_bytes", [0, 2000])
def test_d3_d4_pictures_larger_than_their_cache(checkpoints: Checkpoints, cache_bytes: int) -> None:
    """D3, D4: one picture over the budget, or many that waited, and nobody got on any more.

    Here the cache is for reuse alone: what does not fit is computed again for each chunk.
    """
    path = checkpoints("qwen2_5_vl")
    requests = [
        _request("qwen2_5_vl", str(n), [3, (4, 4 + n % 3), 2], temperature=n % 2) for n in range(8)
    ]
    expected = run(make_engine(path), requests).token_ids
    options = {"image_cache_bytes": cache_bytes, "max_chunk_tokens": 5, "max_running": 4}
    engine = make_engine(path, path, num_draft_tokens=3, **options)
    outcome = run(engine, requests)
    assert outcome.failures == {}
    assert outcome.token_ids == expected
    assert engine.stats().spec_failures == {}


@pytest.mark.parametrize("method", [{}, {"method": "ngram", "ngram_min": 1}])
def test_two_poisoned_requests_fail_alone(checkpoints: Checkpoints, method: dict[str, Any]) -> None:
    """Among sixteen, in their prompts and in mid-answer: the others' answers are exact."""
    path = checkpoints("qwen2_5_vl")
    requests = [
        _request("qwen2_5_vl", f"r{n}", [6 + n] if n % 2 else [2, (2, 3), n], temperature=n % 3 / 2)
        for n in range(16)
    ]
    expected = run(make_engine(path), requests).token_ids
    engine = make_engine(path, max_chunk_tokens=8, **method)
    forward = engine._runner.forward
    # One never gets through its prompt, the other fails after five tokens.
    poison = {"r3": 0, "r10": 5}

    def poisoned(batch: Any, *args: Any) -> Any:
        tables = set(batch.attention.block_table[:, 0].tolist())
        for seq in engine.scheduler.running:
            limit = poison.get(seq.request_id)
            if limit is not None and seq.num_emitted >= limit and seq.block_table[0] in tables:
                raise RuntimeError("poison")
        return forward(batch, *args)

    engine._runner.forward = poisoned  # type: ignore[method-assign]
    outcome = run(engine, requests)
    assert set(outcome.failures) == set(poison)
    assert outcome.token_ids["r10"] == expected["r10"][:5]
    for name in poison:
        expected.pop(name)
        outcome.token_ids.pop(name, None)
    assert outcome.token_ids == expected
    assert engine.blocks.num_free == engine.blocks.num_blocks

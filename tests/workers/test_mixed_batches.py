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

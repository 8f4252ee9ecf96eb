"""The embedded NEXTN model through the engine: lossless, as the library says, worth drafting."""

from __future__ import annotations

import pytest

from tests.workers import reference
from tests.workers.engines import growing_batches, make_engine, run
from tests.workers.test_demo_pair import KINDS, make_requests
from tests.workers.test_lossless import assert_same
from workers.contracts import GenerationRequest

MODEL = "deploy/demo/models/nextn"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless(temperature: float) -> None:
    """Batches of 1 to 7, image and text mixed, then again on the prefixes they left."""
    requests = make_requests(28, model=MODEL, temperature=temperature)
    engine = make_engine(MODEL, prefix_caching=False)
    plain = {r.request_id: run(engine, [r]).token_ids[r.request_id] for r in requests}
    for num_drafts, chunk, blocks in ((3, 512, 256), (5, 16, 256), (2, 64, 14)):
        engine = make_engine(
            MODEL,
            method="nextn",
            num_draft_tokens=num_drafts,
            max_chunk_tokens=chunk,
            num_blocks=blocks,
            state_interval=32,
        )
        for _ in range(2):
            for group in growing_batches(requests, largest=7):
                assert_same(MODEL, group, run(engine, group), plain)
        stats = engine.stats()
        assert stats.spec_failures == {}
        assert stats.accepted_tokens > 0
        # A pool that is always full keeps no prefix, and preempts.
        assert (stats.cached_tokens > 0, stats.preemptions > 0) == (blocks == 256, blocks < 256)


def test_greedy_equals_generate() -> None:
    requests = make_requests(len(KINDS), model=MODEL, temperature=0.0)
    outcome = run(make_engine(MODEL, method="nextn"), requests)
    for request in requests:
        expected = reference.generate(MODEL, request)
        got = outcome.token_ids[request.request_id]
        assert got == expected, reference.describe_difference(MODEL, request, got, expected)


def test_a1_image_prompts_are_drafted_as_well_as_text() -> None:
    """A1, A2: with wrong draft positions acceptance falls on image prompts, and nothing else."""
    requests = make_requests(60, model=MODEL, temperature=0.0)
    rates = {}
    groups: dict[str, list[GenerationRequest]] = {
        "text": [r for r in requests if not r.images],
        "image": [r for r in requests if r.images],
    }
    for name, group in groups.items():
        engine = make_engine(MODEL, method="nextn", num_draft_tokens=3)
        run(engine, group)
        stats = engine.stats()
        rates[name] = stats.accepted_tokens / stats.draft_tokens
    print(rates)
    assert rates["image"] > 0.5
    assert rates["text"] > 0.3

"""The embedded demo pair through the engine: lossless, as the library says, and worth drafting."""

from __future__ import annotations

import asyncio
import base64
import io
import random

import pytest

from deploy.demo import scenes, tasks
from serving.images import ImageLimits
from serving.processor import ImageProcessor
from serving.prompts import PromptBuilder
from serving.schema import ChatBody
from serving.tokenizer import ServingTokenizer
from tests.workers import reference
from tests.workers.engines import growing_batches, make_engine, run
from tests.workers.test_lossless import assert_same
from workers.contracts import GenerationRequest

TARGET, DRAFT = "deploy/demo/models/target", "deploy/demo/models/draft"


def _content(conversation: tasks.Conversation) -> list[dict[str, object]]:
    parts: list[dict[str, object]] = []
    for scene in conversation.scenes:
        buffer = io.BytesIO()
        scenes.draw(scene).save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    text = {"type": "text", "text": conversation.turns[0].prompt}
    return [text, *parts] if conversation.images_last else [*parts, text]


def make_requests(count: int, model: str = TARGET, **sampling: object) -> list[GenerationRequest]:
    """Return held-out prompts of every kind, through the ingress's own prompt builder."""
    builder = PromptBuilder(
        ServingTokenizer.load(model, None), ImageProcessor.load(model, None), ImageLimits()
    )
    rng = random.Random(11)
    requests = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        conversation = tasks.held_out_conversation(rng, kind)
        body = ChatBody.model_validate(
            {
                "model": "demo",
                "messages": [{"role": "user", "content": _content(conversation)}],
                "max_completion_tokens": 48,
                "seed": number,
                **sampling,
            }
        )
        requests.append(asyncio.run(builder.chat(body, f"{kind}-{number}")).generation)
    return requests


KINDS = tuple(tasks.KINDS)


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def requests_(request: pytest.FixtureRequest) -> list[GenerationRequest]:
    return make_requests(36, temperature=request.param)


@pytest.fixture(scope="module")
def plain(requests_: list[GenerationRequest]) -> dict[str, list[int]]:
    engine = make_engine(TARGET, prefix_caching=False)
    return {r.request_id: run(engine, [r]).token_ids[r.request_id] for r in requests_}


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("chunk", [7, 16, 64, 2048])
def test_lossless(
    requests_: list[GenerationRequest], plain: dict[str, list[int]], num_drafts: int, chunk: int
) -> None:
    """Batches of 1 to 8, image and text mixed, then again on the prefixes they left."""
    engine = make_engine(TARGET, DRAFT, num_draft_tokens=num_drafts, max_chunk_tokens=chunk)
    for _ in range(2):
        for group in growing_batches(requests_):
            assert_same(TARGET, group, run(engine, group), plain)
    stats = engine.stats()
    assert stats.spec_failures == {}
    assert stats.cached_tokens > 0


def test_lossless_under_preemption(
    requests_: list[GenerationRequest], plain: dict[str, list[int]]
) -> None:
    engine = make_engine(TARGET, DRAFT, num_blocks=12, max_chunk_tokens=32, prefix_caching=False)
    assert_same(TARGET, requests_, run(engine, requests_), plain)
    assert engine.stats().preemptions > 0


def test_greedy_equals_generate() -> None:
    requests = make_requests(len(KINDS), temperature=0.0)
    outcome = run(make_engine(TARGET, DRAFT), requests)
    for request in requests:
        expected = reference.generate(TARGET, request)
        got = outcome.token_ids[request.request_id]
        assert got == expected, reference.describe_difference(TARGET, request, got, expected)


def test_the_pair_speculates_and_image_prompts_do_too() -> None:
    """A1, A2: with wrong draft positions only image prompts fall; text alone shows nothing."""
    requests = make_requests(60, temperature=0.0)
    rates = {}
    for name, group in (
        ("all", requests),
        ("text", [r for r in requests if not r.images]),
        ("image", [r for r in requests if r.images]),
    ):
        engine = make_engine(TARGET, DRAFT, num_draft_tokens=4)
        run(engine, group)
        stats = engine.stats()
        rates[name] = stats.accepted_tokens / stats.draft_tokens
    print(rates)
    assert rates["all"] > 0.6
    assert rates["image"] > 0.6
    assert rates["text"] > 0.3  # lower: the small draft cannot copy lists of words

"""Several answers to one body: numbered, seeded, merged, and over together (C3, C4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from serving.choices import ChoiceDelta, fan_out, merge
from serving.textstream import TextDelta, TextRequest, TextUsage
from tests.serving.answers import ask, chat_body, comparable, joined, post, stream, text_body
from tests.serving.doubles import FaithfulWorkers, ScriptedWorkers, deltas_of, encode
from workers.contracts import GenerationRequest, SamplingParams, TokenDelta
from workers.errors import GenerationFailed, QueueFull, WorkerLost

SAID = "the quick 中文😀 fox"
IDS = encode(f"{SAID}<|im_end|>")


def faithful(size: int = 3) -> FaithfulWorkers:
    return FaithfulWorkers([], ids=IDS, size=size)


def request_of(prompt: tuple[int, ...] = (1, 2), seed: int = 7) -> TextRequest:
    return TextRequest(GenerationRequest("r", prompt, SamplingParams(seed=seed)))


def test_choices_are_numbered_prompt_by_prompt() -> None:
    choices = fan_out([request_of((1,)), request_of((2,))], 3)
    assert [c.generation.prompt_ids for c in choices] == [(1,)] * 3 + [(2,)] * 3
    names = [c.generation.request_id for c in choices]
    assert names == ["r", "r-1", "r-2", "r-3", "r-4", "r-5"]
    seeds = [c.generation.sampling.seed for c in choices]
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3
    assert seeds[0] == 7
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert seeds == [c.generation.sampling.seed for c in fan_out([request_of()] * 2, 3)]
    (alone,) = fan_out([request_of()], 1)
    assert alone.generation.sampling == request_of().generation.sampling


def test_pixels_are_shared() -> None:
    request = request_of()
    assert all(c.generation.images is request.generation.images for c in fan_out([request], 4))


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    "body",
    [
        chat_body(n=3, seed=5, logprobs=True, return_token_ids=True),
        text_body(n=2, prompt=["a", "b b"], echo=True, logprobs=1, max_tokens=40, best_of=2),
        text_body(prompt=[[5], [6, 7], [8]], return_token_ids=True, max_tokens=40),
    ],
    ids=["chat", "texts", "ids"],
)
async def test_c3_streamed_or_not(size: int, body: dict[str, Any]) -> None:
    """C3, C4: each choice whole, one end each, and the usage of all of them."""
    workers = faithful(size)
    answer = await ask(workers, body)
    count = body.get("n", 1) * (len(body["prompt"]) if "prompt" in body else 1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    prompts = [r.prompt_ids for r in workers.requests[:: body.get("n", 1)]]
    usage = answer["usage"]
    assert usage["completion_tokens"] == count * len(IDS)
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(prompts)
    assert joined(await stream(faithful(size), body)) == comparable(answer)


async def test_texts_are_in_the_order_of_their_prompts() -> None:
    answer = await ask(faithful(), text_body(prompt=["one ", "two "], n=2, echo=True))
    texts = [choice["text"][:4] for choice in answer["choices"]]
    assert texts == ["one ", "one ", "two ", "two "]


async def test_each_choice_of_a_chat_has_its_role_once() -> None:
    chunks = await stream(faithful(), chat_body(n=4))
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1, 2, 3]
    seen: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] in seen or "role" in choice["delta"]
            seen.add(choice["index"])


@pytest.mark.parametrize("error", [QueueFull("full"), GenerationFailed("nan"), RuntimeError("x")])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_first_failure_ends_all(error: Exception, is_stream: bool) -> None:
    """A choice that fails must not leave the others running for nobody."""
    endless = list(deltas_of(IDS * 200))
    workers = ScriptedWorkers([endless, [error], endless], delay_s=0.001)
    response = await post(workers, chat_body(n=3, stream=is_stream))
    assert (workers.num_open, workers.num_closed_early) == (0, 2)
    if is_stream and response.status_code == 200:
        assert '"error"' in response.text
        assert "[DONE]" not in response.text
    else:
        assert response.status_code >= 400


async def test_a_choice_whose_worker_is_lost_is_replayed_alone() -> None:
    lost = [*deltas_of(IDS, (3,))[:2], WorkerLost("died")]
    workers = ScriptedWorkers([list(deltas_of(IDS, (3,))), lost, list(deltas_of(IDS, (3,)))])
    answer = await ask(workers, chat_body(n=2))
    assert [c["message"]["content"] for c in answer["choices"]] == [SAID, SAID]
    assert len(workers.requests) == 3
    assert workers.requests[2].request_id.endswith("-1")


class Source:
    """Streams that say when they are closed."""

    def __init__(self, count: int) -> None:
        self.num_open = 0
        self.streams = [self._stream(i) for i in range(count)]

    async def _stream(self, index: int) -> AsyncGenerator[TextDelta, None]:
        self.num_open += 1
        try:
            for i in range(1000):
                await asyncio.sleep(0)
                yield TextDelta(f"{index}.{i} ", TextUsage(1, i, 0))
        finally:
            await asyncio.sleep(0)  # closing takes time, as at a worker
            self.num_open -= 1


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("num_taken", [0, 1, 20])
async def test_closing_leaves_nothing(count: int, num_taken: int) -> None:
    """C21: a client that goes leaves no choice running, and no task."""
    source = Source(count)
    before = asyncio.all_tasks()
    merged = merge(source.streams)
    for _ in range(num_taken):
        await anext(merged)
    await merged.aclose()
    assert source.num_open == 0
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("count", [1, 3])
async def test_cancelling_leaves_nothing(count: int) -> None:
    source = Source(count)
    before = asyncio.all_tasks()

    async def read() -> None:
        async with aclosing(merge(source.streams)) as merged:
            async for _ in merged:
                await asyncio.sleep(0)

    task = asyncio.ensure_future(read())
    while not source.num_open:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert source.num_open == 0
    assert asyncio.all_tasks() == before


async def test_each_choice_stays_in_order_and_a_slow_reader_holds_them_back() -> None:
    source = Source(3)
    seen: list[ChoiceDelta] = []
    async with aclosing(merge(source.streams)) as merged:
        async for said in merged:
            seen.append(said)
            if len(seen) == 30:
                break
            for _ in range(50):  # time in which they could run away
                await asyncio.sleep(0)
    for choice in range(3):
        counts = [s.delta.usage.completion_tokens for s in seen if s.choice == choice]
        assert counts == list(range(len(counts)))
        assert 8 <= len(counts) <= 12


async def test_speculation_is_summed_over_choices() -> None:
    body = chat_body(n=2, speculation={"report": True})
    num = len(IDS)
    expected = {"draft_tokens": 2 * num, "accepted_tokens": num, "steps": num, "fallbacks": 0}
    usage = (await ask(faithful(), body))["usage"]
    assert usage["speculation"] == {key: 2 * value for key, value in expected.items()}
    chunks = await stream(faithful(), body)
    assert chunks[-1]["usage"] == usage
    for choice in range(2):
        totals = [
            chunk["speculation"] for chunk in chunks[2:-1] if chunk["choices"][0]["index"] == choice
        ]
        for name in expected:
            counts = [total[name] for total in totals]
            assert counts == sorted(counts)
        assert totals[-1] == {**expected, "tokens": num}
    plain = await stream(faithful(), chat_body(n=2))
    assert not any("speculation" in chunk for chunk in plain)
    assert "speculation" not in plain[-1]["usage"]


async def test_a_replay_does_not_make_totals_fall() -> None:
    def counted(deltas: list[TokenDelta], start: int = 0) -> list[TokenDelta]:
        return [
            TokenDelta(
                d.request_id, d.start, d.token_ids, d.finish_reason, num_draft_tokens=4 * (i + 1),
                num_accepted_tokens=2 * (i + 1), num_steps=i + 1,
            )
            for i, d in enumerate(deltas[start:])
        ]  # fmt: skip

    deltas = deltas_of(IDS, (3,))
    workers = ScriptedWorkers(
        [[*counted(deltas)[:2], WorkerLost("died")], [*counted(deltas, start=2)]]
    )
    answer = await ask(workers, chat_body(speculation={"report": True}))
    num = len(deltas)
    assert answer["usage"]["speculation"] == {
        "draft_tokens": 4 * num, "accepted_tokens": 2 * num, "steps": num, "fallbacks": 0,
    }  # fmt: skip

"""Text, finish reason and usage end at the same token (B1, B3, C3)."""

from __future__ import annotations

import re
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.relay import Relay
from serving.textstream import TextDelta, TextRequest, join, stream_text, token_offsets
from serving.tools.calls import Parsed, ToolCall
from tests.serving.doubles import ScriptedWorkers, deltas_of, encode, make_tokenizer
from workers.contracts import FinishReason, GenerationRequest, SamplingParams, TokenDelta


def make_request(stops: tuple[str, ...] = (), **sampling: object) -> TextRequest:
    params = SamplingParams(seed=1, **sampling)  # type: ignore[arg-type]
    return TextRequest(GenerationRequest("r", (1, 2, 3), params), stops)


async def run(workers: ScriptedWorkers, request: TextRequest) -> list[TextDelta]:
    relay = Relay(workers, max_replays=0)
    deltas = stream_text(request, make_tokenizer(), relay.run(request.generation))
    async with aclosing(deltas):
        return [delta async for delta in deltas]


def text_of(results: list[TextDelta]) -> str:
    return "".join(delta.text for delta in results)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
async def test_stop_string_inside_a_delta_trims_text_and_usage(size: int) -> None:
    """B3: usage ends at the token that completed the stop string, and the engine is told."""
    ids = encode("the quick brown fox jumps over")
    until = next(n for n in range(len(ids) + 1) if "fox" in make_tokenizer().decode(ids[:n]))
    workers = ScriptedWorkers([list(deltas_of(ids, (size,)))])
    results = await run(workers, make_request(("fox",)))
    assert text_of(results) == "the quick brown "
    assert results[-1].finish_reason is FinishReason.STOP
    assert results[-1].usage.completion_tokens == until
    assert results[-1].usage.prompt_tokens == 3
    assert workers.num_open == 0
    assert workers.num_taken <= -(-until // size)


async def test_without_stop_the_held_text_comes_at_the_end() -> None:
    ids = encode("hello f")
    workers = ScriptedWorkers([list(deltas_of(ids, (2,), FinishReason.LENGTH))])
    results = await run(workers, make_request(("fox",)))
    assert text_of(results) == "hello f"
    assert results[-1].finish_reason is FinishReason.LENGTH
    assert results[-1].usage.completion_tokens == len(ids)


@pytest.mark.parametrize("stops", [(), ("nothing",)])
async def test_a_stop_token_counts_and_shows_no_text(stops: tuple[str, ...]) -> None:
    ids = encode("hello there")
    workers = ScriptedWorkers([list(deltas_of(ids, (3,)))])
    results = await run(workers, make_request(stops, stop_token_ids=(ids[-1],)))
    assert text_of(results) == make_tokenizer().decode(ids[:-1])
    assert results[-1].usage.completion_tokens == len(ids)


@pytest.mark.parametrize("stops", [(), ("nothing",)])
async def test_the_model_s_own_end_token_shows_no_text(stops: tuple[str, ...]) -> None:
    """Not every model's end of sequence is a special token: its name would end the answer."""
    ids = encode("hello there!")
    workers = ScriptedWorkers([list(deltas_of(ids, (3,)))])
    results = await run(workers, make_request(stops))
    assert text_of(results) == "hello there"
    assert results[-1].usage.completion_tokens == len(ids)


async def test_a_stop_id_before_the_end_is_text() -> None:
    """Within min_tokens a stop token does not stop, and must not vanish from the text."""
    ids = encode("!hello")
    workers = ScriptedWorkers([list(deltas_of(ids, (3,), FinishReason.LENGTH))])
    results = await run(workers, make_request(stop_token_ids=(ids[0],), min_tokens=2))
    assert text_of(results) == "!hello"


async def test_no_stop_string_counts_within_min_tokens() -> None:
    ids = encode("stop stop stop")
    first = len(encode("stop"))
    workers = ScriptedWorkers([list(deltas_of(ids, (4,)))])
    results = await run(workers, make_request(("stop",), min_tokens=first))
    assert text_of(results) == "stop "


async def test_cached_tokens_are_those_of_the_first_delta() -> None:
    script = [TokenDelta("r", 0, (5,), num_cached_tokens=2),
              TokenDelta("r", 1, (6,), FinishReason.STOP, num_cached_tokens=3)]  # fmt: skip
    results = await run(ScriptedWorkers([list(script)]), make_request())
    assert results[-1].usage.cached_tokens == 2


class BracketParser:
    """Takes `[name]` for a call."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> Parsed:
        self._held += text
        calls = re.findall(r"\[(\w+)\]", self._held)
        content, bracket, rest = re.sub(r"\[\w+\]", "", self._held).partition("[")
        self._held = bracket + rest
        return Parsed(content, tuple(ToolCall(name, "{}") for name in calls))

    def flush(self) -> Parsed:
        held, self._held = self._held, ""
        return Parsed(held)


def calling(text: str, stops: tuple[str, ...] = (), **options: Any) -> TextRequest:
    return replace(make_request(stops), new_parser=BracketParser, **options)


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
async def test_c6_calls_and_what_is_none(size: int, finish: FinishReason) -> None:
    """C6, B31: a call that was cut off comes as the text that it is, whatever the blocks were."""
    said = "so [quick] and [brown] then [f"
    ids = encode(f"{said}<|im_end|>" if finish is FinishReason.STOP else said)
    workers = ScriptedWorkers([list(deltas_of(ids, (size,), finish))])
    results = await run(workers, calling(said))
    assert text_of(results) == "so  and  then [f"
    assert [call.name for delta in results for call in delta.calls] == ["quick", "brown"]
    assert results[-1].num_calls == 2
    assert results[-1].finish_reason is finish
    for before, delta in pairwise(results):
        assert delta.num_calls == before.num_calls + len(delta.calls)


@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_a_single_call_ends_the_answer(size: int) -> None:
    """The calls behind it are not made: dropping them would show a client half an answer."""
    said = "so [quick] and [brown]"
    ids = encode(said)
    until = next(n for n in range(len(ids) + 1) if "]" in make_tokenizer().decode(ids[:n]))
    workers = ScriptedWorkers([list(deltas_of(ids, (size,), FinishReason.LENGTH))])
    results = await run(workers, calling(said, is_single_call=True))
    assert [call.name for delta in results for call in delta.calls] == ["quick"]
    assert results[-1].finish_reason is FinishReason.STOP
    assert results[-1].usage.completion_tokens == until
    assert sum(len(delta.token_ids) for delta in results) == until
    assert workers.num_open == 0


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_a_stop_string_inside_a_call_leaves_text(size: int) -> None:
    ids = encode("so [quick] and")
    workers = ScriptedWorkers([list(deltas_of(ids, (size,)))])
    results = await run(workers, calling("", ("ick",)))
    assert text_of(results) == "so [qu"
    assert results[-1].num_calls == 0


async def test_deltas_joined() -> None:
    ids = encode("so [quick] 中文")
    whole, parts = [
        join(await run(ScriptedWorkers([list(deltas_of(ids, (size,)))]), calling("")))
        for size in (100, 1)
    ]
    assert whole == parts


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    stops=st.lists(st.sampled_from(["fox", "o", "中", "文😀", "nope", " b"]), max_size=3),
)
@settings(deadline=None)
async def test_b31_chunks_do_not_change_the_result(sizes: list[int], stops: list[str]) -> None:
    """B4, B31: several tokens per step give the ids, text, usage and reason of one per step."""
    ids = encode("the quick brown 中文😀 fox")
    outcomes = set()
    for cut in (sizes, [1]):
        workers = ScriptedWorkers([list(deltas_of(ids, cut, FinishReason.LENGTH))])
        results = await run(workers, make_request(tuple(stops)))
        ids_sent = tuple(i for delta in results for i in delta.token_ids)
        assert len(ids_sent) == results[-1].usage.completion_tokens
        outcomes.add((text_of(results), results[-1].finish_reason, results[-1].usage, ids_sent))
    assert len(outcomes) == 1


@given(st.text(max_size=40))
@settings(deadline=None)
def test_offsets_of_a_prompt(text: str) -> None:
    """C17: they never go back, and stay within the text."""
    ids = encode(text)
    offsets = token_offsets(ids, make_tokenizer(), len(text))
    assert len(offsets) == len(ids)
    assert list(offsets) == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    ends = [*offsets[1:], len(text)]
    for token_id, start, end in zip(ids, offsets, ends, strict=False):
        shown = make_tokenizer().decode([token_id])
        assert text[start:end] == shown or "\ufffd" in shown

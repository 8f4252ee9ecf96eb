"""Log-probabilities, ids and echoes: both shapes, and where they end (B3, B11, C17)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serving.logprobs import MIN_LOGPROB, chat_logprobs, completion_logprobs
from serving.textstream import ScoredToken
from serving.token_bytes import TokenBytes
from tests.serving.answers import ask, chat_body, comparable, joined, stream, text_body
from tests.serving.doubles import (
    FaithfulWorkers,
    encode,
    logprob_of,
    make_hf_tokenizer,
    make_tokenizer,
)
from workers.contracts import TokenLogprob

SAID = "the quick 中文😀 fox"
IDS = encode(f"{SAID}<|im_end|>")
SIZES = [1, 2, 5, 100]


def faithful(size: int = 3) -> FaithfulWorkers:
    return FaithfulWorkers([], ids=IDS, size=size)


def bytes_of(entries: list[Any]) -> bytes:
    return bytes(byte for entry in entries for byte in entry["bytes"])


@pytest.mark.parametrize("size", SIZES)
async def test_c17_chat_shape(size: int) -> None:
    """C17: an entry for each token, the one that stopped included, streamed or not."""
    body = chat_body(logprobs=True, top_logprobs=3)
    answer = await ask(faithful(size), body)
    (choice,) = answer["choices"]
    assert choice["logprobs"].keys() == {"content", "refusal"}
    entries = choice["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == len(IDS)
    assert bytes_of(entries) == f"{SAID}<|im_end|>".encode()
    for token_id, entry in zip(IDS, entries, strict=True):
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] == logprob_of(token_id, 0).logprob
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
        assert [top.keys() for top in entry["top_logprobs"]] == [
            {"token", "logprob", "bytes"} for _ in range(3)
        ]
    assert joined(await stream(faithful(size), body)) == comparable(answer)


async def test_only_the_chosen_token() -> None:
    (choice,) = (await ask(faithful(), chat_body(logprobs=True)))["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    (choice,) = (await ask(faithful(), text_body(logprobs=0)))["choices"]
    columns = choice["logprobs"]
    assert all(len(top) == 1 for top in columns["top_logprobs"])


@pytest.mark.parametrize("fields", [{"logprobs": False}, {"logprobs": None}, {}])
async def test_without_being_asked_there_are_none(fields: dict[str, Any]) -> None:
    workers = faithful()
    answer = await ask(workers, chat_body(**fields))
    assert answer["choices"][0]["logprobs"] is None
    assert workers.requests[0].sampling.num_logprobs is None
    assert not {"prompt_token_ids", "speculation"} & answer.keys()
    assert "token_ids" not in answer["choices"][0]


def check_columns(columns: dict[str, Any], text: str, num_tokens: int) -> None:
    """Check a completion's shape against its text: each token stands where it says it does."""
    assert columns.keys() == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert {len(column) for column in columns.values()} == {num_tokens}
    offsets = columns["text_offset"]
    assert offsets == sorted(offsets)
    for offset, end, token in zip(offsets, [*offsets[1:], len(text)], columns["tokens"],
                                  strict=True):  # fmt: skip
        piece = text[offset:end]
        # Halves of a character show as U+FFFD, all of it at its last; specials show no text.
        assert piece == token or "\ufffd" in token or token.startswith("<|")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("prompt", ["say 中 it: ", [5, 6, 7]], ids=["text", "ids"])
@pytest.mark.parametrize("echo", [True, False])
async def test_c17_completion_shape(size: int, prompt: Any, echo: bool) -> None:
    """C17: stream, echo and log-probabilities together: offsets shifted, tokens were wrong."""
    body = text_body(prompt=prompt, echo=echo, logprobs=2, max_tokens=40)
    workers = faithful(size)
    answer = await ask(workers, body)
    (choice,) = answer["choices"]
    ids = list(workers.requests[0].prompt_ids)
    shown = prompt if isinstance(prompt, str) else make_tokenizer().decode(prompt)
    assert choice["text"] == (shown if echo else "") + SAID
    num_prompt = len(ids) if echo else 0
    columns = choice["logprobs"]
    check_columns(columns, choice["text"], num_prompt + len(IDS))
    if echo:
        assert (columns["token_logprobs"][0], columns["top_logprobs"][0]) == (None, None)
        assert columns["token_logprobs"][1:num_prompt] == [
            logprob_of(i, 0).logprob for i in ids[1:]
        ]
        assert columns["text_offset"][num_prompt] == len(shown)
        assert workers.requests[0].sampling.num_prompt_logprobs == 2
    else:
        assert workers.requests[0].sampling.num_prompt_logprobs is None
    assert answer["usage"]["completion_tokens"] == len(IDS)
    assert joined(await stream(faithful(size), body)) == comparable(answer)


async def test_echo_alone_scores_nothing() -> None:
    workers = faithful()
    (choice,) = (await ask(workers, text_body(prompt="a fox: ", echo=True)))["choices"]
    assert choice["text"].startswith("a fox: the")
    assert choice["logprobs"] is None
    assert workers.requests[0].sampling.num_prompt_logprobs is None


async def test_stops_are_looked_for_in_the_answer_alone() -> None:
    body = text_body(prompt="a fox: ", echo=True, stop="fox", max_tokens=40)
    (choice,) = (await ask(faithful(), body))["choices"]
    assert choice["text"] == f"a fox: {SAID.removesuffix('fox')}"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_a_prompt_can_be_scored(logprobs: int | None) -> None:
    """B11: its tokens' log-probabilities, and nothing of the token that the engine adds."""
    workers = faithful()
    body = text_body(prompt="a fox", echo=True, max_tokens=0, logprobs=logprobs,
                     return_token_ids=True)  # fmt: skip
    answer = await ask(workers, body)
    (choice,) = answer["choices"]
    num_prompt = answer["usage"]["prompt_tokens"]
    assert workers.requests[0].sampling.max_tokens == 1
    assert (choice["text"], choice["finish_reason"]) == ("a fox", "length")
    assert (answer["usage"]["completion_tokens"], choice["token_ids"]) == (0, [])
    if logprobs is not None:
        check_columns(choice["logprobs"], "a fox", num_prompt)
    chunks = joined(await stream(faithful(), body))
    chunks["choices"][0].setdefault("token_ids", [])
    assert chunks == comparable(answer)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stop", ["文", "fox", "k 中", "o"])
@pytest.mark.parametrize("is_chat", [True, False])
async def test_b3_all_end_at_the_same_token(size: int, stop: str, is_chat: bool) -> None:
    """B3: a stop string cut the text in mid-block; ids, log-probabilities and usage ran on."""
    tokenizer = make_tokenizer()
    num_tokens = next(n for n in range(len(IDS)) if stop in tokenizer.decode(IDS[:n]))
    asked = {"logprobs": True} if is_chat else {"logprobs": 0}
    make = chat_body if is_chat else text_body
    body = make(stop=stop, return_token_ids=True, max_tokens=40, **asked)
    answer = await ask(faithful(size), body)
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if is_chat else choice["text"]
    assert text == SAID[: SAID.index(stop)]
    assert choice["token_ids"] == IDS[:num_tokens]
    assert answer["usage"]["completion_tokens"] == num_tokens
    scores = choice["logprobs"]
    assert len(scores["content"] if is_chat else scores["tokens"]) == num_tokens
    assert joined(await stream(faithful(size), body)) == comparable(answer)


async def test_held_text_holds_no_scores() -> None:
    """A character of several tokens comes with the last; the first ones' numbers come at once."""
    chunks = await stream(faithful(1), chat_body(logprobs=True, return_token_ids=True))
    parts = [chunk["choices"][0] for chunk in chunks[1:-2]]
    assert [len(part["logprobs"]["content"]) for part in parts] == [1] * len(IDS)
    assert [part["token_ids"] for part in parts] == [[i] for i in IDS]
    assert "" in [part["delta"]["content"] for part in parts]


async def test_prompt_ids() -> None:
    workers = faithful()
    answer = await ask(workers, chat_body(return_token_ids=True))
    assert answer["prompt_token_ids"] == list(workers.requests[0].prompt_ids)
    assert answer["choices"][0]["token_ids"] == IDS
    several = await ask(faithful(), text_body(prompt=[[5], [6, 7]], n=2, return_token_ids=True))
    assert several["prompt_token_ids"] == [[5], [6, 7]]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e30])
def test_c18_numbers_that_json_has_no_word_for(logprob: float) -> None:
    """C18: a token that a mask forbids has minus infinity."""
    score = ScoredToken(1, 0, TokenLogprob(1, logprob, ((2, logprob),)))
    (entry,) = chat_logprobs([score], lambda token_id: b"x").content
    assert (entry.logprob, entry.top_logprobs[0].logprob) == (MIN_LOGPROB, MIN_LOGPROB)
    columns = completion_logprobs([score], lambda token_id: b"x")
    assert (columns.token_logprobs, columns.top_logprobs) == ([MIN_LOGPROB], [{"x": MIN_LOGPROB}])


def test_tokens_that_look_the_same_keep_the_likelier() -> None:
    score = ScoredToken(1, 0, TokenLogprob(1, -3.0, ((2, -1.0), (3, -2.0))))
    columns = completion_logprobs([score], lambda token_id: bytes([0xE4 + token_id]))
    assert columns.top_logprobs == [{"\ufffd": -1.0}]


def test_bytes_of_a_byte_level_vocabulary() -> None:
    backend = make_hf_tokenizer().backend_tokenizer
    table = TokenBytes(backend)
    text = "the 中文😀\n\t é<|im_end|>"
    ids = backend.encode(text).ids
    assert b"".join(table.of(i) for i in ids) == text.encode()
    assert table.of(10**6) == b""


def test_bytes_of_a_sentencepiece_vocabulary() -> None:
    vocab = ["<unk>", "<0xE4>", "<0xB8>", "<0xAD>", "▁the", "é", "▁"]
    backend = Tokenizer(models.Unigram([(token, -1.0) for token in vocab], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("▁<s>", special=True)])
    table = TokenBytes(backend)
    assert b"".join(table.of(i) for i in (4, 1, 2, 3, 5, 6)) == " the中é ".encode()
    assert table.of(7) == "▁<s>".encode()
    backend.decoder = decoders.Metaspace()
    assert TokenBytes(backend).of(4) == b" the"

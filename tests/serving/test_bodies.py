"""Good and bad bodies: what OpenAI accepts passes or is refused by name, never a 5xx (C15, B7)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from serving.schema import MAX_MESSAGES, MAX_PARTS, MAX_PROMPT_IDS, ChatBody, CompletionBody
from tests.serving.doubles import ScriptedWorkers, data_url, deltas_of, encode, make_app, picture

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": data_url(picture())}}


async def post(path: str, body: Any = None, **options: Any) -> httpx.Response:
    workers = ScriptedWorkers([list(deltas_of(encode("fine<|im_end|>")))])
    transport = httpx.ASGITransport(app=make_app(workers))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        if body is not None:
            options["json"] = body
        return await client.post(path, **options)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [USER], **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hi", **fields}


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[fields])


def parts(*items: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": list(items)}])


GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat()),
    (CHAT, chat(max_tokens=5)),
    (CHAT, chat(max_completion_tokens=5)),
    (CHAT, chat(max_tokens=5, max_completion_tokens=5)),
    (CHAT, chat(temperature=0)),
    (CHAT, chat(temperature=1e-10, top_p=1e-9)),
    (CHAT, chat(temperature=2, top_p=0)),
    (CHAT, chat(temperature=None, top_p=None, max_tokens=None, stop=None, seed=None)),
    (CHAT, chat(top_k=-1)),
    (CHAT, chat(top_k=10**6)),
    (CHAT, chat(seed=-(2**63))),
    (CHAT, chat(stop="x")),
    (CHAT, chat(stop=["a", "b", "c", "d"])),
    (CHAT, chat(stop=[])),
    (CHAT, chat(n=1, presence_penalty=0, frequency_penalty=0.0, logprobs=False, logit_bias={})),
    (CHAT, chat(tools=[], tool_choice="none", response_format={"type": "text"}, store=False)),
    (CHAT, chat(user="someone", parallel_tool_calls=True, metadata={}, service_tier="auto")),
    (CHAT, chat(speculation={"enabled": False})),
    (CHAT, chat(speculation={"num_draft_tokens": 0})),
    (CHAT, chat(stream=False)),
    (CHAT, chat(messages=[{"role": "developer", "content": "be brief"}, USER])),
    (CHAT, chat(messages=[USER, {"role": "assistant", "content": ""}, USER])),
    (CHAT, chat(messages=[USER, {"role": "assistant", "content": "a", "refusal": None,
                                 "tool_calls": None, "function_call": None, "audio": None}, USER])),
    (CHAT, message(role="user", content="")),
    (CHAT, parts({"type": "text", "text": "a"}, {"type": "text", "text": "b"})),
    (CHAT, parts(IMAGE, {"type": "text", "text": "what?"}, IMAGE)),
    (CHAT, parts({"type": "image_url", "image_url": {**IMAGE["image_url"], "detail": "auto"}})),
    (TEXT, text()),
    (TEXT, text(prompt=["hi"])),
    (TEXT, text(prompt=[5, 6, 7])),
    (TEXT, text(echo=False, best_of=1, logprobs=None, suffix=None)),
    (TEXT, text(max_tokens=3, min_tokens=3, ignore_eos=True, stop_token_ids=[9])),
]  # fmt: skip

# path, body, parameter named
BAD: list[tuple[str, Any, str | None]] = [
    (CHAT, {}, "model"),
    (CHAT, {"model": "demo"}, "messages"),
    (CHAT, {"messages": [USER]}, "model"),
    (CHAT, [], None),
    (CHAT, "text", None),
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, chat(messages=None), "messages"),
    (CHAT, chat(messages="hi"), "messages"),
    (CHAT, chat(messages=["hi"]), "messages[0]"),
    (CHAT, message(content="hi"), "messages[0]"),
    (CHAT, message(role="boss", content="hi"), "messages[0]"),
    (CHAT, message(role="tool", content="hi", tool_call_id="1"), "messages[0]"),
    (CHAT, message(role=5, content="hi"), "messages[0]"),
    (CHAT, message(role="user"), "messages[0].content"),
    (CHAT, message(role="user", content=None), "messages[0].content"),
    (CHAT, message(role="user", content=5), "messages[0].content"),
    (CHAT, message(role="user", content=[]), "messages[0].content"),
    (CHAT, message(role="user", content={}), "messages[0].content"),
    (CHAT, message(role="user", content="hi", name="bob"), "messages[0].name"),
    (CHAT, message(role="user", content="hi", extra=1), "messages[0].extra"),
    (CHAT, message(role="assistant", content=None), "messages[0].content"),
    (CHAT, message(role="assistant", content="", tool_calls=[{}]), "messages[0].tool_calls"),
    (CHAT, message(role="system", content=[IMAGE]), "messages[0].content[0].type"),
    (CHAT, parts("hi"), "messages[0].content[0]"),
    (CHAT, parts({"type": "text"}), "messages[0].content[0].text"),
    (CHAT, parts({"type": "text", "text": 5}), "messages[0].content[0].text"),
    (CHAT, parts({"type": "text", "text": "a", "b": 1}), "messages[0].content[0].b"),
    (CHAT, parts({"type": "input_audio", "input_audio": {}}), "messages[0].content[0]"),
    (CHAT, parts({"type": "video_url", "video_url": {}}), "messages[0].content[0].video_url"),
    (CHAT, parts({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}),
     "messages[0].content[0].video_url"),
    (CHAT, parts({"type": "video"}), "messages[0].content[0].video"),
    (CHAT, parts({"type": "video", "video": []}), "messages[0].content[0].video"),
    (CHAT, parts({"type": "video", "video": "data:"}), "messages[0].content[0].video"),
    (CHAT, parts({"type": "video", "video": ["data:", 5]}), "messages[0].content[0].video[1]"),
    (CHAT, parts({"type": "video", "video": ["data:"], "fps": 0}), "messages[0].content[0].fps"),
    (CHAT, parts({"type": "video", "video": ["data:"], "fps": 1e9}), "messages[0].content[0].fps"),
    (CHAT, parts({"type": "video", "video": ["data:"], "fps": "2"}), "messages[0].content[0].fps"),
    # The test's model has no videos.
    (CHAT, parts({"type": "video", "video": ["data:"]}), "messages[0].content[0].video"),
    (CHAT, parts({"type": "image_url"}), "messages[0].content[0].image_url"),
    (CHAT, parts({"type": "image_url", "image_url": "data:"}), "messages[0].content[0].image_url"),
    (CHAT, parts({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url"),
    (CHAT, parts({"type": "image_url", "image_url": {"url": "http://x/a.png"}}),
     "messages[0].content[0].image_url"),
    (CHAT, parts({"type": "text", "text": "a"},
                 {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
     "messages[0].content[1].image_url"),
    (CHAT, parts({"type": "image_url", "image_url": {**IMAGE["image_url"], "detail": "high"}}),
     "messages[0].content[0].image_url.detail"),
    (CHAT, chat(temperature=-0.1), "temperature"),
    (CHAT, chat(temperature=2.1), "temperature"),
    (CHAT, chat(temperature="1"), "temperature"),
    (CHAT, chat(temperature=True), "temperature"),
    (CHAT, chat(top_p=1.1), "top_p"),
    (CHAT, chat(top_p=-1), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(top_k=1.5), "top_k"),
    (CHAT, chat(min_p=2), "min_p"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens="5"), "max_tokens"),
    (CHAT, chat(max_tokens=10**30), "max_tokens"),
    (CHAT, chat(max_tokens=True), "max_tokens"),
    (CHAT, chat(max_tokens=5, max_completion_tokens=6), "max_completion_tokens"),
    (CHAT, chat(min_tokens=6, max_tokens=5), "min_tokens"),
    (CHAT, chat(seed=2**63), "seed"),
    (CHAT, chat(seed=0.5), "seed"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=["a"] * 5), "stop"),
    (CHAT, chat(stop=["a", ""]), "stop[1]"),
    (CHAT, chat(stop=5), "stop"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (CHAT, chat(stop_token_ids=[10**6]), "stop_token_ids[0]"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(stream=True, stream_options={"usage": True}), "stream_options.usage"),
    (CHAT, chat(n=2), "n"),
    (CHAT, chat(n=True), "n"),
    (CHAT, chat(presence_penalty=0.5), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-2), "frequency_penalty"),
    (CHAT, chat(repetition_penalty=1.1), "repetition_penalty"),
    (CHAT, chat(logit_bias={"5": 1}), "logit_bias"),
    (CHAT, chat(logprobs=True), "logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools"),
    (CHAT, chat(tool_choice="auto"), "tool_choice"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
    (CHAT, chat(modalities=["audio"]), "modalities"),
    (CHAT, chat(audio={}), "audio"),
    (CHAT, chat(store=True), "store"),
    (CHAT, chat(reasoning_effort="low"), "reasoning_effort"),
    (CHAT, chat(temperature_c=1), "temperature_c"),
    (CHAT, chat(prompt="x"), "prompt"),
    (CHAT, chat(echo=True), "echo"),
    (CHAT, chat(speculation={"enabled": 1}), "speculation.enabled"),
    (CHAT, chat(speculation={"num_draft_tokens": -1}), "speculation.num_draft_tokens"),
    (CHAT, chat(speculation={"draft": "x"}), "speculation.draft"),
    (CHAT, chat(speculation=True), "speculation"),
    (TEXT, text(prompt=None), "prompt"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=""), "prompt"),
    (TEXT, text(prompt=["a", "b"]), "prompt"),
    (TEXT, text(prompt=[[1, 2]]), "prompt[0]"),
    (TEXT, text(prompt=[1, -2]), "prompt[1]"),
    (TEXT, text(prompt=[1, 10**6]), "prompt[1]"),
    (TEXT, text(prompt=[1, "a"]), "prompt[1]"),
    (TEXT, text(best_of=2), "best_of"),
    (TEXT, text(echo=True), "echo"),
    (TEXT, text(logprobs=0), "logprobs"),
    (TEXT, text(suffix="x"), "suffix"),
    (TEXT, text(messages=[USER]), "messages"),
    (TEXT, text(max_completion_tokens=5), "max_completion_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), GOOD)
async def test_good_bodies(path: str, body: Any) -> None:
    response = await post(path, body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == "fine"


@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_bodies(path: str, body: Any, param: str | None) -> None:
    response = await post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert param is None or param.rpartition(".")[2].split("[")[0] in error["message"]


async def test_unknown_model_is_404() -> None:
    response = await post(CHAT, chat(model="other"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}', b"null", b"1e999",
        b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
        b'{"model": "demo", "messages": [], "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=range(10),
)  # fmt: skip
async def test_broken_json_is_400(content: bytes) -> None:
    response = await post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_nan_is_400() -> None:
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
    response = await post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


MANY = 20_000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (text(prompt=[-1] * MANY), "prompt[0]"),
        (text(prompt=["a", *[1] * MANY]), "prompt[1]"),
        (text(prompt=["\ud800"] * MANY), "prompt[0]"),
        (text(stop_token_ids=["a"] * MANY), "stop_token_ids[0]"),
        (chat(messages=[1] * MANY), "messages[0]"),
        (chat(messages=[USER] * (MAX_MESSAGES + 1)), "messages"),
        (parts(*[1] * MANY), "messages[0].content[0]"),
        (parts(*[{"type": "text", "text": ""}] * (MAX_PARTS + 1)), "messages[0].content"),
        (message(role="system", content=[1] * MANY), "messages[0].content[0]"),
        (chat(stop=[1] * MANY), "stop[0]"),
        (chat(**{f"x{i}": i for i in range(MANY)}), "x0"),
        (message(role="user", content="", **{f"x{i}": i for i in range(MANY)}), "messages[0].x0"),
    ],
    ids=range(12),
)
async def test_one_error_is_built_however_many_there_are(body: dict[str, Any], param: str) -> None:
    """A small body of a million bad items must not take gigabytes and block the event loop."""
    model = CompletionBody if "prompt" in body else ChatBody
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() == 1
    # HTTP clients cannot send a lone surrogate, only its escape.
    content = json.dumps(body).encode()
    response = await post(
        TEXT if model is CompletionBody else CHAT,
        content=content,
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_token_ids_are_bounded() -> None:
    """Without a bound a body of ids alone could hold millions of Python objects."""
    with pytest.raises(ValidationError, match="at most"):
        CompletionBody.model_validate(text(prompt=[1] * (MAX_PROMPT_IDS + 1)))


def test_a_role_of_another_type_is_not_written_out() -> None:
    """Writing it out costs its size again, and Python refuses to when it is nested deeply."""
    role: list[Any] = []
    for _ in range(10_000):
        role = [role]
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate(message(role=role, content=""))
    assert caught.value.errors(include_input=False)[0]["loc"] == ("messages", 0)


@pytest.mark.parametrize("content", ["\ud800", "中\udc00", "ok \ud83d!"])
def test_lone_surrogates_are_found(content: str) -> None:
    """Such a string breaks every encoder after it."""
    with pytest.raises(ValidationError, match="lone surrogate"):
        ChatBody.model_validate(message(role="user", content=content))
    assert ChatBody.model_validate(message(role="user", content="中😀\ue000\uffff"))

"""Good and bad bodies: what OpenAI accepts passes or is refused by name, never a 5xx (C15, B7)."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from serving.messages import MAX_MESSAGES, MAX_PARTS
from serving.schema import MAX_PROMPT_IDS, ChatBody, CompletionBody
from tests.serving.answers import speaks_of_tools
from tests.serving.doubles import (
    FaithfulWorkers,
    data_url,
    encode,
    make_app,
    make_tokenizer,
    picture,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
VOCAB = make_tokenizer().vocab_size
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": data_url(picture())}}


async def post(path: str, body: Any = None, **options: Any) -> httpx.Response:
    workers = FaithfulWorkers([], ids=encode("fine<|im_end|>"))
    app = make_app(workers, tools=speaks_of_tools(body))
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
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


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": schema})


def function(**fields: Any) -> dict[str, Any]:
    return chat(tools=[{"type": "function", "function": fields}])


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def calls(*items: Any) -> dict[str, Any]:
    return message(role="assistant", content=None, tool_calls=list(items))


TOOL = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}

GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat()),
    (CHAT, chat(max_tokens=5)),
    (CHAT, chat(max_completion_tokens=5)),
    (CHAT, chat(max_tokens=5, max_completion_tokens=5)),
    (CHAT, chat(temperature=0)),
    (CHAT, chat(temperature=1e-10, top_p=1e-9)),
    (CHAT, chat(temperature=2, top_p=0)),
    (CHAT, chat(timeout=30)),
    (TEXT, text(timeout=29.5)),
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
    (CHAT, {**chat(), **dict.fromkeys(set(ChatBody.model_fields) - {"model", "messages"})}),
    (TEXT, {**text(), **dict.fromkeys(set(CompletionBody.model_fields) - {"model", "prompt"})}),
    (CHAT, chat(temperature=0, top_p=0, top_k=1, min_p=0)),
    (CHAT, chat(temperature=1e-4, top_p=1e-4, top_k=VOCAB + 1, min_p=1)),
    (CHAT, chat(temperature=1e-300, top_p=1, top_k=0)),
    (CHAT, chat(temperature=2, top_p=1.0, top_k=2**31 - 1, seed=2**63 - 1)),
    (CHAT, chat(presence_penalty=-2, frequency_penalty=2, repetition_penalty=10)),
    (CHAT, chat(presence_penalty=0.5, frequency_penalty=-2.0, repetition_penalty=0.01)),
    (CHAT, chat(logit_bias={"0": -100, "5": 100, str(VOCAB - 1): 0.5})),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(VOCAB)})),
    (CHAT, chat(n=3, seed=1)),
    (CHAT, chat(n=128)),
    (CHAT, chat(logprobs=True)),
    (CHAT, chat(logprobs=True, top_logprobs=0)),
    (CHAT, chat(logprobs=True, top_logprobs=20)),
    (CHAT, chat(logprobs=False, top_logprobs=0)),
    (CHAT, chat(response_format={"type": "text"}, return_token_ids=True)),
    (CHAT, chat(tool_choice="none")),
    (CHAT, chat(tools=[TOOL])),
    (CHAT, chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)),
    (CHAT, chat(tools=[TOOL], tool_choice="none", response_format={"type": "json_object"})),
    (CHAT, chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)),
    (CHAT, chat(tools=[TOOL], tool_choice=named("paint"), response_format={"type": "text"})),
    (CHAT, chat(tools=[TOOL], response_format={"type": "json_object"})),
    (CHAT, function(name="a" * 64)),
    (CHAT, function(name="a-B_9", description=None, parameters=None, strict=None)),
    (CHAT, function(name="a", parameters={}, strict=True)),
    (CHAT, function(name="a", parameters={"type": "object", "properties": {}}, strict=False)),
    (CHAT, calls(CALL)),
    (CHAT, calls(CALL, {**CALL, "id": "c2"})),
    (CHAT, chat(messages=[USER, *calls(CALL)["messages"],
                          {"role": "tool", "tool_call_id": "c1", "content": "x", "name": "a"}])),
    (CHAT, message(role="tool", content=[{"type": "text", "text": "x"}], tool_call_id="")),
    (CHAT, message(role="assistant", content=[{"type": "text", "text": "x"}], tool_calls=[CALL])),
    (CHAT, chat(response_format={"type": "json_object"})),
    (CHAT, schema_format({"name": "a", "schema": {}})),
    (CHAT, schema_format({"name": "a", "schema": {"type": "object"}, "strict": True,
                          "description": "an object"})),
    (CHAT, schema_format({"name": "a", "schema": {"type": "array"}, "strict": None})),
    (TEXT, text(response_format={"type": "json_object"})),
    (TEXT, text(structured_outputs={"json": {"type": "integer"}})),
    (TEXT, text(structured_outputs={"regex": "a+", "json": None})),
    (TEXT, text(structured_outputs={"choice": ["a", "b"]})),
    (TEXT, text(structured_outputs={"grammar": 'start: "a" | "b"'})),
    (CHAT, chat(structured_outputs={"regex": "a"}, response_format={"type": "text"})),
    (CHAT, chat(tool_choice="auto", parallel_tool_calls=False)),
    (CHAT, chat(speculation={"enabled": True, "num_draft_tokens": 8, "report": True})),
    (CHAT, chat(speculation={"enabled": None, "num_draft_tokens": None, "report": None})),
    (CHAT, chat(stream_options=None)),
    (CHAT, chat(stop_token_ids=list(range(64)))),
    (CHAT, chat(max_tokens=2**31 - 1)),
    (CHAT, chat(messages=[{"role": "system", "content": [{"type": "text", "text": "a"}]}, USER])),
    (CHAT, chat(messages=[USER, {"role": "assistant", "content": "a", "tool_calls": []}, USER])),
    (TEXT, text()),
    (TEXT, text(prompt=["hi"])),
    (TEXT, text(prompt=[5, 6, 7])),
    (TEXT, text(prompt=["a", "b"])),
    (TEXT, text(prompt=[[1, 2], [3]])),
    (TEXT, text(prompt=["a"] * 128)),
    (TEXT, text(prompt=["a"] * 64, n=2)),
    (TEXT, text(echo=False, best_of=1, logprobs=None, suffix=None)),
    (TEXT, text(n=2, best_of=2)),
    (TEXT, text(logprobs=0)),
    (TEXT, text(logprobs=20)),
    (TEXT, text(max_tokens=None, stop=[])),
    (TEXT, text(max_tokens=5, min_tokens=5, ignore_eos=True, stop_token_ids=[9])),
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
    (CHAT, message(role=5, content="hi"), "messages[0]"),
    (CHAT, message(role="user"), "messages[0].content"),
    (CHAT, message(role="user", content=None), "messages[0].content"),
    (CHAT, message(role="user", content=5), "messages[0].content"),
    (CHAT, message(role="user", content=[]), "messages[0].content"),
    (CHAT, message(role="user", content={}), "messages[0].content"),
    (CHAT, message(role="user", content="hi", name="bob"), "messages[0].name"),
    (CHAT, message(role="user", content="hi", extra=1), "messages[0].extra"),
    (CHAT, message(role="assistant", content=None), "messages[0].content"),
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
    (CHAT, chat(timeout=0), "timeout"),
    (CHAT, chat(timeout=-1), "timeout"),
    (TEXT, text(timeout="5"), "timeout"),
    (TEXT, text(timeout=86_401), "timeout"),
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
    (CHAT, chat(n=True), "n"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
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
    (TEXT, text(prompt=[1, -2]), "prompt[1]"),
    (TEXT, text(prompt=[1, 10**6]), "prompt[1]"),
    (TEXT, text(prompt=[1, "a"]), "prompt[1]"),
    (TEXT, text(best_of=2), "best_of"),
    (TEXT, text(suffix="x"), "suffix"),
    (TEXT, text(messages=[USER]), "messages"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=[[]]), "prompt[0]"),
    (TEXT, text(prompt=[[1], []]), "prompt[1]"),
    (TEXT, text(prompt=[[1], "a"]), "prompt[1]"),
    (TEXT, text(prompt=[[1], [VOCAB]]), "prompt[1][0]"),
    (TEXT, text(prompt=[VOCAB]), "prompt[0]"),
    (TEXT, text(prompt=[True]), "prompt[0]"),
    (TEXT, text(prompt=[1.5]), "prompt[0]"),
    (TEXT, text(prompt=[10**30]), "prompt[0]"),
    (TEXT, text(prompt={}), "prompt"),
    (TEXT, text(prompt=["a"] * 129), "prompt"),
    (TEXT, text(prompt=["a"] * 65, n=2), "prompt"),
    (TEXT, text(best_of=0), "best_of"),
    (TEXT, text(n=2, best_of=3), "best_of"),
    (TEXT, text(n=2, best_of=1), "best_of"),
    (TEXT, text(best_of=True), "best_of"),
    (TEXT, text(logprobs=21), "logprobs"),
    (TEXT, text(logprobs=-1), "logprobs"),
    (TEXT, text(logprobs=True), "logprobs"),
    (TEXT, text(top_logprobs=1), "top_logprobs"),
    (TEXT, text(echo="yes"), "echo"),
    (TEXT, text(max_tokens=0), "max_tokens"),
    (TEXT, text(max_tokens=-1, echo=True), "max_tokens"),
    (TEXT, text(max_tokens=0, min_tokens=1, echo=True), "min_tokens"),
    (TEXT, text(min_tokens=17), "min_tokens"),
    (TEXT, text(tools=[]), "tools"),
    (TEXT, text(n=129), "n"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=129), "n"),
    (CHAT, chat(n=1.0), "n"),
    (CHAT, chat(n="2"), "n"),
    (CHAT, chat(n=10**40), "n"),
    (CHAT, chat(temperature=[]), "temperature"),
    (CHAT, chat(temperature=10**400), "temperature"),
    (CHAT, chat(top_k=10**40), "top_k"),
    (CHAT, chat(top_p="0.5"), "top_p"),
    (CHAT, chat(min_p=-0.1), "min_p"),
    (CHAT, chat(min_tokens=-1), "min_tokens"),
    (CHAT, chat(ignore_eos=1), "ignore_eos"),
    (CHAT, chat(seed=-(2**63) - 1), "seed"),
    (CHAT, chat(seed="1"), "seed"),
    (CHAT, chat(presence_penalty=2.1), "presence_penalty"),
    (CHAT, chat(presence_penalty="1"), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-2.1), "frequency_penalty"),
    (CHAT, chat(frequency_penalty=[]), "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(repetition_penalty=-1), "repetition_penalty"),
    (CHAT, chat(repetition_penalty=10.1), "repetition_penalty"),
    (CHAT, chat(repetition_penalty=True), "repetition_penalty"),
    (CHAT, chat(logit_bias=[]), "logit_bias"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias.x"),
    (CHAT, chat(logit_bias={"05": 1}), "logit_bias.05"),
    (CHAT, chat(logit_bias={"-1": 1}), "logit_bias.-1"),
    (CHAT, chat(logit_bias={"": 1}), "logit_bias."),
    (CHAT, chat(logit_bias={"\u0665": 1}), "logit_bias.\u0665"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias.5"),
    (CHAT, chat(logit_bias={"5": "1"}), "logit_bias.5"),
    (CHAT, chat(logit_bias={"5": None}), "logit_bias.5"),
    (CHAT, chat(logit_bias={"5": True}), "logit_bias.5"),
    (CHAT, chat(logit_bias={"5": 10**400}), "logit_bias.5"),
    (CHAT, chat(logit_bias={str(VOCAB): 1}), f"logit_bias.{VOCAB}"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
    (CHAT, chat(stop_token_ids=[VOCAB]), "stop_token_ids[0]"),
    (CHAT, chat(stop_token_ids=[0] * 65), "stop_token_ids"),
    (CHAT, chat(stop_token_ids=5), "stop_token_ids"),
    (CHAT, chat(logprobs=1), "logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=True), "top_logprobs"),
    (CHAT, chat(logprobs=False, top_logprobs=1), "top_logprobs"),
    (CHAT, chat(return_token_ids=1), "return_token_ids"),
    (CHAT, chat(speculation={"report": "yes"}), "speculation.report"),
    (CHAT, chat(speculation={"num_draft_tokens": 10**40}), "speculation.num_draft_tokens"),
    (CHAT, chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (CHAT, chat(user=5), "user"),
    (CHAT, chat(response_format="json"), "response_format"),
    (CHAT, chat(response_format={}), "response_format"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format"),
    (CHAT, chat(response_format={"type": "text", "x": 1}), "response_format.x"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (CHAT, schema_format({}), "response_format.json_schema.name"),
    (CHAT, schema_format({"name": "a"}), "response_format.json_schema.schema"),
    (CHAT, schema_format({"name": "a", "schema": None}), "response_format.json_schema.schema"),
    (CHAT, schema_format({"name": "a", "schema": "{}"}), "response_format.json_schema.schema"),
    (CHAT, schema_format({"name": "a b", "schema": {}}), "response_format.json_schema.name"),
    (CHAT, schema_format({"name": "a" * 65, "schema": {}}), "response_format.json_schema.name"),
    (CHAT, schema_format({"name": "a", "schema": {}, "strict": 1}),
     "response_format.json_schema.strict"),
    (CHAT, schema_format({"name": "a", "schema": {}, "x": 1}), "response_format.json_schema.x"),
    (TEXT, text(response_format={"type": "xml"}), "response_format"),
    (TEXT, text(structured_outputs={}), "structured_outputs"),
    (TEXT, text(structured_outputs="x"), "structured_outputs"),
    (TEXT, text(structured_outputs={"regex": ""}), "structured_outputs.regex"),
    (TEXT, text(structured_outputs={"regex": 5}), "structured_outputs.regex"),
    (TEXT, text(structured_outputs={"json": "{}"}), "structured_outputs.json"),
    (TEXT, text(structured_outputs={"choice": []}), "structured_outputs.choice"),
    (TEXT, text(structured_outputs={"choice": "a"}), "structured_outputs.choice"),
    (TEXT, text(structured_outputs={"choice": ["a", 5]}), "structured_outputs.choice[1]"),
    (TEXT, text(structured_outputs={"choice": [""]}), "structured_outputs.choice[0]"),
    (TEXT, text(structured_outputs={"grammar": {}}), "structured_outputs.grammar"),
    (TEXT, text(structured_outputs={"json": {}, "regex": "a"}), "structured_outputs"),
    (TEXT, text(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs"),
    (TEXT, text(structured_outputs={"whitespace": " "}), "structured_outputs.whitespace"),
    (TEXT, text(guided_json={}), "guided_json"),
    (CHAT, chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
     "structured_outputs"),
    (CHAT, schema_format({"name": "a", "schema": {"type": "thing"}}),
     "response_format.json_schema.schema"),
    (CHAT, schema_format({"name": "a", "schema": {"not": {"type": "null"}, "type": "string",
                                                  "format": "nothing"}}),
     "response_format.json_schema.schema"),
    (CHAT, function(name="a", parameters={"type": "thing"}, strict=True),
     "tools[0].function.parameters"),
    (TEXT, text(structured_outputs={"json": {"enum": [[2**64]]}}), "structured_outputs.json"),
    (CHAT, function(name="a", parameters={"minimum": -(2**63) - 1}),
     "tools[0].function.parameters"),
    (TEXT, text(structured_outputs={"regex": "("}), "structured_outputs.regex"),
    (TEXT, text(structured_outputs={"regex": "(?=a)b"}), "structured_outputs.regex"),
    (TEXT, text(structured_outputs={"json": {"type": 5}}), "structured_outputs.json"),
    (TEXT, text(structured_outputs={"grammar": "start: nothing"}), "structured_outputs.grammar"),
    (TEXT, text(structured_outputs={"grammar": "]"}), "structured_outputs.grammar"),
    (CHAT, chat(tools={}), "tools"),
    (CHAT, chat(tools=[5]), "tools[0]"),
    (CHAT, chat(tools=[{}]), "tools[0].type"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function"),
    (CHAT, chat(tools=[{"type": "web_search"}]), "tools[0].type"),
    (CHAT, function(), "tools[0].function.name"),
    (CHAT, function(name=""), "tools[0].function.name"),
    (CHAT, function(name="a b"), "tools[0].function.name"),
    (CHAT, function(name="a\n"), "tools[0].function.name"),
    (CHAT, function(name="\u00e9"), "tools[0].function.name"),
    (CHAT, function(name="a" * 65), "tools[0].function.name"),
    (CHAT, function(name="a", parameters=[]), "tools[0].function.parameters"),
    (CHAT, function(name="a", parameters="{}"), "tools[0].function.parameters"),
    (CHAT, function(name="a", strict="yes"), "tools[0].function.strict"),
    (CHAT, function(name="a", description=5), "tools[0].function.description"),
    (CHAT, function(name="a", returns={}), "tools[0].function.returns"),
    (CHAT, chat(tools=[TOOL, TOOL]), "tools[1].function.name"),
    (CHAT, chat(tools=[TOOL] * 129), "tools"),
    (CHAT, chat(tools=[TOOL], tool_choice="any"), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice=5), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice={}), "tool_choice.type"),
    (CHAT, chat(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice.function"),
    (CHAT, chat(tools=[TOOL], tool_choice=named("other")), "tool_choice"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(tools=[], tool_choice="required"), "tool_choice"),
    (CHAT, chat(tool_choice=named("paint")), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}),
     "response_format"),
    (CHAT, chat(tools=[TOOL], tool_choice=named("paint"), structured_outputs={"regex": "a"}),
     "structured_outputs"),
    (CHAT, chat(parallel_tool_calls="no"), "parallel_tool_calls"),
    (CHAT, chat(functions=[{"name": "a"}]), "functions"),
    (CHAT, message(role="tool", content="hi"), "messages[0].tool_call_id"),
    (CHAT, message(role="tool", content=None, tool_call_id="1"), "messages[0].content"),
    (CHAT, message(role="tool", content=[IMAGE], tool_call_id="1"),
     "messages[0].content[0].type"),
    (CHAT, message(role="function", content="hi"), "messages[0]"),
    (CHAT, message(role="assistant"), "messages[0].content"),
    (CHAT, message(role="assistant", content=None, tool_calls=[]), "messages[0].content"),
    (CHAT, message(role="assistant", content=None, tool_calls=None), "messages[0].content"),
    (CHAT, message(role="assistant", content=5, tool_calls=[CALL]), "messages[0].content"),
    (CHAT, message(role="assistant", content="", tool_calls={}), "messages[0].tool_calls"),
    (CHAT, message(role="assistant", content="", tool_calls=[{}]), "messages[0].tool_calls[0].id"),
    (CHAT, calls({**CALL, "type": "code"}), "messages[0].tool_calls[0].type"),
    (CHAT, calls({**CALL, "function": {"name": "a"}}),
     "messages[0].tool_calls[0].function.arguments"),
    (CHAT, calls({**CALL, "function": {"name": "a", "arguments": {}}}),
     "messages[0].tool_calls[0].function.arguments"),
    (CHAT, message(role="user", content="x", tool_calls=[CALL]), "messages[0].tool_calls"),
    (CHAT, message(role="system", content="x", name="me"), "messages[0].name"),
    (CHAT, message(role="assistant", content="x", name="me"), "messages[0].name"),
    (TEXT, text(max_completion_tokens=5), "max_completion_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), GOOD)
async def test_good_bodies(path: str, body: Any) -> None:
    response = await post(path, body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == "fine"
    assert choice.keys() >= {"index", "finish_reason", "logprobs"}


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
    for body in (
        schema_format({"name": "a", "schema": {"a": [{"const": content}]}}),
        schema_format({"name": "a", "schema": {content: {}}}),
        function(name="a", parameters={"description": content}),
        chat(structured_outputs={"choice": [content]}),
        calls({**CALL, "function": {"name": "a", "arguments": content}}),
    ):
        with pytest.raises(ValidationError, match="lone surrogate"):
            ChatBody.model_validate(body)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_json_lacks_are_found(number: float) -> None:
    """Python's parser takes them, and nothing that reads a schema does."""
    for body in (
        schema_format({"name": "a", "schema": {"minimum": number}}),
        chat(logit_bias={"5": number}),
        chat(presence_penalty=number),
    ):
        with pytest.raises(ValidationError):
            ChatBody.model_validate(body)


@pytest.mark.parametrize("depth", [100, 900, 5_000, 100_000])
@pytest.mark.parametrize(
    "place",
    [
        "{}",
        '{{"model": "demo", "messages": {}}}',
        '{{"model": "demo", "prompt": {}}}',
        '{{"model": "demo", "prompt": "x", "speculation": {}}}',
        '{{"model": "demo", "prompt": "x", "logit_bias": {}}}',
    ],
)
@pytest.mark.parametrize("brackets", ["[]", ('{"a":', "}")])
async def test_deep_json_is_400(place: str, depth: int, brackets: Any) -> None:
    """Python gives up on deep values wherever it meets them: reading, checking, or printing."""
    opening, closing = brackets
    deep = opening * depth + ("1" if closing == "}" else "") + closing * depth
    content = place.format(deep).encode()
    for path in (CHAT, TEXT, "/tokenize"):
        response = await post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, (path, response.text)
        assert response.json()["error"]["type"] == "invalid_request_error"
        if depth == 100_000:
            assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("depth", [100, 900, 100_000])
@pytest.mark.parametrize(
    "place",
    [
        '"response_format": {{"type": "json_schema", "json_schema": {{"name": "a","schema":{}}}}}',
        '"tools": [{{"type": "function", "function": {{"name": "a", "parameters": {}}}}}]',
        '"metadata": {}',
    ],
    ids=["response_format", "tools", "metadata"],
)
async def test_a_deep_schema_is_no_failure(place: str, depth: int) -> None:
    """What is passed on as it came meets code that is not ours, which may give up as well."""
    deep = '{"items":' * depth + "{}" + "}" * depth
    fields = f'"messages": [{json.dumps(USER)}], {place.format(deep)}'
    content = f'{{"model": "demo", {fields}}}'.encode()
    response = await post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code < 500, response.text


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "%"],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
async def test_another_content_type_is_refused(path: str, content_type: str) -> None:
    content = json.dumps({**text(), "messages": [USER]}).encode()
    response = await post(path, content=content, headers={"content-type": content_type})
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"

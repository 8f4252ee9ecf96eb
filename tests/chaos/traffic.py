"""Streams for the chaos suite: what is asked, what came, and whether it is as it should be."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.conftest import SAMPLE

IMAGE = base64.b64encode(SAMPLE.read_bytes()).decode()
SHOWN = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
    {"type": "text", "text": "Describe the image."},
]
COUNT = "Count from 3 to 9."
NUMBERS = {
    "type": "object",
    "properties": {
        "numbers": {
            "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 60, "maxItems": 60,
        },
    },
    "required": ["numbers"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "note", "strict": True, "parameters": NUMBERS}}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": NUMBERS}}
LONG: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True}
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """One kind of request; the seed is filled in by the run."""

    name: str
    options: dict[str, Any]
    content: Any = COUNT
    is_chat: bool = True

    def body(self, model: str, seed: int) -> dict[str, Any]:
        """Return the body of a stream."""
        body = {
            "model": model, "seed": seed, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True}, **self.options,
        }  # fmt: skip
        if self.is_chat:
            return {**body, "messages": [{"role": "user", "content": self.content}]}
        return {**body, "prompt": self.content}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"


CASES = (
    Case("greedy", {**LONG, "temperature": 0}),
    Case("image, T 1", {**LONG, "temperature": 1}, SHOWN),
    Case("image, T 1, without speculation", {
        **LONG, "temperature": 1, "speculation": {"enabled": False}, "max_tokens": 300,
    }, SHOWN),
    Case("stop strings, T 1", {**LONG, "temperature": 1.2, "stop": ["zz", "17, 1", "qu"]}),
    Case("logprobs, T 1", {**LONG, "temperature": 1, "logprobs": True, "top_logprobs": 3}),
    Case("n, image", {**LONG, "temperature": 1, "n": 3, "max_tokens": 250}, SHOWN),
    Case("penalties", {**LONG, "temperature": 0.8, "frequency_penalty": 0.5,
                       "repetition_penalty": 1.1}),
    Case("schema, T 1", {"temperature": 1, "max_tokens": 600, "response_format": AS_SCHEMA}),
    Case("schema, n, logprobs", {"temperature": 1, "max_tokens": 600, "n": 2, "logprobs": True,
                                 "response_format": AS_SCHEMA}, SHOWN),
    Case("tool", {"temperature": 1, "max_tokens": 900, "tools": [TOOL],
                  "tool_choice": "required", "parallel_tool_calls": False}),
    Case("text, echo, logprobs", {**LONG, "temperature": 1, "echo": True, "logprobs": 2},
         "Count from 3 to 9. ", is_chat=False),
)  # fmt: skip


@dataclass
class Answer:
    """A stream put together, with all that must not depend on faults."""

    status: int = 0
    # By choice: text, ids, calls, log-probabilities, finish reason.
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    calls: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    is_done: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids.values()))

    @property
    def has_ended(self) -> bool:
        """Whether it ended as a stream must: every choice once, then the word that ends it."""
        ends = [len(reasons) for reasons in self.reasons.values()]
        return self.is_done and ends == [1] * len(self.ids) and self.error is None

    def add(self, chunk: dict[str, Any]) -> None:
        """Take a chunk."""
        self.error = chunk.get("error", self.error)
        if usage := chunk.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.usage = {name: usage[name] for name in names}
        for choice in chunk.get("choices", ()):
            index = choice["index"]
            delta = choice.get("delta", {})
            text = (choice.get("text") or "") + (delta.get("content") or "")
            self.texts[index] = self.texts.get(index, "") + text
            self.ids.setdefault(index, []).extend(choice.get("token_ids") or [])
            functions = [call["function"] for call in delta.get("tool_calls") or ()]
            self.calls.setdefault(index, []).extend(functions)
            self.logprobs.setdefault(index, []).extend(_logprobs(choice.get("logprobs")))
            if choice["finish_reason"] is not None:
                self.reasons.setdefault(index, []).append(choice["finish_reason"])

    def difference(self, other: Answer) -> str | None:
        """Return what is not the same; None = nothing."""
        for name in ("status", "texts", "ids", "calls", "reasons", "usage", "error", "is_done"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} instead of {theirs!r}"[:2000]
        for index, expected in other.logprobs.items():
            mine = self.logprobs.get(index, [])
            if len(mine) != len(expected) or any(
                abs(a - b) > TOLERANCE for a, b in zip(mine, expected, strict=True)
            ):
                return f"logprobs of choice {index}"
        return None


def _logprobs(found: Any) -> Iterable[float]:
    if not found:
        return
    for entry in found.get("content") or ():
        yield entry["logprob"]
        yield from (top["logprob"] for top in entry["top_logprobs"])
    yield from (value for value in found.get("token_logprobs") or () if value is not None)


async def ask(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], answer: Answer | None = None
) -> Answer:
    """Stream one request to its end; `answer` may be watched meanwhile."""
    answer = answer or Answer()
    async with client.stream("POST", path, json=body) as response:
        answer.status = response.status_code
        answer.headers = dict(response.headers)
        if response.status_code != 200:
            text = (await response.aread()).decode()
            assert text.startswith('{"error"'), (response.status_code, text)
            answer.error = json.loads(text)["error"]
            return answer
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.is_done = True
            elif line.startswith("data: "):
                answer.add(json.loads(line.removeprefix("data: ")))
    return answer

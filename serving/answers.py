"""What one request's answer looks like, whole or in chunks.

Owns which field of the OpenAI API holds what a choice said, and what was asked to be shown. Knows
no order of chunks and no workers. Invariant: a chunk and the whole are made by the same code, so
chunks put together are the whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serving.logprobs import TokenBytesOf, chat_logprobs, completion_logprobs
from serving.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletionChoice,
    Envelope,
    FunctionCall,
    PromptDetails,
    SpeculationUsage,
    ToolCallItem,
    Usage,
)
from serving.textstream import TextDelta, TextRequest
from workers.contracts import FinishReason


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one request wants to be answered."""

    kind: Literal["chat", "completion"]
    id: str
    created: int
    model: str
    # One for each answer, prompt by prompt.
    choices: tuple[TextRequest, ...]
    token_bytes: TokenBytesOf
    # Answers to each prompt.
    n: int = 1
    include_usage: bool = False
    returns_ids: bool = False
    reports_speculation: bool = False

    def whole(self, results: Sequence[TextDelta]) -> dict[str, Any]:
        """Return the answer in one piece, of what each choice said in all."""
        choices: Any = [
            self._chat_choice(index, said)
            if self.kind == "chat"
            else self._text_choice(index, said, self._finish_reason(said))
            for index, said in enumerate(results)
        ]
        name: Any = "chat.completion" if self.kind == "chat" else "text_completion"
        return Envelope(
            id=self.id, object=name, created=self.created, model=self.model, choices=choices,
            usage=self._usage(results), **self._prompt_ids(),
        ).dump()  # fmt: skip

    def role_chunk(self, index: int) -> bytes:
        """Return the first chunk of a chat's choice."""
        delta = ChatDelta(role="assistant", content="")
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        return self._chunk([choice], is_first=index == 0)

    def is_shown(self, said: TextDelta) -> bool:
        """Whether there is anything to put into a chunk."""
        return bool(said.text or said.calls or said.scores or (said.token_ids and self.returns_ids))

    def chunk(self, index: int, said: TextDelta, *, is_first: bool) -> bytes:
        """Return a chunk with what a choice said."""
        if self.kind == "completion":
            text = self._text_choice(index, said, None)
            return self._chunk([text], said=said, is_first=is_first)
        fields: dict[str, Any] = (
            {"tool_calls": self._calls(index, said, True)} if said.calls else {}
        )
        if said.text or not said.calls:
            fields["content"] = said.text
        return self._chunk([self._chat_chunk(index, said, ChatDelta(**fields))], said=said)

    def finish_chunk(self, index: int, last: TextDelta, *, is_first: bool) -> bytes:
        """Return a choice's last chunk, which has the reason and nothing else."""
        reason = self._finish_reason(last)
        choice: Any
        if self.kind == "completion":
            choice = CompletionChoice(index=index, text="", logprobs=None, finish_reason=reason)
        else:
            choice = ChatChunkChoice(
                index=index, delta=ChatDelta(), logprobs=None, finish_reason=reason
            )
        return self._chunk([choice], said=last, is_first=is_first)

    def usage_chunk(self, results: Sequence[TextDelta]) -> bytes:
        """Return the chunk that has the usage and no choices."""
        return self._chunk([], usage=self._usage(results))

    def _chunk(
        self,
        choices: Any,
        *,
        usage: Usage | None = None,
        said: TextDelta | None = None,
        is_first: bool = False,
    ) -> bytes:
        name: Any = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        fields: dict[str, Any] = {"usage": usage} if self.include_usage else {}
        if is_first:
            fields |= self._prompt_ids()
        if said is not None and self.reports_speculation:
            fields["speculation"] = _speculation([said], tokens=said.usage.completion_tokens)
        return encode_event(
            Envelope(
                id=self.id, object=name, created=self.created, model=self.model,
                choices=choices, **fields,
            ).dump()
        )  # fmt: skip

    def _text_choice(self, index: int, said: TextDelta, reason: str | None) -> CompletionChoice:
        scores = completion_logprobs(said.scores, self.token_bytes) if said.scores else None
        return CompletionChoice(
            index=index, text=said.text, logprobs=scores, finish_reason=reason, **self._ids(said)
        )

    def _chat_choice(self, index: int, said: TextDelta) -> ChatChoice:
        # OpenAI's clients take an empty answer beside calls for null.
        content = None if said.calls and not said.text else said.text
        calls: dict[str, Any] = (
            {"tool_calls": self._calls(index, said, False)} if said.calls else {}
        )
        return ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", content=content, refusal=None, **calls),
            logprobs=chat_logprobs(said.scores, self.token_bytes) if said.scores else None,
            finish_reason=self._finish_reason(said),
            **self._ids(said),
        )

    def _chat_chunk(self, index: int, said: TextDelta, delta: ChatDelta) -> ChatChunkChoice:
        scores = chat_logprobs(said.scores, self.token_bytes) if said.scores else None
        return ChatChunkChoice(
            index=index, delta=delta, logprobs=scores, finish_reason=None, **self._ids(said)
        )

    def _calls(self, choice: int, said: TextDelta, is_chunk: bool) -> list[ToolCallItem]:
        first = said.num_calls - len(said.calls)
        return [
            ToolCallItem(
                **({"index": i} if is_chunk else {}),
                id=self._call_id(choice, i),
                type="function",
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for i, call in enumerate(said.calls, first)
        ]

    def _call_id(self, choice: int, call: int) -> str:
        name = f"{self.id}:{choice}:{call}"
        return f"call_{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"

    @staticmethod
    def _finish_reason(said: TextDelta) -> str:
        if said.num_calls and said.finish_reason is FinishReason.STOP:
            return "tool_calls"
        return str(said.finish_reason)

    def _ids(self, said: TextDelta) -> dict[str, Any]:
        return {"token_ids": list(said.token_ids)} if self.returns_ids else {}

    def _prompt_ids(self) -> dict[str, Any]:
        if not self.returns_ids:
            return {}
        prompts = [list(c.generation.prompt_ids) for c in self.choices[:: self.n]]
        return {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts}

    def _usage(self, results: Sequence[TextDelta]) -> Usage:
        # A prompt counts once, however many answers it gets.
        firsts = [said.usage for said in results[:: self.n]]
        num_prompt = sum(usage.prompt_tokens for usage in firsts)
        num_completion = sum(said.usage.completion_tokens for said in results)
        details = PromptDetails(cached_tokens=sum(usage.cached_tokens for usage in firsts))
        fields = {"speculation": _speculation(results)} if self.reports_speculation else {}
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=details,
            **fields,
        )


def _speculation(results: Sequence[TextDelta], **fields: int) -> SpeculationUsage:
    totals = [said.speculation for said in results]
    return SpeculationUsage(
        draft_tokens=sum(total.draft_tokens for total in totals),
        accepted_tokens=sum(total.accepted_tokens for total in totals),
        steps=sum(total.steps for total in totals),
        fallbacks=sum(total.fallbacks for total in totals),
        **fields,
    )


def encode_event(value: dict[str, Any]) -> bytes:
    """Encode one event.

    As ASCII: some clients cut lines at U+2028 or U+0085 too, which JSON may hold unescaped.
    """
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"

"""The HTTP bodies of the OpenAI API, as far as they are honoured, and nothing else.

Owns names, types and ranges of the parameters of generation. Knows no model, no tokenizer and no
Ray. Invariant: a body that validates holds only parameters that take effect. A parameter of
OpenAI's API that is not supported passes at its neutral value alone (`store=false`); any other
value, and any unknown name, is an error naming the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from serving.fields import (
    MAX_INT,
    Body,
    Text,
    TokenId,
    body_error,
    neutral,
    tag_text_or_list,
)
from serving.formats import (
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
    ToolChoice,
    Tools,
)
from serving.messages import Messages

MAX_STOPS = 4
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_BIAS = 100
# Most likely tokens reported beside each one.
MAX_LOGPROBS = 20
# Answers to one body: its prompts times `n`.
MAX_CHOICES = 128
# Beyond any model's context; the engine knows the model's own. Of all prompts together.
MAX_PROMPT_IDS = 2**21
# One way to write each number: two keys cannot be one token.
_BIAS_KEY = re.compile("0|[1-9][0-9]{0,9}")


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, neutral(False)] = None


class Speculation(Body):
    """This request's own wishes for speculative decoding; the output does not depend on them."""

    enabled: bool | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    # Whether the answer says what drafts did.
    report: bool | None = None


StopText = Annotated[Text, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopText, Tag("(text)")]
    | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS), Tag("(list)")],
    Discriminator(tag_text_or_list),
]


def _check_biases(value: Any) -> Any:
    """Check all at once: a dict's own checks would build an error for each entry."""
    if not isinstance(value, dict):
        raise body_error("logit_bias", "must be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise body_error("logit_bias", f"at most {MAX_BIASES} entries are accepted")
    for key, bias in value.items():
        param = f"logit_bias.{str(key)[:40]}"
        if not isinstance(key, str) or not _BIAS_KEY.fullmatch(key):
            raise body_error(param, "keys are token ids, in decimal")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise body_error(param, f"a bias is a number in [-{MAX_BIAS}, {MAX_BIAS}]")
    return value


LogitBias = Annotated[
    dict[str, float],
    BeforeValidator(_check_biases),
    WithJsonSchema({
        "type": "object",
        "propertyNames": {"pattern": f"^({_BIAS_KEY.pattern})$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "maxProperties": MAX_BIASES,
    }),
]  # fmt: skip


# A day.
MAX_TIMEOUT_S = 86_400


class GenerationBody(Body):
    """The parameters that both endpoints share."""

    model: Text
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # -1 and 0 both mean off.
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_IDS)] | None = (
        None
    )
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    # Seconds after which it is given up, whatever it is doing.
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    # An opaque label of the client's own; nothing here depends on it.
    user: Text | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def reports_speculation(self) -> bool:
        """Whether the answer says what drafts did."""
        return self.speculation is not None and bool(self.speculation.report)

    @property
    def has_form(self) -> bool:
        """Whether the whole answer must look in a certain way."""
        has_format = not isinstance(self.response_format, TextFormat | None)
        return has_format or self.structured_outputs is not None

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report at each token of the answer; None = nothing."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return None

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise body_error("stream_options", "only allowed when stream is true")
        if self.structured_outputs is not None and not isinstance(
            self.response_format, TextFormat | None
        ):
            raise body_error("structured_outputs", "contradicts response_format; send one of them")
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    # Whether one answer may call more than one function.
    parallel_tool_calls: bool | None = None

    functions: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral("none")] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    audio: Annotated[Any, neutral()] = None
    prediction: Annotated[Any, neutral()] = None
    reasoning_effort: Annotated[Any, neutral()] = None
    verbosity: Annotated[Any, neutral()] = None
    web_search_options: Annotated[Any, neutral()] = None
    store: Annotated[Any, neutral(False)] = None
    metadata: Annotated[Any, neutral({})] = None
    service_tier: Annotated[Any, neutral("auto", "default")] = None

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report at each token of the answer; None = nothing."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise body_error("max_completion_tokens", "contradicts max_tokens; send one of them")
        if self.top_logprobs and not self.logprobs:
            raise body_error("top_logprobs", "only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if not self.forces_call:
            return self
        names = [tool.function.name for tool in self.tools or ()]
        if not names:
            raise body_error("tool_choice", "there are no tools to call")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise body_error("tool_choice", "no tool has this name")
        if self.has_form:
            param = "structured_outputs" if self.structured_outputs else "response_format"
            raise body_error(param, "contradicts tool_choice, which asks for a call")
        return self


MAX_PROMPTS = MAX_CHOICES
PromptIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPT_IDS)]


def _tag_prompt(value: Any) -> str:
    match value:
        case [str(), *_]:
            return "(texts)"
        case [list(), *_]:
            return "(prompts)"
        case list():
            return "(ids)"
    return "(text)"


def _check_total(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], list):
        total = sum(len(prompt) for prompt in value if isinstance(prompt, list))
        if total > MAX_PROMPT_IDS:
            raise body_error("prompt", f"at most {MAX_PROMPT_IDS} token ids are accepted")
    return value


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    # A text, token ids, or several of one of them.
    prompt: Annotated[
        Annotated[Text, Tag("(text)")]
        | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("(texts)")]
        | Annotated[PromptIds, Tag("(ids)")]
        | Annotated[
            list[PromptIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("(prompts)")
        ],
        Discriminator(_tag_prompt),
        BeforeValidator(_check_total),
    ]
    # 0 scores a prompt: nothing is said after it.
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # Whether the text begins with the prompt.
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    suffix: Annotated[Any, neutral()] = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt if not isinstance(prompt, int)]
        return several or [[i for i in self.prompt if isinstance(i, int)]]

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report at each token of the answer; None = nothing."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.logprobs if self.echo else None

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        n = self.n or 1
        if len(self.prompts) * n > MAX_CHOICES:
            raise body_error("prompt", f"prompts times n are at most {MAX_CHOICES}")
        if self.best_of not in (None, n):
            raise body_error("best_of", "not supported: only the value of n")
        if self.max_tokens == 0 and not self.echo:
            raise body_error("max_tokens", "0 is for scoring a prompt, with echo")
        return self

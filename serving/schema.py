"""The HTTP bodies of the OpenAI API, as far as they are honoured, and nothing else.

Owns names, types and ranges of request fields and the shapes of responses. Knows no model, no
tokenizer and no Ray. Invariant: a body that validates holds only parameters that take effect. A
parameter of OpenAI's API that is not supported yet passes at its neutral value alone (`n=1`,
`logprobs=false`); any other value, and any unknown name, is an error naming the parameter. How
many errors are built does not grow with the body: lists end at their first bad item.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_INT = 2**31 - 1
MAX_STOPS = 4
MAX_STOP_IDS = 64
MAX_MESSAGES = 4096
# Of one message.
MAX_PARTS = 4096
# Time stamps and positions stay within what a prompt can hold.
MIN_FPS = 0.01
MAX_FPS = 240
# As many prompts as OpenAI's API takes in one body.
MAX_TEXTS = 2048
# Beyond any model's context; the engine knows the model's own.
MAX_PROMPT_IDS = 2**21


def neutral(*values: object) -> AfterValidator:
    """Accept null and `values` only: the parameter is known and not supported yet."""

    def check(value: Any) -> Any:
        for accepted in values:
            # True == 1 in Python, but not in JSON.
            if value == accepted and isinstance(value, bool) == isinstance(accepted, bool):
                return value
        if value is None:
            return value
        accepts = " or ".join(repr(v) for v in values) if values else "null"
        raise PydanticCustomError(
            "unsupported_parameter", "not supported yet: only {accepts}", {"accepts": accepts}
        )

    return AfterValidator(check)


def _tag_by_type(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return _tag(kind)


def _tag_by_role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return _tag(role)


def _tag(name: Any) -> str:
    # Whatever else stands there may be large: it is not written out.
    return f"({name})" if isinstance(name, str) else "()"


def _tag_text_or_list(value: Any) -> str:
    return "(text)" if isinstance(value, str) else "(list)"


def _is_unicode(text: str) -> str:
    # JSON can escape half a surrogate pair; such a string is no text and breaks every encoder.
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "invalid_unicode", "not valid Unicode: a lone surrogate"
        ) from None
    return text


Text = Annotated[str, AfterValidator(_is_unicode)]


class Body(BaseModel):
    """A part of a request: strict types, no unknown names, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, values: Any) -> Any:
        """Drop all unknown names but the first: one is enough for the error they end in."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        unknown = [name for name in values if name not in fields]
        if len(unknown) < 2:
            return values
        return {name: values[name] for name in (*(values.keys() & fields), unknown[0])}


class TextPart(Body):
    """Text inside a message's content list."""

    type: Literal["text"]
    text: Text


class ImageUrl(Body):
    """Where an image is."""

    url: Text
    detail: Annotated[Any, neutral("auto")] = None


class ImagePart(Body):
    """An image inside a message's content list."""

    type: Literal["image_url"]
    image_url: ImageUrl


class VideoPart(Body):
    """A video inside a message's content list, as frames of one size."""

    type: Literal["video"]
    video: Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
    # Frames a second; as Qwen's own client samples them unless told otherwise.
    fps: Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS)] = 2.0


def _refuse_container(value: Any) -> Any:  # noqa: ARG001 - whatever it holds
    raise PydanticCustomError(
        "unsupported_parameter",
        'video files are not decoded here; send the frames: {{"type": "video", "video": '
        '["data:image/...", ...], "fps": 2.0}}',
    )


class VideoUrlPart(Body):
    """A video file: known, and not decoded here."""

    type: Literal["video_url"]
    video_url: Annotated[Any, AfterValidator(_refuse_container)]


Part = Annotated[
    Annotated[TextPart, Tag("(text)")]
    | Annotated[ImagePart, Tag("(image_url)")]
    | Annotated[VideoPart, Tag("(video)")]
    | Annotated[VideoUrlPart, Tag("(video_url)")],
    Discriminator(
        _tag_by_type,
        custom_error_type="unsupported_parameter",
        custom_error_message="content parts of this type are not supported: text, image_url or "
        "video",
    ),
]
# Tags in parentheses are dropped from error paths: they are our names, not the client's.
UserContent = Annotated[
    Annotated[Text, Tag("(text)")]
    | Annotated[
        list[Part], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("(list)")
    ],
    Discriminator(_tag_text_or_list),
]
TextContent = Annotated[
    Annotated[Text, Tag("(text)")]
    | Annotated[
        list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("(list)")
    ],
    Discriminator(_tag_text_or_list),
]


class SystemMessage(Body):
    """Instructions; `developer` is OpenAI's newer name of the same role."""

    role: Literal["system", "developer"]
    content: TextContent
    name: Annotated[Any, neutral()] = None


class UserMessage(Body):
    """What the user says and shows."""

    role: Literal["user"]
    content: UserContent
    name: Annotated[Any, neutral()] = None


class AssistantMessage(Body):
    """An earlier answer; the null fields are what OpenAI's client sends back."""

    role: Literal["assistant"]
    content: TextContent
    name: Annotated[Any, neutral()] = None
    refusal: Annotated[Any, neutral()] = None
    tool_calls: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral()] = None
    audio: Annotated[Any, neutral()] = None
    annotations: Annotated[Any, neutral([])] = None


Message = Annotated[
    Annotated[SystemMessage, Tag("(system)")]
    | Annotated[SystemMessage, Tag("(developer)")]
    | Annotated[UserMessage, Tag("(user)")]
    | Annotated[AssistantMessage, Tag("(assistant)")],
    Discriminator(
        _tag_by_role,
        custom_error_type="unsupported_parameter",
        custom_error_message="role must be system, developer, user or assistant",
    ),
]


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, neutral(False)] = None


class Speculation(Body):
    """This request's own wishes for speculative decoding; the output does not depend on them."""

    enabled: bool = True
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None


StopText = Annotated[Text, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopText, Tag("(text)")]
    | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS), Tag("(list)")],
    Discriminator(_tag_text_or_list),
]


class GenerationBody(Body):
    """The parameters that both endpoints share."""

    model: Text
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # -1 and 0 both mean off.
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_IDS)] | None = (
        None
    )
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    # An opaque label of the client's own; nothing here depends on it.
    user: Text | None = None

    n: Annotated[Any, neutral(1)] = None
    presence_penalty: Annotated[Any, neutral(0)] = None
    frequency_penalty: Annotated[Any, neutral(0)] = None
    repetition_penalty: Annotated[Any, neutral(1)] = None
    logit_bias: Annotated[Any, neutral({})] = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _body_error("stream_options", "only allowed when stream is true")
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None

    logprobs: Annotated[Any, neutral(False)] = None
    top_logprobs: Annotated[Any, neutral(0)] = None
    response_format: Annotated[Any, neutral({"type": "text"})] = None
    tools: Annotated[Any, neutral([])] = None
    tool_choice: Annotated[Any, neutral("none")] = None
    parallel_tool_calls: Annotated[Any, neutral(True, False)] = None
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

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise _body_error("max_completion_tokens", "contradicts max_tokens; send one of them")
        return self


TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]


def _tag_prompt(value: Any) -> str:
    if isinstance(value, list):
        return "(texts)" if value and isinstance(value[0], str) else "(ids)"
    return "(text)"


def _only_one(texts: list[str]) -> list[str]:
    if len(texts) > 1:
        raise PydanticCustomError("unsupported_parameter", "several prompts: not supported yet")
    return texts


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    # One text, a list with one text, or token ids.
    prompt: Annotated[
        Annotated[Text, Tag("(text)")]
        | Annotated[
            list[Text],
            Field(fail_fast=True, max_length=MAX_TEXTS),
            AfterValidator(_only_one),
            Tag("(texts)"),
        ]
        | Annotated[
            list[TokenId],
            Field(fail_fast=True, min_length=1, max_length=MAX_PROMPT_IDS),
            Tag("(ids)"),
        ],
        Discriminator(_tag_prompt),
    ]

    best_of: Annotated[Any, neutral(1)] = None
    echo: Annotated[Any, neutral(False)] = None
    logprobs: Annotated[Any, neutral()] = None
    suffix: Annotated[Any, neutral()] = None


def _body_error(param: str, problem: str) -> PydanticCustomError:
    """Return an error of the whole body that names one parameter (`errors` reads it)."""
    return PydanticCustomError("body_error", "{problem}", {"param": param, "problem": problem})

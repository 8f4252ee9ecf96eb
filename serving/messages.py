"""The messages of a chat: who speaks, and what a message may hold.

Owns roles, content parts and the calls of tools that an answer made. Knows no template and no
pixels. Invariant: what validates here can be rendered; what a model's template has no place for
is refused later, by its own name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from serving.fields import Body, Name, Text, neutral, tag, tag_by_type, tag_text_or_list

MAX_MESSAGES = 4096
# Of one message.
MAX_PARTS = 4096
# That one answer made.
MAX_CALLS = 1024
# Time stamps and positions stay within what a prompt can hold.
MIN_FPS = 0.01
MAX_FPS = 240


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
    video_url: Annotated[Any, AfterValidator(_refuse_container), WithJsonSchema({"not": {}})]


Part = Annotated[
    Annotated[TextPart, Tag("(text)")]
    | Annotated[ImagePart, Tag("(image_url)")]
    | Annotated[VideoPart, Tag("(video)")]
    | Annotated[VideoUrlPart, Tag("(video_url)")],
    Discriminator(
        tag_by_type,
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
    Discriminator(tag_text_or_list),
]
TextContent = Annotated[
    Annotated[Text, Tag("(text)")]
    | Annotated[
        list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("(list)")
    ],
    Discriminator(tag_text_or_list),
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


class CalledFunction(Body):
    """Which function was called, and with what."""

    name: Name
    # JSON, as a text: an answer that was cut off need not be whole.
    arguments: Text


class Call(Body):
    """A call that an earlier answer made."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Body):
    """An earlier answer; the null fields are what OpenAI's client sends back."""

    role: Literal["assistant"]
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    # Null or absent beside calls alone. Stands behind them, since its check looks at them.
    content: Annotated[TextContent | None, Field(validate_default=True)] = None
    name: Annotated[Any, neutral()] = None
    refusal: Annotated[Any, neutral()] = None
    function_call: Annotated[Any, neutral()] = None
    audio: Annotated[Any, neutral()] = None
    annotations: Annotated[Any, neutral([])] = None

    @field_validator("content")
    @classmethod
    def _has_content(cls, content: Any, info: ValidationInfo) -> Any:
        # Not there at all when it was wrong itself.
        if content is None and not info.data.get("tool_calls", True):
            raise PydanticCustomError("missing", "needed where there are no tool_calls")
        return content


class ToolMessage(Body):
    """What a called tool answered."""

    role: Literal["tool"]
    content: TextContent
    tool_call_id: Text
    name: Text | None = None


def _tag_by_role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return tag(role)


Message = Annotated[
    Annotated[SystemMessage, Tag("(system)")]
    | Annotated[SystemMessage, Tag("(developer)")]
    | Annotated[UserMessage, Tag("(user)")]
    | Annotated[AssistantMessage, Tag("(assistant)")]
    | Annotated[ToolMessage, Tag("(tool)")],
    Discriminator(
        _tag_by_role,
        custom_error_type="unsupported_parameter",
        custom_error_message="role must be system, developer, user, assistant or tool",
    ),
]
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]

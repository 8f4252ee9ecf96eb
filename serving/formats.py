"""What an answer must look like: response formats, structured outputs, tools.

Owns the fields of these and what they forbid each other. Knows no grammar and no template.
Invariant: of several ways to ask for a form, a body that validates uses one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serving.fields import Body, JsonObject, Name, Text, body_error, tag, tag_by_type

MAX_TOOLS = 128
MAX_CHOICES = 4096
# Of a grammar or a regular expression.
MAX_PATTERN = 2**18


class TextFormat(Body):
    """Anything."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema with the name that OpenAI's API wants for it."""

    name: Name
    description: Text | None = None
    # Enforced either way.
    strict: bool | None = None
    # Pydantic's models have a method of the field's own name.
    schema_: JsonObject = Field(alias="schema")


class JsonSchemaFormat(Body):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("(text)")]
    | Annotated[JsonObjectFormat, Tag("(json_object)")]
    | Annotated[JsonSchemaFormat, Tag("(json_schema)")],
    Discriminator(
        tag_by_type,
        custom_error_type="unsupported_parameter",
        custom_error_message="type must be text, json_object or json_schema",
    ),
]
Pattern = Annotated[Text, Field(min_length=1, max_length=MAX_PATTERN)]


class StructuredOutputs(Body):
    """vLLM's way to ask for a form: one of these."""

    json_: JsonObject | None = Field(default=None, alias="json")
    regex: Pattern | None = None
    choice: (
        Annotated[list[Pattern], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)] | None
    ) = None
    # Lark's or GBNF's notation.
    grammar: Pattern | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = (self.json_, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) != 1:
            raise PydanticCustomError(
                "structured_outputs", "exactly one of json, regex, choice and grammar is needed"
            )
        return self


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: Text | None = None
    # A JSON schema; none = no arguments.
    parameters: JsonObject | None = None
    # Whether its arguments are held to the schema.
    strict: bool | None = None


class Tool(Body):
    """A tool; all of them are functions."""

    type: Literal["function"]
    function: Function


def _check_names(tools: list[Tool]) -> list[Tool]:
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.function.name in names:
            raise body_error(f"tools[{i}].function.name", f"a second {tool.function.name!r}")
        names.add(tool.function.name)
    return tools


Tools = Annotated[
    list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS), AfterValidator(_check_names)
]


class NamedFunction(Body):
    """A function by its name."""

    name: Name


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _tag_tool_choice(value: Any) -> str:
    return tag("word" if isinstance(value, str) else "named")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(word)")]
    | Annotated[NamedTool, Tag("(named)")],
    Discriminator(_tag_tool_choice),
]

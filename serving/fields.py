"""What all bodies are made of: strict values, names that are known, and one error at a time.

Owns the base of bodies and the kinds of values that recur in them. Knows no endpoint. Invariants:
an unknown name is an error, and so is a value of another type, a NaN, or a string that is no
Unicode. How many errors are built does not grow with the body: lists end at their first bad item,
and of many unknown names one is told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Neutral:
    """Accepts null and `values` only: the parameter is known and not supported."""

    values: tuple[object, ...]

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Check the value."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the values."""
        return {"enum": [*self.values, None]}

    def _check(self, value: Any) -> Any:
        for accepted in self.values:
            # True == 1 in Python, but not in JSON.
            if value == accepted and isinstance(value, bool) == isinstance(accepted, bool):
                return value
        if value is None:
            return value
        accepts = " or ".join(repr(v) for v in self.values) if self.values else "null"
        raise PydanticCustomError(
            "unsupported_parameter", "not supported: only {accepts}", {"accepts": accepts}
        )


def neutral(*values: object) -> Neutral:
    """Return the annotation of a parameter that takes effect nowhere."""
    return Neutral(values)


def tag(name: Any) -> str:
    """Return a union's tag: in parentheses, so that error paths leave it out."""
    # Whatever else stands there may be large: it is not written out.
    return f"({name})" if isinstance(name, str) else "()"


def tag_by_type(part: Any) -> str:
    """Return the tag for the `type` of a JSON object or of what it became."""
    return tag(part.get("type") if isinstance(part, dict) else getattr(part, "type", None))


def tag_text_or_list(value: Any) -> str:
    """Return which of two a value is."""
    return "(text)" if isinstance(value, str) else "(list)"


def body_error(param: str, problem: str) -> PydanticCustomError:
    """Return an error that names one parameter itself (`errors` reads it)."""
    return PydanticCustomError("body_error", "{problem}", {"param": param, "problem": problem})


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


def _is_json(value: Any) -> Any:
    """Refuse what Python's parser lets pass and few others: NaN, half characters, depth, width."""
    problem = "not an object that JSON can hold"
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "must be an object")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        problem = "not valid Unicode: a lone surrogate"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:
        problem = "NaN and Infinity are no JSON"
    else:
        if not _has_wide_integer(value):
            return value
        problem = "integers beyond 64 bits are not accepted"
    raise PydanticCustomError("invalid_json_value", "{problem}", {"problem": problem})


def _has_wide_integer(value: Any) -> bool:
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            rest.extend(item.values())
        elif isinstance(item, list):
            rest.extend(item)
        elif isinstance(item, int) and not -(2**63) <= item < 2**64:
            return True
    return False


Text = Annotated[str, AfterValidator(_is_unicode)]
# Of a function or a schema, as OpenAI limits them.
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
# An object of the client's own, such as a JSON schema.
JsonObject = Annotated[dict[str, Any], BeforeValidator(_is_json)]


class Body(BaseModel):
    """A part of a request: strict types, no unknown names, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, values: Any) -> Any:
        """Drop all unknown names but the first: one is enough for the error they end in."""
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in values if name not in known]
        if len(unknown) < 2:
            return values
        return {name: values[name] for name in (*(values.keys() & known), unknown[0])}

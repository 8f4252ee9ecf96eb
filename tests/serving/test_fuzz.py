"""Bodies that nobody thought of, made from the API's own description (C15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serving.api import ROUTES
from tests.serving.doubles import FaithfulWorkers, encode, make_app

IDS = encode("the quick 中文😀 fox<|im_end|>")
BOUNDED = settings(
    max_examples=100, derandomize=True, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
CHECKS: list[Callable[..., Any]] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# The path of the one model is a name that no generator guesses.
CASES = [(path, method, GenerationMode.POSITIVE) for path, method, _ in ROUTES]
CASES += [(path, method, GenerationMode.NEGATIVE) for path, method, _ in ROUTES if method == "POST"]


@pytest.fixture(scope="module")
def app() -> Any:
    return make_app(FaithfulWorkers([], ids=IDS, size=3), tools=True)


@pytest.fixture(scope="module")
def api(app: Any) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_c15_any_body(api: Any, path: str, method: str, mode: GenerationMode) -> None:
    """C15: a body of any kind is an answer or a refusal, as described, and never a 5xx."""
    operation = api[path.replace(":path", "")][method]
    is_right = mode is GenerationMode.POSITIVE
    statuses = set()

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if is_right and isinstance(case.body, dict):
            case.body["model"] = "demo"  # or nearly all would be 404
            case.body.pop("timeout", None)  # or nearly all would be 504
        response = case.call()
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)
        # Right bodies may be refused as well, for what no description can tell.
        assert is_right or response.status_code >= 400

    check()
    assert not is_right or "model_id" in path or 200 in statuses


async def test_c15_the_app_answers_afterwards(app: Any) -> None:
    """C15: whatever was sent before has not hurt those that come after."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.json()["choices"][0]["message"]["content"] == "the quick 中文😀 fox"

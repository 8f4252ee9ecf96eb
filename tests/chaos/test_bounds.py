"""Memory stays where it was, however many different pictures come by."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.chaos.conftest import Report, leaked_blocks, memory_mib, scaled
from tests.chaos.traffic import ask
from tests.e2e.conftest import Server

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_IMAGES = scaled(200, 2000)
SAMPLES = 8
# Caches fill up and allocators grow at first; this is for what never stops growing.
MAX_GROWTH_MIB = 40.0


def _picture(number: int) -> str:
    image = Image.new("RGB", (112, 112), (number % 256, number // 256, 128))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _body(model: str, number: int) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": _picture(number)}},
        {"type": "text", "text": "Describe the image."},
    ]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": 4, "stream": True}


async def test_d11_memory_is_flat_over_distinct_images(
    server: Server, client: httpx.AsyncClient, report: Report
) -> None:
    """D11: hundreds of requests with one image each took all memory, pictures never let go."""
    gate = asyncio.Semaphore(8)

    async def show(number: int) -> None:
        async with gate:
            answer = await ask(client, "/v1/chat/completions", _body(server.model, number))
        report.streams_run += 1
        report.status_5xx += answer.status >= 500
        assert answer.is_done, answer

    held: list[float] = []
    size = NUM_IMAGES // SAMPLES
    for sample in range(SAMPLES):
        await asyncio.gather(*map(show, range(sample * size, (sample + 1) * size)))
        held.append(await asyncio.to_thread(memory_mib, server))
    report.memory_mib["after distinct images"] = held
    leaked = await asyncio.to_thread(leaked_blocks, server)
    report.leaked_blocks += leaked
    assert leaked == 0
    # The first half fills the caches.
    assert max(held[SAMPLES // 2 :]) - held[SAMPLES // 2 - 1] < MAX_GROWTH_MIB, held

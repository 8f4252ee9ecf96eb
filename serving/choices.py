"""Several answers to one body: a request for each choice, and their streams as one.

Owns the numbering, the seeds and the ids of choices, and the merging. Knows no text and no HTTP.
Invariants: choice 0 of any `n` is what `n = 1` gives; the first choice that fails ends all, and
its error is the whole's; when the merged stream is closed, every choice's stream is, and no task
is left.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from serving.textstream import TextDelta, TextRequest


class ChoiceDelta(NamedTuple):
    """What one choice's stream said."""

    choice: int
    delta: TextDelta


def fan_out(requests: Sequence[TextRequest], n: int) -> tuple[TextRequest, ...]:
    """Return `n` choices for each prompt: the prompt's index * n + i; pixels are shared."""
    return tuple(
        _choice(request, prompt * n + i, i) for prompt, request in enumerate(requests)
        for i in range(n)
    )  # fmt: skip


def _choice(request: TextRequest, index: int, i: int) -> TextRequest:
    generation = request.generation
    sampling = generation.sampling
    # The same for all prompts, so that several in one body are what each alone would be.
    seed = sampling.seed if i == 0 else _derived_seed(sampling.seed, i)
    name = generation.request_id if index == 0 else f"{generation.request_id}-{index}"
    sampling = replace(sampling, seed=seed)
    return replace(request, generation=replace(generation, request_id=name, sampling=sampling))


def _derived_seed(seed: int, i: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


async def merge(
    streams: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield what the streams say as it comes; closes all of them however it ends."""
    if len(streams) == 1:  # most are; a queue and a task would only add delay
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield ChoiceDelta(0, delta)
        return
    # Short: a client that does not read must hold its requests back, as with one choice.
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    num_running = len(pumps)
    try:
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        # Those whose pump never began.
        await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncGenerator[TextDelta, None],
    queue: asyncio.Queue[ChoiceDelta | Exception | None],
) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put(ChoiceDelta(index, delta))
    except Exception as error:  # noqa: BLE001 - not lost: whoever reads the queue raises it
        await queue.put(error)
        return
    await queue.put(None)

"""The engine says what the library says: greedy output against `generate()`, per family."""

from __future__ import annotations

import pytest

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from workers.contracts import GenerationRequest

PROMPTS: dict[str, list[int | tuple[int, int]]] = {
    "short": [3],
    "text": [70],
    "one image": [6, (3, 4), 5],
    "image first": [(2, 3), 9],
    "image last": [8, (4, 2)],
    "adjacent images": [4, (2, 2), (3, 5), 6],
    "three images": [5, (1, 1), 7, (2, 6), (5, 2), 3],
    "five images": [(2, 2), 3, (1, 4), (4, 1), 2, (3, 3), 1, (2, 5), 4],
}


def _requests(family: str) -> list[GenerationRequest]:
    requests = []
    for seed, (name, parts) in enumerate(PROMPTS.items()):
        if "image" in name and family not in tiny.VISION_FAMILIES:
            continue
        ids, images = tiny.prompt(seed, parts)
        requests.append(tiny.request(name, ids, images, max_tokens=16))
    return requests


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("chunk", [7, 16, 512])
def test_greedy_equals_generate(checkpoints: Checkpoints, family: str, chunk: int) -> None:
    """A3, A7, A9: several images, image and text requests in one batch, any chunking."""
    path = checkpoints(family)
    requests = _requests(family)
    outcome = run(make_engine(path, max_chunk_tokens=chunk), requests, per_step=1)
    for request in requests:
        expected = reference.generate(path, request)
        got = outcome.token_ids[request.request_id]
        assert got == expected, reference.describe_difference(path, request, got, expected)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("length", [31, 32, 33, 67])
def test_a4_chunk_boundaries(checkpoints: Checkpoints, family: str, length: int) -> None:
    """A4: positions were cut on the left but not on the right of a chunk."""
    path = checkpoints(family)
    parts: list[int | tuple[int, int]] = [length]
    if family in tiny.VISION_FAMILIES:
        parts = [20, (4, 5), max(length - 42, 1)]  # the boundary falls inside the image
    ids, images = tiny.prompt(length, parts)
    request = tiny.request("r", ids, images)
    outcome = run(make_engine(path, max_chunk_tokens=32), [request])
    assert outcome.token_ids["r"] == reference.generate(path, request)


def test_a6_a_delta_belongs_to_its_request(checkpoints: Checkpoints) -> None:
    """A6: the delta lived on the model object, and a text request inherited another's."""
    path = checkpoints("qwen2_5_vl")
    requests = _requests("qwen2_5_vl")
    engine = make_engine(path, prefix_caching=False)
    solo = {r.request_id: run(engine, [r]).token_ids[r.request_id] for r in requests}
    together = run(engine, requests, per_step=2).token_ids
    assert together == solo

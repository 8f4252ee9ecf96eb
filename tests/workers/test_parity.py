"""The engine says what the library says: greedy output against `generate()`, per family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from tests.workers.tiny import Part, Video
from workers.contracts import GenerationRequest
from workers.errors import ModelLoadError

# No side, no number of steps and no interval is like another's.
PROMPTS: dict[str, list[Part]] = {
    "short": [3],
    "text": [70],
    "one image": [6, (3, 4), 5],
    "image first": [(2, 3), 9],
    "image last": [8, (4, 2)],
    "adjacent images": [4, (2, 2), (3, 5), 6],
    "three images": [5, (1, 1), 7, (2, 6), (5, 2), 3],
    "five images": [(2, 2), 3, (1, 4), (4, 1), 2, (3, 3), 1, (2, 5), 4],
    "one video": [4, Video(3, 2, 4, 1.5), 5],
    "long video last": [3, Video(7, 1, 2, 2.0)],
    "video, image": [2, Video(2, 3, 2, 1.0), 3, (2, 4), 3],
    "image, video": [(2, 4), Video(3, 1, 3, 2.5), 4],
    "video, image, video": [Video(2, 2, 1, 1.0), (1, 3), Video(3, 1, 2, 3.0), 2],
}


def _requests(family: str) -> list[GenerationRequest]:
    requests = []
    for seed, (name, parts) in enumerate(PROMPTS.items()):
        has_media = any(not isinstance(part, int) for part in parts)
        if has_media and family not in tiny.VISION_FAMILIES:
            continue
        if "video" in name and family not in tiny.VIDEO_FAMILIES:
            continue
        ids, media = tiny.prompt_for(family, seed, parts)
        requests.append(tiny.request(name, ids, media, max_tokens=16))
    return requests


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> Callable[[str], dict[str, list[int]]]:
    """Return the library's answers to a family's requests."""
    known: dict[str, dict[str, list[int]]] = {}

    def answers(family: str) -> dict[str, list[int]]:
        if family not in known:
            path = checkpoints(family)
            known[family] = {r.request_id: reference.generate(path, r) for r in _requests(family)}
        return known[family]

    return answers


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("chunk", [7, 16, 512])
def test_greedy_equals_generate(
    checkpoints: Checkpoints,
    expected: Callable[[str], dict[str, list[int]]],
    family: str,
    chunk: int,
) -> None:
    """A3, A7, A9, A13: images and videos in any order, with text in one batch, any chunking."""
    path = checkpoints(family)
    requests = _requests(family)
    outcome = run(make_engine(path, max_chunk_tokens=chunk), requests, per_step=1)
    assert outcome.failures == {}
    for request in requests:
        right = expected(family)[request.request_id]
        got = outcome.token_ids[request.request_id]
        assert got == right, reference.describe_difference(path, request, got, right)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("length", [31, 32, 33, 67])
def test_a4_chunk_boundaries(checkpoints: Checkpoints, family: str, length: int) -> None:
    """A4: positions were cut on the left but not on the right of a chunk."""
    path = checkpoints(family)
    prompts: list[list[Part]] = [[length]]
    if family in tiny.VISION_FAMILIES:
        # The boundary falls inside the image, and inside the video.
        prompts = [[20, (4, 5), max(length - 42, 1)]]
    if family in tiny.VIDEO_FAMILIES:
        prompts.append([length - 15, Video(4, 2, 3, 2.0), 2])
    requests = [
        tiny.request(str(seed), *tiny.prompt_for(family, length + seed, parts))
        for seed, parts in enumerate(prompts)
    ]
    engine = make_engine(path, max_chunk_tokens=32)
    for request in requests:
        outcome = run(engine, [request])
        assert outcome.token_ids[request.request_id] == reference.generate(path, request)


@pytest.mark.parametrize("family", sorted(tiny.VISION_FAMILIES))
def test_a6_a_delta_belongs_to_its_request(checkpoints: Checkpoints, family: str) -> None:
    """A6: the delta lived on the model object, and a text request inherited another's."""
    requests = _requests(family)
    engine = make_engine(checkpoints(family), prefix_caching=False)
    solo = {r.request_id: run(engine, [r]).token_ids[r.request_id] for r in requests}
    together = run(engine, requests, per_step=2).token_ids
    assert together == solo


WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_5_vl"])
@pytest.mark.parametrize("chunk", [7, 512])
def test_a_window_of_some_layers_is_honoured(
    checkpoints: Checkpoints, family: str, chunk: int
) -> None:
    """Qwen2-MoE's layers do not hand their window on; the library's mask alone has it."""
    path = checkpoints(family, **WINDOW)
    requests = [tiny.request(str(n), tiny.prompt(n, [n])[0], max_tokens=16) for n in (3, 9, 10, 60)]
    outcome = run(make_engine(path, max_chunk_tokens=chunk), requests)
    everything = run(make_engine(checkpoints(family)), requests)
    for request in requests:
        right = reference.generate(path, request)
        got = outcome.token_ids[request.request_id]
        assert got == right, reference.describe_difference(path, request, got, right)
    assert outcome.token_ids["60"] != everything.token_ids["60"], "the window hid nothing"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
            "dynamic rope",
        ),
    ],
)
def test_what_packing_cannot_do_is_refused(
    tmp_path: Path, family: str, changes: dict[str, object], message: str
) -> None:
    """Dynamic rope would give a request positions that depend on its neighbours in the batch."""
    path = tiny.save(tmp_path, family, 0, **changes)
    with pytest.raises(ModelLoadError, match=message):
        make_engine(path)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "qwen3_vl_moe"])
def test_a_row_goes_to_its_own_experts(checkpoints: Checkpoints, family: str) -> None:
    """Experts run over all rows of a packed step at once: a row must not see its neighbours."""
    model = reference.load(checkpoints(family))
    core = getattr(model.model, "language_model", model.model)
    block = core.layers[-1].mlp
    rows = torch.randn(1, 40, model.config.get_text_config().hidden_size)
    with torch.inference_mode():
        together = block(rows)
        alone = torch.cat([block(rows[:, i : i + 1]) for i in range(rows.shape[1])], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)

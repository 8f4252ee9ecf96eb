"""Speculation is invisible: the same tokens with and without it, exactly, in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import Outcome, growing_batches, make_engine, run
from tests.workers.tiny import Part, Video
from workers.contracts import GenerationRequest
from workers.engine import Engine

IMAGE_PARTS: list[list[Part]] = [
    [6, (3, 4), 5],
    [(2, 3), 4],
    [8, (2, 5)],
    [3, (2, 2), (3, 3), 2, (1, 4), 6],
]
VIDEO_PARTS: list[list[Part]] = [
    [5, Video(3, 2, 3, 1.5), 4],
    [2, Video(6, 1, 2, 2.0)],
    [(2, 3), Video(2, 3, 2, 1.0), 3],
]


def _pool(family: str, count: int = 36) -> list[GenerationRequest]:
    """Return mixed requests: text, images and videos, greedy and sampled, filtered and not."""
    sampling = itertools.cycle(
        [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 0.0},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 0.7, "top_k": 12, "min_p": 0.02},
        ]
    )
    media_parts = list(IMAGE_PARTS)
    if family in tiny.VIDEO_FAMILIES:
        media_parts += VIDEO_PARTS
    requests = []
    for seed in range(count):
        has_media = family in tiny.VISION_FAMILIES and seed % 2
        parts: list[Part] = [3 + 5 * (seed % 9)]
        if has_media:
            parts = media_parts[seed // 2 % len(media_parts)]
        ids, media = tiny.prompt_for(family, seed, parts)
        requests.append(
            tiny.request(
                f"r{seed}",
                ids,
                media,
                max_tokens=8 + seed % 9,
                ignore_eos=bool(seed % 3),
                **{"seed": 1000 + seed, **next(sampling)},
            )
        )
    return requests


def assert_same(
    path: str, requests: list[GenerationRequest], ours: Outcome, plain: dict[str, list[int]]
) -> None:
    """Compare with plain decoding; a difference is told with its logit gap."""
    assert ours.failures == {}
    for request in requests:
        got, expected = ours.token_ids[request.request_id], plain[request.request_id]
        assert got == expected, reference.describe_difference(path, request, got, expected)


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> Callable[[str], dict[str, list[int]]]:
    """Return each request's tokens when it is alone and decoded plainly."""
    known: dict[str, dict[str, list[int]]] = {}

    def tokens(family: str) -> dict[str, list[int]]:
        if family not in known:
            engine = make_engine(checkpoints(family), prefix_caching=False)
            known[family] = {
                r.request_id: run(engine, [r]).token_ids[r.request_id] for r in _pool(family)
            }
        return known[family]

    return tokens


def _run_twice(engine: Engine, path: str, expected: dict[str, list[int]], family: str) -> None:
    """Run every batch size, then the same requests again on the prefixes they left."""
    for _ in range(2):
        for group in growing_batches(_pool(family)):
            assert_same(path, group, run(engine, group), expected)


@pytest.mark.parametrize("chunk", [7, 16, 64, 2048])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_b26_b32_matrix(
    checkpoints: Checkpoints,
    noisy_draft: Callable[[str], str],
    plain: Callable[[str], dict[str, list[int]]],
    chunk: int,
    num_drafts: int,
    prefix_caching: bool,
) -> None:
    """B26, B32: batch 1-8, image and text, T 0 and 1, with and without cache hits."""
    path = checkpoints("qwen2_5_vl")
    engine = make_engine(
        path,
        noisy_draft("qwen2_5_vl"),
        max_chunk_tokens=chunk,
        num_draft_tokens=num_drafts,
        prefix_caching=prefix_caching,
    )
    _run_twice(engine, path, plain("qwen2_5_vl"), "qwen2_5_vl")
    stats = engine.stats()
    assert stats.spec_failures == {}
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert (stats.cached_tokens > 0) == prefix_caching


@pytest.mark.parametrize(
    ("family", "num_drafts"),
    [
        *((family, 4) for family in tiny.FAMILIES),
        *((family, number) for family in ("llama", "qwen3_vl") for number in (1, 8, 16)),
    ],
)
def test_b27_every_family_with_a_draft_model(
    checkpoints: Checkpoints,
    noisy_draft: Callable[[str], str],
    plain: Callable[[str], dict[str, list[int]]],
    family: str,
    num_drafts: int,
) -> None:
    """B27: 1 to 16 drafts; chunks end inside images and videos, whose prefixes are found again."""
    path = checkpoints(family)
    engine = make_engine(
        path, noisy_draft(family), num_draft_tokens=num_drafts, max_chunk_tokens=13
    )
    _run_twice(engine, path, plain(family), family)
    stats = engine.stats()
    assert stats.spec_failures == {}
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    # A draft's recurrent state is not kept for reuse, so nothing is.
    assert (stats.cached_tokens > 0) == (family not in tiny.HYBRIDS)


@pytest.mark.parametrize(
    ("family", "method", "num_drafts"),
    [
        *((family, method, 4) for family in tiny.HYBRIDS for method in ("ngram", "nextn")),
        *(("qwen3_5", "nextn", number) for number in (1, 8)),
    ],
)
def test_b24_hybrids_without_a_draft_model(
    checkpoints: Checkpoints,
    plain: Callable[[str], dict[str, list[int]]],
    family: str,
    method: str,
    num_drafts: int,
) -> None:
    """B24: n-gram and NEXTN on hybrids (n-gram on every family: `test_pairings`)."""
    path = checkpoints(family)
    engine = make_engine(
        path,
        method=method,
        ngram_min=1,
        num_draft_tokens=num_drafts,
        max_chunk_tokens=13,
        state_interval=16,
    )
    _run_twice(engine, path, plain(family), family)
    stats = engine.stats()
    assert stats.spec_failures == {}
    assert stats.draft_tokens > 0
    assert stats.cached_tokens > 0


@pytest.mark.parametrize("draft", ["qwen2_5_vl", "llama", "qwen2"])
def test_a22_unrelated_drafts(
    checkpoints: Checkpoints, plain: Callable[[str], dict[str, list[int]]], draft: str
) -> None:
    """A22: a VL draft and text-only drafts under an mrope target, almost always wrong."""
    path = checkpoints("qwen2_5_vl")
    engine = make_engine(path, checkpoints(draft, 7, num_hidden_layers=1))
    _run_twice(engine, path, plain("qwen2_5_vl"), "qwen2_5_vl")
    stats = engine.stats()
    assert stats.spec_failures == {}
    assert stats.accepted_tokens < 0.5 * stats.draft_tokens


@pytest.mark.parametrize("num_blocks", [6, 9, 14])
def test_b30_d13_forced_preemption(
    checkpoints: Checkpoints,
    noisy_draft: Callable[[str], str],
    plain: Callable[[str], dict[str, list[int]]],
    num_blocks: int,
) -> None:
    """B30: stale drafts after preemption; a tiny pool preempts all the time.

    D13: the draft's K/V has the target's block ids, so it cannot be short of any.
    """
    path = checkpoints("qwen2_5_vl")
    engine = make_engine(
        path,
        noisy_draft("qwen2_5_vl"),
        num_blocks=num_blocks,
        num_draft_tokens=5,
        max_chunk_tokens=16,
        prefix_caching=False,
    )
    for group in growing_batches(_pool("qwen2_5_vl")):
        outcome = run(engine, group)
        assert_same(path, group, outcome, plain("qwen2_5_vl"))
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a1_a_target_that_drafts_for_itself_is_always_accepted(
    checkpoints: Checkpoints, family: str
) -> None:
    """A1, A2, B18: wrong draft positions show here, above all with images in the prompt."""
    path = checkpoints(family)
    engine = make_engine(path, path, num_draft_tokens=5, max_chunk_tokens=16)
    run(engine, _pool(family))
    stats = engine.stats()
    assert stats.accepted_tokens > 100
    # A stop inside a block trims it, yet the drafts before and after it were still equal.
    assert stats.accepted_tokens == stats.draft_tokens


def test_b12_b14_a_seed_decides_whatever_the_batch(checkpoints: Checkpoints) -> None:
    """B12, B14: one seed gives one output, another seed another."""
    path = checkpoints("llama")
    ids, _ = tiny.prompt(0, [20])
    requests = [
        tiny.request(f"{name}{seed}", ids, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(5)
        for name in "ab"
    ]
    out = run(make_engine(path, path), requests).token_ids
    assert all(out[f"a{seed}"] == out[f"b{seed}"] for seed in range(5))
    assert len({tuple(out[f"a{seed}"]) for seed in range(5)}) == 5


def test_per_request_draft_limits(checkpoints: Checkpoints) -> None:
    """A request may ask for fewer drafts or none, beside others that draft."""
    path = checkpoints("qwen2_5_vl")
    ids, images = tiny.prompt(3, [5, (3, 3), 4])
    engine = make_engine(path, path, num_draft_tokens=4)
    requests = [
        tiny.request(str(limit), ids, images, max_draft_tokens=limit, ignore_eos=True)
        for limit in (None, 0, 1, 9)
    ]
    outcome = run(engine, requests)
    assert len({tuple(ids) for ids in outcome.token_ids.values()}) == 1
    steps = outcome.num_deltas
    assert steps["0"] == 12
    assert steps["1"] == 1 + 6  # the first token, then pairs; the last one alone
    assert steps["None"] == steps["9"] == 1 + 3


# The middle prompt has limit - 1 tokens, limit, and limit + 1; the first crosses the lowest.
@pytest.mark.parametrize("limit", [40, 46, 47, 48, 56])
def test_b20_past_the_drafts_context_the_request_goes_on(
    checkpoints: Checkpoints, limit: int
) -> None:
    """B20: a prompt between the draft's and the target's context killed the engine."""
    path = checkpoints("llama")
    draft = checkpoints("llama", max_position_embeddings=limit)
    requests = [tiny.request(str(n), tiny.prompt(n, [n])[0], ignore_eos=True) for n in (30, 47, 70)]
    expected = run(make_engine(path), requests).token_ids
    engine = make_engine(path, draft)
    assert run(engine, requests).token_ids == expected
    stats = engine.stats()
    assert stats.spec_failures == {}
    assert stats.draft_tokens > 0


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_b4_a_stop_inside_an_accepted_block(checkpoints: Checkpoints, max_tokens: int) -> None:
    """B4: run greedy once, then declare each produced token to be the stop."""
    path = checkpoints("llama")
    ids, _ = tiny.prompt(5, [12])
    engine = make_engine(path, path, num_draft_tokens=5)
    free = run(engine, [tiny.request("r", ids, ignore_eos=True)]).token_ids["r"]
    for stop in dict.fromkeys(free):
        request = tiny.request(
            "r", ids, ignore_eos=True, stop_token_ids=(stop,), max_tokens=max_tokens
        )
        outcome = run(engine, [request])
        end = free.index(stop) + 1
        assert outcome.token_ids["r"] == free[: min(end, max_tokens)]
        assert outcome.reasons["r"] == ("stop" if end <= max_tokens else "length")

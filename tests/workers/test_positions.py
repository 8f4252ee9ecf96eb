"""Rope positions and KV slots of every forward pass, against whole-sequence references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import Outcome, make_engine, run
from tests.workers.recording import RecordedSpan, record
from tests.workers.tiny import Part, Video
from workers import batch_info
from workers.batch_info import (
    ForwardBatch,
    ForwardMode,
    RopeLayout,
    RopeTable,
    SequenceSpan,
    compute_spec_mrope_positions,
)
from workers.contracts import GenerationRequest
from workers.errors import BatchInfoError, ModelLoadError

BLOCK = 16
LIMITS = batch_info.BatchLimits(vocab_size=100, num_blocks=64, block_size=BLOCK)
CPU = torch.device("cpu")

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
PROMPTS: list[list[Part]] = [
    [9],
    [(3, 5), 7],  # image first
    [6, (2, 7)],  # image last: the temporal axis alone would continue wrongly
    [4, (2, 2), (5, 3), 3],  # adjacent, two sizes
    [30],
    [2, (4, 4), 3, (1, 6), 5, (6, 2)],
    [3, Video(5, 2, 3, 1.5), 4],
    [2, (2, 3), Video(9, 1, 2, 2.0)],  # last, and longer in time than in space
]


def _requests(family: str = "qwen2_5_vl") -> list[GenerationRequest]:
    requests = []
    for seed, parts in enumerate(PROMPTS):
        ids, media = tiny.prompt_for(family, seed, parts)
        requests.append(tiny.request(f"r{seed}", ids, media, max_tokens=14 + seed, ignore_eos=True))
    return requests


def _check(
    spans: list[RecordedSpan],
    requests: list[GenerationRequest],
    outcome: Outcome,
    expected: Callable[[GenerationRequest, list[int], RecordedSpan], Tensor],
) -> None:
    """Compare each recorded span with the columns of its whole sequence, and its slots."""
    by_id = {request.request_id: request for request in requests}
    for span in spans:
        request = by_id[span.request_id]
        # Drafts may run past the final tokens: what stands there does not matter for positions.
        ids = [*request.prompt_ids, *outcome.token_ids[span.request_id], *[2] * 16]
        assert torch.equal(span.rope_positions, expected(request, ids, span)), span
        slots = [
            span.block_table[p // BLOCK] * BLOCK + p % BLOCK for p in span.seq_positions.tolist()
        ]
        assert span.slots.tolist() == slots, span
        if span.mode is ForwardMode.DRAFT_DECODE:
            assert int(span.seq_positions.min()) >= len(request.prompt_ids)


def _columns(path: str) -> Callable[[GenerationRequest, list[int], RecordedSpan], Tensor]:
    def columns(request: GenerationRequest, ids: list[int], span: RecordedSpan) -> Tensor:
        return reference.positions(path, request, ids)[:, span.seq_positions]

    return columns


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [7, 16, 512])
def test_every_mode_agrees_with_the_whole_sequence(
    checkpoints: Checkpoints,
    noisy_draft: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    chunk: int,
) -> None:
    """A1, A4, A7, A16: the same column in extend, decode, verify, draft-extend and draft decode."""
    path = checkpoints(family)
    engine = make_engine(path, noisy_draft(family), max_chunk_tokens=chunk)
    spans = record(engine, monkeypatch)
    requests = _requests(family)
    outcome = run(engine, requests, per_step=1)
    plain = make_engine(path)
    plain_spans = record(plain, monkeypatch)
    plain_outcome = run(plain, requests)
    _check(spans, requests, outcome, _columns(path))
    _check(plain_spans, requests, plain_outcome, _columns(path))
    modes = Counter(span.mode for span in [*spans, *plain_spans])
    assert set(modes) == set(ForwardMode), "a mode was not exercised"
    stats = engine.stats()
    assert 0.1 < stats.accepted_tokens / stats.draft_tokens < 0.95, "accepts are not ragged"


def test_positions_after_preemption_and_replay(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt ending in an image, run again with emitted tokens, seeds them from all axes."""
    path = checkpoints("qwen2_5_vl")
    engine = make_engine(
        path, noisy_draft("qwen2_5_vl"), num_blocks=13, max_chunk_tokens=16, prefix_caching=False
    )
    spans = record(engine, monkeypatch)
    requests = _requests()
    outcome = run(engine, requests)
    assert engine.stats().preemptions > 0
    _check(spans, requests, outcome, _columns(path))

    replays = [
        tiny.request(
            r.request_id,
            list(r.prompt_ids),
            r.media,
            emitted=tuple(outcome.token_ids[r.request_id][:9]),
            max_tokens=r.sampling.max_tokens,
            ignore_eos=True,
        )
        for r in requests
    ]
    engine = make_engine(path, noisy_draft("qwen2_5_vl"), max_chunk_tokens=16)
    spans = record(engine, monkeypatch)
    for replay in replays:
        engine.add(replay)
    tails: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            tails.setdefault(delta.request_id, []).extend(delta.token_ids)
    for replay in replays:
        name = replay.request_id
        assert [*replay.emitted_ids, *tails[name]] == outcome.token_ids[name]
    _check(spans, replays, outcome, _columns(path))


def test_a22_a_text_draft_under_an_mrope_target_counts_linearly(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A22: a text draft took the target's layout and got corrupt positions."""
    path = checkpoints("qwen2_5_vl")
    engine = make_engine(path, checkpoints("llama"))
    spans = record(engine, monkeypatch)
    requests = _requests()
    outcome = run(engine, requests)
    target = _columns(path)

    def expected(request: GenerationRequest, ids: list[int], span: RecordedSpan) -> Tensor:
        return target(request, ids, span) if span.is_target else span.seq_positions

    _check(spans, requests, outcome, expected)


def _per_request_from_the_prompt(
    layout: RopeLayout, spans: list[SequenceSpan], seq_positions: Tensor, deltas: Tensor
) -> Tensor:
    """The fault that this project grew out of: sizes from the prompt, not from the tokens.

    An image request whose prompt slice is empty falls back to a decode-shaped single position; a
    text request gets one for each of its tokens.
    """
    if layout is RopeLayout.LINEAR:
        return seq_positions
    parts = []
    for span in spans:
        if span.rope is None:
            parts.append(torch.arange(span.start, span.end).expand(3, -1))
            continue
        columns = span.rope.prompt[:, span.start : span.end]
        if columns.shape[1] == 0:
            columns = torch.full((3, 1), span.end - 1 + span.rope.delta)
        parts.append(columns)
    return torch.cat(parts, dim=1)


def test_seed_crash_mixed_image_and_text_draft_extend(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed's crash: positions rebuilt per request had the wrong number in draft-extend.

    Image requests got 1 position, text requests n; the sum was not the batch's. Symptoms there:
    out-of-bounds reads in a fused kernel, or "size of tensor a (40) must match b (10)".
    """
    path, draft = checkpoints("qwen2_5_vl"), noisy_draft("qwen2_5_vl")
    # One batch in which image and text requests draft-extend together.
    engine = make_engine(path, draft, num_draft_tokens=4)
    outcome = run(engine, _requests())
    assert engine.stats().spec_failures == {}
    expected = run(make_engine(path), _requests()).token_ids
    assert outcome.token_ids == expected
    accepted = engine.stats().accepted_per_position
    assert accepted[0] > accepted[-1] > 0, "accept lengths do not differ"

    # The same scenario with the fault put back must not pass unnoticed; nor does a start with it.
    engine = make_engine(path, draft, num_draft_tokens=4)
    monkeypatch.setattr(batch_info, "_rope_positions", _per_request_from_the_prompt)
    outcome = run(engine, _requests())
    assert engine.stats().spec_failures or outcome.failures or outcome.token_ids != expected
    with pytest.raises(ModelLoadError, match="warm-up"):
        make_engine(path, draft)


def _span(num: int, start: int, blocks: list[int], **kwargs: Any) -> SequenceSpan:
    return SequenceSpan(list(range(2, 2 + num)), start, blocks, **kwargs)


def _build(*spans: SequenceSpan, layout: RopeLayout = RopeLayout.MROPE) -> ForwardBatch:
    return ForwardBatch.build(ForwardMode.DRAFT_EXTEND, layout, spans, LIMITS, CPU)


def test_ragged_accepts_by_hand() -> None:
    """Lengths [1, 3, 2] with deltas 10, none and -2 after short prompts."""
    table = torch.zeros((3, 4), dtype=torch.int64)
    batch = _build(
        _span(1, 20, [1, 2], rope=RopeTable(table, 10)),
        _span(3, 30, [3, 4, 5]),
        _span(2, 40, [6, 7, 8], rope=RopeTable(table, -2)),
    )
    assert batch.rope_positions.tolist() == [[30, 30, 31, 32, 38, 39]] * 3
    assert batch.seq_positions.tolist() == [20, 30, 31, 32, 40, 41]
    assert batch.attention.slot_mapping.tolist() == [36, 78, 79, 80, 136, 137]
    assert batch.attention.cu_seqlens_q.tolist() == [0, 1, 4, 6]
    assert batch.attention.kv_lens.tolist() == [21, 33, 42]


def test_spec_positions_default_to_the_draft_inputs_own() -> None:
    drafts = torch.tensor([100, 101, 200, 201])
    lens, deltas = torch.tensor([2, 2]), torch.tensor([10, -2])
    out = compute_spec_mrope_positions(drafts, lens, deltas)
    assert out.tolist() == [[110, 111, 198, 199]] * 3
    own = torch.tensor([5, 6, 7])
    out = compute_spec_mrope_positions(drafts, torch.tensor([1, 2]), deltas, seq_positions=own)
    assert out.tolist() == [[15, 4, 5]] * 3
    with pytest.raises(BatchInfoError):
        compute_spec_mrope_positions(drafts, torch.tensor([1, 2]), deltas)


def test_next_decode_moves_index_slot_and_rope_together() -> None:
    table = torch.zeros((3, 4), dtype=torch.int64)
    batch = _build(_span(2, 14, [1, 2], rope=RopeTable(table, -3)), _span(1, 3, [3]))
    batch = batch.next_decode(torch.tensor([9, 8]), [0, 1])
    assert batch.seq_positions.tolist() == [16, 4]
    assert batch.rope_positions.tolist() == [[13, 4]] * 3
    assert batch.attention.slot_mapping.tolist() == [32, 52]
    batch = batch.next_decode(torch.tensor([7]), [0])
    assert (batch.seq_positions.tolist(), batch.attention.kv_lens.tolist()) == ([17], [18])


def test_next_decode_never_leaves_a_sequences_own_blocks() -> None:
    """The table is padded with block 0, which is somebody's: a short row must not reach it."""
    batch = _build(_span(1, 15, [5]), _span(1, 3, [1, 2, 3]))
    with pytest.raises(BatchInfoError, match="leave blocks"):
        batch.next_decode(torch.tensor([9, 9]), [0, 1])


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "at least one"),
        ([SequenceSpan([], 0, [1])], "0 tokens"),
        ([_span(1, -1, [1])], "tokens from -1"),
        ([_span(4, 14, [1])], "18 tokens in 1 blocks"),
        ([_span(2, 0, [1], num_logit_rows=3)], "3 logit rows of 2"),
        ([SequenceSpan([100], 0, [1])], r"outside \[0, 100\)"),
        ([SequenceSpan([-1], 0, [1])], r"outside \[0, 100\)"),
        ([_span(2, 0, [1]), _span(2, 1, [1])], "share a KV slot"),
        ([_span(1, 0, [64])], r"slot outside \[0, 1024\)"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(
    spans: list[SequenceSpan], message: str
) -> None:
    """B23, B30: bad ids and sizes reached a kernel and took the device down."""
    with pytest.raises(BatchInfoError, match=message):
        _build(*spans)

"""A draft model with recurrent state: its drafts are right whatever happens to its slots."""

from __future__ import annotations

import gc

import pytest

from tests.workers import tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from workers.contracts import GenerationRequest, SamplingParams
from workers.sequence import Sequence
from workers.spec.hybrid_draft import DraftSlots


def _sequence(name: str) -> Sequence:
    return Sequence(GenerationRequest(name, (1, 2), SamplingParams(seed=0)), frozenset(), 8)


def _requests(count: int) -> list[GenerationRequest]:
    requests = []
    for seed in range(count):
        ids, media = tiny.prompt_for("qwen3_5", seed, [5, (2, 3), 4] if seed % 2 else [20 + seed])
        requests.append(
            tiny.request(
                f"r{seed}", ids, media, max_tokens=25, temperature=seed % 2, ignore_eos=True
            )
        )
    return requests


def test_the_least_recently_used_slot_is_given_away() -> None:
    slots = DraftSlots(2)
    a, b, c = (_sequence(name) for name in "abc")
    assert {slots.place(a).slot, slots.place(b).slot} == {0, 1}
    slots.place(a).num_tokens = 5
    slots.place(b).num_tokens = 6
    slots.place(a)
    assert slots.place(c).slot == 1
    assert (slots.place(a).slot, slots.place(a).num_tokens) == (0, 5)
    assert slots.place(b).num_tokens == 0, "what stood in its slot is gone"
    assert slots.draft_slot(b) >= 2


def test_a_sequence_that_is_gone_leaves_its_slot() -> None:
    slots = DraftSlots(1)
    slots.place(_sequence("a"))
    gc.collect()
    assert len(slots._places) == 0
    slots.place(_sequence("b"))


@pytest.mark.parametrize("num_blocks", [6, 256])
def test_a1_every_draft_of_the_target_itself_is_accepted(
    checkpoints: Checkpoints, num_blocks: int
) -> None:
    """A1: also after preemption, when slots went to others meanwhile, and behind a small budget."""
    path = checkpoints("qwen3_5")
    requests = _requests(9)
    plain = make_engine(path, prefix_caching=False)
    expected = {r.request_id: run(plain, [r]).token_ids[r.request_id] for r in requests}
    engine = make_engine(
        path,
        path,
        num_blocks=num_blocks,
        max_running=3,
        max_chunk_tokens=16,
        max_step_tokens=24,
        num_draft_tokens=5,
    )
    assert run(engine, requests).token_ids == expected
    stats = engine.stats()
    assert (stats.preemptions > 0) == (num_blocks == 6)
    assert stats.spec_failures == {}
    assert stats.accepted_tokens == stats.draft_tokens > 100


def test_no_prefix_is_reused_and_the_log_says_so(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoints("qwen3_5_text")
    engine = make_engine(path, path)
    assert "no prefix is reused: the draft model has linear attention" in caplog.text
    requests = _requests(1)
    for _ in range(2):
        run(engine, requests)
    assert engine.stats().cached_tokens == 0

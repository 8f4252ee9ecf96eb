"""Failures stay where they happen: drafts cost speed, a target failure ends one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers import tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from tests.workers.scripted import end_wait
from tests.workers.tiny import mixed_requests
from workers.batch_info import ForwardBatch, ForwardMode
from workers.engine import Engine
from workers.models.runner import StepOutput
from workers.spec.drafter import DraftTask, Proposal
from workers.spec.verifier import num_accepted


def _break_forward(
    engine: Engine, mode: ForwardMode, fault: Callable[[Tensor], Tensor], every: int
) -> None:
    """Let the draft model's forward go wrong in one mode, every n-th time."""
    runner = engine._drafting.drafter._runner  # type: ignore[union-attr]
    forward, calls = runner.forward, {"n": 0}

    def broken(batch: ForwardBatch, *args: Any) -> StepOutput:
        out = forward(batch, *args)
        if batch.mode is mode:
            calls["n"] += 1
            if calls["n"] % every == 0:
                return replace(out, logits=fault(out.logits))
        return out

    runner.forward = broken


def _raise(_: Tensor) -> Tensor:
    raise RuntimeError("a made-up one")


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "raises": _raise,
    "nan": lambda logits: torch.full_like(logits, torch.nan),
    "mis-sized": lambda logits: logits[:-1],
}


@pytest.mark.parametrize("mode", [ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_DECODE])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("every", [1, 3])
def test_a_broken_draft_model_costs_speed_only(
    pair: tuple[str, str], mode: ForwardMode, fault: str, every: int
) -> None:
    """The draft's exception, NaN or wrong shape ended the server elsewhere."""
    path, draft = pair
    expected = run(make_engine(path), mixed_requests()).token_ids
    engine = make_engine(path, draft)
    _break_forward(engine, mode, FAULTS[fault], every)
    outcome = run(engine, mixed_requests())
    assert outcome.token_ids == expected
    assert outcome.failures == {}
    assert sum(engine.stats().spec_failures.values()) > 0
    # What comes after the faults is drafted well again: no K/V was trusted that should not be.
    del engine._drafting.drafter._runner.forward  # type: ignore[union-attr]
    before = engine.stats()
    end_wait(engine)
    assert run(engine, mixed_requests()).token_ids == expected
    after = engine.stats()
    assert after.breaker_state == "closed"
    assert after.accepted_tokens > before.accepted_tokens
    assert after.spec_failures == before.spec_failures


class _ScriptedDrafter:
    """Proposes whatever it is told, or raises."""

    name = "scripted"
    needs_kv = False
    max_sequence_len = 1 << 30

    def __init__(self, propose: Callable[[Sequence[DraftTask]], Proposal]) -> None:
        self.propose = propose


def _engine_with(path: str, propose: Callable[[Sequence[DraftTask]], Proposal]) -> Engine:
    engine = make_engine(path, num_draft_tokens=4)
    engine._drafting.drafter = engine._admission._drafter = _ScriptedDrafter(propose)
    return engine


def _ids(value: int) -> Callable[[Sequence[DraftTask]], Proposal]:
    return lambda tasks: Proposal([[value] * task.num_drafts for task in tasks])


def _crash(_: Sequence[DraftTask]) -> Proposal:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("propose", "failure"),
    [
        (_ids(tiny.VOCAB), "propose:id_out_of_range"),
        (_ids(-1), "propose:id_out_of_range"),
        (_crash, "propose:ZeroDivisionError"),
        (lambda tasks: Proposal([[3.0] for _ in tasks]), "propose:id_out_of_range"),  # type: ignore[list-item]
        (lambda _: Proposal([]), "propose:ValueError"),
        (lambda tasks: Proposal([[3] * 50 for _ in tasks]), None),  # more than was asked
        (lambda tasks: Proposal([[] for _ in tasks]), None),
        (_ids(7), None),
    ],
)
def test_b23_any_proposal_is_survived(
    checkpoints: Checkpoints,
    propose: Callable[[Sequence[DraftTask]], Proposal],
    failure: str | None,
) -> None:
    """B23: a draft id equal to the vocabulary size aborted decoding."""
    path = checkpoints("qwen2_5_vl")
    expected = run(make_engine(path), mixed_requests()).token_ids
    engine = _engine_with(path, propose)
    outcome = run(engine, mixed_requests())
    assert outcome.token_ids == expected
    failures = engine.stats().spec_failures
    assert set(failures) == ({failure} if failure else set())


def test_an_oracle_drafter_is_always_accepted(checkpoints: Checkpoints) -> None:
    path = checkpoints("llama")
    request = tiny.request("r", tiny.prompt(0, [9])[0], max_tokens=30, ignore_eos=True)
    script = run(make_engine(path), [request]).token_ids["r"]

    def oracle(tasks: Sequence[DraftTask]) -> Proposal:
        return Proposal([script[t.seq.num_emitted :][: t.num_drafts] for t in tasks])

    engine = _engine_with(path, oracle)
    outcome = run(engine, [request])
    assert outcome.token_ids["r"] == script
    assert outcome.num_deltas["r"] == 1 + -(-29 // 5)
    stats = engine.stats()
    assert stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize("poison", ["raise", "nan"])
def test_a_target_failure_ends_the_one_request_that_causes_it(
    pair: tuple[str, str], poison: str
) -> None:
    path, draft = pair
    requests = mixed_requests()
    expected = run(make_engine(path), requests).token_ids
    engine = make_engine(path, draft)
    runner = engine._runner
    forward = runner.forward

    def poisoned(batch: ForwardBatch, *args: Any) -> StepOutput:
        victims = [s for s in engine.scheduler.running if s.request_id == "r2" and s.num_emitted]
        out = forward(batch, *args)
        rows = batch.attention.block_table[:, 0].tolist()
        for seq in victims:
            if seq.block_table[0] in rows:
                if poison == "raise":
                    raise RuntimeError("poison")
                ends = batch.attention.cu_seqlens_q[1:].tolist()
                end = ends[rows.index(seq.block_table[0])]
                out.logits[(batch.logit_rows == end - 1).nonzero()] = torch.nan
        return out

    runner.forward = poisoned  # type: ignore[method-assign]
    outcome = run(engine, requests)
    assert set(outcome.failures) == {"r2"}
    del expected["r2"]
    outcome.token_ids.pop("r2", None)
    assert outcome.token_ids == expected
    stats = engine.stats()
    assert stats.finished["error"] == 1
    assert stats.admitted == sum(stats.finished.values())


@pytest.mark.parametrize("fault", ["raises", "not finite behind the accepted"])
def test_drafts_that_the_target_chokes_on_cost_speed_only(
    pair: tuple[str, str], fault: str
) -> None:
    path, draft = pair
    expected = run(make_engine(path), mixed_requests()).token_ids
    engine = make_engine(path, draft)
    forward = engine._runner.forward

    def choking(batch: ForwardBatch, *args: Any) -> StepOutput:
        out = forward(batch, *args)
        logits = out.logits.clone()
        if batch.mode is ForwardMode.TARGET_VERIFY:
            if fault == "raises":
                raise RuntimeError("too many rows")
            inputs = batch.input_ids[batch.logit_rows].tolist()
            # A row whose own input was not what the sequence goes on with.
            for seq in engine.scheduler.running:
                row = next((r for r, i in enumerate(inputs) if i == seq.token_ids[-1]), None)
                drafts = seq.draft_ids
                if row is not None and inputs[row + 1 : row + 1 + len(drafts)] == drafts:
                    emitted = expected[seq.request_id][seq.num_emitted :]
                    right = num_accepted(drafts, emitted)
                    logits[row + right + 1 : row + 1 + len(drafts)] = torch.nan
        return replace(out, logits=logits)

    engine._runner.forward = choking  # type: ignore[method-assign]
    outcome = run(engine, mixed_requests())
    assert outcome.failures == {}
    assert outcome.token_ids == expected
    keys = set(engine.stats().spec_failures)
    assert keys == ({"verify:RuntimeError"} if fault == "raises" else set())


def test_a_lost_device_is_nobodys_request(checkpoints: Checkpoints) -> None:
    """A dead device failed request after request, with health ok: it must end the worker."""
    engine = make_engine(checkpoints("llama"))

    def lost(*_: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine._runner.forward = lost  # type: ignore[method-assign]
    for request in mixed_requests(3)[::2]:
        engine.add(request)
    with pytest.raises(RuntimeError, match="CUDA error"):
        engine.step()


def test_one_sequences_draft_failure_leaves_the_others_their_drafts(
    pair: tuple[str, str],
) -> None:
    """One image that only the draft's tower choked on stopped everybody's drafts."""
    path, draft = pair
    requests = mixed_requests(4)
    expected = run(make_engine(path), requests).token_ids
    engine = make_engine(path, draft)
    adapter = engine._drafting.drafter._runner.adapter  # type: ignore[union-attr]

    def broken(_: Any) -> Tensor:
        raise RuntimeError("the draft's tower does not like this image")

    adapter.embed_media = broken
    engine._drafting.drafter._runner.image_cache._entries.clear()  # type: ignore[union-attr]
    drafted: dict[str, int] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step().deltas:
            drafted[delta.request_id] = delta.num_draft_tokens
    assert {name for name, count in drafted.items() if count} == {"r0", "r2"}
    assert set(engine.stats().spec_failures) == {"draft_extend:RuntimeError"}
    assert engine.stats().finished["length"] == len(expected)


def test_draft_catch_up_keeps_to_the_steps_budget(pair: tuple[str, str]) -> None:
    """After an outage every sequence caught up at once, in one forward pass of any size."""
    path, draft = pair
    engine = make_engine(path, draft, max_step_tokens=64, max_chunk_tokens=32, max_running=8)
    runner = engine._drafting.drafter._runner  # type: ignore[union-attr]
    forward, sizes, outage = runner.forward, [], {"on": True}

    def recording(batch: ForwardBatch, *args: Any) -> StepOutput:
        if outage["on"]:
            raise RuntimeError("out for a while")
        sizes.append(len(batch.input_ids))
        return forward(batch, *args)

    runner.forward = recording
    for seed in range(8):
        ids, _ = tiny.prompt(seed, [70])
        engine.add(tiny.request(f"r{seed}", ids, max_tokens=40, ignore_eos=True))
    while (
        any(seq.num_uncomputed > 1 for seq in engine.scheduler.running) or engine.scheduler.waiting
    ):
        engine.step()
    outage["on"] = False
    assert engine.stats().breaker_state == "open"
    end_wait(engine)
    while engine.has_work:
        engine.step()
    assert max(sizes) <= 64 + 2 * 8
    assert engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_bad_block_leaves_the_prefix_cache(pair: tuple[str, str], side: str) -> None:
    """A transient NaN in a prompt chunk stayed in the cache and failed everyone who shared it."""
    path, draft = pair
    ids, _ = tiny.prompt(1, [100])
    request = tiny.request("r", ids, ignore_eos=True)
    expected = run(make_engine(path), [request]).token_ids
    engine = make_engine(path, draft, max_chunk_tokens=32)
    runner = engine._runner if side == "target" else engine._drafting.drafter._runner  # type: ignore[union-attr]
    embed, calls = runner.adapter.embed, {"n": 0}

    def transient(input_ids: Tensor) -> Tensor:
        calls["n"] += 1
        embeddings = embed(input_ids)
        return embeddings * torch.nan if calls["n"] == 1 else embeddings

    runner.adapter.embed = transient
    outcome = run(engine, [request])
    if side == "target":
        assert set(outcome.failures) == {"r"}
    else:
        assert outcome.token_ids == expected
        assert set(engine.stats().spec_failures) == {"draft_decode:non_finite"}
    failures = engine.stats().spec_failures
    again = run(engine, [request])
    assert again.token_ids == expected
    assert engine.stats().spec_failures == failures
    assert engine.stats().draft_tokens > 0

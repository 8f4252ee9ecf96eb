"""Every stage of drafting, broken in every way: the answers are those of plain decoding.

The faults are put in from outside; the code under test knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from tests.workers.scripted import end_wait
from tests.workers.tiny import mixed_requests
from workers.batch_info import ForwardMode
from workers.config import BreakerConfig
from workers.engine import Engine
from workers.models.runner import StepOutput
from workers.spec.drafter import DraftTask, Proposal

FAMILY, HYBRID = "qwen2_5_vl", "qwen3_5"
BREAKER = BreakerConfig(max_failures=3, window=10, open_s=3600, max_open_s=3600)
METHODS = ("draft_model", "nextn", "ngram")
Heal = Callable[[], None]


def _raise(*_: Any) -> Any:
    raise RuntimeError("a made-up one")


class _Clock:
    """The drafting's clock: only what is slow on purpose takes time."""

    now_s = 0.0


def _slow(value: Any) -> Any:
    _Clock.now_s += 2 * BREAKER.slow_s
    return value


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: _Clock.now_s)
    monkeypatch.setattr("workers.drafting.time", clock)


LOGITS: dict[str, Callable[[Any], Any]] = {
    "raises": _raise,
    "nan": lambda logits: torch.full_like(logits, torch.nan),
    "wrong shape": lambda logits: logits[:, :-3],
    "too few rows": lambda logits: logits[:-1],
    "slow": _slow,
}
PROPOSALS: dict[str, Callable[[Proposal], Any]] = {
    "raises": _raise,
    "too few": lambda proposal: replace(proposal, draft_ids=proposal.draft_ids[:-1]),
    "id out of range": lambda p: replace(p, draft_ids=[[10**9] for _ in p.draft_ids]),
    "no ids": lambda p: replace(p, draft_ids=[["a"] for _ in p.draft_ids]),
    "none": lambda _: None,
    "slow": _slow,
}


def _break_propose(engine: Engine, fault: Callable[[Any], Any]) -> Heal:
    drafter: Any = engine._drafting.drafter
    propose = drafter.propose

    def broken(tasks: Sequence[DraftTask]) -> Any:
        proposal = propose(tasks)
        return fault(proposal) if any(task.num_drafts for task in tasks) else proposal

    drafter.propose = broken
    return lambda: drafter.__dict__.pop("propose")


def _break_forward(engine: Engine, mode: ForwardMode, fault: Callable[[Any], Any]) -> Heal:
    runner: Any = engine._drafting.drafter._runner  # type: ignore[union-attr]
    forward = runner.forward

    def broken(batch: Any, *args: Any, **options: Any) -> StepOutput:
        out = forward(batch, *args, **options)
        return replace(out, logits=fault(out.logits)) if batch.mode is mode else out

    runner.forward = broken
    return lambda: runner.__dict__.pop("forward")


Break = Callable[[Engine], Heal]
CASES: list[Any] = [
    pytest.param(method, lambda e, f=fault: _break_propose(e, f), id=f"{method}-propose-{name}")
    for method in METHODS
    for name, fault in PROPOSALS.items()
]
CASES += [
    pytest.param(
        method, lambda e, m=mode, f=fault: _break_forward(e, m, f), id=f"{method}-{mode}-{name}"
    )
    for method in ("draft_model", "nextn")
    for mode in (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_DECODE)
    for name, fault in LOGITS.items()
]


@pytest.fixture(scope="module")
def setting(checkpoints: Checkpoints, noisy_draft: Callable[[str], str]) -> Callable[..., Any]:
    """Return a function that makes an engine for a method, and knows the plain answers."""
    plain: dict[str, dict[str, list[int]]] = {}

    def make(method: str) -> tuple[Engine, dict[str, list[int]]]:
        family = HYBRID if method == "nextn" else FAMILY
        path = checkpoints(family)
        if family not in plain:
            plain[family] = run(make_engine(path), mixed_requests()).token_ids
        draft = noisy_draft(family) if method == "draft_model" else None
        options = {} if method == "draft_model" else {"method": method}
        options |= {"ngram_min": 1} if method == "ngram" else {}
        engine = make_engine(path, draft, num_draft_tokens=3, breaker=BREAKER, **options)
        return engine, plain[family]

    return make


@pytest.mark.parametrize(("method", "break_it"), CASES)
def test_output_stays_the_breaker_opens_and_drafts_come_back(
    setting: Callable[..., Any], method: str, break_it: Break
) -> None:
    """A draft's exception, NaN, wrong shape or id ended the server, or was tried for ever."""
    engine, expected = setting(method)
    heal = break_it(engine)
    # A sequence whose draft K/V is not trusted any more does not fail again: others must come.
    for _ in range(4):
        outcome = run(engine, mixed_requests())
        assert outcome.token_ids == expected
        assert outcome.failures == {}
    broken = engine.stats()
    assert sum(broken.spec_failures.values()) > 0
    assert (broken.breaker_state, broken.breaker_opened) == ("open", 1)

    # Left off: nothing is drafted, nothing fails any more.
    assert run(engine, mixed_requests()).token_ids == expected
    left_off = engine.stats()
    assert left_off.spec_failures == broken.spec_failures
    assert left_off.draft_tokens == broken.draft_tokens

    # On trial, and still broken: it is left off again after one step.
    end_wait(engine)
    assert run(engine, mixed_requests()).token_ids == expected
    assert engine.stats().breaker_opened == 2

    heal()
    end_wait(engine)
    healed = engine.stats()
    assert run(engine, mixed_requests()).token_ids == expected
    stats = engine.stats()
    assert stats.breaker_state == "closed"
    assert stats.accepted_tokens > healed.accepted_tokens
    assert stats.spec_failures == healed.spec_failures
    engine.blocks.check_integrity([])


def test_a_sequence_catches_up_after_an_outage(checkpoints: Checkpoints) -> None:
    """Draft K/V that fell behind was trusted, and acceptance collapsed until the answer's end.

    The target drafts for itself: every draft of right K/V is accepted.
    """
    path = checkpoints(FAMILY)
    requests = [replace_max(r) for r in mixed_requests(4)]
    expected = run(make_engine(path), requests).token_ids
    engine = make_engine(path, path, num_draft_tokens=3, breaker=BREAKER)
    for request in requests:
        engine.add(request)
    got: dict[str, list[int]] = {}

    def step() -> None:
        for delta in engine.step().deltas:
            got.setdefault(delta.request_id, []).extend(delta.token_ids)

    for _ in range(4):
        step()
    heal = _break_propose(engine, _raise)
    while engine.stats().breaker_state != "open":
        step()
    for _ in range(6):
        step()
    assert len(engine.scheduler.running) == len(requests), "they must see the end of the outage"
    heal()
    end_wait(engine)
    before = engine.stats()
    while engine.has_work:
        step()
    after = engine.stats()
    assert got == expected
    drafted = after.draft_tokens - before.draft_tokens
    assert drafted > 20
    assert after.accepted_tokens - before.accepted_tokens == drafted


def replace_max(request: Any) -> Any:
    sampling = replace(request.sampling, max_tokens=60, ignore_eos=True, stop_token_ids=())
    return replace(request, sampling=sampling)


def test_one_sequence_cannot_open_the_breaker(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str]
) -> None:
    """One image that only the draft choked on switched off everybody's speculation."""
    path = checkpoints(FAMILY)
    engine = make_engine(path, noisy_draft(FAMILY), breaker=BREAKER)
    runner: Any = engine._drafting.drafter._runner  # type: ignore[union-attr]

    def no_images(_: Any) -> Any:
        raise RuntimeError("the draft's tower does not like this image")

    runner.adapter.embed_media = no_images
    requests = mixed_requests(6)
    run(engine, requests)
    stats = engine.stats()
    assert stats.spec_failures["draft_extend:RuntimeError"] > 0
    assert (stats.breaker_state, stats.breaker_opened) == ("closed", 0)
    assert stats.accepted_tokens > 0


def test_prefixes_are_reused_while_drafting_is_left_off(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str]
) -> None:
    """During an outage of the draft no prompt was found in the cache, which cost more than it."""
    path = checkpoints(FAMILY)
    engine = make_engine(path, noisy_draft(FAMILY), breaker=BREAKER)
    _break_propose(engine, _raise)
    for _ in range(3):
        run(engine, mixed_requests())
    assert engine.stats().breaker_state == "open"
    run(engine, mixed_requests())
    before = engine.stats().cached_tokens
    run(engine, mixed_requests())
    assert engine.stats().cached_tokens > before

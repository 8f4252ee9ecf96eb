"""Recurrent state after any accept pattern is the state of decoding one token after the other."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import Outcome, make_engine, run
from tests.workers.scripted import Script, script
from tests.workers.tiny_families import HYBRIDS
from workers.contracts import GenerationRequest
from workers.engine import Engine
from workers.errors import BatchInfoError
from workers.kv.linear_state import LinearShape, LinearStatePool
from workers.models.linear_step import LinearStep

TOLERANCE = 1e-5
DRAFTS = 5
# Weights drawn wider amplify float32 rounding between one row at a time and many to 2e-5, drafts
# or none.
MILD = {"initializer_range": 0.08}
# (request id, tokens computed) -> every layer's state
States = dict[tuple[str, int], list[Tensor]]

PATTERNS: dict[str, Script] = {
    "none accepted": lambda name, n: (DRAFTS, 0),
    "all accepted": lambda name, n: (DRAFTS, DRAFTS),
    "alternating": lambda name, n: (DRAFTS, 2) if n % 2 else (0, 0),
    "ragged": lambda name, n: ((7 * n + ord(name[1])) % 6, (5 * n + n // 4 + ord(name[1])) % 6),
    "one at a time": lambda name, n: (1, n % 2),
}


def _requests(family: str) -> list[GenerationRequest]:
    is_vision = family in tiny.VISION_FAMILIES
    prompts: list[list[Any]] = [[3], [40], [9, (2, 3), 4], [70], [(3, 3)]]
    requests = []
    for seed, parts in enumerate(prompts if is_vision else [[3], [40], [70], [33], [20]]):
        ids, media = tiny.prompt_for(family, seed, parts)
        requests.append(
            tiny.request(
                f"r{seed}", ids, media, max_tokens=24, ignore_eos=True, temperature=float(seed % 2)
            )
        )
    return requests


def _record(engine: Engine) -> Callable[[], States]:
    """Return what copies every running sequence's state now."""
    pool = engine._runner.states
    assert pool is not None

    def states() -> States:
        found = {}
        for seq in engine.scheduler.running:
            if seq.state_source != seq.state_slot:
                continue
            layers = [pool.layer(i) for i in pool.shape.layer_ids]
            found[seq.request_id, seq.num_computed_tokens] = [
                t[seq.state_slot].clone() for layer in layers for t in (layer.conv, layer.recurrent)
            ]
        return found

    return states


def _run(engine: Engine, requests: list[GenerationRequest]) -> tuple[Outcome, States]:
    """Run and collect the states after every step."""
    record, found = _record(engine), States()
    outcome = Outcome()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        outcome.take(engine)
        found |= record()
        engine.blocks.check_integrity(engine.scheduler.running)
    return outcome, found


def _assert_states(ours: States, expected: States) -> None:
    assert ours
    for key, layers in ours.items():
        for got, want in zip(layers, expected[key], strict=True):
            # Of the tensor's own scale: entries near zero are sums of large ones.
            scale = max(1.0, want.abs().max().item())
            assert (got - want).abs().max().item() < TOLERANCE * scale, key


@pytest.fixture(scope="module")
def one_by_one(
    checkpoints: Checkpoints,
) -> Callable[[str], tuple[dict[str, list[int]], States]]:
    """Return what plain decoding gives, each request alone, prompts token by token."""
    known: dict[str, tuple[dict[str, list[int]], States]] = {}

    def of(family: str) -> tuple[dict[str, list[int]], States]:
        if family not in known:
            engine = make_engine(
                checkpoints(family, **MILD), prefix_caching=False, max_chunk_tokens=1
            )
            tokens: dict[str, list[int]] = {}
            states = States()
            for request in _requests(family):
                outcome, found = _run(engine, [request])
                tokens |= outcome.token_ids
                states |= found
            known[family] = tokens, states
        return known[family]

    return of


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_b24_state_after_any_accept_pattern(
    checkpoints: Checkpoints,
    one_by_one: Callable[[str], tuple[dict[str, list[int]], States]],
    family: str,
    pattern: str,
) -> None:
    """B24: after a partial accept the next step read the state of another column."""
    tokens, expected = one_by_one(family)
    for changes in ({"max_chunk_tokens": 512}, {"max_chunk_tokens": 7, "prefix_caching": False}):
        engine = make_engine(checkpoints(family, **MILD), num_draft_tokens=DRAFTS, **changes)
        script(engine, PATTERNS[pattern], tokens)
        outcome, states = _run(engine, _requests(family))
        assert outcome.failures == {}
        assert outcome.token_ids == tokens
        _assert_states(states, expected)
        stats = engine.stats()
        if pattern == "all accepted":
            assert stats.accepted_tokens == stats.draft_tokens > 0
        if pattern == "none accepted":
            assert stats.accepted_tokens == 0 < stats.draft_tokens


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_text"])
def test_state_survives_preemption(
    checkpoints: Checkpoints,
    one_by_one: Callable[[str], tuple[dict[str, list[int]], States]],
    family: str,
) -> None:
    tokens, expected = one_by_one(family)
    for prefix_caching in (False, True):
        engine = make_engine(
            checkpoints(family, **MILD),
            num_blocks=8 if family == "qwen3_5" else 6,
            num_draft_tokens=DRAFTS,
            prefix_caching=prefix_caching,
            state_interval=16,
        )
        script(engine, PATTERNS["ragged"], tokens)
        outcome, states = _run(engine, _requests(family))
        assert engine.stats().preemptions > 0
        assert outcome.token_ids == tokens
        _assert_states(states, expected)


def test_a_step_that_failed_left_the_states_alone(
    checkpoints: Checkpoints,
    one_by_one: Callable[[str], tuple[dict[str, list[int]], States]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step narrowed down to a poison request runs its halves again, on the states before it."""
    tokens, expected = one_by_one("qwen3_5")
    engine = make_engine(checkpoints("qwen3_5", **MILD), num_draft_tokens=DRAFTS)
    script(engine, PATTERNS["ragged"], tokens)
    sampler = engine._target._sampler
    sample, calls = sampler.sample, {"n": 0}

    def failing(*args: Any) -> Any:
        calls["n"] += 1
        if calls["n"] % 3 == 1:  # after the forward pass, before the commit
            raise RuntimeError("out of memory, say")
        return sample(*args)

    monkeypatch.setattr(sampler, "sample", failing)
    outcome, states = _run(engine, _requests("qwen3_5"))
    survivors = {name: ids for name, ids in outcome.token_ids.items() if name in outcome.reasons}
    assert survivors
    assert survivors == {name: tokens[name] for name in survivors}
    _assert_states(states, expected)


@pytest.mark.parametrize("method", ["none", "ngram", "nextn"])
def test_b25_a_repeated_conversation_with_cache_hits_equals_one_without(
    checkpoints: Checkpoints, method: str
) -> None:
    """B25: cached state held rejected drafts; no error, and half of the answers wrong."""
    path = checkpoints("qwen3_5", **MILD)
    cached = make_engine(path, method=method, state_interval=16, max_chunk_tokens=64)
    plain = make_engine(path, prefix_caching=False)
    record, expected = _record(cached), _record(plain)
    history, media = tiny.prompt_for("qwen3_5", 4, [12, (2, 3), 9])
    for turn in range(5):
        request = tiny.request(
            f"t{turn}",
            list(history),
            media,
            max_tokens=21,
            ignore_eos=True,
            temperature=float(turn % 2),
            seed=turn,
        )
        answers = []
        found: list[States] = []
        for engine, states in ((cached, record), (plain, expected)):
            seen = States()
            engine.add(request)
            outcome = Outcome()
            while engine.has_work:
                outcome.take(engine)
                seen |= states()
            answers.append(outcome.token_ids[request.request_id])
            found.append(seen)
        assert answers[0] == answers[1], reference.describe_difference(path, request, *answers)
        both = found[0].keys() & found[1].keys()
        _assert_states({key: found[0][key] for key in both}, found[1])
        # The next turn: everything so far, and a new question.
        history += [*answers[0], *range(20 + turn, 27 + turn)]
    stats = cached.stats()
    assert stats.cached_tokens > 200
    if method == "nextn":
        assert stats.draft_tokens > 0


def test_a14_a_cached_state_belongs_to_its_picture(checkpoints: Checkpoints) -> None:
    """A14: the same question about picture A, then B, then A again."""
    engine = make_engine(checkpoints("qwen3_5"), state_interval=16)
    ids, first = tiny.prompt_for("qwen3_5", 1, [9, (4, 4), 30])
    _, second = tiny.prompt_for("qwen3_5", 2, [9, (4, 4), 30])
    answers, cached = [], []
    for name, media in (("a", first), ("b", second), ("c", first)):
        before = engine.stats().cached_tokens
        request = tiny.request(name, ids, media, ignore_eos=True)
        answers.append(run(engine, [request]).token_ids[name])
        cached.append(engine.stats().cached_tokens - before)
    assert cached == [0, 0, 48]
    assert answers[0] == answers[2] != answers[1]


def test_states_are_counted_and_reported(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        engine = make_engine(checkpoints("qwen3_5"), max_running=4, state_cache_bytes=100_000)
    pool = engine._runner.states
    assert pool is not None
    state_bytes = pool.shape.state_bytes
    assert (
        engine.info("w").state_bytes
        == state_bytes
        == sum(
            t[0].nbytes
            for i in pool.shape.layer_ids
            for t in (pool.layer(i).conv, pool.layer(i).recurrent)
        )
    )
    assert f"recurrent state: {state_bytes} bytes a sequence" in caplog.text
    assert engine.blocks.states is not None
    assert engine.blocks.states.num_slots == 4 + min(100_000 // state_bytes, 16)


def test_no_room_for_states_turns_reuse_off_and_says_so(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(checkpoints("qwen3_5_text"), state_cache_bytes=10)
    assert "no prefix is reused: cache.state_cache_bytes (10)" in caplog.text
    ids, _ = tiny.prompt(1, [300])
    for name in "ab":
        run(engine, [tiny.request(name, ids)])
    assert engine.stats().cached_tokens == 0


def _pool(num_slots: int) -> LinearStatePool:
    shape = LinearShape((0,), 3, 40, 4, 8, 12, torch.float32)
    return LinearStatePool(shape, num_slots, torch.device("cpu"))


def test_a_long_run_is_never_cut() -> None:
    step = LinearStep(_pool(2), [100], [-1], torch.device("cpu"))
    with pytest.raises(BatchInfoError, match="cannot be cut"):
        step.commit([99], [0])


def test_a_fresh_sequence_does_not_see_what_its_slot_held() -> None:
    """A slot is not cleared between sequences: what is left there, NaN even, must not matter."""
    pool = _pool(1)
    nan = torch.tensor([0])
    pool.write(0, nan, torch.full((1, 3, 40), torch.nan), torch.full((1, 4, 8, 12), torch.nan))
    weight, mixed = torch.randn(40, 4), torch.randn(5, 40)
    step = LinearStep(pool, [5], [-1], torch.device("cpu"))
    assert step.convolve(0, mixed, weight).isfinite().all()


def test_random_window_lengths_agree_with_a_whole_convolution() -> None:
    """The convolution's window after any cut is the sequence's latest rows, zeros before it."""
    rng = random.Random(1)
    pool = _pool(2)
    weight, rows = torch.randn(40, 4), torch.randn(2, 60, 40)
    whole = torch.nn.functional.conv1d(
        rows.transpose(1, 2), weight.unsqueeze(1), groups=40, padding=3
    )[:, :, :60]
    expected = torch.nn.functional.silu(whole).transpose(1, 2)
    done = [0, 0]
    while max(done) < 50:
        lens = [rng.randrange(1, 8), rng.randrange(1, 8)]
        sources = [slot if done[slot] else -1 for slot in (0, 1)]
        step = LinearStep(pool, lens, sources, torch.device("cpu"))
        mixed = torch.cat([rows[i, done[i] : done[i] + lens[i]] for i in (0, 1)])
        out = step.convolve(0, mixed, weight).split(lens)
        for i in (0, 1):
            torch.testing.assert_close(out[i], expected[i, done[i] : done[i] + lens[i]])
        kept = [rng.randrange(1, n + 1) for n in lens]
        step._pending[0].results = [torch.zeros(len(g.members), 4, 8, 12) for g in step._groups]
        step.commit(kept, [0, 1])
        done = [d + k for d, k in zip(done, kept, strict=True)]

"""Log-probabilities: the model's own, with and without speculation, of output and prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine
from workers.contracts import GenerationRequest, TokenDelta, TokenLogprob
from workers.engine import Engine

FAMILY = "qwen2_5_vl"
# What the issue of exactness allows in float32.
TOLERANCE = 1e-4
# Linear attention adds up along the prompt: with wide weights, the library itself is 3e-4 from its
# own float64 after 70 tokens, on some processors.
CHANGES = {"qwen3_5": {"initializer_range": 0.08}}


def _deltas(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        result = engine.step()
        assert result.failures == {}
        for delta in result.deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def _logprobs(deltas: list[TokenDelta]) -> list[TokenLogprob]:
    for delta in deltas:
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
    return [entry for delta in deltas for entry in delta.logprobs or ()]


def _assert_close(
    ours: Iterable[TokenLogprob | None], theirs: Iterable[TokenLogprob | None]
) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)
            assert [i for i, _ in a.top] == [i for i, _ in b.top]
            values = [value for _, value in b.top]
            assert [value for _, value in a.top] == pytest.approx(values, abs=TOLERANCE)


def _assert_right(entry: TokenLogprob, logits: torch.Tensor, num_top: int) -> None:
    """Compare with the library's logits.  # [V]."""
    expected = logits.log_softmax(-1)
    assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=TOLERANCE)
    assert len(entry.top) == num_top
    assert all(a >= b for (_, a), (_, b) in pairwise(entry.top))
    best = expected.topk(num_top).values.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
    for token_id, value in entry.top:
        assert value == pytest.approx(expected[token_id].item(), abs=TOLERANCE)


def _requests(**params: object) -> list[GenerationRequest]:
    requests = []
    for seed in range(8):
        ids, images = tiny.prompt(seed, [5, (2, 3), 4] if seed % 2 else [3 + 9 * seed])
        requests.append(
            tiny.request(
                f"r{seed}", ids, images, seed=seed, temperature=seed % 3 / 2,
                num_logprobs=seed % 4, frequency_penalty=seed % 5 / 5, **params,
            )
        )  # fmt: skip
    return requests


def test_logprobs_are_the_models_own(checkpoints: Checkpoints) -> None:
    """B10: not those after bias, penalties, temperature and filters."""
    path = checkpoints(FAMILY)
    for request in _requests(logit_bias=((4, 3.0),), top_p=0.9, min_tokens=3):
        (deltas,) = _deltas(make_engine(path), [request]).values()
        emitted: list[int] = []
        for entry in _logprobs(deltas):
            logits = reference.logits(path, request, emitted)
            _assert_right(entry, logits, request.sampling.num_logprobs or 0)
            emitted.append(entry.token_id)


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_b10_logprobs_with_speculation_are_those_without(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str], num_drafts: int
) -> None:
    """B10: under speculation they were all 0.0, or wrong, or turned speculation off."""
    path, requests = checkpoints(FAMILY), _requests()
    plain = make_engine(path, prefix_caching=False)
    expected = {key: _logprobs(d) for r in requests for key, d in _deltas(plain, [r]).items()}
    engine = make_engine(path, noisy_draft(FAMILY), num_draft_tokens=num_drafts)
    for request_id, deltas in _deltas(engine, requests).items():
        _assert_close(_logprobs(deltas), expected[request_id])
    assert engine.stats().accepted_tokens > 0


def test_b3_logprobs_end_where_the_tokens_end(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str]
) -> None:
    """B3: the text was cut, ids and log-probabilities kept the tail of the accepted block."""
    path = checkpoints(FAMILY)
    ids, _ = tiny.prompt(0, [10])
    engine = make_engine(path, path)  # its own draft: whole blocks are accepted
    free = tiny.request("r", ids, ignore_eos=True, num_logprobs=1)
    (deltas,) = _deltas(engine, [free]).values()
    answer = [token_id for delta in deltas for token_id in delta.token_ids]
    for stop in answer:
        stopped = tiny.request("r", ids, ignore_eos=True, num_logprobs=1, stop_token_ids=(stop,))
        (deltas,) = _deltas(engine, [stopped]).values()
        got = [entry.token_id for entry in _logprobs(deltas)]
        assert got == answer[: answer.index(stop) + 1]


def _prompt_logprobs(deltas: list[TokenDelta]) -> tuple[TokenLogprob | None, ...]:
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    assert deltas[0].prompt_logprobs is not None
    return deltas[0].prompt_logprobs


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "qwen3_5"])
def test_b11_prompt_logprobs_are_the_librarys(checkpoints: Checkpoints, family: str) -> None:
    path = checkpoints(family, **CHANGES.get(family, {}))
    engine = make_engine(path, max_chunk_tokens=16)
    for seed, length in enumerate([1, 2, 15, 16, 17, 70]):
        parts = [length, (2, 3), 4] if family in tiny.VISION_FAMILIES else [length]
        ids, images = tiny.prompt(seed, parts)
        request = tiny.request("r", ids, images, max_tokens=1, num_prompt_logprobs=2)
        (deltas,) = _deltas(engine, [request]).values()
        entries = _prompt_logprobs(deltas)
        assert entries[0] is None
        assert [entry.token_id for entry in entries[1:] if entry] == ids[1:]
        logits = reference.prompt_logits(path, request)
        for entry, row in zip(entries[1:], logits, strict=False):
            assert entry is not None
            _assert_right(entry, row, 2)


@pytest.mark.parametrize("method", ["draft_model", "ngram", "nextn"])
def test_b11_prompt_logprobs_with_speculation_are_those_without(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str], method: str
) -> None:
    """B11: eight concurrent prompts over one chunk, max_tokens 1: far off for some."""
    family = "qwen3_5" if method == "nextn" else FAMILY
    path = checkpoints(family, **CHANGES.get(family, {}))
    requests = []
    for seed in range(8):
        ids, images = tiny.prompt(seed, [20 + 17 * seed])
        requests.append(
            tiny.request(f"r{seed}", ids, images, max_tokens=1 + seed % 3, num_prompt_logprobs=1)
        )
    plain = make_engine(path)
    expected = {
        key: _prompt_logprobs(d) for r in requests for key, d in _deltas(plain, [r]).items()
    }
    draft = noisy_draft(family) if method == "draft_model" else None
    engine = make_engine(path, draft, method=method, max_chunk_tokens=32, max_step_tokens=64)
    for _ in range(2):  # then with all of the prompts in the prefix cache
        for request_id, deltas in _deltas(engine, requests).items():
            _assert_close(_prompt_logprobs(deltas), expected[request_id])


def test_prompt_logprobs_survive_preemption(checkpoints: Checkpoints) -> None:
    """Chunks that run again bring their entries again."""
    path = checkpoints(FAMILY)
    requests = [
        tiny.request(
            f"r{seed}", tiny.prompt(seed, [40])[0], max_tokens=30, ignore_eos=True,
            num_prompt_logprobs=0,
        )
        for seed in range(4)
    ]  # fmt: skip
    plain = make_engine(path)
    expected = {
        key: _prompt_logprobs(d) for r in requests for key, d in _deltas(plain, [r]).items()
    }
    engine = make_engine(path, num_blocks=10, max_chunk_tokens=8, max_step_tokens=64)
    for request_id, deltas in _deltas(engine, requests).items():
        _assert_close(_prompt_logprobs(deltas), expected[request_id])
    assert engine.stats().preemptions > 0


def test_a_replay_brings_no_prompt_logprobs_again(checkpoints: Checkpoints) -> None:
    engine = make_engine(checkpoints(FAMILY))
    ids, _ = tiny.prompt(0, [10])
    request = tiny.request("r", ids, emitted=(5, 6), num_prompt_logprobs=0, num_logprobs=0)
    (deltas,) = _deltas(engine, [request]).values()
    assert all(delta.prompt_logprobs is None for delta in deltas)
    assert len(_logprobs(deltas)) == 10


def test_deltas_count_steps_and_fallbacks(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step that gave tokens is one, and one whose drafting failed is a fallback."""
    path = checkpoints(FAMILY)
    engine = make_engine(path, noisy_draft(FAMILY))
    request = tiny.request("r", tiny.prompt(0, [9])[0], max_tokens=16, ignore_eos=True)
    (deltas,) = _deltas(engine, [request]).values()
    assert [delta.num_steps for delta in deltas] == list(range(1, len(deltas) + 1))
    assert deltas[-1].num_fallbacks == 0
    assert deltas[-1].num_draft_tokens >= deltas[-1].num_accepted_tokens > 0

    def fail(tasks: object) -> object:
        raise RuntimeError("no drafts today")

    monkeypatch.setattr(engine._drafting.drafter, "propose", fail)
    (deltas,) = _deltas(engine, [request]).values()
    # Before the last token none is drafted, so none is missed.
    assert (deltas[-1].num_steps, deltas[-1].num_fallbacks) == (16, 14)

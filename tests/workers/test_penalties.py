"""Penalties and bias: exact at every position, whatever was drafted."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import Outcome, make_engine, run
from tests.workers.scripted import script
from workers.contracts import FinishReason, GenerationRequest, SamplingParams
from workers.errors import InvalidRequest
from workers.sampling.penalties import PenalisedRow, TokenCounts
from workers.sampling.sampler import Sampler, SamplingRow

CPU = torch.device("cpu")
FAMILY = "qwen2_5_vl"
SETTINGS = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 1.0, "temperature": 1.0},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "temperature": 0.8, "top_p": 0.9},
    {"frequency_penalty": -0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": ((7, 4.0), (11, 100.0), (30, -100.0)), "temperature": 1.0},
    {"logit_bias": ((5, 2.5),), "frequency_penalty": 2.0, "min_p": 0.05, "temperature": 1.0},
    {"min_p": 0.3, "temperature": 1.0, "presence_penalty": -1.0},
    {"top_k": 1, "temperature": 1.0, "frequency_penalty": 0.6},
    {"min_tokens": 9, "frequency_penalty": 1.1},
]


class _History:
    def __init__(self, prompt: list[int], emitted: list[int]) -> None:
        self.token_ids = prompt + emitted
        self.prompt_len = len(prompt)


def _requests(count: int = 20) -> list[GenerationRequest]:
    requests = []
    for seed, params in zip(range(count), itertools.cycle(SETTINGS), strict=False):
        ids, images = tiny.prompt(seed, [4, (2, 3), 3] if seed % 3 == 1 else [4 + 3 * seed])
        requests.append(
            tiny.request(f"r{seed}", ids, images, max_tokens=16, seed=100 + seed, **params)
        )
    return requests


def _plain(path: str, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    engine = make_engine(path, prefix_caching=False)
    return {r.request_id: run(engine, [r]).token_ids[r.request_id] for r in requests}


def _assert_equal(outcome: Outcome, expected: dict[str, list[int]]) -> None:
    assert outcome.failures == {}
    assert outcome.token_ids == expected


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_draft_tokens": 8, "max_chunk_tokens": 7}, {"num_blocks": 8, "num_draft_tokens": 3}],
    ids=["k=4", "k=8, small chunks", "preempting"],
)
def test_b6_b8_every_parameter_equals_plain_decoding(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str], changes: dict[str, int]
) -> None:
    """B6, B8: only the last token of each accepted block reached the penalty state."""
    path, requests = checkpoints(FAMILY), _requests()
    expected = _plain(path, requests)
    engine = make_engine(path, noisy_draft(FAMILY), **changes)
    _assert_equal(run(engine, requests), expected)
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert (stats.preemptions > 0) == ("num_blocks" in changes)
    assert stats.spec_failures == {}


@pytest.mark.parametrize("method", ["ngram", "nextn"])
def test_b8_other_drafters(checkpoints: Checkpoints, method: str) -> None:
    """B8: min_p or logit_bias were refused, or ran on the bonus token only."""
    family = "qwen3_5" if method == "nextn" else FAMILY
    path, requests = checkpoints(family), _requests(10)
    if method == "nextn":
        requests = [r for r in requests if not r.images]
    expected = _plain(path, requests)
    # What falls into loops gives n-grams something to find.
    engine = make_engine(path, method=method, num_draft_tokens=3)
    _assert_equal(run(engine, requests), expected)
    assert engine.stats().draft_tokens > 0


@pytest.mark.parametrize("num_right", range(5))
def test_b6_penalties_at_every_accept_length(checkpoints: Checkpoints, num_right: int) -> None:
    """B6: the counts behind a verified position are those of the drafts before it, no others."""
    path = checkpoints(FAMILY)
    requests = [
        tiny.request(f"r{i}", tiny.prompt(i, [6])[0], max_tokens=15, ignore_eos=True, **params)
        for i, params in enumerate(SETTINGS[:5])
    ]
    expected = _plain(path, requests)
    engine = make_engine(path)
    script(engine, lambda request_id, emitted: (4, num_right), expected)
    _assert_equal(run(engine, requests), expected)


def test_repetition_penalty_equals_the_library(checkpoints: Checkpoints) -> None:
    path = checkpoints("llama")
    for seed in range(4):
        ids, _ = tiny.prompt(seed, [9 + seed])
        request = tiny.request("r", ids, max_tokens=14, repetition_penalty=1.7, ignore_eos=True)
        got = run(make_engine(path), [request]).token_ids["r"]
        expected = reference.load(path).generate(
            torch.tensor([ids]), max_new_tokens=14, do_sample=False, repetition_penalty=1.7,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert got == expected[0, len(ids) :].tolist()


def test_presence_and_frequency_count_the_output_only(checkpoints: Checkpoints) -> None:
    """As OpenAI defines them, from the library's own logits of each whole sequence."""
    path = checkpoints("llama")
    model = reference.load(path)
    ids, _ = tiny.prompt(3, [12])
    request = tiny.request(
        "r", ids, max_tokens=14, ignore_eos=True, presence_penalty=0.7, frequency_penalty=0.9,
        logit_bias=((3, 1.5),),
    )  # fmt: skip
    got = run(make_engine(path), [request]).token_ids["r"]
    for place, token_id in enumerate(got):
        with torch.no_grad():
            logits = model(torch.tensor([ids + got[:place]])).logits[0, -1]
        for said in set(got[:place]):
            logits[said] -= 0.7 + 0.9 * got[:place].count(said)
        logits[3] += 1.5
        assert token_id == int(logits.argmax())


def test_b7_opposite_penalties_give_different_texts(checkpoints: Checkpoints) -> None:
    """B7: frequency_penalty -2 and +2 gave the same text."""
    ids, _ = tiny.prompt(0, [10])
    answers = {
        penalty: run(
            make_engine(checkpoints("llama")),
            [tiny.request("r", ids, max_tokens=24, ignore_eos=True, frequency_penalty=penalty)],
        ).token_ids["r"]
        for penalty in (-2.0, 0.0, 2.0)
    }
    distinct = {penalty: len(set(answer)) for penalty, answer in answers.items()}
    assert distinct[-2.0] < distinct[0.0] < distinct[2.0]


def test_b8_a_banned_token_never_comes(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str]
) -> None:
    """B8: logit_bias -100 on the greedy token, then on what takes its place."""
    path = checkpoints(FAMILY)
    ids, _ = tiny.prompt(0, [10])
    banned: list[int] = []
    for _ in range(4):
        bias = tuple((token_id, -100.0) for token_id in banned)
        request = tiny.request("r", ids, ignore_eos=True, logit_bias=bias)
        answers = [
            run(engine, [request]).token_ids["r"]
            for engine in (make_engine(path), make_engine(path, noisy_draft(FAMILY)))
        ]
        assert answers[0] == answers[1]
        assert not set(banned) & set(answers[0])
        banned.append(answers[0][0])


def test_min_tokens_and_penalties_stop_at_the_same_token(
    checkpoints: Checkpoints, noisy_draft: Callable[[str], str]
) -> None:
    """B4, B6: a stop is allowed exactly from `min_tokens` on, also inside an accepted block."""
    path = checkpoints(FAMILY)
    ids, _ = tiny.prompt(5, [10])
    free = tiny.request("r", ids, max_tokens=20, ignore_eos=True, frequency_penalty=0.4)
    answer = run(make_engine(path), [free]).token_ids["r"]
    for min_tokens in range(1, 12):
        for engine in (make_engine(path), make_engine(path, noisy_draft(FAMILY))):
            request = tiny.request(
                "r", ids, max_tokens=20, ignore_eos=True, frequency_penalty=0.4,
                stop_token_ids=(answer[4],), min_tokens=min_tokens,
            )  # fmt: skip
            outcome = run(engine, [request])
            got = outcome.token_ids["r"]
            assert answer[4] not in got[:min_tokens]
            if min_tokens <= answer.index(answer[4]):
                assert got == answer[: answer.index(answer[4]) + 1]
                assert outcome.reasons["r"] is FinishReason.STOP


def test_a_replay_counts_what_was_emitted_elsewhere(checkpoints: Checkpoints) -> None:
    path = checkpoints(FAMILY)
    engine, requests = make_engine(path), _requests(10)
    expected = _plain(path, requests)
    for request in requests:
        answer = expected[request.request_id]
        for cut in {1, len(answer) // 2, len(answer) - 1} - {0, len(answer)}:
            outcome = Outcome()
            outcome.token_ids[request.request_id] = answer[:cut]
            engine.add(request.resume_after(answer[:cut]))
            while engine.has_work:
                outcome.take(engine)
            _assert_equal(outcome, {request.request_id: answer})


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", ((tiny.VOCAB, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, float("nan")),)),
        ("num_logprobs", 21),
        ("num_prompt_logprobs", -1),
        ("grammar", "start: 'a'"),
    ],
)
def test_refused_parameters(checkpoints: Checkpoints, param: str, value: object) -> None:
    """One request's parameters are refused by name, and cost nobody else a thing."""
    engine = make_engine(checkpoints("llama"))
    with pytest.raises(InvalidRequest) as refusal:
        engine.add(tiny.request("bad", [5, 6], **{param: value}))
    assert refusal.value.param == param
    assert run(engine, [tiny.request("good", [5, 6])]).failures == {}


def _expected_logits(row: PenalisedRow, logits: torch.Tensor) -> torch.Tensor:
    """Return one row's penalised logits, from the definition."""
    params, known = row.params, logits.clone()
    prompt = row.history.token_ids[: row.history.prompt_len]
    said = [*row.history.token_ids[row.history.prompt_len :], *row.draft_ids]
    for token_id in {*prompt, *said}:
        rate = params.repetition_penalty
        known[token_id] = known[token_id] / rate if known[token_id] > 0 else known[token_id] * rate
    for token_id in set(said):
        known[token_id] -= params.frequency_penalty * said.count(token_id)
        known[token_id] -= params.presence_penalty
    return known


_ids = st.lists(st.integers(0, 11), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(_ids, st.lists(_ids, min_size=1, max_size=4), _ids), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_counts_follow_sequences_that_grow(
    histories: list[tuple[list[int], list[list[int]], list[int]]], seed: int
) -> None:
    """Whatever grows by whatever blocks, in whatever company, rows equal the definition."""
    torch.manual_seed(seed)
    counts = TokenCounts(12, CPU)
    live = [(_History(prompt, []), blocks, drafts) for prompt, blocks, drafts in histories]
    params = SamplingParams(
        0, presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5
    )
    for turn in range(4):
        rows = [
            PenalisedRow(params, history, drafts[:n])
            for number, (history, _, drafts) in enumerate(live)
            if (number + turn + seed) % 3
            for n in range(len(drafts) + 1)
        ]
        logits = torch.randn(len(rows) + 2, 12)
        expected = [_expected_logits(row, logits[i + 1]) for i, row in enumerate(rows)]
        untouched = logits[[0, -1]].clone()
        if rows:
            counts.penalise(logits, range(1, len(rows) + 1), rows)
            torch.testing.assert_close(logits[1:-1], torch.stack(expected))
        assert torch.equal(logits[[0, -1]], untouched)
        for history, blocks, _ in live:
            history.token_ids += blocks[turn % len(blocks)]


def test_rows_of_the_gone_are_used_again() -> None:
    """D11: a row for each request that ever had a penalty would fill the memory."""
    counts = TokenCounts(8, CPU)
    params = SamplingParams(0, frequency_penalty=1.0)
    for number in range(100):
        history = _History([1], [number % 8])
        logits = torch.zeros(1, 8)
        counts.penalise(logits, [0], [PenalisedRow(params, history, ())])
        assert logits[0].tolist() == [-1.0 if i == number % 8 else 0.0 for i in range(8)]
        del history
    assert len(counts._counts) <= 4


def test_a_narrow_sampler_ignores_ids_it_lacks() -> None:
    """A draft model may have fewer ids than its target."""
    history = _History([30], [31, 2])
    row = SamplingRow(
        SamplingParams(0, temperature=0.0, frequency_penalty=2.0, logit_bias=((40, 5.0), (3, 1.0))),
        3, 2, frozenset({50}), history, (33, 3),
    )  # fmt: skip
    logits = torch.zeros(1, 8)
    logits[0, 2] = 1.9
    assert Sampler(8, 8, CPU).sample(logits, [row]).token_ids.tolist() == [0]

"""Structured output: every token legal, every draft checked, the same with and without drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from tests.workers.engines import Outcome, make_engine, run
from tests.workers.test_demo_pair import make_requests
from workers.contracts import FinishReason, GenerationRequest, SamplingParams
from workers.engine import Engine
from workers.errors import GenerationFailed, InvalidRequest
from workers.sampling.grammar import GrammarCompiler, GrammarError, GrammarState

TARGET, DRAFT = "deploy/demo/models/target", "deploy/demo/models/draft"
NEXTN = "deploy/demo/models/nextn"
TOKENIZER = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
EOS_IDS = frozenset(TOKENIZER.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
EOS = TOKENIZER.token_to_id("<|im_end|>")
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "color": {"enum": ["red", "green", "blue"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["color", "count"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    },
]
# The demo models have never seen JSON: without a bound they would fill it with blanks.
COMPACT = {"whitespace_flexible": False}
GRAMMARS = [LLMatcher.grammar_from_json_schema(schema, COMPACT) for schema in SCHEMAS]


def _encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def _text(ids: Iterable[int]) -> str:
    text: str = TOKENIZER.decode(list(ids), skip_special_tokens=True)
    return text


def _requests(count: int, **changes: Any) -> list[GenerationRequest]:
    """Return prompts for the demo, images among them, each with a schema and an even mix of T."""
    requests = []
    for number, request in enumerate(make_requests(count)):
        sampling = {
            "seed": 500 + number,
            "temperature": (0.0, 1.0)[number // 3 % 2],
            "max_tokens": 160,
            "grammar": GRAMMARS[number % len(GRAMMARS)],
            **changes,
        }
        requests.append(
            GenerationRequest(
                request.request_id, request.prompt_ids, SamplingParams(**sampling), request.images
            )
        )
    return requests


def _assert_valid(outcome: Outcome, requests: list[GenerationRequest]) -> None:
    assert outcome.failures == {}
    for number, request in enumerate(requests):
        ids = outcome.token_ids[request.request_id]
        if outcome.reasons[request.request_id] is FinishReason.LENGTH:
            continue  # a number of many digits, say
        assert ids[-1] in EOS_IDS
        jsonschema.validate(json.loads(_text(ids)), SCHEMAS[number % len(SCHEMAS)])
    stopped = [r for r in outcome.reasons.values() if r is FinishReason.STOP]
    assert len(stopped) > 0.9 * len(requests)


def _engine(method: str, **changes: Any) -> Engine:
    if method == "none":
        return make_engine(TARGET, **changes)
    if method in ("draft", "self"):
        return make_engine(TARGET, DRAFT if method == "draft" else TARGET, **changes)
    return make_engine(NEXTN if method == "nextn" else TARGET, method=method, **changes)


@pytest.mark.parametrize("method", ["draft", "self", "ngram", "nextn"])
@pytest.mark.parametrize(
    "changes", [{"num_blocks": 640}, {"num_blocks": 40, "num_draft_tokens": 7}]
)
def test_b17_b18_b19_concurrent_schemas(method: str, changes: dict[str, int]) -> None:
    """B17, B18, B19: 64 concurrent schema requests, with images, at T 0 and 1, short of blocks.

    A draft outside the grammar crashed the engine; what followed an accepted block was unchecked.
    The target as its own draft, whose drafts are nearly all accepted, finds the second.
    """
    requests = _requests(64)
    plain = _engine("none") if method != "nextn" else make_engine(NEXTN)
    expected = run(plain, requests)
    _assert_valid(expected, requests)
    engine = _engine(method, **changes)
    outcome = run(engine, requests)
    assert outcome.token_ids == expected.token_ids
    assert outcome.reasons == expected.reasons
    stats = engine.stats()
    assert stats.spec_failures == {}
    assert stats.accepted_tokens > 0
    assert (stats.preemptions > 0) == (changes["num_blocks"] == 40)
    if method == "self":
        assert stats.accepted_tokens > 0.95 * stats.draft_tokens


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_b17_no_illegal_draft_is_verified(method: str) -> None:
    """B17: cut at the first illegal token, so that no verification is spent on the rest."""
    engine = _engine(method)
    for request in _requests(12):
        engine.add(request)
    num_drafts = 0
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            assert seq.grammar is not None
            assert seq.grammar.num_legal(seq.draft_ids) == len(seq.draft_ids)
            num_drafts += len(seq.draft_ids)
    assert num_drafts > 0


def test_b30_a_replay_goes_on_where_the_grammar_was() -> None:
    """B30: drafts out of step with the grammar after a preemption; also after a worker's death."""
    requests = _requests(6)
    engine = _engine("draft")
    expected = run(engine, requests)
    for request in requests:
        answer = expected.token_ids[request.request_id]
        for cut in range(1, len(answer), max(1, len(answer) // 4)):
            outcome = Outcome()
            outcome.token_ids[request.request_id] = answer[:cut]
            engine.add(request.resume_after(answer[:cut]))
            while engine.has_work:
                outcome.take(engine)
            assert outcome.token_ids[request.request_id] == answer


def test_free_requests_share_the_batch() -> None:
    """A neighbour's grammar changes nothing in a request without one."""
    free = make_requests(12)
    expected = run(_engine("none"), free).token_ids
    structured = _requests(24)[12:]
    outcome = run(
        _engine("draft"), [r for pair in zip(free, structured, strict=True) for r in pair]
    )
    assert {r.request_id: outcome.token_ids[r.request_id] for r in free} == expected


@pytest.mark.parametrize("changes", [{"ignore_eos": True}, {"min_tokens": 120}])
@pytest.mark.parametrize("method", ["none", "self"])
def test_an_output_ends_where_its_grammar_ends(changes: dict[str, Any], method: str) -> None:
    """Nothing may follow, whatever else was asked: it ends there, instead of failing."""
    requests = _requests(6, **changes)
    _assert_valid(run(_engine(method), requests), requests)


def test_min_tokens_where_the_grammar_leaves_room() -> None:
    grammar = LLMatcher.grammar_from_regex("[a-c ]*")
    for method in ("none", "draft", "self"):
        (request,) = _requests(1, grammar=grammar, min_tokens=20, max_tokens=40)
        ids = run(_engine(method), [request]).token_ids[request.request_id]
        assert len(ids) > 20
        assert not EOS_IDS & set(ids[:20])
        assert set(_text(ids)) <= set("abc ")


def test_other_parameters_hold_inside_a_grammar() -> None:
    """Bias, penalties and filters choose among what the grammar allows."""
    changes = {
        "grammar": LLMatcher.grammar_from_regex("(red|green|blue)( (red|green|blue)){3}"),
        # A token of several characters may spell a word too: every token with an r.
        "logit_bias": tuple((i, -100.0) for i in range(740) if "r" in TOKENIZER.decode([i])),
        "frequency_penalty": 1.0,
        "top_p": 0.8,
        "temperature": 1.0,
        "num_logprobs": 2,
    }
    requests = _requests(9, **changes)
    expected = run(_engine("none"), requests)
    for request in requests:
        words = _text(expected.token_ids[request.request_id]).split()
        assert len(words) == 4
        assert "red" not in words
    assert run(_engine("draft"), requests).token_ids == expected.token_ids


@pytest.mark.parametrize("grammar", ["start: (", "{}", "start: missing", "start: /(((/"])
def test_a_grammar_that_does_not_compile_is_refused(grammar: str) -> None:
    engine = _engine("none")
    (request,) = _requests(1, grammar=grammar)
    for attempt in (engine.prepare, engine.add):
        with pytest.raises(InvalidRequest, match="cannot be compiled") as refusal:
            attempt(request)
        assert refusal.value.param == "grammar"
    assert run(engine, make_requests(1)).failures == {}


def test_a_grammar_that_becomes_too_expensive_costs_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parser's bounds show in the middle of an output: that one ends with an error."""
    masks = GrammarState.masks

    def give_up(self: GrammarState, draft_ids: Any) -> np.ndarray:
        if self is victim.grammar:
            raise GrammarError("too many items")
        return masks(self, draft_ids)

    requests = _requests(6)
    expected = run(_engine("none"), requests)
    engine = _engine("draft")
    for request in requests:
        engine.add(request)
    outcome = Outcome()
    for _ in range(4):
        outcome.take(engine)
    victim = engine.scheduler.running[2]
    monkeypatch.setattr(GrammarState, "masks", give_up)
    while engine.has_work:
        outcome.take(engine)
    assert isinstance(outcome.failures.pop(victim.request_id), GenerationFailed)
    assert outcome.failures == {}
    for request in requests:
        if request.request_id != victim.request_id:
            assert outcome.token_ids[request.request_id] == expected.token_ids[request.request_id]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, 768, EOS_IDS)


def _allowed(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_masks_do_not_move_the_state(compiler: GrammarCompiler) -> None:
    """B17: the matcher must be rewound after a rejection, also over an end that was drafted."""
    rng = random.Random(3)
    for grammar in GRAMMARS:
        state, moved = compiler.state(grammar), compiler.state(grammar)
        for _ in range(60):
            before = _allowed(state.masks(())[0])
            drafts: list[int] = []
            while len(drafts) < 6:
                last = _allowed(state.masks(drafts)[-1])
                drafts.append(rng.choice(sorted(last)))
                if drafts[-1] in EOS_IDS:
                    break
            assert state.num_legal(drafts) == len(drafts)
            masks = state.masks(drafts)
            assert _allowed(masks[0]) == before
            for place, token_id in enumerate(drafts):
                assert token_id in _allowed(masks[place])
            assert _allowed(state.masks(())[0]) == before
            token_id = rng.choice(sorted(before))
            assert state.accept(token_id) == moved.accept(token_id) == (token_id in EOS_IDS)
            if token_id in EOS_IDS:
                break
            assert _allowed(state.masks(())[0]) == _allowed(moved.masks(())[0])


def test_drafts_are_cut_at_the_first_illegal_one(compiler: GrammarCompiler) -> None:
    state = compiler.state(LLMatcher.grammar_from_regex("a[0-9]+b"))
    legal = [_encode(c)[0] for c in ("a", "1", "2", "b")]
    assert state.num_legal([*legal, EOS]) == 5
    assert state.num_legal([*legal, EOS, legal[0]]) == 5
    for place in range(4):
        assert state.num_legal([*legal[:place], _encode("x")[0], *legal[place:]]) == place
    assert state.num_legal([EOS]) == 0
    assert state.num_legal([]) == 0


def test_an_illegal_token_is_reported(compiler: GrammarCompiler) -> None:
    state = compiler.state(LLMatcher.grammar_from_regex("a+"))
    state.accept(_encode("x")[0])
    with pytest.raises(GrammarError):
        state.masks(())


@pytest.mark.parametrize("special", [False, True])
def test_text_that_looks_like_an_added_token_is_spelled_out(special: bool) -> None:
    """The parser offered the one token it does not take, and the request failed."""
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    tokenizer.add_tokens([AddedToken("<think>", special=special)])
    compiler = GrammarCompiler(tokenizer, 768, EOS_IDS)
    state = compiler.state(LLMatcher.grammar_from_regex("<think>yes"))
    ids: list[int] = []
    while not (allowed := _allowed(state.masks(())[0])) & EOS_IDS:
        ids.append(min(allowed))
        assert not state.accept(ids[-1])
    assert tokenizer.token_to_id("<think>") not in ids
    assert tokenizer.decode(ids) == "<think>yes"


def test_states_of_one_grammar_are_apart(compiler: GrammarCompiler) -> None:
    grammar = LLMatcher.grammar_from_regex("a[bc]")
    first = compiler.state(grammar)
    first.accept(_encode("a")[0])
    second = compiler.state(grammar)
    assert _allowed(first.masks(())[0]) == {_encode("b")[0], _encode("c")[0]}
    assert _encode("a")[0] in _allowed(second.masks(())[0])


def test_compiled_grammars_are_bounded(compiler: GrammarCompiler) -> None:
    """D11: a grammar for each request that ever had one would fill the memory."""
    for number in range(200):
        compiler.state(LLMatcher.grammar_from_regex(f"a{{{number + 1}}}"))
    assert len(compiler._compiled) == 64

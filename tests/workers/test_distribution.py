"""Sampled tokens follow the target's own probabilities, with speculation and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from tests.workers.test_sampling import assert_drawn_from, reference_probs
from workers.contracts import GenerationRequest, MediaInput, SamplingParams
from workers.engine import Engine

NUM_REQUESTS = 3000
PARAMS = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}]


def _requests(prompt: tuple[list[int], list[MediaInput]], **params: Any) -> list[GenerationRequest]:
    return [
        tiny.request(str(seed), *prompt, seed=seed, max_tokens=3, ignore_eos=True, **params)
        for seed in range(NUM_REQUESTS)
    ]


def _assert_the_targets(
    path: str, engine: Engine, requests: list[GenerationRequest], params: dict[str, float]
) -> None:
    """Run the requests, and test the first tokens, and the second ones after the commonest."""
    outcome = run(engine, requests).token_ids
    sampling = SamplingParams(seed=0, **params)  # type: ignore[arg-type]
    pairs = [(outcome[r.request_id][0], outcome[r.request_id][1]) for r in requests]
    logits = reference.logits(path, requests[0])
    firsts = torch.bincount(torch.tensor([a for a, _ in pairs]), minlength=len(logits))
    assert_drawn_from(firsts, reference_probs(logits, sampling))
    first, _ = Counter(a for a, _ in pairs).most_common(1)[0]
    seconds = torch.bincount(
        torch.tensor([b for a, b in pairs if a == first]), minlength=len(logits)
    )
    logits = reference.logits(path, requests[0], [first])
    assert_drawn_from(seconds, reference_probs(logits, sampling))


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("params", PARAMS)
def test_b16_first_and_second_token_are_the_targets(
    checkpoints: Checkpoints,
    noisy_draft: Callable[[str], str],
    speculation: bool,
    params: dict[str, float],
) -> None:
    """B16: the second token is the first that a draft can touch; both must be the target's."""
    path = checkpoints("qwen2_5_vl")
    draft = noisy_draft("qwen2_5_vl") if speculation else None
    engine = make_engine(path, draft, num_blocks=400, max_running=64, max_waiting=NUM_REQUESTS)
    requests = _requests(tiny.prompt(2, [4, (2, 3), 3]), **params)
    _assert_the_targets(path, engine, requests, params)
    assert engine.stats().accepted_tokens > 100 or not speculation


@pytest.mark.parametrize("params", PARAMS)
def test_b16_with_the_ngram(checkpoints: Checkpoints, params: dict[str, float]) -> None:
    """B16: few ids, each of them in the prompt, so that lookups are often right by chance."""
    path = checkpoints("llama", vocab_size=24)
    engine = make_engine(
        path,
        method="ngram",
        ngram_min=1,
        num_blocks=400,
        max_running=64,
        max_waiting=NUM_REQUESTS,
    )
    ids = [2 + token_id % 22 for token_id in tiny.prompt(4, [60])[0]]
    _assert_the_targets(path, engine, _requests((ids, []), **params), params)
    assert engine.stats().accepted_tokens > 100


@pytest.mark.parametrize("params", PARAMS)
def test_b16_with_a_nextn_head(checkpoints: Checkpoints, params: dict[str, float]) -> None:
    """B16: few ids, so that the drafts of a random head are often right by chance."""
    path = checkpoints("qwen3_5_text", vocab_size=24)
    engine = make_engine(
        path, method="nextn", num_blocks=400, max_running=64, max_waiting=NUM_REQUESTS
    )
    ids = [2 + token_id % 22 for token_id in tiny.prompt(4, [12])[0]]
    _assert_the_targets(path, engine, _requests((ids, []), **params), params)
    assert engine.stats().accepted_tokens > 50

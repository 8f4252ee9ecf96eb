"""Sampled tokens follow the target's own probabilities, with speculation and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from tests.workers.test_sampling import assert_drawn_from, reference_probs
from workers.contracts import GenerationRequest, SamplingParams

NUM_REQUESTS = 3000


def _requests(params: dict[str, float]) -> list[GenerationRequest]:
    ids, images = tiny.prompt(2, [4, (2, 3), 3])
    return [
        tiny.request(str(seed), ids, images, seed=seed, max_tokens=3, ignore_eos=True, **params)
        for seed in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}]
)
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
    requests = _requests(params)
    outcome = run(engine, requests).token_ids
    assert engine.stats().accepted_tokens > 100 or not speculation

    sampling = SamplingParams(seed=0, **params)  # type: ignore[arg-type]
    pairs = [(outcome[r.request_id][0], outcome[r.request_id][1]) for r in requests]
    firsts = torch.bincount(torch.tensor([a for a, _ in pairs]), minlength=tiny.VOCAB)
    assert_drawn_from(firsts, reference_probs(reference.logits(path, requests[0]), sampling))
    first, _ = Counter(a for a, _ in pairs).most_common(1)[0]
    seconds = torch.bincount(
        torch.tensor([b for a, b in pairs if a == first]), minlength=tiny.VOCAB
    )
    logits = reference.logits(path, requests[0], [first])
    assert_drawn_from(seconds, reference_probs(logits, sampling))

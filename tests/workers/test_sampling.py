"""Noise and sampler: distribution, filters, and independence of everything around a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from workers.contracts import SamplingParams
from workers.sampling.noise import GumbelNoise, row_key
from workers.sampling.sampler import Sampler, SamplingRow

CPU = torch.device("cpu")
# A correct sampler fails a test at this level once in a million runs; seeds are fixed anyway.
ALPHA = 1e-6


def row(position: int = 0, seed: int = 0, **params: Any) -> SamplingRow:
    num_emitted = params.pop("num_emitted", 0)
    stop_ids = params.pop("stop_ids", frozenset())
    return SamplingRow(SamplingParams(seed=seed, **params), position, num_emitted, stop_ids)


def reference_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The textbook chain in float64: temperature, top-k, top-p, min-p.  # [V] -> [V]."""
    probs = (logits.double() / params.temperature).softmax(-1)
    order = probs.argsort(descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    kept = torch.where(keep, probs, 0)
    kept /= kept.sum()
    before = kept[order].cumsum(0) - kept[order]
    keep[order[(before >= params.top_p) & (torch.arange(len(order)) > 0)]] = False
    keep &= probs >= params.min_p * probs.max()
    kept = torch.where(keep, probs, 0)
    return kept / kept.sum()


def counts(sampler: Sampler, logits: Tensor, num: int, **params: Any) -> Tensor:
    """Sample one row at `num` positions.  # -> [V]."""
    rows = [row(position, **params) for position in range(num)]
    ids = sampler.sample(logits.expand(num, -1).clone(), rows).token_ids
    return torch.bincount(ids, minlength=len(logits))


def assert_drawn_from(observed: Tensor, probs: Tensor) -> None:
    """Chi-square test; ids of probability 0 must never occur."""
    assert observed[probs == 0].sum() == 0
    expected = probs * observed.sum()
    rare = (expected > 0) & (expected < 5)
    seen = [*observed[expected >= 5].tolist(), observed[rare].sum().item()]
    wanted = [*expected[expected >= 5].tolist(), expected[rare].sum().item()]
    if wanted[-1] < 5:
        seen[-2:], wanted[-2:] = [sum(seen[-2:])], [sum(wanted[-2:])]
    total = sum(wanted)
    result = stats.chisquare(seen, [w * sum(seen) / total for w in wanted])
    assert result.pvalue > ALPHA, result


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
    ],
)
def test_b16_frequencies_follow_the_processed_distribution(params: dict[str, Any]) -> None:
    """B16: verification ignored temperature, top-p and top-k."""
    torch.manual_seed(0)
    logits = torch.randn(40) * 1.5
    observed = counts(Sampler(40, 40, CPU), logits, 20_000, **params)
    assert_drawn_from(observed, reference_probs(logits, SamplingParams(seed=0, **params)))


@pytest.mark.parametrize("params", [{"top_p": 0.9999}, {"min_p": 1e-7}, {"top_k": 3000}])
def test_a_filter_wider_than_the_candidates_looks_at_all_ids(params: dict[str, Any]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6000) * 0.2
    observed = counts(Sampler(6000, 6000, CPU), logits, 3000, **params)
    probs = reference_probs(logits, SamplingParams(seed=0, **params))
    assert observed[probs == 0].sum() == 0
    assert (observed > 0).sum() > 1500


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    top_k=st.sampled_from([0, 1, 2, 7, 30, 31]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    temperature=st.sampled_from([0.0, 1e-10, 1e-4, 0.5, 1.0, 2.0, 100.0]),
)
def test_c18_a_row_depends_on_itself_alone(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """C18: extreme parameters of one request gave inf or NaN and killed everybody's engine."""
    generator = torch.Generator().manual_seed(seed % 1000)
    logits = torch.randn((4, 30), generator=generator) * 3
    sampler = Sampler(30, 30, CPU)
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    mine = row(5, seed=seed, **params)
    alone = sampler.sample(logits[:1].clone(), [mine])
    others = [row(6, temperature=0.0), row(7, top_p=0.5), row(8)]
    together = sampler.sample(logits.flip(0), [*others, mine])
    assert alone.is_finite.all()
    assert together.token_ids[-1] == alone.token_ids[0]
    if temperature < 1e-5 or top_k == 1 or top_p < 1e-3 or min_p == 1.0:
        assert alone.token_ids[0] == logits[0].argmax()


def test_c20_padded_ids_are_never_sampled() -> None:
    """C20: an id in the padded part of the vocabulary was emitted."""
    logits = torch.zeros(16)
    logits[12:] = 50.0
    sampler = Sampler(16, 12, CPU)
    assert counts(sampler, logits, 500)[12:].sum() == 0
    assert counts(sampler, logits, 5, temperature=0.0)[12:].sum() == 0


def test_b6_stops_are_masked_until_min_tokens() -> None:
    logits = torch.zeros((3, 8))
    logits[:, 3] = 9.0
    rows = [
        row(temperature=0.0, min_tokens=2, num_emitted=n, stop_ids=frozenset({3})) for n in range(3)
    ]
    ids = Sampler(8, 8, CPU).sample(logits, rows).token_ids.tolist()
    assert ids[0] != 3
    assert ids[1] != 3
    assert ids[2] == 3


def test_rows_that_are_not_finite_are_reported() -> None:
    logits = torch.zeros((4, 8))
    logits[1, 2] = torch.nan
    logits[2] = torch.inf
    logits[3] = -torch.inf
    sampled = Sampler(8, 8, CPU).sample(logits, [row()] * 4)
    assert sampled.is_finite.tolist() == [True, False, False, False]


def test_noise_is_standard_gumbel() -> None:
    noise = GumbelNoise(500, CPU)
    drawn = noise.rows(noise.keys((3, position) for position in range(400))).flatten()
    assert stats.kstest(drawn.numpy(), "gumbel_r").pvalue > ALPHA


def test_noise_of_some_ids_equals_the_noise_of_all() -> None:
    noise = GumbelNoise(1000, CPU)
    keys = noise.keys([(1, 2), (3, 4)])
    ids = torch.tensor([[5, 999, 0], [7, 8, 5]])
    assert torch.equal(noise.at(keys, ids), noise.rows(keys).gather(1, ids))


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Row keys of small, close numbers must not correlate."""
    noise = GumbelNoise(2000, CPU)
    keys = noise.keys([(0, 0), (0, 1), (1, 0), (1, 1), (-1, 0), (2**62, 0)])
    correlation = torch.corrcoef(noise.rows(keys))
    assert (correlation - torch.eye(len(keys))).abs().max() < 0.12
    assert len({row_key(seed, position) for seed in range(50) for position in range(50)}) == 2500


def test_shared_noise_makes_a_rough_draft_agree() -> None:
    """Gumbel coupling: independent noise would agree in about sum(p*q), here under 0.1."""
    torch.manual_seed(0)
    target = torch.randn(2000) * 2
    draft = target + torch.randn(2000) * 0.8
    sampler = Sampler(2000, 2000, CPU)
    rows = [row(position) for position in range(400)]
    a = sampler.sample(target.expand(400, -1).clone(), rows).token_ids
    b = sampler.sample(draft.expand(400, -1).clone(), rows).token_ids
    assert (a == b).float().mean() > 0.4


def test_no_noise_can_rule_out_a_certain_id() -> None:
    """A uniform that rounded to 1 gave -inf, and an id of probability 1 lost."""
    noise = GumbelNoise(152_000, CPU)
    assert noise.rows(noise.keys([(1, 12)])).isfinite().all()
    every = torch.arange(-(2**31), 2**31 - 1, 65_537, dtype=torch.int64).to(torch.int32)
    assert noise.at(every, torch.zeros((len(every), 1), dtype=torch.int64)).isfinite().all()

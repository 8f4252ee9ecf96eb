"""The one sampler, used for plain steps, for verification and by drafters.

Owns the chain from logits to token ids: vocabulary mask, min_tokens, temperature, top-k, top-p,
min-p, noise, argmax. Knows no model, no sequence and no draft: a row is told its parameters, its
position and how much was emitted before it. Invariant: a row's result depends on that row alone,
so verifying many positions at once gives what one-by-one decoding gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workers.contracts import SamplingParams
from workers.sampling.noise import GumbelNoise

# Below this a temperature means greedy; dividing by it would overflow.
MIN_TEMPERATURE = 1e-5
# Filtered rows look at this many of the largest logits before falling back to a full sort.
_NUM_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is for."""

    params: SamplingParams
    # Index in the sequence of the token to be sampled.
    position: int
    # Tokens emitted before it.
    num_emitted: int
    stop_ids: frozenset[int]

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes no noise."""
        return self.params.temperature < MIN_TEMPERATURE

    @property
    def is_filtered(self) -> bool:
        """Whether some ids may be ruled out."""
        return bool(self.params.top_k or self.params.top_p < 1 or self.params.min_p > 0)


class SampledRows(NamedTuple):
    """One id a row; a row whose logits are not finite has no meaning."""

    token_ids: Tensor  # [R] int64
    is_finite: Tensor  # [R] bool


class Sampler:
    """Samples ids in `[0, num_ids)` from logits of width `vocab_size`."""

    def __init__(self, vocab_size: int, num_ids: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_ids = num_ids
        self._noise = GumbelNoise(vocab_size, device)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledRows:
        """Sample one id a row.

        Args:
            logits: Overwritten.  # [R, V] any float
            rows: One a row of `logits`.
        """
        logits = logits.float()
        logits[:, self._num_ids :] = -torch.inf  # padding of the vocabulary: no such tokens
        _mask_stops(logits, rows)
        # NaN and inf surface in the maximum; -inf everywhere does too.
        best, token_ids = logits.max(dim=-1)
        whole = [i for i, row in enumerate(rows) if not (row.is_greedy or row.is_filtered)]
        filtered = [i for i, row in enumerate(rows) if row.is_filtered and not row.is_greedy]
        if whole:
            index, scaled, keys = self._sampled(logits, rows, whole)
            token_ids[index] = (scaled + self._noise.rows(keys)).argmax(dim=-1)
        if filtered:
            index, scaled, keys = self._sampled(logits, rows, filtered)
            token_ids[index] = self._sample_filtered(scaled, keys, [rows[i] for i in filtered])
        return SampledRows(token_ids, best.isfinite())

    def _sampled(
        self, logits: Tensor, rows: Sequence[SamplingRow], index: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows' index, their logits over temperature, and their noise keys."""
        where = torch.tensor(index, device=logits.device)
        temperature = torch.tensor([rows[i].params.temperature for i in index])
        scaled = logits[where] / temperature.to(logits.device).unsqueeze(1)
        return (
            where,
            scaled,
            self._noise.keys((rows[i].params.seed, rows[i].position) for i in index),
        )

    def _sample_filtered(self, scaled: Tensor, keys: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Sample rows with top-k, top-p or min-p; the noise is taken on candidates only."""
        width = min(self._vocab_size, _NUM_CANDIDATES)
        log_total = scaled.logsumexp(dim=-1)
        values, ids = scaled.topk(width, dim=-1)  # [R, C], descending
        keep = _keep(values, log_total, rows)
        token_ids = self._best(values, ids, keep, keys)
        # Where the last candidate survives, a smaller one might as well: look at all of them. Each
        # row decides that for itself, whatever its neighbours are.
        wide = keep[:, -1].nonzero().squeeze(1) if width < self._vocab_size else keep.new_empty(0)
        if len(wide):
            values, ids = scaled[wide].sort(dim=-1, descending=True)
            keep = _keep(values, log_total[wide], [rows[i] for i in wide.tolist()])
            token_ids[wide] = self._best(values, ids, keep, keys[wide])
        return token_ids

    def _best(self, values: Tensor, ids: Tensor, keep: Tensor, keys: Tensor) -> Tensor:
        """Add the noise and choose among the survivors.  # all [R, C], keys [R] -> [R]."""
        scores = (values + self._noise.at(keys, ids)).masked_fill_(~keep, -torch.inf)
        return ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)


def _mask_stops(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Rule out stop ids where `min_tokens` has not been reached."""
    for i, row in enumerate(rows):
        if row.num_emitted < row.params.min_tokens:
            # A draft model may be narrower than the ids of its target.
            ids = [stop_id for stop_id in row.stop_ids if stop_id < logits.shape[1]]
            logits[i, torch.tensor(ids, dtype=torch.int64, device=logits.device)] = -torch.inf


def _keep(values: Tensor, log_total: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Say which candidates survive top-k, then top-p of what top-k left, then min-p.

    Ids of equal value survive together, so that the order of a sort decides nothing.

    Args:
        values: Largest logits over temperature, descending.  # [R, C] float32
        log_total: Log of the sum over all ids of exp(logit).  # [R] float32
        rows: The rows' parameters.

    Returns:
        The survivors; the first is one in every row that is finite.  # [R, C] bool
    """
    device, width = values.device, values.shape[1]
    top_k = torch.tensor([min(r.params.top_k or width, width) for r in rows], device=device)
    top_p = torch.tensor([r.params.top_p for r in rows], device=device).unsqueeze(1)
    min_p = torch.tensor([r.params.min_p for r in rows], device=device).unsqueeze(1)
    keep = values >= values.gather(1, top_k.unsqueeze(1) - 1)
    has_top_k = torch.tensor([bool(r.params.top_k) for r in rows], device=device)
    log_kept = values.masked_fill(~keep, -torch.inf).logsumexp(dim=-1)
    log_norm = torch.where(has_top_k, log_kept, log_total).unsqueeze(1)
    probs = (values - log_norm).exp()
    before = probs.cumsum(dim=-1) - probs  # mass of the strictly larger candidates
    count = ((before < top_p) | (top_p >= 1)).sum(dim=-1, keepdim=True).clamp_(min=1)
    keep &= values >= values.gather(1, count - 1)
    floor = values[:, :1] + torch.where(min_p > 0, min_p, torch.ones_like(min_p)).log()
    return keep & ((values >= floor) | (min_p <= 0)) & values.isfinite()

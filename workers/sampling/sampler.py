"""The one sampler, used for plain steps, for verification and by drafters.

Owns the chain from logits to token ids: vocabulary mask, penalties, bias, min_tokens, grammar,
temperature, top-k, top-p, min-p, noise, argmax; log-probabilities are taken before the penalties.
Knows no model and no scheduler: a row is told its parameters, its position and what stands before
it. Invariant: a row's result depends on that row alone, so verifying many positions at once gives
what one-by-one decoding gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.contracts import SamplingParams
from workers.sampling.logprobs import RowLogprobs, row_logprobs
from workers.sampling.noise import GumbelNoise
from workers.sampling.penalties import History, PenalisedRow, TokenCounts
from workers.sampling.staging import staged

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
    # The sequence, and the drafts that are taken to follow it: what penalties count.
    history: History | None = None
    draft_ids: Sequence[int] = ()
    # Bits of the ids that the grammar allows; None = any. Minds `min_tokens`.  # [ids/32] int32
    mask: np.ndarray | None = None
    # Most likely tokens to report; None = no log-probabilities.
    num_logprobs: int | None = None

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
    # Of the rows that want them, in order; None where no row does.
    logprobs: RowLogprobs | None = None


class Sampler:
    """Samples ids in `[0, num_ids)` from logits of width `vocab_size`."""

    def __init__(self, vocab_size: int, num_ids: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_ids = num_ids
        self._device = device
        self._noise = GumbelNoise(vocab_size, device)
        self._counts = TokenCounts(vocab_size, device)
        self._bits = torch.arange(32, dtype=torch.int32, device=device)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledRows:
        """Sample one id a row.

        Args:
            logits: Overwritten.  # [R, V] any float
            rows: One a row of `logits`.
        """
        logits = logits.float()
        logits[:, self._num_ids :] = -torch.inf  # padding of the vocabulary: no such tokens
        reported = [i for i, row in enumerate(rows) if row.num_logprobs is not None]
        raw = logits[staged(reported, torch.int64, self._device)] if reported else None
        self._penalise(logits, rows)
        self._add_bias(logits, rows)
        self._mask_stops(logits, rows)
        self._mask_grammar(logits, rows)
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
        logprobs = None
        if raw is not None:
            where = staged(reported, torch.int64, self._device)
            num_top = max(rows[i].num_logprobs or 0 for i in reported)
            logprobs = row_logprobs(raw, token_ids[where], num_top)
        return SampledRows(token_ids, best.isfinite(), logprobs)

    def _penalise(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        index, penalised = [], []
        for i, row in enumerate(rows):
            if row.history is not None and row.params.has_penalties:
                index.append(i)
                penalised.append(PenalisedRow(row.params, row.history, row.draft_ids))
        if index:
            self._counts.penalise(logits, index, penalised)

    def _add_bias(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        biased = [
            (i, token_id, bias)
            for i, row in enumerate(rows)
            for token_id, bias in row.params.logit_bias
            if token_id < self._vocab_size  # a draft model may be narrower
        ]
        if biased:
            numbers, ids, biases = zip(*biased, strict=True)
            where = (
                staged(numbers, torch.int64, self._device),
                staged(ids, torch.int64, self._device),
            )
            logits.index_put_(where, staged(biases, torch.float32, self._device), accumulate=True)

    def _mask_stops(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        """Rule out stop ids where `min_tokens` has not been reached."""
        places = [
            i * self._vocab_size + stop_id
            for i, row in enumerate(rows)
            if row.mask is None and row.num_emitted < row.params.min_tokens
            for stop_id in row.stop_ids
            if stop_id < self._vocab_size
        ]
        if places:
            index = staged(places, torch.int64, self._device)
            logits.view(-1).index_fill_(0, index, -torch.inf)

    def _mask_grammar(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        """Rule out what the rows' grammars do not allow."""
        masks = {i: row.mask for i, row in enumerate(rows) if row.mask is not None}
        if not masks:
            return
        words = np.stack(list(masks.values()))
        bits = staged(words, torch.int32, self._device).unsqueeze(2) >> self._bits
        allowed = (bits & 1).flatten(1)[:, : self._vocab_size].bool()
        where = staged(list(masks), torch.int64, self._device)
        part = logits[where]
        part[:, : allowed.shape[1]].masked_fill_(~allowed, -torch.inf)
        part[:, allowed.shape[1] :] = -torch.inf
        logits[where] = part

    def _sampled(
        self, logits: Tensor, rows: Sequence[SamplingRow], index: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows' index, their logits over temperature, and their noise keys."""
        where = staged(index, torch.int64, self._device)
        temperature = [rows[i].params.temperature for i in index]
        scaled = logits[where] / staged(temperature, torch.float32, self._device).unsqueeze(1)
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
    top_k = staged([min(r.params.top_k or width, width) for r in rows], torch.int64, device)
    top_p = staged([r.params.top_p for r in rows], torch.float32, device).unsqueeze(1)
    min_p = staged([r.params.min_p for r in rows], torch.float32, device).unsqueeze(1)
    keep = values >= values.gather(1, top_k.unsqueeze(1) - 1)
    has_top_k = staged([bool(r.params.top_k) for r in rows], torch.bool, device)
    log_kept = values.masked_fill(~keep, -torch.inf).logsumexp(dim=-1)
    log_norm = torch.where(has_top_k, log_kept, log_total).unsqueeze(1)
    probs = (values - log_norm).exp()
    before = probs.cumsum(dim=-1) - probs  # mass of the strictly larger candidates
    count = ((before < top_p) | (top_p >= 1)).sum(dim=-1, keepdim=True).clamp_(min=1)
    keep &= values >= values.gather(1, count - 1)
    floor = values[:, :1] + torch.where(min_p > 0, min_p, torch.ones_like(min_p)).log()
    return keep & ((values >= floor) | (min_p <= 0)) & values.isfinite()

"""Log-probabilities to report: the model's own, before anything is done to its logits.

Owns how they are computed and brought to the host. Knows no requests beyond how many each row
wants. Invariant: a row's numbers depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.contracts import TokenLogprob


class RowLogprobs(NamedTuple):
    """Numbers of some rows, still on the device."""

    chosen: Tensor  # [n] float32
    top: Tensor  # [n, K] float32, descending
    top_ids: Tensor  # [n, K] int64


def row_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> RowLogprobs:
    """Return each row's log-probability of its token, and the largest ones.

    Args:
        logits: The model's; -inf where there is no token.  # [n, V] float32
        token_ids: One a row.  # [n] int64
        num_top: How many of the largest; 0 = none.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    top, top_ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return RowLogprobs(chosen, top, top_ids)


def on_host(
    rows: RowLogprobs, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Return the rows as values, each with as many of the largest as it wants."""
    return [
        TokenLogprob(token_id, chosen, tuple(zip(top_ids[:n], top[:n], strict=True)))
        for token_id, n, chosen, top, top_ids in zip(
            token_ids,
            num_top,
            rows.chosen.tolist(),
            rows.top.tolist(),
            rows.top_ids.tolist(),
            strict=True,
        )
    ]


def prompt_logprobs(
    logits: Tensor, next_ids: Sequence[int], num_top: int, num_ids: int
) -> list[TokenLogprob]:
    """Return how likely the model thought each token of a stretch of prompt.

    Args:
        logits: Of the tokens before them; overwritten.  # [n, V] any float
        next_ids: The tokens.  # [n]
        num_top: How many of the largest beside each.
        num_ids: Ids that are tokens.
    """
    logits = logits.float()
    logits[:, num_ids:] = -torch.inf
    chosen = torch.tensor(next_ids, device=logits.device)
    return on_host(row_logprobs(logits, chosen, num_top), next_ids, [num_top] * len(next_ids))

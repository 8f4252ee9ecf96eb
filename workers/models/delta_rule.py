"""The gated delta rule over short runs of tokens, with a result that can be cut back exactly.

Owns the arithmetic. Knows no model, no slots and no batch. The recurrence of one head is

    S_t = exp(g_t) S_(t-1) + k_t u_t^T        u_t = beta_t (v_t - (exp(g_t) S_(t-1))^T k_t)
    o_t = S_t^T q_t

(Yang et al. 2025, "Gated Delta Networks", arXiv 2412.06464). With c the running sum of g, the u of
all n tokens follow from one unit-triangular system, and then the state after any a of them is

    S_a = exp(c_a) S_0 + sum over j <= a of exp(c_a - c_j) k_j u_j^T

so that k, u and c, O(n D) numbers, are all that a partial accept needs: no state is kept for each
draft, and no token runs twice. Invariant: a run's outputs and its cut states are the same whether
its tokens come together or one by one, up to float32 rounding.

Shape symbols: n sequences, m tokens each, H value heads, Dk and Dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInput:
    """What the rule runs on; keys and queries not yet normalised."""

    query: Tensor  # [n, m, Hk, Dk]
    key: Tensor  # [n, m, Hk, Dk]
    value: Tensor  # [n, m, H, Dv], H a multiple of Hk
    log_decay: Tensor  # [n, m, H], at most 0
    beta: Tensor  # [n, m, H]


@dataclass(frozen=True, slots=True, eq=False)
class DeltaTrace:
    """What the state after any number of the run's tokens can be made from."""

    key: Tensor  # [n, H, m, Dk] float32, normalised
    update: Tensor  # [n, H, m, Dv] float32
    log_decay: Tensor  # [n, H, m] float32, summed up

    def state_after(self, num_tokens: Tensor, initial: Tensor) -> Tensor:
        """Return the state after each sequence's first tokens.

        Args:
            num_tokens: At least 1.  # [n] int64
            initial: State before the run.  # [n, H, Dk, Dv] float32

        Returns:
            # [n, H, Dk, Dv] float32
        """
        last = (num_tokens - 1).view(-1, 1, 1).expand(-1, self.log_decay.shape[1], 1)
        total = self.log_decay.gather(2, last)  # [n, H, 1]
        places = torch.arange(self.log_decay.shape[2], device=num_tokens.device)
        dropped = (places >= num_tokens.unsqueeze(1)).unsqueeze(1)  # [n, 1, m]
        # Filled before exp: past the cut the difference is positive, and may overflow.
        weight = (total - self.log_decay).masked_fill(dropped, float("-inf")).exp()
        # What was dropped may be anything, and 0 times a NaN is NaN.
        key = self.key.masked_fill(dropped.unsqueeze(3), 0.0)
        update = self.update.masked_fill(dropped.unsqueeze(3), 0.0)
        added = (key * weight.unsqueeze(3)).transpose(2, 3) @ update
        return total.exp().unsqueeze(3) * initial + added


def run(inputs: DeltaInput, initial: Tensor) -> tuple[Tensor, DeltaTrace]:
    """Run the rule over n equally long runs.

    Args:
        inputs: The run.
        initial: State before it.  # [n, H, Dk, Dv] float32

    Returns:
        Outputs [n, m, H, Dv] float32, and the trace.
    """
    repeats = inputs.value.shape[2] // inputs.key.shape[2]
    query = _by_head(_normalised(inputs.query), repeats) * inputs.query.shape[-1] ** -0.5
    key = _by_head(_normalised(inputs.key), repeats)
    value = _by_head(inputs.value.float(), 1)
    beta = inputs.beta.float().transpose(1, 2).unsqueeze(3)  # [n, H, m, 1]
    log_decay = inputs.log_decay.float().transpose(1, 2).cumsum(2)  # [n, H, m]
    decay = log_decay.exp().unsqueeze(3)  # since the run's start
    update = beta * (value - decay * (key @ initial))
    scores = query @ key.transpose(2, 3)
    if key.shape[2] > 1:
        between = (log_decay.unsqueeze(3) - log_decay.unsqueeze(2)).tril()
        between = between.exp().tril()  # [n, H, m, m], from column to row
        system = (beta * (key @ key.transpose(2, 3)) * between).tril(-1)
        update = torch.linalg.solve_triangular(system, update, upper=False, unitriangular=True)
        scores = scores * between
    output = decay * (query @ initial) + scores @ update
    return output.transpose(1, 2), DeltaTrace(key, update, log_decay)


def _normalised(rows: Tensor) -> Tensor:
    """Scale each head's row to length 1, as the checkpoints' kernels do."""
    rows = rows.float()
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _EPSILON)


def _by_head(rows: Tensor, repeats: int) -> Tensor:
    """# [n, m, Hk, D] -> [n, Hk * repeats, m, D]."""
    return rows.repeat_interleave(repeats, dim=2).transpose(1, 2)

"""Linear attention of one packed step: read states before it, write them after acceptance.

Owns the grouping of a step's sequences and what a step leaves behind until it is known how many
of its tokens stand. Knows no model layer beyond its number, and no acceptance. Short runs (decode,
verify, small chunks) of equal length are one call of `delta_rule`; a long chunk, which holds no
drafts, goes through the library's own chunked rule, a kernel where one is installed.

Invariant: nothing is written before `commit`; a step that failed is simply run again. What commit
writes for a sequence is the state after exactly its kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from workers.errors import BatchInfoError
from workers.kv.linear_state import LinearStatePool
from workers.models import delta_rule
from workers.models.delta_rule import DeltaInput, DeltaTrace

# A longer run is a prompt chunk: with one of these many, its square matrices stay small.
MAX_RUN_LEN = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences of the step with equally many tokens, or a single long one."""

    members: tuple[int, ...]  # their numbers in the step
    q_len: int
    rows: Tensor  # [n * q_len] int64, packed rows, sequence by sequence
    sources: Tensor  # [n] int64, slots; 0 where fresh
    fresh: Tensor  # [n] bool, sequences that begin in this step


@dataclass(slots=True, eq=False)
class _Pending:
    """What one layer leaves for the commit."""

    window: Tensor  # [T + S * (K-1), conv_dim]: each sequence's old window, then its new rows
    # By group: a trace to cut, or the state after a long run.  # [1, H, Dk, Dv] float32
    results: list[DeltaTrace | Tensor] = field(default_factory=list)


class LinearStep:
    """One forward pass's view on the states of its sequences."""

    def __init__(
        self,
        pool: LinearStatePool,
        q_lens: Sequence[int],
        sources: Sequence[int],
        device: torch.device,
    ) -> None:
        """Plan a step.

        Args:
            pool: The model's states.
            q_lens: Tokens of each sequence.
            sources: Slot with each sequence's state before the step; -1 = it begins here.
            device: Where the step runs.
        """
        self._pool = pool
        self._q_lens = tuple(q_lens)
        self._sources = tuple(sources)
        self._device = device
        self._pending: dict[int, _Pending] = {}

    def convolve(self, layer_id: int, mixed: Tensor, weight: Tensor) -> Tensor:
        """Apply the causal depthwise convolution and its activation.

        Args:
            layer_id: The layer.
            mixed: # [T, conv_dim]
            weight: # [conv_dim, K]

        Returns:
            # [T, conv_dim]
        """
        old = self._pool.layer(layer_id).conv[self._all_sources]  # [S, K-1, conv_dim]
        old = old.masked_fill(self._all_fresh[:, None, None], 0)
        window = mixed.new_empty((len(mixed) + old.shape[0] * old.shape[1], mixed.shape[1]))
        window[self._token_places] = mixed
        window[self._old_places] = old.flatten(0, 1)
        reach = weight.shape[1] - 1
        out = window[self._token_places] * weight[:, reach]
        for back in range(1, reach + 1):
            out = out + window[self._token_places - back] * weight[:, reach - back]
        self._pending[layer_id] = _Pending(window)
        return silu(out)

    def recur(self, layer_id: int, inputs: DeltaInput) -> Tensor:
        """Apply the gated delta rule.

        Args:
            layer_id: A layer that has been convolved.
            inputs: Packed: every field's leading axes are [1, T].

        Returns:
            # [T, H, Dv] float32
        """
        states = self._pool.layer(layer_id).recurrent
        results = self._pending[layer_id].results
        out = inputs.value.new_empty(inputs.value.shape[1:], dtype=torch.float32)
        for group in self._groups:
            initial = states[group.sources].masked_fill(group.fresh[:, None, None, None], 0)
            part = _select(inputs, group)
            result: DeltaTrace | Tensor
            if group.q_len <= MAX_RUN_LEN:
                attended, result = delta_rule.run(part, initial)
            else:
                attended, result = _run_long(part, initial)
            results.append(result)
            out[group.rows] = attended.flatten(0, 1)
        return out

    @torch.inference_mode()
    def commit(self, kept: Sequence[int], slots: Sequence[int]) -> None:
        """Write each sequence's state after its first `kept` tokens to its slot.

        Raises:
            BatchInfoError: A long run is to be cut; drafts are never part of one.
        """
        lens = zip(self._q_lens, kept, strict=True)
        if any(q_len > MAX_RUN_LEN and q_len != stand for q_len, stand in lens):
            raise BatchInfoError(f"a run of over {MAX_RUN_LEN} tokens cannot be cut")
        kept_all = torch.tensor(list(kept), device=self._device)
        slots_all = torch.tensor(list(slots), device=self._device)
        reach = self._pool.shape.conv_rows
        # A window's first row, plus the tokens that stand: the next window begins there.
        places = (self._starts + kept_all).unsqueeze(1) + torch.arange(reach, device=self._device)
        for layer_id, pending in self._pending.items():
            states = self._pool.layer(layer_id).recurrent
            conv = pending.window[places]  # [S, K-1, conv_dim]
            for group, result in zip(self._groups, pending.results, strict=True):
                members = torch.tensor(group.members, device=self._device)
                if isinstance(result, DeltaTrace):
                    initial = states[group.sources]
                    initial = initial.masked_fill(group.fresh[:, None, None, None], 0)
                    state = result.state_after(kept_all[members], initial)
                else:
                    state = result
                self._pool.write(layer_id, slots_all[members], conv[members], state)
        self._pending = {}

    @cached_property
    def _starts(self) -> Tensor:
        """First row of each sequence in a window.  # [S] int64."""
        reach = self._pool.shape.conv_rows
        starts = accumulate((q_len + reach for q_len in self._q_lens[:-1]), initial=0)
        return torch.tensor(list(starts), device=self._device)

    @cached_property
    def _old_places(self) -> Tensor:
        """Rows of the old windows in the new one.  # [S * (K-1)] int64."""
        reach = torch.arange(self._pool.shape.conv_rows, device=self._device)
        return (self._starts.unsqueeze(1) + reach).flatten()

    @cached_property
    def _token_places(self) -> Tensor:
        """Rows of the step's tokens in a window.  # [T] int64."""
        lens = torch.tensor(self._q_lens, device=self._device)
        # Each sequence's window is preceded by its own old rows and those of all before it.
        before = torch.arange(1, len(lens) + 1, device=self._device) * self._pool.shape.conv_rows
        total = sum(self._q_lens)
        shift = before.repeat_interleave(lens, output_size=total)
        return torch.arange(total, device=self._device) + shift

    @cached_property
    def _all_sources(self) -> Tensor:
        return torch.tensor([max(slot, 0) for slot in self._sources], device=self._device)

    @cached_property
    def _all_fresh(self) -> Tensor:
        return torch.tensor([slot < 0 for slot in self._sources], device=self._device)

    @cached_property
    def _groups(self) -> tuple[_Group, ...]:
        by_len: dict[tuple[int, int], list[int]] = {}
        for number, q_len in enumerate(self._q_lens):
            # A long run is a group of its own.
            by_len.setdefault((q_len, number if q_len > MAX_RUN_LEN else -1), []).append(number)
        ends = tuple(accumulate(self._q_lens))
        groups = []
        for (q_len, _), members in by_len.items():
            rows = [row for m in members for row in range(ends[m] - q_len, ends[m])]
            index = torch.tensor(members, device=self._device)
            groups.append(
                _Group(
                    members=tuple(members),
                    q_len=q_len,
                    rows=torch.tensor(rows, device=self._device),
                    sources=self._all_sources[index],
                    fresh=self._all_fresh[index],
                )
            )
        return tuple(groups)


def _select(inputs: DeltaInput, group: _Group) -> DeltaInput:
    """Take a group's rows out of the packed step.  # [1, T, ...] -> [n, q_len, ...]."""

    def part(packed: Tensor) -> Tensor:
        return packed[0, group.rows].view(len(group.members), group.q_len, *packed.shape[2:])

    return DeltaInput(
        query=part(inputs.query),
        key=part(inputs.key),
        value=part(inputs.value),
        log_decay=part(inputs.log_decay),
        beta=part(inputs.beta),
    )


def _run_long(inputs: DeltaInput, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Run one long chunk: outputs [1, m, H, Dv], and the state after it [1, H, Dk, Dv]."""
    out, state = torch_chunk_gated_delta_rule(
        inputs.query,
        inputs.key,
        inputs.value,
        g=inputs.log_decay,
        beta=inputs.beta,
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out.float(), state.float()

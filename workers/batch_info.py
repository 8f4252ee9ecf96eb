"""Batch info: what one forward pass is told about its tokens, for every model and mode.

Owns the packed device view of a step (`ForwardBatch`), the attention metadata and the rope
positions. Knows no model, no scheduler and no request: it is built from spans of sequences.
Called by the engine for the target and by the drafters for theirs.

Shape symbols used everywhere: S sequences, T packed tokens, R logit rows, K drafts, V vocabulary,
B blocks, H query heads, Hkv key/value heads, D head size, P prompt tokens.

Invariant: sizes, KV slots and rope positions all come from `seq_positions`, the index of each
token in its own sequence. The mode never decides a size or a position, the slot never comes from
a rope coordinate, and the rope position of index p of a sequence is the same number in every mode:

    p <  prompt_len    the prompt's own table, column p
    p >= prompt_len    p + delta on all three axes          (delta 0 for text)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

from workers.errors import BatchInfoError


class ForwardMode(Enum):
    """Which model runs and why. For logs and statistics; it sizes nothing."""

    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_DECODE = "draft_decode"
    DRAFT_EXTEND = "draft_extend"


class RopeLayout(Enum):
    """How the *running* model counts positions; a text draft under an mrope target is linear."""

    LINEAR = "linear"
    MROPE = "mrope"


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """A prompt's multimodal rope positions, computed once from the whole prompt."""

    prompt: Tensor  # [3, P] int64, CPU: temporal, height, width
    # Added to the index of every token after the prompt.
    delta: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What ids and slots must stay below."""

    vocab_size: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSpan:
    """Tokens `[start, start + len(token_ids))` of one sequence, to be run in one step."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    # None = text only: linear positions, or delta 0 on three axes.
    rope: RopeTable | None = None
    # The last n tokens get logits.
    num_logit_rows: int = 1
    # Slot of the recurrent state after `start` tokens, in models that have one; -1 = none yet.
    state_source: int = -1

    @property
    def end(self) -> int:
        """Index one past the span's last token: the sequence's K/V length after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """What a paged attention function needs beside query, key and value."""

    cu_seqlens_q: Tensor  # [S+1] int32
    kv_lens: Tensor  # [S] int32, the step's own tokens included
    slot_mapping: Tensor  # [T] int64, where each token's K/V goes
    block_table: Tensor  # [S, max blocks] int32, padded with 0
    # The same lengths on the host, so that no kernel launch waits for the device.
    q_lens: tuple[int, ...]
    kv_lens_cpu: tuple[int, ...]

    @property
    def max_q_len(self) -> int:
        """Longest span of the step."""
        return max(self.q_lens)

    @property
    def max_kv_len(self) -> int:
        """Longest sequence of the step."""
        return max(self.kv_lens_cpu)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One packed step on the device: all spans' tokens in one row, without padding."""

    mode: ForwardMode
    layout: RopeLayout
    input_ids: Tensor  # [T] int64
    seq_positions: Tensor  # [T] int64, index of the token in its sequence
    rope_positions: Tensor  # [T] int64 (linear) or [3, T] int64 (mrope)
    rope_deltas: Tensor  # [S] int64
    logit_rows: Tensor  # [R] int64, rows of the packed tokens
    attention: AttentionMetadata
    # Slots in each sequence's own blocks, on the host.
    capacities: tuple[int, ...]
    # Each span's `state_source`.
    state_sources: tuple[int, ...]
    limits: BatchLimits

    @classmethod
    def build(
        cls,
        mode: ForwardMode,
        layout: RopeLayout,
        spans: Sequence[SequenceSpan],
        limits: BatchLimits,
        device: torch.device,
    ) -> ForwardBatch:
        """Pack `spans` into one step.

        Raises:
            BatchInfoError: A span is empty, leaves its blocks, writes another's slot, or holds an
                id outside the vocabulary.
        """
        _check_spans(spans, limits)
        q_lens = tuple(len(span.token_ids) for span in spans)
        cu_seqlens = tuple(accumulate(q_lens, initial=0))
        lens = torch.tensor(q_lens)
        starts = torch.tensor([span.start for span in spans])
        seq_positions = _positions(starts, lens, cu_seqlens)  # [T]
        block_table = _padded_block_table(spans)  # [S, max blocks]
        token_rows = torch.arange(len(spans)).repeat_interleave(lens)  # [T]
        slots = _slots(seq_positions, block_table, token_rows, limits.block_size)
        _check_slots(slots, limits)
        rows = [
            row
            for end, span in zip(cu_seqlens[1:], spans, strict=True)
            for row in range(end - span.num_logit_rows, end)
        ]
        attention = AttentionMetadata(
            cu_seqlens_q=torch.tensor(cu_seqlens, dtype=torch.int32, device=device),
            kv_lens=(starts + lens).to(device, torch.int32),
            slot_mapping=slots.to(device),
            block_table=block_table.to(device, torch.int32),
            q_lens=q_lens,
            kv_lens_cpu=tuple(span.end for span in spans),
        )
        ids = [token for span in spans for token in span.token_ids]
        deltas = torch.tensor([0 if s.rope is None else s.rope.delta for s in spans])
        return cls(
            mode=mode,
            layout=layout,
            input_ids=torch.tensor(ids, device=device),
            seq_positions=seq_positions.to(device),
            rope_positions=_rope_positions(layout, spans, seq_positions, deltas).to(device),
            rope_deltas=deltas.to(device),
            logit_rows=torch.tensor(rows, dtype=torch.int64, device=device),
            attention=attention,
            capacities=tuple(len(s.block_table) * limits.block_size for s in spans),
            state_sources=tuple(span.state_source for span in spans),
            limits=limits,
        )

    def next_decode(self, input_ids: Tensor, keep: Sequence[int]) -> ForwardBatch:
        """Return the draft-decode step after this one: one more token for the kept sequences.

        Positions grow by one in index, slot and rope alike; nothing is read back from the device.

        Args:
            input_ids: The token to run for each kept sequence.  # [len(keep)] int64
            keep: Rows of this batch's sequences that draft on, ascending.

        Raises:
            BatchInfoError: A kept sequence has no block for its next token.
        """
        meta, device = self.attention, input_ids.device
        index = torch.tensor(list(keep), device=device)
        kv_lens_cpu = tuple(meta.kv_lens_cpu[i] + 1 for i in keep)
        capacities = tuple(self.capacities[i] for i in keep)
        if any(kv_len > room for kv_len, room in zip(kv_lens_cpu, capacities, strict=True)):
            raise BatchInfoError(f"kv lengths {kv_lens_cpu} leave blocks of {capacities} slots")
        block_table = meta.block_table[index]
        seq_positions = meta.kv_lens[index].to(torch.int64)  # next index = tokens so far
        deltas = self.rope_deltas[index]
        rows = torch.arange(len(keep), device=device)
        attention = AttentionMetadata(
            cu_seqlens_q=torch.arange(len(keep) + 1, dtype=torch.int32, device=device),
            kv_lens=(seq_positions + 1).to(torch.int32),
            slot_mapping=_slots(seq_positions, block_table, rows, self.limits.block_size),
            block_table=block_table,
            q_lens=(1,) * len(keep),
            kv_lens_cpu=kv_lens_cpu,
        )
        return replace(
            self,
            mode=ForwardMode.DRAFT_DECODE,
            input_ids=input_ids,
            seq_positions=seq_positions,
            rope_positions=seq_positions
            if self.layout is RopeLayout.LINEAR
            else compute_spec_mrope_positions(seq_positions, torch.ones_like(rows), deltas),
            rope_deltas=deltas,
            logit_rows=rows,
            attention=attention,
            capacities=capacities,
            state_sources=tuple(self.state_sources[i] for i in keep),
        )


def compute_spec_mrope_positions(
    draft_positions: Tensor,
    q_lens: Tensor,
    deltas: Tensor,
    seq_positions: Tensor | None = None,
) -> Tensor:
    """Return rope positions for tokens that all lie after their prompts.

    By default the draft input's own positions are used; draft-extend, whose tokens are the
    accepted ones and ragged, passes the batch's own consistent `seq_positions`.

    Args:
        draft_positions: Index of each drafted token in its sequence.  # [T] int64
        q_lens: Tokens per sequence.  # [S] int64
        deltas: Each sequence's offset after its prompt.  # [S] int64
        seq_positions: Replaces `draft_positions`.  # [T] int64

    Returns:
        The same number on all three axes.  # [3, T] int64

    Raises:
        BatchInfoError: The number of positions is not the sum of `q_lens`.
    """
    positions = draft_positions if seq_positions is None else seq_positions
    # One token per sequence needs no repeat: the draft-decode path stays free of host reads.
    per_token = deltas if len(deltas) == len(positions) else deltas.repeat_interleave(q_lens)
    if len(per_token) != len(positions):
        raise BatchInfoError(f"{len(positions)} positions for {len(per_token)} tokens")
    return (positions + per_token).expand(3, -1)


def _rope_positions(
    layout: RopeLayout, spans: Sequence[SequenceSpan], seq_positions: Tensor, deltas: Tensor
) -> Tensor:
    """Apply the one rule; the slow half runs only for spans that still touch their prompt."""
    if layout is RopeLayout.LINEAR:
        return seq_positions
    lens = torch.tensor([len(span.token_ids) for span in spans])
    positions = compute_spec_mrope_positions(seq_positions, lens, deltas, seq_positions)
    if all(s.rope is None or s.start >= s.rope.prompt.shape[1] for s in spans):
        return positions
    positions = positions.clone()
    row = 0
    for span in spans:
        if span.rope is not None:
            columns = span.rope.prompt[:, span.start : span.end]  # empty past the prompt
            positions[:, row : row + columns.shape[1]] = columns
        row += len(span.token_ids)
    return positions


def _positions(starts: Tensor, lens: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
    """Index of every packed token in its sequence."""
    offsets = starts - torch.tensor(cu_seqlens[:-1])
    return torch.arange(cu_seqlens[-1]) + offsets.repeat_interleave(lens)


def _slots(
    seq_positions: Tensor, block_table: Tensor, token_rows: Tensor, block_size: int
) -> Tensor:
    """KV slot of every token.

    Args:
        seq_positions: Index in the sequence.  # [T] int64
        block_table: Of the sequences.  # [S, max blocks] int32 or int64
        token_rows: Sequence of each token.  # [T] int64
        block_size: Slots per block.
    """
    blocks = block_table[token_rows, seq_positions // block_size].to(torch.int64)
    return blocks * block_size + seq_positions % block_size


def _padded_block_table(spans: Sequence[SequenceSpan]) -> Tensor:
    """Block ids as a rectangle; the padding is never read, since `kv_lens` ends before it."""
    width = max(len(span.block_table) for span in spans)
    return torch.tensor([[*s.block_table, *[0] * (width - len(s.block_table))] for s in spans])


def _check_spans(spans: Sequence[SequenceSpan], limits: BatchLimits) -> None:
    if not spans:
        raise BatchInfoError("a step needs at least one sequence")
    for number, span in enumerate(spans):
        num_tokens = len(span.token_ids)
        if num_tokens == 0 or span.start < 0:
            raise BatchInfoError(f"sequence {number}: {num_tokens} tokens from {span.start}")
        if not 0 <= span.num_logit_rows <= num_tokens:
            raise BatchInfoError(
                f"sequence {number}: {span.num_logit_rows} logit rows of {num_tokens} tokens"
            )
        if span.end > len(span.block_table) * limits.block_size:
            raise BatchInfoError(
                f"sequence {number}: {span.end} tokens in {len(span.block_table)} blocks"
            )
        if min(span.token_ids) < 0 or max(span.token_ids) >= limits.vocab_size:
            raise BatchInfoError(f"sequence {number}: an id outside [0, {limits.vocab_size})")


def _check_slots(slots: Tensor, limits: BatchLimits) -> None:
    if len(torch.unique(slots)) != len(slots):
        raise BatchInfoError("two tokens of one step share a KV slot")
    if int(slots.min()) < 0 or int(slots.max()) >= limits.num_blocks * limits.block_size:
        raise BatchInfoError(f"a KV slot outside [0, {limits.num_blocks * limits.block_size})")

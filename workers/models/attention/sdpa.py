"""Attention in plain torch: the backend for CPUs and for GPUs without a flash-attn distribution.

Owns the grouping of a step's sequences and the masks. Knows nothing of kernels beyond
`scaled_dot_product_attention`. Sequences with equally many new tokens form a group, and a group
is one padded call: a step of decodes or of equal verifies is one call, a ragged one a few.

Invariant: a slot outside a sequence's `[0, kv_len)` never reaches its result. A mask alone cannot
promise that, since a weight of 0 times a NaN is NaN: such slots are cut off or zeroed after the
gather. Lengths are read on the host only (`q_lens`, `kv_lens_cpu`): no launch waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.models.attention.backend import StepMemo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from workers.batch_info import AttentionMetadata

# Up to this many new tokens a group's query heads share one call as rows: decodes and verifies
# would otherwise be matrix-vector products. Above it each head of the group gets its own call,
# because the mask of the folded rows would be as many times larger, and rows are plenty.
MAX_FOLDED_Q_LEN = 32


class _Layout(NamedTuple):
    """What a plan depends on beside the step."""

    block_size: int
    heads_per_kv: int
    dtype: torch.dtype
    # Keys that a row sees at most; None = all.
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences of a step with the same number of new tokens: n of them, up to L keys each."""

    num_seqs: int
    q_len: int
    max_kv_len: int  # L
    blocks: Tensor  # [n * blocks of L] int64
    # None = the group is the whole step, in its order.
    token_rows: Tensor | None  # [n * q_len] int64
    # Rows of the n * (slots of the gathered blocks) that lie in [kv_len, L) of their sequence;
    # None where there are none.
    tail_rows: Tensor | None  # int64
    # Added to the scores; None where every row sees every key.
    mask: Tensor | None  # [n, 1, q_len or q_len * heads per kv head, L]


class SdpaBackend:
    """Gathers each group's blocks and calls torch's attention once per group."""

    name = "sdpa"

    def __init__(self) -> None:
        self._groups = StepMemo[tuple[_Group, ...]]()

    def __call__(
        self,
        query: Tensor,  # [T, H, D]
        key_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
        value_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
        meta: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See `AttentionBackend`."""
        block_size, num_kv_heads = key_cache.shape[1:3]
        layout = _Layout(
            block_size,
            query.shape[1] // num_kv_heads,
            query.dtype,
            # One that hides nothing in this step is none: the layers then share a plan.
            None if window is not None and window >= meta.max_kv_len else window,
        )
        groups = self._groups.get(meta, layout, lambda: _plan(meta, layout))
        if groups[0].token_rows is None:
            return _attend(query, key_cache, value_cache, groups[0], scale)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in groups:
            rows = group.token_rows
            assert rows is not None  # only a group that is the whole step has none
            attended = _attend(query[rows], key_cache, value_cache, group, scale)
            out.index_copy_(0, rows, attended)
        return out


def _attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, group: _Group, scale: float
) -> Tensor:
    """One group's attention.

    Args:
        query: The group's rows, sequence by sequence.  # [n * q_len, H, D]
        key_cache: All keys.  # [num_blocks, block_size, Hkv, D]
        value_cache: All values.  # [num_blocks, block_size, Hkv, D]
        group: Where the group's blocks are and what its rows see.
        scale: Factor of the scores.

    Returns:
        # [n * q_len, H, D]
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    key = _gather(key_cache, group).transpose(1, 2)  # [n, Hkv, L, D]
    value = _gather(value_cache, group).transpose(1, 2)
    rows = query.reshape(
        group.num_seqs, group.q_len, num_kv_heads, num_heads // num_kv_heads, head_dim
    ).transpose(1, 2)  # [n, Hkv, q_len, heads per kv head, D]
    if group.q_len <= MAX_FOLDED_Q_LEN:
        out = scaled_dot_product_attention(
            rows.flatten(2, 3), key, value, attn_mask=group.mask, scale=scale
        ).reshape(rows.shape)
    else:
        out = torch.stack(
            [
                scaled_dot_product_attention(heads, key, value, attn_mask=group.mask, scale=scale)
                for heads in rows.unbind(3)
            ],
            dim=3,
        )
    return out.transpose(1, 2).reshape(query.shape)


def _gather(cache: Tensor, group: _Group) -> Tensor:
    """Copy the group's blocks out of one cache, with zeros past each sequence's end.

    Returns:
        # [n, L, Hkv, D]
    """
    # Whole blocks as rows: one long copy each, where slots would be many short ones.
    blocks = cache.view(cache.shape[0], -1).index_select(0, group.blocks)
    if group.tail_rows is not None:
        blocks.view(-1, cache.shape[2] * cache.shape[3]).index_fill_(0, group.tail_rows, 0)
    return blocks.view(group.num_seqs, -1, *cache.shape[2:])[:, : group.max_kv_len]


def _plan(meta: AttentionMetadata, layout: _Layout) -> tuple[_Group, ...]:
    """Group the step's sequences by their number of new tokens."""
    by_q_len: dict[int, list[int]] = {}
    for row, q_len in enumerate(meta.q_lens):
        by_q_len.setdefault(q_len, []).append(row)
    return tuple(_plan_group(meta, rows, layout) for rows in by_q_len.values())


def _plan_group(meta: AttentionMetadata, seq_rows: Sequence[int], layout: _Layout) -> _Group:
    """Lay out one group: its blocks, its token rows, and what they may see."""
    q_len = meta.q_lens[seq_rows[0]]
    lens_cpu = [meta.kv_lens_cpu[row] for row in seq_rows]
    max_kv_len = max(lens_cpu)
    is_whole_step = len(seq_rows) == len(meta.q_lens)
    block_table, kv_lens, token_rows = meta.block_table, meta.kv_lens, None
    device = block_table.device
    if not is_whole_step:
        # Not blocking: the bytes are staged before the call returns, and nobody waits.
        index = torch.tensor(seq_rows).to(device, non_blocking=True)
        block_table, kv_lens = block_table[index], kv_lens[index]
        starts = meta.cu_seqlens_q[index].to(torch.int64)
        token_rows = (starts.unsqueeze(1) + torch.arange(q_len, device=device)).flatten()
    num_blocks = -(-max_kv_len // layout.block_size)
    num_slots = num_blocks * layout.block_size
    is_uniform = min(lens_cpu) == max_kv_len
    sees_all = is_uniform and q_len == 1 and layout.window is None
    keys = torch.arange(max_kv_len, device=device)
    return _Group(
        num_seqs=len(seq_rows),
        q_len=q_len,
        max_kv_len=max_kv_len,
        blocks=block_table[:, :num_blocks].flatten().to(torch.int64),
        token_rows=token_rows,
        tail_rows=None if is_uniform else _tail_rows(lens_cpu, num_slots, device),
        mask=None if sees_all else _causal_mask(kv_lens, keys, q_len, layout),
    )


def _tail_rows(lens: Sequence[int], stride: int, device: torch.device) -> Tensor:
    """Number the gathered slots between each sequence's end and the longest one's, one list."""
    longest = max(lens)
    rows = [
        torch.arange(i * stride + kv_len, i * stride + longest) for i, kv_len in enumerate(lens)
    ]
    return torch.cat(rows).to(device, non_blocking=True)


def _causal_mask(kv_lens: Tensor, keys: Tensor, q_len: int, layout: _Layout) -> Tensor:
    """What to add to the scores: 0 where visible, -inf elsewhere.

    Args:
        kv_lens: Length of each sequence.  # [n]
        keys: Index of every key.  # [L]
        q_len: New tokens, the last of which sees its sequence's last key.
        layout: The scores' dtype, the window, and how many heads' rows may be folded.

    Returns:
        # [n, 1, q_len or q_len * heads per kv head, L]
    """
    last_keys = kv_lens.unsqueeze(1) - q_len + torch.arange(q_len, device=keys.device)  # [n, q_len]
    hidden = keys > last_keys.unsqueeze(2)
    if layout.window is not None:
        hidden |= keys <= last_keys.unsqueeze(2) - layout.window
    mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=keys.device)
    # Given as a float: torch would turn a bool into this in every layer.
    mask.masked_fill_(hidden, float("-inf"))
    rows_per_token = layout.heads_per_kv if q_len <= MAX_FOLDED_Q_LEN else 1
    return mask.repeat_interleave(rows_per_token, dim=1).unsqueeze(1)

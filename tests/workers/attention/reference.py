"""A slow, obvious attention to hold the backends against, and random steps to hold them on.

Owns `attend` (float64, one row and one head at a time), `make_step` and the steps every backend is
tried on. Knows no backend. Invariant: every slot that no sequence owns holds NaN, so that a
backend reading one cannot pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from workers.batch_info import AttentionMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


# (q_len, kv_len) of each sequence.
STEPS = {
    "one decode": [(1, 20)],
    "equal decodes": [(1, 20), (1, 20)],
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 70)],
    "verifies": [(5, 9), (5, 40), (5, 5)],
    "one whole prompt": [(40, 40)],
    "chunks of one length": [(40, 40), (40, 90)],
    "ragged": [(40, 60), (1, 33), (5, 21), (1, 48), (3, 3), (5, 64)],
}


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    query: Tensor  # [T, H, D]
    key_cache: Tensor  # [num_blocks, block_size, Hkv, D]
    value_cache: Tensor  # [num_blocks, block_size, Hkv, D]
    meta: AttentionMetadata
    scale: float
    # Keys that a row sees at most; None = all.
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts and sizes of a model."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8


def make_step(
    lens: Sequence[tuple[int, int]],
    heads: Heads = Heads(),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    window: int | None = None,
) -> Step:
    """Lay sequences out over scattered blocks among foreign ones; what nobody owns is NaN."""
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-kv_len // block_size) for _, kv_len in lens]
    num_blocks = sum(widths) + 3
    # Block 0 is nobody's: table padding points at it.
    order = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    tables = [[order.pop() for _ in range(width)] for width in widths]
    table = torch.zeros(len(lens), max(widths) + 1, dtype=torch.int32)
    owned = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    slots: list[int] = []
    for row, ((q_len, kv_len), blocks) in enumerate(zip(lens, tables, strict=True)):
        table[row, : len(blocks)] = torch.tensor(blocks)
        own = [blocks[p // block_size] * block_size + p % block_size for p in range(kv_len)]
        owned.view(-1)[own] = True
        slots += own[kv_len - q_len :]
    shape = (num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
    caches = torch.randn(2, *shape, generator=generator)
    caches[:, ~owned] = float("nan")
    q_lens = tuple(q_len for q_len, _ in lens)
    kv_lens = tuple(kv_len for _, kv_len in lens)
    query = torch.randn(sum(q_lens), heads.num_heads, heads.head_dim, generator=generator)
    meta = AttentionMetadata(
        cu_seqlens_q=torch.tensor(list(accumulate(q_lens, initial=0)), dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        block_table=table,
        q_lens=q_lens,
        kv_lens_cpu=kv_lens,
    )
    keys, values = caches.to(dtype)
    return Step(query.to(dtype), keys, values, meta, heads.head_dim**-0.5, window)


def reference_attention(step: Step) -> Tensor:
    """What the step's result should be, in float64."""
    meta = step.meta
    lens = list(zip(meta.q_lens, meta.kv_lens_cpu, strict=True))
    return attend(
        step.query,
        step.key_cache,
        step.value_cache,
        lens,
        meta.block_table,
        scale=step.scale,
        window=step.window,
    )


def attend(
    query: Tensor,  # [T, H, D]
    key_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    value_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    lens: Sequence[tuple[int, int]],
    block_table: Tensor,  # [S, max blocks]
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:  # [T, H, D] float64
    """Attend one row and head at a time; row i of q_len sees kv_len - q_len + i + 1 keys.

    Of those, the last `window` at most.
    """
    out = torch.empty(query.shape, dtype=torch.float64)
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // num_kv_heads
    row = 0
    for seq, (q_len, kv_len) in enumerate(lens):
        slots = [(int(block_table[seq, p // block_size]), p % block_size) for p in range(kv_len)]
        keys = torch.stack([key_cache[slot] for slot in slots]).double()
        values = torch.stack([value_cache[slot] for slot in slots]).double()
        for i in range(q_len):
            end = kv_len - q_len + i + 1
            visible = slice(0 if window is None else max(end - window, 0), end)
            for head in range(query.shape[1]):
                scores = keys[visible, head // group] @ query[row, head].double() * scale
                out[row, head] = scores.softmax(0) @ values[visible, head // group]
            row += 1
    return out

"""The K/V tensors of one model, paged by the worker's block ids.

Owns the memory. Knows no block owner: whoever holds a block id may read and write it. Invariant:
the layout is `[num_blocks, block_size, Hkv, D]`, contiguous, per layer and for K and V apart,
which is what paged flash-attention kernels and the SDPA fallback both read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one model's keys and values need."""

    # The model's own indices of the layers that have keys and values.
    layer_ids: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers, keys and values."""
        elements = 2 * len(self.layer_ids) * block_size * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize


class KVPool:
    """Keys and values of all layers of one model."""

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        # Zeros, not empty memory: a masked NaN times weight 0 is NaN.
        self._layers = {
            layer: (
                torch.zeros(size, dtype=shape.dtype, device=device),
                torch.zeros(size, dtype=shape.dtype, device=device),
            )
            for layer in shape.layer_ids
        }

    def layer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return the layer's keys and values.  # each [B, block_size, Hkv, D]."""
        return self._layers[layer_id]

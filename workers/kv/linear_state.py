"""The recurrent state of sequences in models with linear attention.

Owns the memory: one convolution window and one recurrent matrix a slot and layer. Knows no slot
owner (`kv.state_slots` hands them out), no model and no arithmetic. Invariant: a slot is written
by `write` and `copy` only, both between forward passes, so a pass that fails leaves every slot as
it was and can be run again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What one sequence's state of one model needs."""

    # The model's own indices of its linear-attention layers.
    layer_ids: tuple[int, ...]
    conv_rows: int  # kernel size - 1
    conv_dim: int
    num_heads: int
    key_dim: int
    value_dim: int
    # Of the convolution window: copies of activations. The recurrent matrix is float32.
    dtype: torch.dtype

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        conv = self.conv_rows * self.conv_dim * self.dtype.itemsize
        recurrent = self.num_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return len(self.layer_ids) * (conv + recurrent)


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """One layer's state of every slot."""

    conv: Tensor  # [slots, K-1, conv_dim], the latest inputs, oldest first
    recurrent: Tensor  # [slots, H, Dk, Dv] float32


class LinearStatePool:
    """States of all layers of one model."""

    def __init__(self, shape: LinearShape, num_slots: int, device: torch.device) -> None:
        self.shape = shape
        self._layers = {
            layer: LayerStates(
                conv=torch.zeros(
                    (num_slots, shape.conv_rows, shape.conv_dim), dtype=shape.dtype, device=device
                ),
                recurrent=torch.zeros(
                    (num_slots, shape.num_heads, shape.key_dim, shape.value_dim), device=device
                ),
            )
            for layer in shape.layer_ids
        }

    def layer(self, layer_id: int) -> LayerStates:
        """Return one layer's states, to be read."""
        return self._layers[layer_id]

    def write(self, layer_id: int, slots: Tensor, conv: Tensor, recurrent: Tensor) -> None:
        """Store states of one layer.

        Args:
            layer_id: The layer.
            slots: Where to.  # [n] int64, unique
            conv: # [n, K-1, conv_dim]
            recurrent: # [n, H, Dk, Dv] float32
        """
        states = self._layers[layer_id]
        states.conv.index_copy_(0, slots, conv)
        states.recurrent.index_copy_(0, slots, recurrent)

    def copy(self, source: int, destination: int) -> None:
        """Copy one slot's state to another."""
        for states in self._layers.values():
            states.conv[destination].copy_(states.conv[source])
            states.recurrent[destination].copy_(states.recurrent[source])

"""Gated delta nets for training on a CPU: shorter chunks than the library's forward asks for.

Owns a faster forward of the library's gated delta net. Knows nothing of batches or checkpoints: it
adds no parameters, and the saved models run the library's own forward. Invariant: the result equals
the library's without a cache, for rows that have their padding on the right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

if TYPE_CHECKING:
    from transformers import Qwen3_5ForConditionalGeneration

CHUNK: Final = 32  # tokens; the library's 64 suits a GPU, here a step then takes half as long again


class ShortChunkDeltaNet(Qwen3_5GatedDeltaNet):
    """The library's gated delta net in chunks of `CHUNK` tokens.

    Work within a chunk grows with the square of its length, and rows are padded to whole chunks.
    """

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Run whole rows, without a cache.

        Args:
            hidden_states: [B, T, hidden] float32.

        Returns:
            [B, T, hidden] float32.
        """
        batch, length, _hidden = hidden_states.shape
        qkv = causal_conv1d_fn(
            self.in_proj_qkv(hidden_states).transpose(1, 2),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            activation=self.activation,
        ).transpose(1, 2)
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        query, key, value = (x.reshape(batch, length, -1, d) for x, d in zip(
            qkv.split(sizes, dim=-1), [self.head_k_dim, self.head_k_dim, self.head_v_dim],
            strict=True,
        ))  # fmt: skip
        decay = -self.A_log.exp() * functional.softplus(
            self.in_proj_a(hidden_states) + self.dt_bias
        )  # [B, T, value heads], logarithmic
        mixed, _state = torch_chunk_gated_delta_rule(
            query,
            key,
            value,
            g=decay,
            beta=self.in_proj_b(hidden_states).sigmoid(),
            chunk_size=CHUNK,
            use_qk_l2norm_in_kernel=True,
        )  # [B, T, value heads, value dims]
        gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        normed = self.norm(mixed.reshape(-1, self.head_v_dim), gate)
        return self.out_proj(normed.reshape(batch, length, -1))


def use_short_chunks(model: Qwen3_5ForConditionalGeneration) -> None:
    """Switch a model's linear layers to the short chunks, over the same parameters."""
    for module in model.modules():
        if type(module) is Qwen3_5GatedDeltaNet:
            module.__class__ = ShortChunkDeltaNet

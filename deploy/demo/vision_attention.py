"""Vision attention for training on a CPU: one call per chunk length, not one per chunk.

Owns a faster forward of the library's vision attention. Knows nothing of text layers, batches or
checkpoints: it adds no parameters, and the saved models run the library's own forward. Invariant:
the result equals the library's for every split into chunks (pictures or windows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GroupedAttention(nn.Module):
    """The forward of the library's vision attentions with equally long chunks computed together.

    The library runs one attention call per chunk; a batch of fifty pictures has hundreds of
    windows, and the calls then take longer than the arithmetic. Both generations of the library's
    module have the parts used here.
    """

    qkv: nn.Linear
    proj: nn.Linear
    num_heads: int
    scaling: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend within each chunk `[cu_seqlens[i], cu_seqlens[i + 1])` of the rows.

        Args:
            hidden_states: [rows, hidden] float32.
            cu_seqlens: [chunks + 1] int, with a leading 0.
            position_embeddings: Cosine and sine, each [rows, head_dim].
        """
        assert position_embeddings is not None
        rows = hidden_states.shape[0]
        qkv = self.qkv(hidden_states).reshape(rows, 3, self.num_heads, -1)
        query, key = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], *position_embeddings)
        qkv = torch.stack((query, key, qkv[:, 2]), dim=1)  # [rows, 3, heads, head_dim]
        starts = cu_seqlens[:-1]
        lengths = cu_seqlens[1:] - starts
        outputs, order = [], []
        for length in lengths.unique().tolist():
            index = starts[lengths == length, None] + torch.arange(length)  # [chunks, length]
            q, k, v = qkv[index].permute(2, 0, 3, 1, 4)  # each [chunks, heads, length, head_dim]
            attended = functional.scaled_dot_product_attention(q, k, v, scale=self.scaling)
            outputs.append(attended.transpose(1, 2).reshape(index.numel(), -1))
            order.append(index.reshape(-1))
        restored = torch.cat(outputs)[torch.argsort(torch.cat(order))]
        return self.proj(restored)


class GroupedQwen25Attention(GroupedAttention, Qwen2_5_VLVisionAttention):
    """Qwen2.5-VL's vision attention, grouped."""


class GroupedQwen35Attention(GroupedAttention, Qwen3_5VisionAttention):
    """Qwen3.5's vision attention, grouped."""


_GROUPED: Final = {
    Qwen2_5_VLVisionAttention: GroupedQwen25Attention,
    Qwen3_5VisionAttention: GroupedQwen35Attention,
}


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model's vision tower to the grouped forward, over the same parameters."""
    for block in model.model.visual.blocks:
        block.attn.__class__ = _GROUPED.get(type(block.attn), type(block.attn))

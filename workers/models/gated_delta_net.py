"""The gated delta net layer of Qwen3.5, packed and over our own states.

Owns the order of the layer's parts; projections, convolution weights and norms are the library's
own modules, wrapped. Knows no slots and no acceptance: `LinearStep` travels through the model as
the step's context does. Invariant: as the library's layer for a single sequence, to float32
rounding, whatever else is in the step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import softplus

from workers.errors import ModelLoadError
from workers.models.delta_rule import DeltaInput
from workers.models.paged import PagedContext


class PackedGatedDeltaNet(nn.Module):
    """Takes the place of a loaded layer in its decoder layer."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self._layer_id = int(inner.layer_idx)

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden]
        attention_mask: Tensor | None = None,
        attn_metadata: PagedContext | None = None,
        **_: object,
    ) -> Tensor:
        """Run the layer.  # [1, T, hidden].

        Raises:
            ModelLoadError: The library did not call as this module relies on.
        """
        if attn_metadata is None or attn_metadata.linear is None or attention_mask is not None:
            raise ModelLoadError("transformers called linear attention without the context")
        inner, step = self.inner, attn_metadata.linear
        mixed = step.convolve(
            self._layer_id, inner.in_proj_qkv(hidden_states)[0], inner.conv1d.weight.squeeze(1)
        )
        query, key, value = mixed.split([inner.key_dim, inner.key_dim, inner.value_dim], dim=-1)
        # In float32: A_log may be so large that half precision has no number for its exp.
        decay_rate = inner.A_log.float().exp()
        log_decay = -decay_rate * softplus(inner.in_proj_a(hidden_states).float() + inner.dt_bias)
        out = step.recur(
            self._layer_id,
            DeltaInput(
                query=query.view(1, len(mixed), -1, inner.head_k_dim),
                key=key.view(1, len(mixed), -1, inner.head_k_dim),
                value=value.view(1, len(mixed), -1, inner.head_v_dim),
                log_decay=log_decay,
                beta=inner.in_proj_b(hidden_states).sigmoid(),
            ),
        ).to(hidden_states.dtype)  # [T, H, Dv]
        gate = inner.in_proj_z(hidden_states).view(-1, inner.head_v_dim)
        out = inner.norm(out.reshape(-1, inner.head_v_dim), gate)
        result: Tensor = inner.out_proj(out.view(1, len(mixed), -1))
        return result


def pack_linear_layers(text_model: Any) -> None:
    """Replace every linear-attention layer of a loaded text stack by its packed form."""
    for layer in text_model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = PackedGatedDeltaNet(layer.linear_attn)

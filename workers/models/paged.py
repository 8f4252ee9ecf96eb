"""The attention function that transformers' models call instead of their own.

Owns the one registered name and the step's context that travels through the model as a keyword.
Knows no scheduler and no family. Invariant: the function works only on what its call brings (the
context), never on a global; a mask handed to it means the library's contract has changed, and is
refused loudly rather than ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from transformers import AttentionInterface

from workers.batch_info import AttentionMetadata
from workers.errors import ModelLoadError
from workers.kv.pool import KVPool
from workers.models.attention.backend import AttentionBackend, write_kv
from workers.models.linear_step import LinearStep

# Registered as attention only, not as a mask: the library then builds no mask at all.
ATTENTION_NAME = "specserve_paged"


@dataclass(frozen=True, slots=True, eq=False)
class PagedContext:
    """What one forward pass gives to every attention layer."""

    meta: AttentionMetadata
    pool: KVPool
    backend: AttentionBackend
    # None for models without linear attention.
    linear: LinearStep | None = None


def paged_attention(  # noqa: PLR0913 - the signature is the library's
    module: nn.Module,
    query: Tensor,  # [1, H, T, D] after rope
    key: Tensor,  # [1, Hkv, T, D] after rope
    value: Tensor,  # [1, Hkv, T, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attn_metadata: PagedContext | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Write the step's K/V and attend over the pages.

    Returns:
        # [1, T, H, D], and no weights

    Raises:
        ModelLoadError: The library did not call as this module relies on.
    """
    if attn_metadata is None or attention_mask is not None:
        raise ModelLoadError("transformers called attention with a mask or without the context")
    context = attn_metadata
    keys, values = context.pool.layer(cast("int", module.layer_idx))
    write_kv(
        keys,
        values,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        context.meta.slot_mapping,
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Qwen2-MoE windows a layer by its mask alone, of which we get none, and says so on the module.
    window = sliding_window or getattr(module, "sliding_window", None)
    rows = query[0].transpose(0, 1)
    out = context.backend(rows, keys, values, context.meta, scale, window)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)

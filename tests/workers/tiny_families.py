"""Tiny random models of every family.

Weights are drawn wide (initializer_range 0.2), so that logits differ by far more than float32
rounding: an equality test then finds bugs, not ties. Every factory takes a seed and changes of the
text config.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf

VOCAB = 160
IMAGE_PAD, VISION_START, VISION_END, VIDEO_PAD = 150, 151, 152, 153
EOS = 1
PATCH, MERGE = 4, 2

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
# Not hidden_size / num_attention_heads: whoever derives it fails.
_HEAD_DIM = 16
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}


def _rope(sections: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}


def _text(config: Any, model: Any, own: dict[str, Any], seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return model(config(**{**_TEXT, **own, **changes}))


def _vision(
    family: str, own_text: dict[str, Any], own_vision: dict[str, Any], seed: int, **changes: Any
) -> Any:
    torch.manual_seed(seed)
    text = {**_TEXT, **own_text, **changes}
    # The key that names the width of the tower's output differs.
    width = "hidden_size" if family == "Qwen2VL" else "out_hidden_size"
    config = getattr(hf, f"{family}Config")(
        text_config=text,
        vision_config={**_VISION, **own_vision, width: text["hidden_size"]},
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return getattr(hf, f"{family}ForConditionalGeneration")(config)


# Three kinds of layers to tell apart: a window shorter than most prompts, none, and again one.
_GEMMA3: dict[str, Any] = {
    "head_dim": _HEAD_DIM,
    "query_pre_attn_scalar": _HEAD_DIM,
    "num_hidden_layers": 3,
    "sliding_window": 11,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 20.0,
}
# Unequal sections: heights and widths swapped, or sections interleaved wrongly, give other logits.
_SECTIONED = {"rope_parameters": _rope([2, 3, 1])}
_INTERLEAVED = {
    "head_dim": _HEAD_DIM,
    "num_hidden_layers": 3,
    "rope_parameters": {**_rope([4, 2, 2]), "mrope_interleaved": True},
}
_WINDOWED_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}
# Two levels under three text layers.
_DEEPSTACK = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}

_HYBRID: dict[str, Any] = {
    "head_dim": 24,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # The first half of a head is rotated.
    "rope_parameters": {
        **_rope([3, 2, 1]),
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
    "mtp_num_hidden_layers": 1,
}
_HYBRID_EXPERTS = {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 32}
_PLAIN_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_position_embeddings": 36,
}


def _hybrid(make: Callable[..., Any], seed: int, **changes: Any) -> Any:
    """Draw a hybrid with mild decays, A in (0.01, 1).

    With the library's own initialisation tiny models are ill-conditioned: the library disagrees
    with itself by 2e-3 between its two recurrences.
    """
    model = make(seed, **changes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.empty_like(weight).uniform_(0.01, 1).log())
    return model


# Models with linear attention; their checkpoints carry a NEXTN head (see `tiny.save`).
HYBRIDS: dict[str, Callable[..., Any]] = {
    "qwen3_5_text": partial(
        _hybrid, partial(_text, hf.Qwen3_5TextConfig, hf.Qwen3_5ForCausalLM, _HYBRID)
    ),
    "qwen3_5_moe_text": partial(
        _hybrid,
        partial(_text, hf.Qwen3_5MoeTextConfig, hf.Qwen3_5MoeForCausalLM, _HYBRID_EXPERTS),
    ),
    "qwen3_5": partial(_hybrid, partial(_vision, "Qwen3_5", _HYBRID, _PLAIN_TOWER)),
    "qwen3_5_moe": partial(_hybrid, partial(_vision, "Qwen3_5Moe", _HYBRID_EXPERTS, _PLAIN_TOWER)),
}
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": partial(_text, hf.LlamaConfig, hf.LlamaForCausalLM, {}),
    "qwen2": partial(_text, hf.Qwen2Config, hf.Qwen2ForCausalLM, {}),
    "qwen2_moe": partial(
        _text,
        hf.Qwen2MoeConfig,
        hf.Qwen2MoeForCausalLM,
        {**_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "qwen3": partial(_text, hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": _HEAD_DIM}),
    "qwen3_moe": partial(
        _text, hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM, {**_EXPERTS, "head_dim": _HEAD_DIM}
    ),
    "gemma3_text": partial(_text, hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, _GEMMA3),
    "qwen2_vl": partial(_vision, "Qwen2VL", _SECTIONED, {"embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": partial(_vision, "Qwen2_5_VL", _SECTIONED, _WINDOWED_TOWER),
    "qwen3_vl": partial(_vision, "Qwen3VL", _INTERLEAVED, _DEEPSTACK),
    "qwen3_vl_moe": partial(_vision, "Qwen3VLMoe", {**_INTERLEAVED, **_EXPERTS}, _DEEPSTACK),
    **HYBRIDS,
}
VISION_FAMILIES = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
)
VIDEO_FAMILIES = VISION_FAMILIES
# A run of placeholders for each step of a video's grid, instead of one for all.
SPLIT_VIDEO_FAMILIES = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})

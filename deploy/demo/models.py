"""The demo pair's architecture: Qwen2.5-VL in miniature, once larger and once smaller.

Owns the sizes, the image processor's settings and how a checkpoint folder is written. Knows
nothing of training or of tasks. Invariants: all demo models share the vocabulary and the picture
geometry, and weights are stored as float16 values that the returned models also hold, so that
loading a folder as float32 gives exactly the weights that were measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from deploy.demo import tokenizer as tok

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

PATCH: Final = 8  # pixels
MERGE: Final = 2  # patches, each way, that become one token
TEMPORAL_PATCH: Final = 2  # frames; a still picture is repeated
MIN_PIXELS: Final = 64 * 64
MAX_PIXELS: Final = 96 * 96
WINDOW: Final = 48  # pixels; does not divide every picture, so some windows are cut
HEAD_DIM: Final = 32
VOCAB_MULTIPLE: Final = 64


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers in which the two models differ."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vision_depth: int
    vision_hidden: int
    vision_mlp: int
    vision_full_layers: tuple[int, ...]  # the others attend within windows


TARGET: Final = ModelSize(4, 192, 6, 2, 512, 3, 128, 256, (1, 2))
DRAFT: Final = ModelSize(2, 96, 3, 1, 256, 2, 64, 128, (1,))
SMOKE: Final = ModelSize(1, 64, 2, 1, 64, 2, 32, 64, (1,))


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Give the id of every special token."""
    return {token: int(tokenizer.convert_tokens_to_ids(token)) for token in tok.SPECIAL_TOKENS}


def vocab_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Count the embedding's rows, rounded up as real checkpoints do: no token uses the last."""
    return -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def build_config(size: ModelSize, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """Make the configuration of a model over this tokenizer's vocabulary."""
    ids = special_ids(tokenizer)
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocab_size(tokenizer),
            "hidden_size": size.hidden,
            "intermediate_size": size.mlp,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "max_position_embeddings": tok.MAX_LENGTH,
            "rms_norm_eps": 1e-6,
            "bos_token_id": ids[tok.END_OF_TEXT],
            "eos_token_id": ids[tok.TURN_END],
            "pad_token_id": ids[tok.END_OF_TEXT],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                # Halves of a head for time, height and width, in Qwen's proportions.
                "mrope_section": [HEAD_DIM // 8, HEAD_DIM * 3 // 16, HEAD_DIM * 3 // 16],
            },
        },
        vision_config={
            "depth": size.vision_depth,
            "hidden_size": size.vision_hidden,
            "intermediate_size": size.vision_mlp,
            "num_heads": size.vision_hidden // HEAD_DIM,
            "out_hidden_size": size.hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL_PATCH,
            "window_size": WINDOW,
            "fullatt_block_indexes": list(size.vision_full_layers),
        },
        image_token_id=ids[tok.IMAGE_PAD],
        video_token_id=ids[tok.VIDEO_PAD],
        vision_start_token_id=ids[tok.VISION_START],
        vision_end_token_id=ids[tok.VISION_END],
        tie_word_embeddings=True,
    )


def build_model(
    size: ModelSize, tokenizer: PreTrainedTokenizerFast
) -> Qwen2_5_VLForConditionalGeneration:
    """Make an untrained float32 model; seed torch beforehand to repeat it."""
    return Qwen2_5_VLForConditionalGeneration(build_config(size, tokenizer))


def build_image_processor() -> Qwen2VLImageProcessorPil:
    """Make the image processor all demo models use."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=TEMPORAL_PATCH,
        merge_size=MERGE,
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    )


def round_to_float16(module: nn.Module) -> None:
    """Give a float32 module the values that its float16 checkpoint will hold."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half().float())


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write weights, configuration, tokenizer and image processor as one folder.

    Args:
        model: A float32 model.
        tokenizer: Its tokenizer.
        folder: Made if it is not there.
        extra: Further tensors for the file of the weights, which the library does not know.
    """
    stored = type(model)(model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.half()
    stored.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=model.config.text_config.bos_token_id,
        eos_token_id=[model.config.text_config.eos_token_id, model.config.text_config.bos_token_id],
        pad_token_id=model.config.text_config.pad_token_id,
    )
    stored.save_pretrained(folder)
    weights = folder / "model.safetensors"
    if extra is not None:
        tensors = {**load_file(weights), **{name: t.half() for name, t in extra.items()}}
        save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # written for its owner alone
    tokenizer.save_pretrained(folder)
    build_image_processor().save_pretrained(folder)

"""The demo's Qwen3.5 in miniature: a hybrid vision-language model and its next-token head.

Owns the sizes, the configuration and the head's module. Knows nothing of training, of tasks or of
how a draft is used. Invariants: token ids and picture geometry are the pair's, the model's
parameters and forward are the library's, and the head's tensors have the names and shapes of a real
checkpoint's ``mtp.*``, which the library itself skips when it loads a folder.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from deploy.demo import models
from deploy.demo import tokenizer as tok

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import DynamicCache

HEAD_DIM: Final = 64  # of full attention; a quarter of it carries positions
VISION_HEAD_DIM: Final = 32
LINEAR_HEAD_DIM: Final = 32
FULL_ATTENTION_INTERVAL: Final = 4
ROPE: Final = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
}
MROPE_SECTION: Final = (3, 3, 2)  # frequencies for time, height and width, in Qwen's proportions
NUM_PLACES: Final = models.MAX_PIXELS // models.PATCH**2  # learned, of the largest square's patches
SLOWEST: Final = 0.002  # forgetting per token at first, before a head's own factor
FASTEST: Final = 0.2
PREFIX: Final = "mtp."  # of the head's tensors in a checkpoint


@dataclass(frozen=True, slots=True)
class NextnSize:
    """The numbers that fix the model's and the head's shapes."""

    layers: int  # every fourth has full attention
    hidden: int
    heads: int
    kv_heads: int
    linear_key_heads: int
    linear_value_heads: int
    mlp: int
    vision_depth: int
    vision_hidden: int
    vision_mlp: int


NEXTN: Final = NextnSize(4, 192, 4, 1, 2, 4, 512, 2, 96, 192)
SMOKE: Final = NextnSize(4, 64, 2, 1, 1, 2, 64, 1, 32, 64)


def build_config(size: NextnSize, tokenizer: PreTrainedTokenizerFast) -> Qwen3_5Config:
    """Make the configuration of a model over this tokenizer's vocabulary."""
    ids = models.special_ids(tokenizer)
    return Qwen3_5Config(
        text_config={
            "vocab_size": models.vocab_size(tokenizer),
            "hidden_size": size.hidden,
            "intermediate_size": size.mlp,
            "num_hidden_layers": size.layers,
            "layer_types": [
                "linear_attention" if (i + 1) % FULL_ATTENTION_INTERVAL else "full_attention"
                for i in range(size.layers)
            ],
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "head_dim": HEAD_DIM,
            "attn_output_gate": True,
            "linear_num_key_heads": size.linear_key_heads,
            "linear_num_value_heads": size.linear_value_heads,
            "linear_key_head_dim": LINEAR_HEAD_DIM,
            "linear_value_head_dim": LINEAR_HEAD_DIM,
            "max_position_embeddings": tok.MAX_LENGTH,
            "bos_token_id": ids[tok.END_OF_TEXT],
            "eos_token_id": ids[tok.TURN_END],
            "pad_token_id": ids[tok.END_OF_TEXT],
            "rope_parameters": {**ROPE, "mrope_section": list(MROPE_SECTION)},
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": size.vision_depth,
            "hidden_size": size.vision_hidden,
            "intermediate_size": size.vision_mlp,
            "num_heads": size.vision_hidden // VISION_HEAD_DIM,
            "out_hidden_size": size.hidden,
            "patch_size": models.PATCH,
            "spatial_merge_size": models.MERGE,
            "temporal_patch_size": models.TEMPORAL_PATCH,
            "num_position_embeddings": NUM_PLACES,
            "deepstack_visual_indexes": [],
        },
        image_token_id=ids[tok.IMAGE_PAD],
        video_token_id=ids[tok.VIDEO_PAD],
        vision_start_token_id=ids[tok.VISION_START],
        vision_end_token_id=ids[tok.VISION_END],
        tie_word_embeddings=True,
    )


def build_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5Tokenizer:
    """Give a tokenizer the way of splitting text that the library forces on this architecture.

    `AutoTokenizer` gives every folder of a Qwen3.5 model its own class, whatever the folder says:
    it takes vocabulary and merges from the file and splits numbers into digits. A model that was
    trained otherwise would meet numbers it has never seen.
    """
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        found: Qwen3_5Tokenizer = Qwen3_5Tokenizer.from_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # of this loading; not for a file
        found.init_kwargs.pop(name, None)
    return found


def build_model(
    size: NextnSize, tokenizer: PreTrainedTokenizerFast
) -> Qwen3_5ForConditionalGeneration:
    """Make an untrained float32 model; seed torch beforehand to repeat it."""
    model = Qwen3_5ForConditionalGeneration(build_config(size, tokenizer))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Qwen3_5GatedDeltaNet):
                # The library's own draws make most heads forget within a token or two. Those of
                # state-space models, slow rates on a logarithmic scale, carry a question as far as
                # its answer from the first step on.
                module.A_log.uniform_(0.01, 1.0).log_()
                rate = module.dt_bias.uniform_(math.log(SLOWEST), math.log(FASTEST)).exp_()
                module.dt_bias.copy_(rate + torch.log(-torch.expm1(-rate)))  # inverse softplus
    return model


class MtpHead(nn.Module):
    """One decoder layer that reads a hidden state with the next token, and predicts the one after.

    Its output takes the place of the hidden state for a further step. Embedding and output matrix
    are the model's.
    """

    def __init__(self, config: Qwen3_5Config) -> None:
        super().__init__()
        text = copy.deepcopy(config.text_config)
        text.layer_types = ["full_attention"]
        text._attn_implementation = "sdpa"
        hidden, eps = text.hidden_size, text.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(text, 0)])
        self.norm = Qwen3_5RMSNorm(hidden, eps=eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=text.initializer_range)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: DynamicCache,
    ) -> torch.Tensor:
        """Run rows behind those in the cache.

        Args:
            embedded: [B, rows, hidden], for row p the embedding of token p + 1.
            hidden: [B, rows, hidden], for row p the model's last hidden state at token p.
            rotary: Cosine and sine at the tokens p, each [B, rows, rotary dims].
            mask: [1, 1, rows, cached + rows] bool, true where a row sees another; None for causal.
            cache: Keys and values of earlier rows; extended.

        Returns:
            [B, rows, hidden]: through the output matrix, row p predicts token p + 2.
        """
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        mixed = self.fc(torch.cat(both, dim=-1))
        layer = self.layers[0]
        return self.norm(layer(mixed, position_embeddings=rotary, attention_mask=mask, cache=cache))


def save_checkpoint(
    model: Qwen3_5ForConditionalGeneration,
    head: MtpHead,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> None:
    """Write model and head as one folder."""
    extra = {PREFIX + name: tensor for name, tensor in head.state_dict().items()}
    models.save_checkpoint(model, tokenizer, folder, extra)


def load_checkpoint(folder: Path) -> tuple[Qwen3_5ForConditionalGeneration, MtpHead]:
    """Load a folder's model and head as float32, ready to use."""
    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    head = MtpHead(model.config)
    stored = load_file(folder / "model.safetensors")
    head.load_state_dict(
        {name.removeprefix(PREFIX): t for name, t in stored.items() if name.startswith(PREFIX)}
    )
    return model.eval(), head.eval()

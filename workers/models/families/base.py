"""What the engine asks of a model, whatever its family.

Owns the view on a loaded transformers model: its text stack, its head, its sizes. Knows no batch
building and no sampling. Invariant: an adapter never calls the library's top-level forward or
`generate`, which keep per-request state (rope deltas) on the model object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from workers.batch_info import RopeLayout, RopeTable
from workers.contracts import ImageInput, MediaInput
from workers.errors import InvalidRequest, ModelLoadError
from workers.kv.linear_state import LinearShape
from workers.kv.pool import KVShape
from workers.models.paged import ATTENTION_NAME, PagedContext


@dataclass(frozen=True, slots=True, eq=False)
class VisualRows:
    """The rows of a packed step that stand for images and video."""

    rows: Tensor  # [n] int64, ascending
    features: Tensor  # [n, feature width], as the adapter's `embed_media` made them


@dataclass(frozen=True, slots=True, eq=False)
class StackInput:
    """What a text stack runs on, beside the attention context."""

    embeddings: Tensor  # [T, hidden], images in place
    rope_positions: Tensor  # [T] or [3, T] int64
    visual: VisualRows | None = None
    # For a head that runs on another model's output.  # [T, hidden]
    previous: Tensor | None = None


class ModelAdapter(ABC):
    """A loaded model, ready for packed forward passes."""

    rope_layout: ClassVar[RopeLayout] = RopeLayout.LINEAR
    takes_images: ClassVar[bool] = False
    takes_videos: ClassVar[bool] = False
    # Whether a video is one run of placeholders for each step of its grid, with text between
    # them, or a single run.
    splits_videos: ClassVar[bool] = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model.config.get_text_config()
        _check_rope(self.config)

    @property
    @abstractmethod
    def text_model(self) -> nn.Module:
        """The stack from embeddings to the final norm."""

    @abstractmethod
    def position_ids(self, rope_positions: Tensor) -> Tensor:
        """Shape the batch's rope positions as the text stack wants them."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits; may exceed the tokenizer's ids."""
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        """Tokens of context that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the K/V."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return int(self.config.num_attention_heads)

    @property
    def kv_shape(self) -> KVShape:
        """What the model's keys and values need."""
        head_dim = getattr(self.config, "head_dim", None)
        return KVShape(
            layer_ids=tuple(range(int(self.config.num_hidden_layers))),
            num_kv_heads=int(self.config.num_key_value_heads),
            head_dim=int(head_dim or self.config.hidden_size // self.num_heads),
            dtype=self.dtype,
        )

    @property
    def linear_shape(self) -> LinearShape | None:
        """What a sequence's recurrent state needs; None = the model has none."""
        return None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a sequence by the checkpoint's own generation config."""
        eos = self._model.generation_config.eos_token_id
        if eos is None:
            eos = self.config.eos_token_id
        return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)

    @property
    def vision_config(self) -> Any:
        """The vision tower's config; only where `takes_images`."""
        return self._model.config.vision_config

    @property
    def image_token_id(self) -> int:
        """Placeholder of an image in the prompt; only where `takes_images`."""
        return int(self._model.config.image_token_id)

    @property
    def video_token_id(self) -> int:
        """Placeholder of a video in the prompt; only where `takes_videos`."""
        return int(self._model.config.video_token_id)

    @property
    def merge_size(self) -> int:
        """Patches of a side that become one token; only where `takes_images`."""
        return int(self.vision_config.spatial_merge_size)

    @property
    def patch_dim(self) -> int:
        """Numbers of one patch of pixels; only where `takes_images`."""
        vision = self.vision_config
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    def blank_image(self, start: int) -> ImageInput:
        """Return the smallest image the vision tower takes, for a warm-up."""
        side = self.merge_size
        pixels = np.zeros((side * side, self.patch_dim), np.float32)
        return ImageInput(pixels, (1, side, side), b"blank", start, 1)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return token embeddings.  # [T] int64 -> [T, hidden]."""
        embeddings: Tensor = self._model.get_input_embeddings()(input_ids)
        return embeddings

    def place(self, embeddings: Tensor, visual: VisualRows) -> Tensor:
        """Return the embeddings with images and video in their rows.  # [T, hidden]."""
        return embeddings.index_copy(0, visual.rows, visual.features)

    def hidden_states(self, step: StackInput, context: PagedContext) -> Tensor:
        """Run the text stack over one packed row.

        Args:
            step: Embeddings and positions.
            context: The step's attention.

        Returns:
            After the final norm.  # [T, hidden]
        """
        hidden: Tensor = self.text_model(
            inputs_embeds=step.embeddings.unsqueeze(0),
            position_ids=self.position_ids(step.rope_positions),
            use_cache=False,
            attn_metadata=context,
            **self.stack_keywords(step),
        ).last_hidden_state
        return hidden[0]

    def stack_keywords(self, step: StackInput) -> dict[str, Any]:  # noqa: ARG002 - for families
        """Return what a family's text stack wants beside embeddings and positions."""
        return {}

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head.  # [R, hidden] -> [R, V]."""
        out: Tensor = self._model.get_output_embeddings()(hidden)
        return out

    def rope_table(
        self,
        prompt_ids: Sequence[int],  # noqa: ARG002 - for families with mrope
        media: Sequence[MediaInput],  # noqa: ARG002
    ) -> RopeTable | None:
        """Return the prompt's multimodal positions; None where positions are linear."""
        return None

    def embed_media(self, media: MediaInput) -> Tensor:  # noqa: ARG002 - for families with images
        """Run the vision tower over one image or video.  # [num_tokens, feature width].

        Raises:
            InvalidRequest: The family takes none; admission has refused such a request before.
        """
        raise InvalidRequest(f"{self.config.model_type} takes no images", "messages")


class CheckpointAdapter(ModelAdapter):
    """A family that is loaded from a checkpoint of its own, as all in `ADAPTERS` are."""

    @classmethod
    @abstractmethod
    def model_class(cls) -> Any:
        """Return transformers' class with the language-model head."""

    @classmethod
    @abstractmethod
    def attention_setting(cls) -> str | dict[str, str]:
        """Return `attn_implementation`: ours for the text stack, sdpa for a vision tower."""


def _check_rope(config: Any) -> None:
    """Refuse rope whose frequencies follow the longest sequence of a forward pass.

    Packed with others, a request would get positions that depend on its neighbours.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    # By kind of layer in families with several tables.
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    for table in tables:
        if table.get("rope_type") in ("dynamic", "longrope"):
            raise ModelLoadError(f"{config.model_type}: {table['rope_type']} rope is not supported")


class TextAdapter(CheckpointAdapter):
    """Shared by text families: one stack, linear positions."""

    @classmethod
    def attention_setting(cls) -> str | dict[str, str]:
        """See `CheckpointAdapter`."""
        return ATTENTION_NAME

    @property
    def text_model(self) -> nn.Module:
        """See `ModelAdapter`."""
        stack: nn.Module = self._model.model
        return stack

    def position_ids(self, rope_positions: Tensor) -> Tensor:
        """Return one row.  # [T] -> [1, T]."""
        return rope_positions.unsqueeze(0)

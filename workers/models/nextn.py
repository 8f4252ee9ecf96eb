"""The NEXTN head of a checkpoint: one layer that predicts the token after the next.

Owns the head's modules and their loading from the checkpoint's own `mtp.*` tensors, which the
library leaves out. Knows no drafting. For the token at index p it takes the target's output at p
and the embedding of token p + 1, and predicts token p + 2 (DeepSeek-AI 2024, "DeepSeek-V3
Technical Report", arXiv 2412.19437, section 2.2). Its K/V and rope position are those of index p.

Invariant: embedding, image features and output head are the target's own; every tensor of the head
is loaded, and a tensor that has no place is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from workers.batch_info import RopeLayout
from workers.config import ModelConfig
from workers.contracts import MediaInput
from workers.errors import ModelLoadError
from workers.kv.pool import KVShape
from workers.models.families.base import ModelAdapter, StackInput, VisualRows
from workers.models.paged import PagedContext

_PREFIX = "mtp."
_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class NextNHead(nn.Module):
    """The head's modules, named as in the checkpoint."""

    def __init__(self, text_model: Any) -> None:
        super().__init__()
        config = text_model.config
        norm = type(text_model.norm)
        self.layer_id = config.layer_types.index("full_attention")
        # The library's own decoder layer, as the target has it at its first full attention.
        layer = type(text_model.layers[self.layer_id])
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([layer(config, self.layer_id)])
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, embeddings: Tensor, previous: Tensor, rope: tuple[Tensor, Tensor], context: Any
    ) -> Tensor:
        """Run the head.

        Args:
            embeddings: Of the token after each.  # [1, T, hidden]
            previous: The target's output, or the head's own.  # [1, T, hidden]
            rope: Cosines and sines of each token.  # each [1, T, rotary]
            context: The step's attention.

        Returns:
            After the head's norm.  # [1, T, hidden]
        """
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(previous)]
        hidden = self.layers[0](
            self.fc(torch.cat(both, dim=-1)),
            position_embeddings=rope,
            attention_mask=None,
            position_ids=None,
            cache=None,
            attn_metadata=context,
        )
        normed: Tensor = self.norm(hidden)
        return normed


class NextNAdapter(ModelAdapter):
    """The head as a model of its own, over its target's embedding and output head."""

    def __init__(self, target: ModelAdapter, head: NextNHead) -> None:
        self._target = target
        self._head = head
        self._model = target._model
        self.config = target.config
        # Set on the instance: they are the target's, whatever its family.
        self.rope_layout: RopeLayout = target.rope_layout  # type: ignore[misc]
        self.takes_images: bool = target.takes_images  # type: ignore[misc]

    @property
    def text_model(self) -> nn.Module:
        """See `ModelAdapter`."""
        return self._head

    @property
    def kv_shape(self) -> KVShape:
        """One layer's."""
        target = self._target.kv_shape
        return KVShape((self._head.layer_id,), target.num_kv_heads, target.head_dim, target.dtype)

    def position_ids(self, rope_positions: Tensor) -> Tensor:
        """See `ModelAdapter`."""
        return self._target.position_ids(rope_positions)

    def place(self, embeddings: Tensor, visual: VisualRows) -> Tensor:
        """See `ModelAdapter`."""
        return self._target.place(embeddings, visual)

    def embed_media(self, media: MediaInput) -> Tensor:
        """See `ModelAdapter`."""
        return self._target.embed_media(media)

    def hidden_states(self, step: StackInput, context: PagedContext) -> Tensor:
        """Run the head over one packed row; `step.previous` is required.  # [T, hidden]."""
        if step.previous is None:
            raise ValueError("a NEXTN head runs on another model's output")
        positions = self.position_ids(step.rope_positions)
        embeddings = step.embeddings.unsqueeze(0)
        rope = cast("Any", self._target.text_model).rotary_emb(embeddings, positions)
        hidden: Tensor = self._head(embeddings, step.previous.unsqueeze(0), rope, context)
        return hidden[0]


def load_nextn(config: ModelConfig, target: ModelAdapter) -> NextNAdapter:
    """Load the head that the target's checkpoint carries.

    Raises:
        ModelLoadError: It carries none, one of another depth, or tensors that do not fit.
    """
    layer_types = getattr(target.config, "layer_types", None) or []
    tensors = {name: t for name, t in _head_tensors(config) if name.startswith(_PREFIX)}
    if not tensors or "full_attention" not in layer_types:
        raise ModelLoadError(f"{config.path}: method nextn needs a checkpoint with mtp.* tensors")
    head = NextNHead(target.text_model)
    state = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    try:
        head.load_state_dict(state, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{config.path}: the mtp.* tensors do not fit: {reason}") from error
    device = next(target.text_model.parameters()).device
    head.eval().requires_grad_(False).to(device=device, dtype=target.dtype)
    return NextNAdapter(target, head)


def _head_tensors(config: ModelConfig) -> Iterable[tuple[str, Tensor]]:
    """Read the head's tensors out of the checkpoint's files; the others are not touched."""
    index = _file(config, _INDEX_FILE)
    if index is None:
        names = [_SINGLE_FILE]
    else:
        placed = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        names = sorted({file for name, file in placed.items() if name.startswith(_PREFIX)})
    for name in names:
        path = _file(config, name)
        if path is None:
            raise ModelLoadError(f"{config.path}: {name} is missing")
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                if key.startswith(_PREFIX):
                    yield key, file.get_tensor(key)


def _file(config: ModelConfig, name: str) -> str | None:
    path: str | None = cached_file(
        config.path, name, revision=config.revision, _raise_exceptions_for_missing_entries=False
    )
    return path

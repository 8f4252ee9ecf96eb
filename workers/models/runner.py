"""Executes one model: packed batches in, logits out.

Owns what runs on the device for one model: its weights, its K/V, its image embeddings. Knows no
scheduler and no sampling. The target and a draft model each have a runner; both index their own
K/V by the same block ids. Invariant: everything a forward pass depends on is in its arguments, so
two runners or two steps can never mix state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.batch_info import (
    BatchLimits,
    ForwardBatch,
    ForwardMode,
    RopeLayout,
    SequenceSpan,
)
from workers.contracts import MediaInput
from workers.errors import BatchInfoError
from workers.kv.linear_state import LinearStatePool
from workers.kv.pool import KVPool
from workers.models.attention.select import select_backend
from workers.models.families import ModelAdapter
from workers.models.families.base import StackInput, VisualRows
from workers.models.linear_step import LinearStep
from workers.models.paged import PagedContext


class ImageCache:
    """Image embeddings by content hash, least recently used first out, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()
        # Times it was asked, and knew.
        self.num_queries = 0
        self.num_hits = 0

    @property
    def num_bytes(self) -> int:
        """Of what is kept."""
        return self._num_bytes

    def get(self, key: bytes) -> Tensor | None:
        """Return an embedding and mark it as used."""
        self.num_queries += 1
        if key not in self._entries:
            return None
        self.num_hits += 1
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: bytes, embedding: Tensor) -> None:
        """Keep an embedding, dropping older ones for it; not one that could never fit."""
        if embedding.nbytes > self._max_bytes:
            return
        self._entries[key] = embedding
        self._num_bytes += embedding.nbytes
        while self._num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= dropped.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What one forward pass leaves."""

    logits: Tensor  # [R, V] in the model's dtype
    hidden: Tensor  # [T, hidden] after the final norm
    # Of a model with linear attention: to be committed once it is known which tokens stand.
    linear: LinearStep | None = None


class ModelRunner:
    """One model and its memory on one device."""

    def __init__(  # noqa: PLR0913 - one model's memory, all of it keyword arguments
        self,
        adapter: ModelAdapter,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        attention_backend: str = "auto",
        num_state_slots: int = 0,
        image_cache: ImageCache | None = None,
    ) -> None:
        """Allocate the model's memory.

        Args:
            adapter: The model.
            num_blocks: Blocks of K/V.
            block_size: Slots of a block.
            device: Where it runs.
            attention_backend: The setting.
            num_state_slots: Slots of recurrent state, for a model with linear attention.
            image_cache: Image embeddings; shared where two runners share a vision tower.
        """
        self.adapter = adapter
        self.device = device
        self.limits = BatchLimits(adapter.vocab_size, num_blocks, block_size)
        shape = adapter.kv_shape
        self._pool = KVPool(shape, num_blocks, block_size, device)
        self.backend = select_backend(
            attention_backend, device, shape.dtype, block_size, shape.head_dim
        )
        self.image_cache = ImageCache(0) if image_cache is None else image_cache
        linear = adapter.linear_shape
        self.states = None if linear is None else LinearStatePool(linear, num_state_slots, device)

    @property
    def rope_layout(self) -> RopeLayout:
        """The running model's own layout."""
        return self.adapter.rope_layout

    def build(self, mode: ForwardMode, spans: Sequence[SequenceSpan]) -> ForwardBatch:
        """Pack spans for this model.

        Raises:
            BatchInfoError: The spans contradict each other or this model's limits.
        """
        return ForwardBatch.build(mode, self.rope_layout, spans, self.limits, self.device)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        media: Sequence[Sequence[MediaInput]] = (),
        previous: Tensor | None = None,
    ) -> StepOutput:
        """Run one step.

        Args:
            batch: Built by this runner.
            media: Each sequence's images and videos, in the batch's order; empty when every token
                of the step lies after its prompt.
            previous: Another model's output, for a head that runs on it.  # [T, hidden]
        """
        step = self._stack_input(batch, media, previous)
        linear = None
        if self.states is not None:
            q_lens = batch.attention.q_lens
            linear = LinearStep(self.states, q_lens, batch.state_sources, self.device)
        context = PagedContext(batch.attention, self._pool, self.backend, linear)
        hidden = self.adapter.hidden_states(step, context)
        logits = self.adapter.logits(hidden[batch.logit_rows])
        # A host-side check: a library that changed its ways shows here, in the warm-up.
        if logits.shape != (len(batch.logit_rows), self.limits.vocab_size):
            raise BatchInfoError(f"the model returned logits of shape {tuple(logits.shape)}")
        return StepOutput(logits, hidden, linear)

    def _stack_input(
        self,
        batch: ForwardBatch,
        media: Sequence[Sequence[MediaInput]],
        previous: Tensor | None,
    ) -> StackInput:
        """Embed a step's tokens, images and video in their places."""
        embeddings = self.adapter.embed(batch.input_ids)
        visual = None
        if self.adapter.takes_images and any(media):
            visual = self._visual_rows(batch, media)
        if visual is not None:
            embeddings = self.adapter.place(embeddings, visual)
        return StackInput(embeddings, batch.rope_positions, visual, previous)

    def _visual_rows(
        self, batch: ForwardBatch, media: Sequence[Sequence[MediaInput]]
    ) -> VisualRows | None:
        """Collect the image and video rows that fall into this step's chunks."""
        rows: list[Tensor] = []
        features: list[Tensor] = []
        meta = batch.attention
        offset = 0  # row of the sequence's token 0
        for q_len, end, of_sequence in zip(meta.q_lens, meta.kv_lens_cpu, media, strict=True):
            start = end - q_len
            offset -= start
            for item in of_sequence:
                parts: list[Tensor] = []  # of the item's own rows
                done = 0  # of the item's tokens, in earlier runs
                for run_start, run_end in item.runs:
                    first, last = max(run_start, start), min(run_end, end)
                    if first < last:
                        rows.append(torch.arange(offset + first, offset + last))
                        parts.append(rows[-1] + (done - run_start - offset))
                    done += run_end - run_start
                if parts:
                    features.append(self._features(item)[torch.cat(parts).to(self.device)])
            offset += end
        if not rows:
            return None
        return VisualRows(torch.cat(rows).to(self.device), torch.cat(features))

    def _features(self, media: MediaInput) -> Tensor:
        features = self.image_cache.get(media.content_hash)
        if features is None:
            features = self.adapter.embed_media(media).to(self.adapter.dtype)
            self.image_cache.put(media.content_hash, features)
        return features

"""Executes one model: packed batches in, logits out.

Owns what runs on the device for one model: its weights, its K/V, its image embeddings. Knows no
scheduler and no sampling. The target and a draft model each have a runner; both index their own
K/V by the same block ids. Invariant: everything a forward pass depends on is in its arguments, so
two runners or two steps can never mix state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.batch_info import (
    BatchLimits,
    ForwardBatch,
    ForwardMode,
    RopeLayout,
    SequenceSpan,
)
from workers.contracts import ImageInput
from workers.errors import BatchInfoError
from workers.kv.pool import KVPool
from workers.models.attention.select import select_backend
from workers.models.families import ModelAdapter
from workers.models.paged import PagedContext


class ImageCache:
    """Image embeddings by content hash, least recently used first out, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()

    def get(self, key: bytes) -> Tensor | None:
        """Return an embedding and mark it as used."""
        if key not in self._entries:
            return None
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


class ModelRunner:
    """One model and its memory on one device."""

    def __init__(
        self,
        adapter: ModelAdapter,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        attention_backend: str = "auto",
        image_cache_bytes: int = 0,
    ) -> None:
        self.adapter = adapter
        self.device = device
        self.limits = BatchLimits(adapter.vocab_size, num_blocks, block_size)
        shape = adapter.kv_shape
        self._pool = KVPool(shape, num_blocks, block_size, device)
        self.backend = select_backend(
            attention_backend, device, shape.dtype, block_size, shape.head_dim
        )
        self._image_cache = ImageCache(image_cache_bytes)

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
    def forward(self, batch: ForwardBatch, images: Sequence[Sequence[ImageInput]] = ()) -> Tensor:
        """Run one step and return the logits of its logit rows.

        Args:
            batch: Built by this runner.
            images: Each sequence's images, in the batch's order; empty when every token of the
                step lies after its prompt.

        Returns:
            # [R, V] in the model's dtype
        """
        embeddings = self.adapter.embed(batch.input_ids)
        if self.adapter.takes_images and any(images):
            embeddings = self._with_images(embeddings, batch, images)
        context = PagedContext(batch.attention, self._pool, self.backend)
        hidden = self.adapter.hidden_states(embeddings, batch.rope_positions, context)
        logits = self.adapter.logits(hidden[batch.logit_rows])
        # A host-side check: a library that changed its ways shows here, in the warm-up.
        if logits.shape != (len(batch.logit_rows), self.limits.vocab_size):
            raise BatchInfoError(f"the model returned logits of shape {tuple(logits.shape)}")
        return logits

    def _with_images(
        self, embeddings: Tensor, batch: ForwardBatch, images: Sequence[Sequence[ImageInput]]
    ) -> Tensor:
        """Put the image rows that fall into this step's chunks in their places."""
        row = 0
        meta = batch.attention
        for q_len, end, of_sequence in zip(meta.q_lens, meta.kv_lens_cpu, images, strict=True):
            start = end - q_len
            for image in of_sequence:
                first, last = max(image.start, start), min(image.end, end)
                if first < last:
                    rows = slice(row + first - start, row + last - start)
                    embedding = self._embed_image(image)
                    embeddings[rows] = embedding[first - image.start : last - image.start]
            row += q_len
        return embeddings

    def _embed_image(self, image: ImageInput) -> Tensor:
        embedding = self._image_cache.get(image.content_hash)
        if embedding is None:
            embedding = self.adapter.embed_image(image).to(self.adapter.dtype)
            self._image_cache.put(image.content_hash, embedding)
        return embedding

"""Batches: conversations as padded tensors for training, prompts as inputs for decoding.

Owns tokenisation of conversations, placeholder expansion, picture preprocessing and collation.
Knows nothing of losses, optimisers or how conversations are drawn. Invariants: token for token
the result of the chat template, pixel for pixel the result of the image processor (both tested),
and only the assistants' answers with their end-of-turn token carry labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from deploy.demo import models, scenes
from deploy.demo import tokenizer as tok

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from PIL import Image
    from transformers import PreTrainedTokenizerFast

    from deploy.demo.scenes import Scene
    from deploy.demo.tasks import Conversation

IGNORED: Final = -100  # label of a token without loss
_MEAN: Final = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
_STD: Final = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One conversation as ids; every list has one entry per token."""

    token_ids: list[int]
    labels: list[int]
    is_image: list[int]  # 1 on an image placeholder, else 0: the library's mm_token_type_ids
    scenes: tuple[Scene, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded conversations; pictures follow each other over the whole batch."""

    # [B, T] int64
    input_ids: torch.Tensor
    # [B, T] int64
    labels: torch.Tensor
    # [B, T] int64
    mm_token_type_ids: torch.Tensor
    # [patches, channels * temporal patch * patch * patch] float32, or None without pictures
    pixel_values: torch.Tensor | None
    # [pictures, 3] int64, or None without pictures
    image_grid_thw: torch.Tensor | None
    # [image tokens, 3] int64: colour, shape and place under each token, or None without pictures
    token_facts: torch.Tensor | None


def grid_of(scene: Scene) -> tuple[int, int, int]:
    """Give a scene's grid in patches: time, height, width."""
    return 1, scene.height // models.PATCH, scene.width // models.PATCH


def image_tokens(scene: Scene) -> int:
    """Count the placeholder tokens of a scene's picture."""
    _, height, width = grid_of(scene)
    return height * width // models.MERGE**2


def token_facts(scene: Scene) -> list[tuple[int, int, int]]:
    """Say what lies in the cell under each image token, in the tokens' order.

    Colours and shapes count from 1, with 0 for an empty cell; the place is the cell's index.
    """
    _, height, width = grid_of(scene)
    rows, columns = height // models.MERGE, width // models.MERGE
    inside = {item.place: item for item in scene.items}
    facts = []
    for row in range(rows):
        for column in range(columns):
            # The cell under the token's centre.
            place = (2 * row + 1) * 3 // (2 * rows) * 3 + (2 * column + 1) * 3 // (2 * columns)
            item = inside.get(place)
            colour = list(scenes.COLOURS).index(item.colour) + 1 if item else 0
            shape = scenes.SHAPES.index(item.shape) + 1 if item else 0
            facts.append((colour, shape, place))
    return facts


def pixel_values(image: Image.Image) -> NDArray[np.float32]:
    """Cut a picture that needs no resizing into normalised patches.

    The image processor gives the same rows; this is three times as fast, which counts in training.

    Returns:
        [patches, channels * temporal patch * patch * patch] float32, merge blocks together.
    """
    pixels = (np.asarray(image, dtype=np.float32) / np.float32(255) - _MEAN) / _STD
    height, width, _ = pixels.shape
    patch, merge = models.PATCH, models.MERGE
    blocks = pixels.reshape(
        height // patch // merge, merge, patch, width // patch // merge, merge, patch, 3
    )
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # [H, W, merge, merge, channel, patch, patch]
    blocks = np.repeat(blocks[:, :, :, :, :, None], models.TEMPORAL_PATCH, axis=5)
    return np.ascontiguousarray(blocks.reshape(height * width // patch**2, -1))


class Encoder:
    """Turns conversations into ids with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._image_pad = int(tokenizer.convert_tokens_to_ids(tok.IMAGE_PAD))
        self.pad = int(tokenizer.convert_tokens_to_ids(tok.END_OF_TEXT))

    def encode(self, conversation: Conversation) -> Encoded:
        """Encode a whole conversation, with labels on the answers."""
        token_ids: list[int] = []
        labels: list[int] = []
        for text, is_answer in _segments(conversation):
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            token_ids += ids
            labels += ids if is_answer else [IGNORED] * len(ids)
        return self._finish(conversation, token_ids, labels)

    def encode_prompt(self, conversation: Conversation) -> Encoded:
        """Encode a conversation up to the place where its first answer begins."""
        text = next(text for text, is_answer in _segments(conversation) if not is_answer)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self._finish(conversation, ids, [IGNORED] * len(ids))

    def _finish(self, source: Conversation, ids: list[int], labels: list[int]) -> Encoded:
        is_image = [int(i == self._image_pad) for i in ids]
        return Encoded(ids, labels, is_image, source.scenes)


def _segments(conversation: Conversation) -> list[tuple[str, bool]]:
    """Write a conversation as alternating texts without and with loss."""
    pictures = "".join(
        tok.VISION_START + tok.IMAGE_PAD * image_tokens(scene) + tok.VISION_END
        for scene in conversation.scenes
    )
    system = conversation.system
    before = f"{tok.TURN_START}system\n{system}{tok.TURN_END}\n" if system is not None else ""
    segments = []
    for index, turn in enumerate(conversation.turns):
        prompt = turn.prompt
        if index == 0:
            prompt = prompt + pictures if conversation.images_last else pictures + prompt
        before += f"{tok.TURN_START}user\n{prompt}{tok.TURN_END}\n{tok.TURN_START}assistant\n"
        segments += [(before, False), (turn.answer + tok.TURN_END, True)]
        before = "\n"
    return [*segments, ("\n", False)]


def collate(rows: Sequence[Encoded], pad: int) -> Batch:
    """Pad conversations on the right: with causal attention no row ever sees its padding."""
    length = max(len(row.token_ids) for row in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (length - len(values))

    shown = [scene for row in rows for scene in row.scenes]
    pixels = [pixel_values(scenes.draw(scene)) for scene in shown]
    return Batch(
        input_ids=torch.tensor([padded(row.token_ids, pad) for row in rows]),
        labels=torch.tensor([padded(row.labels, IGNORED) for row in rows]),
        mm_token_type_ids=torch.tensor([padded(row.is_image, 0) for row in rows]),
        pixel_values=torch.from_numpy(np.concatenate(pixels)) if pixels else None,
        image_grid_thw=torch.tensor([grid_of(scene) for scene in shown]) if shown else None,
        token_facts=torch.tensor([f for s in shown for f in token_facts(s)]) if shown else None,
    )


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Name a batch's tensors as the library's `generate` expects them."""
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "attention_mask": torch.ones_like(batch.input_ids),
    }
    if batch.pixel_values is not None:
        inputs["pixel_values"] = batch.pixel_values
        inputs["image_grid_thw"] = batch.image_grid_thw
        inputs["mm_token_type_ids"] = batch.mm_token_type_ids
    return inputs

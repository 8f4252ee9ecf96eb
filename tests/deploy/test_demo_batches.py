"""Batches: the fast paths of training equal the library's own preprocessing and forward."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoImageProcessor, AutoTokenizer

from deploy import demo
from deploy.demo import batches, models, nextn, scenes, tasks
from deploy.demo import tokenizer as tok
from deploy.demo.delta_net import use_short_chunks
from deploy.demo.scenes import Scene
from deploy.demo.vision_attention import use_grouped_attention

if TYPE_CHECKING:
    from pathlib import Path

    from deploy.demo.tasks import Conversation


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.TARGET_DIR)


def every_size() -> list[Scene]:
    scene = scenes.random_scene(random.Random(0), held_out=False)
    return [Scene(scene.items, w, h, 3) for w in scenes.SIDES for h in scenes.SIDES]


def test_pixels_equal_the_shipped_image_processor() -> None:
    processor = AutoImageProcessor.from_pretrained(demo.TARGET_DIR)
    for scene in every_size():
        image = scenes.draw(scene)
        expected = processor(image, return_tensors="np")
        np.testing.assert_array_equal(batches.pixel_values(image), expected["pixel_values"])
        assert expected["image_grid_thw"].tolist() == [list(batches.grid_of(scene))]


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if conversation.system is not None:
        found.append({"role": "system", "content": conversation.system})
    for index, turn in enumerate(conversation.turns):
        parts: list[dict[str, Any]] = [{"type": "text", "text": turn.prompt}]
        pictures = [{"type": "image"}] * (len(conversation.scenes) if index == 0 else 0)
        parts = parts + pictures if conversation.images_last else pictures + parts
        found.append({"role": "user", "content": parts})
        found.append({"role": "assistant", "content": turn.answer})
    return found


@pytest.mark.parametrize("folder", [demo.TARGET_DIR, demo.NEXTN_DIR], ids=lambda p: p.name)
@pytest.mark.parametrize("seed", range(12))
def test_ids_equal_the_chat_template(folder: Path, seed: int) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    conversation = tasks.training_conversation(random.Random(seed))
    text = str(tokenizer.apply_chat_template(messages(conversation), tokenize=False))
    for scene in conversation.scenes:
        # Expanded under another name first, so that the next search finds the next picture.
        text = text.replace(tok.IMAGE_PAD, "<pad>" * batches.image_tokens(scene), 1)
    expected = tokenizer.encode(text.replace("<pad>", tok.IMAGE_PAD), add_special_tokens=False)
    encoded = batches.Encoder(tokenizer).encode(conversation)
    assert encoded.token_ids == expected
    answers = [i for i in encoded.labels if i != batches.IGNORED]
    wanted = "".join(turn.answer + tok.TURN_END for turn in conversation.turns)
    assert tokenizer.decode(answers, skip_special_tokens=False) == wanted


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3.5"])
def test_grouped_vision_attention_equals_the_library(tokenizer: Any, family: str) -> None:
    torch.manual_seed(0)
    model: Any
    if family == "qwen2.5":
        model = models.build_model(models.TARGET, tokenizer).eval()
    else:
        model = nextn.build_model(nextn.NEXTN, tokenizer).eval()
    shown = every_size()
    pixels = np.concatenate([batches.pixel_values(scenes.draw(scene)) for scene in shown])
    grid = torch.tensor([batches.grid_of(scene) for scene in shown])
    before = {type(block.attn) for block in model.model.visual.blocks}
    with torch.inference_mode():
        expected = model.model.visual(torch.from_numpy(pixels), grid).pooler_output
        use_grouped_attention(model)
        found = model.model.visual(torch.from_numpy(pixels), grid).pooler_output
    assert before.isdisjoint(type(block.attn) for block in model.model.visual.blocks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_short_chunks_equal_the_library_whatever_the_padding(tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = nextn.build_model(nextn.SMOKE, tokenizer).eval()
    ids = torch.randint(0, 700, (2, 75))  # more than a chunk of either length, and no multiple
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        use_short_chunks(model)
        found = model(input_ids=ids, use_cache=False).logits
        padded = functional.pad(ids, (0, 30), value=1)
        right = model(input_ids=padded, use_cache=False).logits[:, :75]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(right, expected, rtol=1e-4, atol=1e-5)

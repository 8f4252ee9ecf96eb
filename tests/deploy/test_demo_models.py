"""The shipped pair: it loads with plain transformers, sees, and speculates with misses."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from deploy import demo
from deploy.demo import batches, evaluate, tasks
from deploy.demo import tokenizer as tok

MAX_MODELS_BYTES = 20 * 10**6  # all demo models together


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.TARGET_DIR)


@pytest.fixture(scope="module")
def target() -> Any:
    return load(demo.TARGET_DIR)


def load(folder: Any) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def prompt_of(tokenizer: Any, kind: str, seed: int) -> tuple[batches.Batch, str]:
    conversation = tasks.held_out_conversation(random.Random(seed), kind)
    encoder = batches.Encoder(tokenizer)
    batch = batches.collate([encoder.encode_prompt(conversation)], encoder.pad)
    return batch, conversation.turns[0].answer


def generate(model: Any, batch: batches.Batch) -> list[int]:
    inputs = batches.model_inputs(batch)
    output = model.generate(**inputs, max_new_tokens=evaluate.MAX_NEW_TOKENS)
    return list(output[0, batch.input_ids.shape[1] :].tolist())


def test_target_captions_held_out_scenes(target: Any, tokenizer: Any) -> None:
    right = 0
    for seed in range(10):
        batch, answer = prompt_of(tokenizer, "describe", seed)
        text = tokenizer.decode(generate(target, batch), skip_special_tokens=True)
        right += text == answer
    assert right >= 8


def test_target_captions_the_sample_from_its_file(target: Any, tokenizer: Any) -> None:
    """The file is finer than the models see: guards the resizing settings as shipped."""
    processor = AutoImageProcessor.from_pretrained(demo.TARGET_DIR)
    with Image.open(demo.SAMPLE_IMAGE) as image:
        pictures = processor(image, return_tensors="pt")
    count = int(pictures["image_grid_thw"].prod()) // processor.merge_size**2
    content = [{"type": "image"}, {"type": "text", "text": "Describe the image."}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    text = text.replace(tok.IMAGE_PAD, tok.IMAGE_PAD * count)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    output = target.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == target.config.image_token_id).long(),
        **pictures,
        max_new_tokens=64,
    )
    caption = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert caption == demo.SAMPLE_CAPTION.read_text(encoding="utf-8").strip()


def test_a_long_prompt_breaks_nothing(target: Any, tokenizer: Any) -> None:
    text = "Repeat: " + ", ".join(["apple", "river", "stone"] * 150)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    assert ids.shape[1] > 800
    with torch.inference_mode():
        logits = target(input_ids=ids, use_cache=False).logits
    assert bool(torch.isfinite(logits).all())


def test_speculation_gives_the_target_s_greedy_tokens(target: Any, tokenizer: Any) -> None:
    draft = load(demo.DRAFT_DIR)
    proposed = accepted = 0
    for kind in ("describe", "describe_each", "ask_cell", "count", "reverse"):
        for seed in range(2):
            batch, _ = prompt_of(tokenizer, kind, seed)
            result = evaluate.speculate(target, draft, batch)
            assert list(result.token_ids) == generate(target, batch)
            proposed += result.proposed
            accepted += result.accepted
    assert 0.4 < accepted / proposed < 1.0


def test_the_shipped_folder_is_small_and_its_report_meets_the_bounds() -> None:
    files = [path for path in demo.MODELS_DIR.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_MODELS_BYTES
    report = json.loads(demo.REPORT.read_text(encoding="utf-8"))
    assert report["captions"]["exact"] >= 0.9
    assert 0.6 <= report["all"]["acceptance_rate"] <= 0.97
    assert report["parameters"]["draft"] * 2 < report["parameters"]["target"]

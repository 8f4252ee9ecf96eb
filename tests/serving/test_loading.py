"""Tokenizers and processors from a directory: what is taken, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.processor import ImageProcessor
from serving.tokenizer import ServingTokenizer
from tests.serving.doubles import SPECIALS, make_hf_tokenizer
from workers.errors import ModelLoadError


def save(path: Path, config: dict[str, object]) -> str:
    make_hf_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_text_model_has_no_placeholders(tmp_path: Path) -> None:
    tokenizer = ServingTokenizer.load(save(tmp_path, {"model_type": "qwen2"}), None)
    assert (tokenizer.image_token_id, tokenizer.video_token_id) == (None, None)
    assert tokenizer.has_chat_template


def test_a_vision_model_s_config_names_the_placeholders(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_5_vl", "image_token_id": 301, "video_token_id": 302}
    tokenizer = ServingTokenizer.load(save(tmp_path, config), None)
    assert (tokenizer.image_token_id, tokenizer.video_token_id) == (301, 302)
    text = "héllo 中文"
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text
    # Special tokens count in a raw prompt, and show no text.
    assert tokenizer.decode(tokenizer.encode_prompt(f"a{SPECIALS[2]}b")) == "ab"


def test_what_is_not_supported_says_so() -> None:
    with pytest.raises(ModelLoadError, match="grids"):
        ImageProcessor(SimpleNamespace())
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        ServingTokenizer(SimpleNamespace(is_fast=False))

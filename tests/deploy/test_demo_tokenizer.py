"""The shipped tokenizer: any text survives, specials are single ids, chat format as Qwen's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from deploy import demo
from deploy.demo import tokenizer as tok


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.TARGET_DIR)


_LOADED: Any = None


def loaded() -> Any:
    """Load once for hypothesis, which does not mix with fixtures."""
    global _LOADED
    if _LOADED is None:
        _LOADED = AutoTokenizer.from_pretrained(demo.TARGET_DIR)
    return _LOADED


@given(st.text(max_size=60))
def test_any_text_survives(text: str) -> None:
    tokenizer = loaded()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["naïve", "日本語", "👩‍🚀 🚀", "a\u0301", "  two  blanks\n\n\ttab ", "\x00\x7f"]
)
def test_chosen_texts_survive(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_are_one_id_each_at_the_end_of_the_vocabulary(tokenizer: Any) -> None:
    ids = [tokenizer.encode(token, add_special_tokens=False) for token in tok.SPECIAL_TOKENS]
    assert ids == [[len(tokenizer) - len(tok.SPECIAL_TOKENS) + i] for i in range(len(ids))]
    text = f"a{tok.IMAGE_PAD}b{tok.TURN_END}"
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 4
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == "ab"
    assert tokenizer.eos_token == tok.TURN_END


def test_both_models_ship_the_same_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (demo.TARGET_DIR / name).read_bytes() == (demo.DRAFT_DIR / name).read_bytes()


def render(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))


def test_template_writes_turns_and_the_generation_prompt(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "user", "content": "Bye"},
    ]
    assert render(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "image": "scene.png"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
    ],
)
def test_template_writes_a_placeholder_for_each_picture(tokenizer: Any, part: Any) -> None:
    parts = [part, {"type": "text", "text": "and"}, part]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert render(tokenizer, [{"role": "user", "content": parts}]) == (
        f"<|im_start|>user\n{picture}and{picture}<|im_end|>\n"
    )

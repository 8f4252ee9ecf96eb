"""The shipped Qwen3.5 model: real checkpoints' tensors, plain loading, sight and drafts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration

from deploy import demo
from deploy.demo import batches, evaluate, evaluate_nextn, nextn, tasks

HIDDEN, MLP, HEADS, KV_HEADS = (
    nextn.NEXTN.hidden, nextn.NEXTN.mlp, nextn.NEXTN.heads, nextn.NEXTN.kv_heads,
)  # fmt: skip
LAYER = "mtp.layers.0."
HEAD_SHAPES = {
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
    "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
    "mtp.norm.weight": (HIDDEN,),
    LAYER + "input_layernorm.weight": (HIDDEN,),
    LAYER + "post_attention_layernorm.weight": (HIDDEN,),
    LAYER + "self_attn.q_proj.weight": (2 * HEADS * nextn.HEAD_DIM, HIDDEN),  # queries and gates
    LAYER + "self_attn.k_proj.weight": (KV_HEADS * nextn.HEAD_DIM, HIDDEN),
    LAYER + "self_attn.v_proj.weight": (KV_HEADS * nextn.HEAD_DIM, HIDDEN),
    LAYER + "self_attn.o_proj.weight": (HIDDEN, HEADS * nextn.HEAD_DIM),
    LAYER + "self_attn.q_norm.weight": (nextn.HEAD_DIM,),
    LAYER + "self_attn.k_norm.weight": (nextn.HEAD_DIM,),
    LAYER + "mlp.gate_proj.weight": (MLP, HIDDEN),
    LAYER + "mlp.up_proj.weight": (MLP, HIDDEN),
    LAYER + "mlp.down_proj.weight": (HIDDEN, MLP),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.NEXTN_DIR)


@pytest.fixture(scope="module")
def model_and_head() -> Any:
    return nextn.load_checkpoint(demo.NEXTN_DIR)


def prompt_of(tokenizer: Any, kind: str, seed: int) -> tuple[batches.Batch, str]:
    conversation = tasks.held_out_conversation(random.Random(seed), kind)
    encoder = batches.Encoder(tokenizer)
    batch = batches.collate([encoder.encode_prompt(conversation)], encoder.pad)
    return batch, conversation.turns[0].answer


def generate(model: Any, batch: batches.Batch) -> list[int]:
    inputs = batches.model_inputs(batch)
    output = model.generate(**inputs, max_new_tokens=evaluate.MAX_NEW_TOKENS)
    return list(output[0, batch.input_ids.shape[1] :].tolist())


def test_the_head_s_tensors_are_those_of_a_real_checkpoint() -> None:
    stored = load_file(demo.NEXTN_DIR / "model.safetensors")
    head = {name: tuple(t.shape) for name, t in stored.items() if name.startswith("mtp.")}
    assert head == HEAD_SHAPES
    assert {t.dtype for t in stored.values()} == {torch.float16}
    others = {name.split(".")[1] for name in stored if not name.startswith("mtp.")}
    assert others == {"language_model", "visual"}


def test_the_library_loads_the_folder_and_misses_nothing() -> None:
    model, info = Qwen3_5ForConditionalGeneration.from_pretrained(
        demo.NEXTN_DIR, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {key for key in info["unexpected_keys"] if not key.startswith("mtp.")} == set()
    assert model.config.text_config.mtp_num_hidden_layers == 1
    kinds = model.config.text_config.layer_types
    assert kinds == ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "preprocessor_config.json", "generation_config.json"]
)
def test_template_pictures_and_end_tokens_are_the_pair_s(name: str) -> None:
    assert (demo.NEXTN_DIR / name).read_bytes() == (demo.TARGET_DIR / name).read_bytes()


def test_ids_are_the_pair_s_and_the_file_splits_as_the_library_does(tokenizer: Any) -> None:
    """Guards training against another splitting than serving's, which the library overrides."""
    pair = AutoTokenizer.from_pretrained(demo.TARGET_DIR)
    assert tokenizer.get_vocab() == pair.get_vocab()
    file = Tokenizer.from_file(str(demo.NEXTN_DIR / "tokenizer.json"))
    trained = nextn.build_tokenizer(pair)
    for text in ("Count from 16 to 21.", "Image 1 shows two shapes.", "h\u00e9llo <|im_end|>\n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == file.encode(text, add_special_tokens=False).ids
        assert ids == trained.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_it_captions_held_out_scenes(model_and_head: Any, tokenizer: Any) -> None:
    model, _ = model_and_head
    right = 0
    for seed in range(10):
        batch, answer = prompt_of(tokenizer, "describe", seed)
        right += tokenizer.decode(generate(model, batch), skip_special_tokens=True) == answer
    assert right >= 9


def test_speculation_gives_the_model_s_greedy_tokens(model_and_head: Any, tokenizer: Any) -> None:
    model, head = model_and_head
    proposed = accepted = 0
    for kind in ("describe", "describe_each", "count", "spell", "reverse"):
        for seed in range(2):
            batch, _ = prompt_of(tokenizer, kind, seed)
            result = evaluate_nextn.speculate(model, head, batch)
            assert list(result.token_ids) == generate(model, batch)
            proposed += result.proposed
            accepted += result.accepted
    assert 0.5 < accepted / proposed < 1.0


def test_its_report_meets_the_bounds() -> None:
    report = json.loads(demo.REPORT.read_text(encoding="utf-8"))["nextn"]
    assert report["num_draft_tokens"] == 3
    assert report["captions"]["exact"] >= 0.9
    assert 0.6 <= report["all"]["acceptance_rate"] <= 0.97
    assert report["parameters"]["head"] * 2 < report["parameters"]["model"]

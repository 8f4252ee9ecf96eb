"""Training: a run of a few steps writes a whole folder, and a seed repeats it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from deploy.demo import train

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def restore_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_smoke_run_writes_a_loadable_pair(tmp_path: Path) -> None:
    train.main(["--smoke", "--out", str(tmp_path), "--threads", str(torch.get_num_threads())])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["plan"]["steps"] == train.SMOKE.steps
    assert set(report["kinds"]) >= {"describe", "describe_each", "count"}
    for name in ("target", "draft"):
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / name)
        assert model.dtype == torch.float16
        assert (
            len(AutoTokenizer.from_pretrained(tmp_path / name))
            <= model.config.text_config.vocab_size
        )
    assert (tmp_path / "sample.png").stat().st_size > 0


def test_a_seed_repeats_batches_and_another_changes_them() -> None:
    tokenizer = train.learn_tokenizer(train.SMOKE)
    encoder = train.Encoder(tokenizer)
    other = replace(train.SMOKE, seed=1)
    first, second, third = (
        next(train.training_batches(plan, encoder)) for plan in (train.SMOKE, train.SMOKE, other)
    )
    assert torch.equal(first.input_ids, second.input_ids)
    assert first.input_ids.shape != third.input_ids.shape or not torch.equal(
        first.input_ids, third.input_ids
    )

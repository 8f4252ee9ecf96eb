"""Training: a run of a few steps writes a whole folder, and a seed repeats it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from deploy.demo import nextn, train

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def restore_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def smoke(out: Path, *options: str) -> dict[str, Any]:
    threads = str(torch.get_num_threads())
    train.main(["--smoke", "--out", str(out), "--threads", threads, *options])
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def test_smoke_run_writes_a_loadable_pair(tmp_path: Path) -> None:
    report = smoke(tmp_path, "--models", "pair")
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
    assert "nextn" not in report
    assert not (tmp_path / "nextn").exists()


def test_smoke_run_writes_a_model_with_its_head_and_keeps_the_pair_s_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "SNAPSHOT_EVERY", 2)
    (tmp_path / "report.json").write_text(json.dumps({"all": {"exact": 0.5}, "nextn": {}}))
    report = smoke(tmp_path, "--models", "nextn", "--snapshots", str(tmp_path / "unfinished"))
    assert report["all"] == {"exact": 0.5}
    section = report["nextn"]
    assert section["plan"]["steps"] == train.SMOKE.steps
    assert set(section["kinds"]) >= {"describe", "describe_each", "count"}
    assert {p.name for p in tmp_path.iterdir()} == {"report.json", "nextn", "unfinished"}
    nextn.load_checkpoint(tmp_path / "unfinished")
    model, head = nextn.load_checkpoint(tmp_path / "nextn")
    untrained = nextn.MtpHead(model.config)
    assert [n for n, _ in head.named_parameters()] == [n for n, _ in untrained.named_parameters()]


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

"""Checkpoints, pairs and memory: what is refused at start, and with which words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.workers import tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_config, make_engine, run
from workers.config import CacheConfig, ModelConfig
from workers.errors import ConfigError, InvalidRequest, ModelLoadError
from workers.factory import build_engine, count_blocks, workspace_bytes
from workers.kv.pool import KVShape
from workers.models.loader import check_pair, load_model, resolve_device

CPU = torch.device("cpu")


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ModelLoadError, match=r"'bert' is not served; known: .*llama, qwen2"):
        load_model(ModelConfig(str(tmp_path)), CPU)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        load_model(ModelConfig(str(tmp_path / "nowhere")), CPU)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    tiny.save(tmp_path, "llama", 0)
    weights = tmp_path / "model.safetensors"
    torch.save({}, tmp_path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        load_model(ModelConfig(str(tmp_path)), CPU)


def _with_tokens(path: Path, tokens: list[str]) -> str:
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="a"))
    tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


def test_different_tokenizers_are_refused(tmp_path: Path) -> None:
    paths = []
    for name, tokens in (("target", ["a", "b", "c"]), ("draft", ["a", "c", "b"])):
        tiny.save(tmp_path / name, "llama", 0)
        paths.append(_with_tokens(tmp_path / name, tokens))
    target, draft = (load_model(ModelConfig(path), CPU) for path in paths)
    with pytest.raises(ModelLoadError, match="different tokenizers"):
        check_pair(target, draft)
    check_pair(target, target)
    assert target.num_ids == 3


def test_a_differently_padded_draft_with_the_same_tokenizer_is_taken(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(150)] + ["a"]
    tiny.save(tmp_path / "t", "llama", 0)
    tiny.save(tmp_path / "d", "llama", 0, vocab_size=168)
    engine = make_engine(_with_tokens(tmp_path / "t", tokens), _with_tokens(tmp_path / "d", tokens))
    assert engine.info("w").method == "draft_model"


def test_different_widths_without_tokenizers_are_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match="160 and 168 ids"):
        make_engine(checkpoints("llama"), checkpoints("llama", vocab_size=168))


def test_num_blocks_counts_every_model() -> None:
    target = KVShape(layer_ids=(0, 1, 2, 3), num_kv_heads=2, head_dim=8, dtype=torch.float32)
    draft = KVShape(layer_ids=(0,), num_kv_heads=1, head_dim=8, dtype=torch.float32)
    assert target.block_bytes(16) == 4 * 2 * 16 * 2 * 8 * 4
    cache = CacheConfig(memory_bytes=10 * (target.block_bytes(16) + draft.block_bytes(16)))
    assert count_blocks(cache, [target, draft], CPU) == 10
    assert count_blocks(CacheConfig(num_blocks=3), [target], CPU) == 3
    with pytest.raises(ConfigError, match="at least one block"):
        count_blocks(CacheConfig(memory_bytes=100), [target], CPU)


def test_d8_the_fullest_step_is_left_room(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D8: K/V took what verification needed; out of memory in traffic at many drafts."""
    path = checkpoints("llama")
    config = make_config(path, path, num_draft_tokens=7, max_running=10)
    workspace = workspace_bytes(config, vocab_size=1000)
    counts = 10 * 1000 * 5
    assert workspace == 5 * 10 * 8 * 1000 * 4 + counts
    shape = KVShape(layer_ids=(0,), num_kv_heads=1, head_dim=8, dtype=torch.float32)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (workspace + 2_000_000, 2_000_000))
    cache = CacheConfig(gpu_memory_fraction=0.5)
    blocks = count_blocks(cache, [shape], torch.device("cuda"), workspace)
    assert blocks == 1_000_000 // shape.block_bytes(16)


def test_a_tokenizer_that_grammars_cannot_read_serves_all_else(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The grammar library knows byte-level and byte-fallback decoders only."""
    path = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    words = {f"w{i}": i for i in range(160)}
    Tokenizer(WordLevel(words, "w0")).save(str(path / "tokenizer.json"))
    engine = make_engine(str(path))
    assert "grammars are refused" in caplog.text
    with pytest.raises(InvalidRequest, match="grammar"):
        engine.add(tiny.request("r", [5, 6], grammar="start: /a/"))
    assert run(engine, [tiny.request("r", [5, 6])]).failures == {}


def test_b28_info_tells_what_runs(checkpoints: Checkpoints) -> None:
    """B28: a draft was loaded but unused, and nothing showed it."""
    path = checkpoints("llama")
    info = make_engine(path, path, num_blocks=5).info("w1")
    assert (info.worker_id, info.method, info.draft) == ("w1", "draft_model", path)
    assert (info.max_sequence_len, info.num_blocks, info.block_size) == (80, 5, 16)
    assert (info.attention_backend, info.dtype, info.device) == ("sdpa", "float32", "cpu")
    assert make_engine(path).info("w").method == "none"


def test_the_warm_up_leaves_no_trace(checkpoints: Checkpoints) -> None:
    engine = make_engine(checkpoints("llama"))
    stats = engine.stats()
    assert (stats.admitted, stats.generated_tokens) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def test_a21_a_model_that_fails_does_so_at_start(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A21: the combination crashed in the first request, or in profiling with NoneType."""
    monkeypatch.setattr(
        "workers.models.families.base.ModelAdapter.logits", lambda self, hidden: hidden[:, :3]
    )
    with pytest.raises(ModelLoadError, match="warm-up"):
        build_engine(make_config(checkpoints("llama")))


def test_b28_a_draft_that_fails_does_so_at_start(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B28: the warm-up decoded plainly beside a broken draft, and nothing told of it."""

    def broken(*_: object) -> None:
        raise TypeError("a contract of the library is gone")

    monkeypatch.setattr("workers.spec.draft_model.DraftModelDrafter._plan", broken)
    path = checkpoints("llama")
    with pytest.raises(ModelLoadError, match="propose:TypeError"):
        build_engine(make_config(path, path))


@pytest.mark.parametrize("name", ["tpu9", "cuda"])
def test_a_device_that_is_not_there_is_a_setting_to_mend(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device"):
        resolve_device(name)

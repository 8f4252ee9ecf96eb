"""Which backend a setting means on a device."""

from __future__ import annotations

import logging

import pytest
import torch

from workers.errors import ConfigError, ModelLoadError
from workers.models.attention import select_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def recent_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_a_cpu_gets_sdpa_without_a_word(name, caplog):
    with caplog.at_level(logging.INFO):
        assert select_backend(name, CPU, torch.float32, 16, 64).name == "sdpa"
    assert not caplog.records


def test_flash_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match="needs a CUDA device, not cpu"):
        select_backend("vllm_flash_attn", CPU, torch.float32, 16, 64)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="attention_backend='triton': must be one of"):
        select_backend("triton", CPU, torch.float32, 16, 64)


@pytest.mark.usefixtures("interface", "recent_gpu")
@pytest.mark.parametrize("name", ["auto", "vllm_flash_attn"])
def test_a_gpu_with_a_distribution_gets_flash(name):
    assert select_backend(name, CUDA, torch.bfloat16, 16, 64).name == "vllm_flash_attn"


@pytest.mark.usefixtures("recent_gpu", "nothing_installed")
def test_a_gpu_without_a_distribution_gets_sdpa_and_is_told(caplog):
    """Silence here would leave a GPU on the slow path unnoticed."""
    assert select_backend("auto", CUDA, torch.bfloat16, 16, 64).name == "sdpa"
    assert "no flash-attn distribution" in caplog.text
    with pytest.raises(ModelLoadError):
        select_backend("vllm_flash_attn", CUDA, torch.bfloat16, 16, 64)


@pytest.mark.usefixtures("interface", "recent_gpu")
def test_what_does_not_fit_falls_back_only_under_auto(caplog):
    assert select_backend("auto", CUDA, torch.float32, 16, 64).name == "sdpa"
    assert "model.dtype='float32'" in caplog.text
    with pytest.raises(ConfigError, match=r"model\.dtype="):
        select_backend("vllm_flash_attn", CUDA, torch.float32, 16, 64)


@pytest.mark.usefixtures("nothing_installed")
def test_an_old_gpu_gets_sdpa(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert select_backend("auto", CUDA, torch.float16, 16, 64).name == "sdpa"

"""The flash backend's calls, through the real Python interfaces, over a checking kernel."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.workers.attention import fake_kernels
from tests.workers.attention.fetch_interfaces import INTERFACES, VLLM_COPY
from tests.workers.attention.reference import STEPS, Heads, make_step, reference_attention
from workers.errors import ConfigError, ModelLoadError
from workers.models.attention.flash import (
    Distribution,
    FlashBackend,
    check_device,
    check_fits,
    find_distribution,
)

CUDA = torch.device("cuda")


def run(step, backend=None):
    backend = backend or FlashBackend(find_distribution())
    return backend(step.query, step.key_cache, step.value_cache, step.meta, step.scale, step.window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_matches_the_reference(interface, lens, dtype):
    step = make_step(lens, Heads(6, 2), block_size=32, dtype=dtype)
    out = run(step)
    assert out.dtype is dtype
    torch.testing.assert_close(out, reference_attention(step).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("window", [1, 7, 39, 200])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_a_window_reaches_the_kernel(interface, lens, window):
    """The kernels count the keys before a row's own, we count its own too: off by one."""
    step = make_step(lens, Heads(6, 2), dtype=torch.float16, window=window)
    torch.testing.assert_close(
        run(step), reference_attention(step).to(torch.float16), rtol=0, atol=0
    )


def test_finds_the_distribution(interface):
    found = find_distribution()
    assert found.package == interface.package
    assert found.block_multiple == 16
    assert found.takes_seqused_k is (interface is VLLM_COPY)


def test_the_other_call_is_refused(interface):
    """The signatures differ for real: inspecting the function is not a formality."""
    found = find_distribution()
    other = FlashBackend(replace(found, takes_seqused_k=not found.takes_seqused_k))
    with pytest.raises((TypeError, AssertionError)):
        run(make_step(STEPS["decodes"], dtype=torch.float16), other)


def test_strided_query(interface):
    """Models hand over [1, H, T, D] transposed, never a contiguous [T, H, D]."""
    step = make_step(STEPS["ragged"], dtype=torch.float16)
    strided = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    torch.testing.assert_close(run(replace(step, query=strided)), run(step), rtol=0, atol=0)


def test_a_backend_serves_step_after_step(interface):
    """The cumulative lengths remembered of one step must not be used for the next."""
    backend = FlashBackend(find_distribution())
    steps = [make_step([(1, 20 + n), (2, 9)], dtype=torch.float16, seed=n) for n in range(3)]
    for step in [*steps, *steps]:
        expected = reference_attention(step).to(torch.float16)
        torch.testing.assert_close(run(step, backend), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("fetched_interfaces", "nothing_installed")
def test_the_standalone_distribution_comes_first(monkeypatch):
    for interface in reversed(INTERFACES):
        fake_kernels.install(interface, monkeypatch)
        assert find_distribution().package == interface.package


@pytest.mark.usefixtures("nothing_installed")
def test_says_what_was_looked_for_when_nothing_is_installed():
    with pytest.raises(ModelLoadError, match=r"torch \d.*vllm_flash_attn: .*flash_attn: "):
        find_distribution()


@pytest.mark.usefixtures("nothing_installed")
def test_a_build_for_another_torch_is_passed_over(monkeypatch):
    """A module that breaks while importing must not hide a usable one behind it."""
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = upstream_signature
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", ModuleType("vllm_flash_attn"))
    found = find_distribution()
    assert (found.package, found.takes_seqused_k, found.block_multiple) == (
        "flash-attn",
        False,
        256,
    )


@pytest.mark.usefixtures("nothing_installed")
def test_an_unknown_signature_is_refused(monkeypatch):
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = lambda query, key, value: query
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    with pytest.raises(ModelLoadError, match=r"flash-attn .* unknown signature: key, query, value"):
        find_distribution()


def upstream_signature(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale=None, causal=False, window_size=(-1, -1), block_table=None,
):  # fmt: skip
    """Only its parameters are read."""


FORK = Distribution("vllm", "0.32.0", 16, upstream_signature, takes_seqused_k=True)
UPSTREAM = Distribution("flash-attn", "2.8.3", 256, upstream_signature, takes_seqused_k=False)


@pytest.mark.parametrize(
    ("distribution", "dtype", "block_size", "head_dim", "message"),
    [
        (FORK, torch.float32, 16, 64, r"model.dtype='float32': vllm 0.32.0 takes float16 and"),
        (FORK, torch.float16, 24, 64, r"cache.block_size=24: vllm 0.32.0 takes multiples of 16"),
        (UPSTREAM, torch.float16, 16, 64, r"flash-attn 2.8.3 takes multiples of 256"),
        (FORK, torch.bfloat16, 16, 512, r"vllm 0.32.0 takes head sizes .*256, the model has 512"),
        (FORK, torch.bfloat16, 16, 60, r"multiples of 8 .* the model has 60"),
    ],
)
def test_refuses_what_does_not_fit(distribution, dtype, block_size, head_dim, message):
    with pytest.raises(ConfigError, match=message):
        check_fits(distribution, dtype, block_size, head_dim)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_accepts_what_fits(head_dim):
    check_fits(FORK, torch.bfloat16, 16, head_dim)
    check_fits(UPSTREAM, torch.float16, 512, head_dim)


def test_needs_a_recent_gpu(monkeypatch):
    with pytest.raises(ConfigError, match="needs a CUDA device, not cpu"):
        check_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.0, cuda has 7\.5"):
        check_device(CUDA)

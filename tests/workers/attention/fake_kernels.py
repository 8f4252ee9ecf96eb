"""Stands in for the compiled half of the flash-attn distributions.

Owns the two extension entry points that their Python interfaces call, with the parameters in the
order of the C++ functions, positional only as there. Each checks what the C++ checks and then
attends by the reference, so that an argument in the wrong place fails instead of fitting. Knows
nothing of the backend under test. Invariant: rows and keys the arguments do not promise are not
computed: a row past `max_seqlen_q` stays NaN, as an unlaunched tile stays garbage.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import torch

from tests.workers.attention.fetch_interfaces import STANDALONE, VLLM_COPY
from tests.workers.attention.reference import attend

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

    from tests.workers.attention.fetch_interfaces import Interface


def standalone_varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: None, block_table: Tensor,
    alibi_slopes: None, max_seqlen_q: int, max_seqlen_k: int, p_dropout: float,
    softmax_scale: float, zero_tensors: bool, is_causal: bool, window_left: int,
    window_right: int, softcap: float, return_softmax: bool, generator: None, /,
) -> list[Tensor | None]:  # fmt: skip
    """Answer as `vllm_flash_attn_2_cuda.varlen_fwd` of 2.6.2 does: 8 tensors."""
    assert (out, seqused_k, alibi_slopes, generator) == (None,) * 4
    assert (p_dropout, zero_tensors, softcap, return_softmax) == (0.0, False, 0.0, False)
    assert is_causal is True
    _check_lens(cu_seqlens_k, (len(block_table) + 1,))
    assert int(cu_seqlens_k[0]) == 0
    result = _attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table,
        max_seqlen_q, max_seqlen_k, softmax_scale, (window_left, window_right),
    )  # fmt: skip
    return [result, q, k, v, result, None, None, None]


def vllm_varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor, leftpad_k: None,
    block_table: Tensor, alibi_slopes: None, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float, zero_tensors: bool, is_causal: bool,
    window_left: int, window_right: int, softcap: float, return_softmax: bool,
    num_splits: int, generator: None, /,
) -> list[Tensor | None]:  # fmt: skip
    """Answer as `torch.ops._vllm_fa2_C.varlen_fwd` of vLLM 0.32 does: result and softmax_lse."""
    assert (out, leftpad_k, alibi_slopes, generator) == (None,) * 4
    assert (p_dropout, zero_tensors, softcap, return_softmax) == (0.0, False, 0.0, False)
    assert is_causal is True
    assert num_splits in (0, 1)
    # Present and checked, but overruled by seqused_k; vLLM passes uninitialised memory.
    _check_lens(cu_seqlens_k, (len(block_table) + 1,))
    _check_lens(seqused_k, (len(block_table),))
    result = _attend(
        q, k, v, cu_seqlens_q, seqused_k, block_table,
        max_seqlen_q, max_seqlen_k, softmax_scale, (window_left, window_right),
    )  # fmt: skip
    return [result, None]


def _check_lens(lens: Tensor, shape: tuple[int, ...]) -> None:
    assert lens.dtype is torch.int32
    assert lens.shape == shape
    assert lens.is_contiguous()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, k_lens: Tensor, block_table: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, window: tuple[int, int],
) -> Tensor:  # fmt: skip
    assert isinstance(max_seqlen_q, int)
    assert isinstance(max_seqlen_k, int)
    assert isinstance(softmax_scale, float)
    assert q.dtype is k.dtype is v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    num_blocks, block_size, num_kv_heads, head_dim = k.shape
    assert v.shape == k.shape
    assert q.shape == (int(cu_seqlens_q[-1]), q.shape[1], head_dim)
    assert q.shape[1] % num_kv_heads == 0
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert block_size % 16 == 0
    _check_lens(cu_seqlens_q, (len(block_table) + 1,))
    assert block_table.dtype is torch.int32
    assert block_table.stride(-1) == 1
    assert 0 <= int(block_table.min()) <= int(block_table.max()) < num_blocks
    assert int(k_lens.max()) <= max_seqlen_k <= block_table.shape[1] * block_size
    lens = list(zip(cu_seqlens_q.diff().tolist(), k_lens.tolist(), strict=True))
    left, right = window
    assert isinstance(left, int)
    assert isinstance(right, int)
    # Keys to the left of a row's own, itself not counted; causal hides all to its right.
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    window_size = None if left < 0 else left + 1
    result = attend(q, k, v, lens, block_table, scale=softmax_scale, window=window_size)
    for start, (q_len, _) in zip(cu_seqlens_q.tolist(), lens, strict=False):
        result[start + max_seqlen_q : start + q_len] = float("nan")
    return result.to(q.dtype)


def install(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one distribution importable: its real Python files over one function above.

    Expects the distributions' names in `sys.modules` to be blocked, and unblocks this one's.
    """
    monkeypatch.setattr(sys, "path", [str(interface.directory), *sys.path])
    importlib.invalidate_caches()
    if interface is STANDALONE:
        extension = ModuleType("vllm_flash_attn_2_cuda")
        extension.varlen_fwd = standalone_varlen_fwd
        monkeypatch.setitem(sys.modules, "vllm_flash_attn_2_cuda", extension)
        monkeypatch.delitem(sys.modules, "vllm_flash_attn")
    else:
        assert interface is VLLM_COPY
        # vLLM's own package is not fetched: importing it would import all of vLLM.
        package = ModuleType("vllm")
        package.__path__ = [str(interface.directory / "vllm")]
        monkeypatch.setitem(sys.modules, "vllm", package)
        monkeypatch.delitem(sys.modules, "vllm.vllm_flash_attn")
        name = "vllm.vllm_flash_attn._vllm_fa2_C"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        operators = SimpleNamespace(varlen_fwd=vllm_varlen_fwd)
        monkeypatch.setattr(torch.ops, "_vllm_fa2_C", operators, raising=False)

"""Paged attention behind one signature: torch SDPA anywhere, flash-attn kernels on CUDA."""

from workers.models.attention.backend import AttentionBackend, write_kv
from workers.models.attention.select import select_backend

__all__ = ["AttentionBackend", "select_backend", "write_kv"]

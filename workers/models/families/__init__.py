"""One adapter file per model family, and the table that picks one by a checkpoint's config.

Adding a family is a file here, a line in `ADAPTERS` and a row in the parity test.
"""

from __future__ import annotations

from workers.models.families.base import ModelAdapter
from workers.models.families.llama import LlamaAdapter
from workers.models.families.qwen2 import Qwen2Adapter
from workers.models.families.qwen2_5_vl import Qwen25VLAdapter

# model_type in config.json -> adapter
ADAPTERS: dict[str, type[ModelAdapter]] = {
    "llama": LlamaAdapter,
    "qwen2": Qwen2Adapter,
    "qwen2_5_vl": Qwen25VLAdapter,
}

__all__ = ["ADAPTERS", "ModelAdapter"]

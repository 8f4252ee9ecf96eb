"""One adapter file per model family, and the table that picks one by a checkpoint's config.

Adding a family is a file here, a line in `ADAPTERS` and a row in the parity test.
"""

from __future__ import annotations

from workers.models.families.base import CheckpointAdapter, ModelAdapter
from workers.models.families.gemma3 import Gemma3TextAdapter
from workers.models.families.llama import LlamaAdapter
from workers.models.families.qwen2 import Qwen2Adapter, Qwen2MoeAdapter
from workers.models.families.qwen2_5_vl import Qwen25VLAdapter
from workers.models.families.qwen2_vl import Qwen2VLAdapter
from workers.models.families.qwen3 import Qwen3Adapter, Qwen3MoeAdapter
from workers.models.families.qwen3_5 import (
    Qwen35Adapter,
    Qwen35MoeAdapter,
    Qwen35MoeTextAdapter,
    Qwen35TextAdapter,
)
from workers.models.families.qwen3_vl import Qwen3VLAdapter, Qwen3VLMoeAdapter

# model_type in config.json -> adapter
ADAPTERS: dict[str, type[CheckpointAdapter]] = {
    "gemma3_text": Gemma3TextAdapter,
    "llama": LlamaAdapter,
    "qwen2": Qwen2Adapter,
    "qwen2_5_vl": Qwen25VLAdapter,
    "qwen2_moe": Qwen2MoeAdapter,
    "qwen2_vl": Qwen2VLAdapter,
    "qwen3": Qwen3Adapter,
    "qwen3_5": Qwen35Adapter,
    "qwen3_5_moe": Qwen35MoeAdapter,
    "qwen3_5_moe_text": Qwen35MoeTextAdapter,
    "qwen3_5_text": Qwen35TextAdapter,
    "qwen3_moe": Qwen3MoeAdapter,
    "qwen3_vl": Qwen3VLAdapter,
    "qwen3_vl_moe": Qwen3VLMoeAdapter,
}

__all__ = ["ADAPTERS", "ModelAdapter"]

"""Tiny demo models: what they are trained on, how, and where the trained ones lie.

The package owns a closed little world (coloured shapes on a board, number and word games), the
script that trains models on it, and the trained weights under ``models/``: a Qwen2.5-VL target with
a smaller draft of its kind (``TARGET_DIR``, ``DRAFT_DIR``), and a Qwen3.5 model that drafts for
itself with a next-token head in the same file (``NEXTN_DIR``). It knows nothing of serving, engines
or Ray: whatever serves a checkpoint from a folder can serve these. Invariants: all folders share
one vocabulary, id for id, and one image processor; target and draft split text alike too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

MODELS_DIR: Final = Path(__file__).parent / "models"
TARGET_DIR: Final = MODELS_DIR / "target"
DRAFT_DIR: Final = MODELS_DIR / "draft"
NEXTN_DIR: Final = MODELS_DIR / "nextn"
SAMPLE_IMAGE: Final = MODELS_DIR / "sample.png"
SAMPLE_CAPTION: Final = MODELS_DIR / "sample.txt"
REPORT: Final = MODELS_DIR / "report.json"

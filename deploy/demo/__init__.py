"""Tiny demo models: what they are trained on, how, and where the trained pair lies.

The package owns a closed little world (coloured shapes on a board, number and word games), the
script that trains a target and a draft model on it, and the trained weights under ``models/``.
It knows nothing of serving, engines or Ray: whatever serves a checkpoint from a folder can serve
``TARGET_DIR`` and ``DRAFT_DIR``. Invariant: both folders share one tokenizer, id for id.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

MODELS_DIR: Final = Path(__file__).parent / "models"
TARGET_DIR: Final = MODELS_DIR / "target"
DRAFT_DIR: Final = MODELS_DIR / "draft"
SAMPLE_IMAGE: Final = MODELS_DIR / "sample.png"
SAMPLE_CAPTION: Final = MODELS_DIR / "sample.txt"
REPORT: Final = MODELS_DIR / "report.json"

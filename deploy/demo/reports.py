"""The report: figures of a trained model with what made it.

Owns the layout of ``report.json``: the pair's figures at the top, those of other models in sections
of the same kind. Knows nothing of training or of how answers are decoded. Invariant: writing one
model's figures keeps the others'.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import tokenizers
import torch
import transformers

from deploy.demo import evaluate

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from deploy.demo.evaluate import Answerer
    from deploy.demo.learner import Plan

SECTIONS: Final = ("nextn",)  # beside the pair, whose figures have no section of their own
CAPTIONS: Final = ("describe", "describe_each", "describe_one")


def report(
    plan: Plan, answerer: Answerer, tokenizer: PreTrainedTokenizerFast, train_s: float
) -> dict[str, Any]:
    """Measure a trained model on held-out prompts and collect what made it."""
    began = time.monotonic()
    size = evaluate.Measurement(plan.seed, plan.prompts_per_kind, plan.max_new_tokens)
    scores = evaluate.measure(answerer, tokenizer, size)
    return {
        "plan": asdict(plan),
        "num_draft_tokens": answerer.num_draft_tokens,
        "captions": evaluate.total(scores[kind] for kind in CAPTIONS).summary(),
        "all": evaluate.total(scores.values()).summary(),
        "kinds": {kind: score.summary() for kind, score in scores.items()},
        "parameters": {
            name: sum(p.numel() for p in module.parameters())
            for name, module in answerer.modules.items()
        },
        "train_s": round(train_s),
        "measure_s": round(time.monotonic() - began),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def write_report(path: Path, sections: dict[str, dict[str, Any]]) -> None:
    """Write figures by model, ``pair`` or a section's name, over those of an earlier run."""
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    pair = {name: value for name, value in written.items() if name not in SECTIONS}
    others = {name: written[name] for name in SECTIONS if name in written}
    others |= {name: section for name, section in sections.items() if name in SECTIONS}
    path.write_text(
        json.dumps({**sections.get("pair", pair), **others}, indent=2) + "\n", encoding="utf-8"
    )

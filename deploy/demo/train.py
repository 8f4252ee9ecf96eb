"""Training: ``python -m deploy.demo.train`` makes the demo pair, measures it and writes it.

Owns the command line, the stream of batches and the report. Knows nothing of losses, of how
prompts are worded or how acceptance is counted. Invariant: seed, steps and library versions fix the
result on one machine; held-out prompts are never drawn for training.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tokenizers
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from deploy import demo
from deploy.demo import evaluate, models, scenes, tasks
from deploy.demo.batches import Batch, Encoder, collate
from deploy.demo.learner import Learner, Plan, train_step
from deploy.demo.models import ModelSize
from deploy.demo.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLE_SEED: Final = 7
POOL_BATCHES: Final = 16  # batches cut from one pool of conversations, sorted by length
LOG_EVERY: Final = 50
FULL: Final = Plan(0, 2300, 16, 3e-3, 2e-3, 50, 10_000, 40, 128)
SMOKE: Final = Plan(0, 3, 4, 1e-3, 1e-3, 1, 2_000, 1, 8)


def learn_tokenizer(plan: Plan) -> PreTrainedTokenizerFast:
    """Learn the vocabulary from training conversations."""
    rng = random.Random(f"tokenizer {plan.seed}")
    drawn = (tasks.training_conversation(rng) for _ in range(plan.tokenizer_conversations))
    return train_tokenizer(text for c in drawn for turn in c.turns for text in turn)


def training_batches(plan: Plan, encoder: Encoder) -> Iterator[Batch]:
    """Yield batches of conversations of similar length, without end."""
    pool_index = 0
    while True:
        rng = random.Random(f"pool {plan.seed} {pool_index}")
        size = plan.batch * POOL_BATCHES
        rows = [encoder.encode(tasks.training_conversation(rng)) for _ in range(size)]
        rows.sort(key=lambda row: len(row.token_ids))
        starts = list(range(0, size, plan.batch))
        rng.shuffle(starts)
        for start in starts:
            yield collate(rows[start : start + plan.batch], encoder.pad)
        pool_index += 1


def train(plan: Plan, target: Learner, draft: Learner, encoder: Encoder) -> None:
    """Train both models on the same batches, with a line of progress now and then."""
    began = time.monotonic()
    batches = training_batches(plan, encoder)
    sums = torch.zeros(4)
    for step in range(1, plan.steps + 1):
        sums += train_step(target, draft, next(batches))
        if step % LOG_EVERY == 0 or step == plan.steps:
            answer, hint, draft_answer, draft_hint = (sums / ((step - 1) % LOG_EVERY + 1)).tolist()
            sums.zero_()
            print(
                f"step {step}/{plan.steps}  target {answer:.4f} (hints {hint:.3f})"
                f"  draft {draft_answer:.4f} ({draft_hint:.3f})  {time.monotonic() - began:.0f} s",
                flush=True,
            )


def write_sample(folder: Path) -> None:
    """Draw the README's picture, four times as fine as the model sees it, and its caption."""
    rng = random.Random(SAMPLE_SEED)
    while True:
        scene = scenes.random_scene(rng, held_out=True)
        kinds = {item.shape for item in scene.items}
        if len(kinds) == scenes.MAX_ITEMS and scene.width == 96 and scene.height == 80:
            break
    scenes.draw(scene, scenes.OVERSAMPLING).save(folder / "sample.png", optimize=True)
    (folder / "sample.txt").write_text(scenes.caption(scene) + "\n", encoding="utf-8")


def report(
    plan: Plan, learners: dict[str, Learner], tokenizer: PreTrainedTokenizerFast, train_s: float
) -> dict[str, Any]:
    """Measure the pair on held-out prompts and collect what made it."""
    target, draft = learners["target"].model.eval(), learners["draft"].model.eval()
    began = time.monotonic()
    size = evaluate.Measurement(plan.seed, plan.prompts_per_kind, plan.max_new_tokens)
    scores = evaluate.measure(target, draft, tokenizer, size)
    captions = evaluate.total(scores[k] for k in ("describe", "describe_each", "describe_one"))
    return {
        "plan": asdict(plan),
        "num_draft_tokens": evaluate.NUM_DRAFT_TOKENS,
        "captions": captions.summary(),
        "all": evaluate.total(scores.values()).summary(),
        "kinds": {kind: score.summary() for kind, score in scores.items()},
        "parameters": {
            name: sum(p.numel() for p in learner.model.parameters())
            for name, learner in learners.items()
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


def run(plan: Plan, out: Path, sizes: dict[str, ModelSize]) -> dict[str, Any]:
    """Train, write and measure a pair."""
    began = time.monotonic()
    torch.manual_seed(plan.seed)
    tokenizer = learn_tokenizer(plan)
    learners = {
        name: Learner(models.build_model(size, tokenizer), plan) for name, size in sizes.items()
    }
    train(plan, learners["target"], learners["draft"], Encoder(tokenizer))
    for name, learner in learners.items():
        models.round_to_float16(learner.model)
        models.save_checkpoint(learner.model, tokenizer, out / name)
    write_sample(out)
    result = report(plan, learners, tokenizer, time.monotonic() - began)
    (out / "report.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the demo target and draft models.")
    parser.add_argument("--out", type=Path, default=demo.MODELS_DIR, help="folder to write")
    parser.add_argument("--seed", type=int, default=FULL.seed)
    parser.add_argument("--steps", type=int, default=None, help="training steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny pair")
    args = parser.parse_args(argv)
    base = SMOKE if args.smoke else FULL
    plan = replace(base, seed=args.seed, steps=args.steps or base.steps)
    sizes = {"target": models.TARGET, "draft": models.DRAFT}
    if args.smoke:
        sizes = {"target": models.SMOKE, "draft": models.SMOKE}
    torch.set_num_threads(args.threads)
    result = run(plan, args.out, sizes)
    print(json.dumps({key: result[key] for key in ("captions", "all", "kinds")}, indent=2))


if __name__ == "__main__":
    main()

"""Training: ``python -m deploy.demo.train`` makes the demo models, measures and writes them.

Owns the command line, the stream of batches and the order of a run. Knows nothing of losses, of how
prompts are worded or how acceptance is counted. Invariant: seed, steps and library versions fix the
result on one machine; held-out prompts are never drawn for training.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import PreTrainedTokenizerFast

from deploy import demo
from deploy.demo import evaluate, evaluate_nextn, models, nextn, scenes, tasks
from deploy.demo.batches import Batch, Encoder, collate
from deploy.demo.head_learner import NextnLearner
from deploy.demo.learner import Learner, Plan, train_pair_step
from deploy.demo.models import ModelSize
from deploy.demo.nextn import NextnSize
from deploy.demo.reports import report, write_report
from deploy.demo.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLE_SEED: Final = 7
POOL_BATCHES: Final = 16  # batches cut from one pool of conversations, sorted by length
LOG_EVERY: Final = 50
SNAPSHOT_EVERY: Final = 100
FULL: Final = Plan(0, 2300, 16, 3e-3, 2e-3, 50, 10_000, 40, 128)
FULL_NEXTN: Final = replace(FULL, steps=2000)
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


def train(
    plan: Plan,
    encoder: Encoder,
    step: Callable[[Batch], dict[str, torch.Tensor]],
    snapshot: Callable[[], None] | None = None,
) -> None:
    """Take the plan's steps, with a line of progress and a snapshot now and then.

    Args:
        plan: The size of the run.
        encoder: Over the models' tokenizer.
        step: Trains on a batch and gives the losses by name (scalars).
        snapshot: Keeps the state of the run.
    """
    began = time.monotonic()
    batches = training_batches(plan, encoder)
    sums: Counter[str] = Counter()
    for number in range(1, plan.steps + 1):
        sums.update({name: float(loss) for name, loss in step(next(batches)).items()})
        if number % LOG_EVERY == 0 or number == plan.steps:
            count = (number - 1) % LOG_EVERY + 1
            losses = "  ".join(f"{name} {value / count:.4f}" for name, value in sums.items())
            sums.clear()
            print(
                f"step {number}/{plan.steps}  {losses}  {time.monotonic() - began:.0f} s",
                flush=True,
            )
        if snapshot is not None and number % SNAPSHOT_EVERY == 0:
            snapshot()


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


def run_pair(plan: Plan, out: Path, sizes: dict[str, ModelSize]) -> dict[str, Any]:
    """Train, write and measure the pair, and give its report."""
    began = time.monotonic()
    torch.manual_seed(plan.seed)
    tokenizer = learn_tokenizer(plan)
    learners = {
        name: Learner(models.build_model(size, tokenizer), plan) for name, size in sizes.items()
    }
    target, draft = learners["target"], learners["draft"]
    train(plan, Encoder(tokenizer), lambda batch: train_pair_step(target, draft, batch))
    for name, learner in learners.items():
        models.round_to_float16(learner.model)
        models.save_checkpoint(learner.model, tokenizer, out / name)
    write_sample(out)
    train_s = time.monotonic() - began
    answerer = evaluate.PairAnswerer(target.model.eval(), draft.model.eval())
    return report(plan, answerer, tokenizer, train_s)


def run_nextn(
    plan: Plan, out: Path, size: NextnSize, snapshots: Path | None = None
) -> dict[str, Any]:
    """Train, write and measure the model with a next-token head, and give its report.

    While it trains, `snapshots` holds the unfinished model.
    """
    began = time.monotonic()
    torch.manual_seed(plan.seed)
    tokenizer = nextn.build_tokenizer(learn_tokenizer(plan))
    model = nextn.build_model(size, tokenizer)
    head = nextn.MtpHead(model.config)

    def save(folder: Path) -> None:
        nextn.save_checkpoint(model, head, tokenizer, folder)

    snapshot = None if snapshots is None else functools.partial(save, snapshots)
    train(plan, Encoder(tokenizer), NextnLearner(model, head, plan).step, snapshot)
    save(out / "nextn")
    train_s = time.monotonic() - began
    # The folder as it is loaded anywhere, without training's faster layers.
    answerer = evaluate_nextn.NextnAnswerer(*nextn.load_checkpoint(out / "nextn"))
    return report(plan, answerer, tokenizer, train_s)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the demo models.")
    parser.add_argument("--models", choices=("pair", "nextn", "all"), default="all")
    parser.add_argument("--out", type=Path, default=demo.MODELS_DIR, help="folder to write")
    parser.add_argument("--seed", type=int, default=FULL.seed)
    parser.add_argument("--steps", type=int, default=None, help="training steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a few steps of tiny models")
    parser.add_argument("--snapshots", type=Path, default=None, help="folder for unfinished nextn")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    sections = {}
    if args.models in ("pair", "all"):
        plan = SMOKE if args.smoke else FULL
        sizes = {"target": models.TARGET, "draft": models.DRAFT}
        if args.smoke:
            sizes = {"target": models.SMOKE, "draft": models.SMOKE}
        sections["pair"] = run_pair(_adjusted(plan, args), args.out, sizes)
    if args.models in ("nextn", "all"):
        plan, size = (SMOKE, nextn.SMOKE) if args.smoke else (FULL_NEXTN, nextn.NEXTN)
        sections["nextn"] = run_nextn(_adjusted(plan, args), args.out, size, args.snapshots)
    write_report(args.out / "report.json", sections)
    for name, section in sections.items():
        figures = {key: section[key] for key in ("captions", "all", "kinds")}
        print(name, json.dumps(figures, indent=2))


def _adjusted(plan: Plan, args: argparse.Namespace) -> Plan:
    return replace(plan, seed=args.seed, steps=args.steps or plan.steps)


if __name__ == "__main__":
    main()

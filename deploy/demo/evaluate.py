"""Measurement: answers and acceptance on held-out prompts, with plain transformers.

Owns draft-then-verify decoding, the pair's decoder over the library's own cache, and the counts
made from both. Knows nothing of the serving engine, which it must not share code with: its numbers
are an independent reference. Invariant: the tokens that `run_rounds` returns are the verifier's
greedy continuation, whatever is proposed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
)

from deploy.demo import tasks
from deploy.demo.batches import Batch, Encoder, collate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

NUM_DRAFT_TOKENS: Final = 4
MAX_NEW_TOKENS: Final = 128


@dataclass(frozen=True, slots=True)
class Measurement:
    """The size of a measurement."""

    seed: int
    prompts_per_kind: int
    max_new_tokens: int = MAX_NEW_TOKENS


@dataclass(frozen=True, slots=True)
class Speculation:
    """The outcome for one prompt."""

    token_ids: tuple[int, ...]  # the target's greedy tokens, the end token included
    proposed: int
    accepted: int


@dataclass(slots=True)
class KindScore:
    """Counts over the prompts of one kind."""

    prompts: int = 0
    exact: int = 0
    draft_exact: int | None = None  # prompts that the draft alone answers rightly, if it can
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, other: KindScore) -> None:
        """Add another score's counts."""
        self.prompts += other.prompts
        self.exact += other.exact
        if other.draft_exact is not None:
            self.draft_exact = (self.draft_exact or 0) + other.draft_exact
        self.tokens += other.tokens
        self.proposed += other.proposed
        self.accepted += other.accepted

    def summary(self) -> dict[str, float]:
        """Give the ratios for a report."""
        alone = {}
        if self.draft_exact is not None:
            alone["draft_exact"] = round(self.draft_exact / self.prompts, 4)
        return {
            "prompts": self.prompts,
            "exact": round(self.exact / self.prompts, 4),
            **alone,
            "tokens_per_answer": round(self.tokens / self.prompts, 1),
            "acceptance_rate": round(self.accepted / max(self.proposed, 1), 4),
        }


class Verifier(Protocol):
    """One sequence of the model whose tokens count."""

    @property
    def length(self) -> int:
        """Count the tokens read."""

    def prefill(self, batch: Batch) -> int:
        """Read a prompt, pictures included, and return the token that follows."""

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """Read tokens and return what follows each of them."""

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""


class Proposer(Protocol):
    """Drafts for one sequence."""

    def propose(self, output: Sequence[int]) -> list[int]:
        """Guess what follows an output, of which the verifier has read all but the last token.

        There is no guess behind an end token, as in an engine.
        """


class Answerer(Protocol):
    """A way to answer prompts by speculation."""

    num_draft_tokens: int

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Give what was trained, by its name in the report."""

    def answer(self, prompt: Batch, max_new_tokens: int) -> tuple[Speculation, Speculation | None]:
        """Answer a prompt by speculation and, where the draft is a whole model, by it alone."""


class GreedyDecoder:
    """One sequence of one model, over a cache that can be cut back."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config.text_config)
        self._delta = 0  # mrope position minus index, for every token after the prompt

    @property
    def length(self) -> int:
        """Count the tokens in the cache."""
        return int(self._cache.get_seq_length())

    def prefill(self, batch: Batch) -> int:
        """Read a prompt, pictures included, and return the token that follows."""
        positions, delta = self._model.model.get_rope_index(
            batch.input_ids, batch.mm_token_type_ids, image_grid_thw=batch.image_grid_thw
        )
        self._delta = int(delta)
        logits = self._model(
            input_ids=batch.input_ids,
            position_ids=positions,
            pixel_values=batch.pixel_values,
            image_grid_thw=batch.image_grid_thw,
            cache=self._cache,
            logits_to_keep=1,
        ).logits
        return int(logits[0, -1].argmax())

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """Read tokens and return what follows each of them."""
        start = self.length + self._delta
        positions = torch.arange(start, start + len(token_ids)).expand(3, 1, -1)
        logits = self._model(
            input_ids=torch.tensor([token_ids]), position_ids=positions, cache=self._cache
        ).logits
        return logits[0].argmax(-1).tolist()

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if length < self.length:
            self._cache.crop(length - self.length)  # negative: so many tokens to drop


@torch.inference_mode()
def run_rounds(
    verifier: Verifier, proposer: Proposer, output: list[int], end: int, max_new_tokens: int
) -> Speculation:
    """Decode greedily by rounds of drafting and verifying (arXiv 2211.17192).

    Args:
        verifier: Has read the prompt and no more.
        proposer: Of the same sequence.
        output: The first token, which follows the prompt; extended.
        end: The token behind which an answer stops.
        max_new_tokens: Where it stops at the latest.
    """
    start = verifier.length
    proposed = accepted = 0
    while output[-1] != end and len(output) < max_new_tokens:
        drafts = proposer.propose(output)
        following = verifier.extend([output[-1], *drafts])
        run = 0
        while run < len(drafts) and drafts[run] == following[run]:
            run += 1
        proposed += len(drafts)
        accepted += run
        output += following[: run + 1]
        if end in output:
            del output[output.index(end) + 1 :]
        verifier.crop(start + len(output) - 1)
    return Speculation(tuple(output[:max_new_tokens]), proposed, accepted)


class DraftProposer:
    """Drafts of a smaller model."""

    def __init__(self, draft: Qwen2_5_VLForConditionalGeneration, prompt: Batch, end: int) -> None:
        self._decoder = GreedyDecoder(draft)
        self._decoder.prefill(prompt)
        self._start = self._decoder.length
        self._end = end

    def propose(self, output: Sequence[int]) -> list[int]:
        """Read what the draft has not seen, then go on alone."""
        decoder = self._decoder
        decoder.crop(self._start + len(output) - 1)
        drafts = [decoder.extend(output[decoder.length - self._start :])[-1]]
        while len(drafts) < NUM_DRAFT_TOKENS and drafts[-1] != self._end:
            drafts.append(decoder.extend(drafts[-1:])[-1])
        return drafts


@torch.inference_mode()
def speculate(
    target: Qwen2_5_VLForConditionalGeneration,
    draft: Qwen2_5_VLForConditionalGeneration,
    prompt: Batch,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Speculation:
    """Decode one prompt greedily with the drafts of a smaller model."""
    end = int(target.config.text_config.eos_token_id)
    verifier = GreedyDecoder(target)
    output = [verifier.prefill(prompt)]
    return run_rounds(verifier, DraftProposer(draft, prompt, end), output, end, max_new_tokens)


class PairAnswerer:
    """Answers of a target with the drafts of a smaller model."""

    num_draft_tokens = NUM_DRAFT_TOKENS

    def __init__(self, target: Any, draft: Any) -> None:
        self.modules = {"target": target, "draft": draft}

    def answer(self, prompt: Batch, max_new_tokens: int) -> tuple[Speculation, Speculation]:
        """Answer with both models, and with the draft alone."""
        target, draft = self.modules["target"], self.modules["draft"]
        result = speculate(target, draft, prompt, max_new_tokens)
        # A draft that verifies itself decodes greedily, at a round per five tokens.
        return result, speculate(draft, draft, prompt, max_new_tokens)


def measure(
    answerer: Answerer, tokenizer: PreTrainedTokenizerFast, plan: Measurement
) -> dict[str, KindScore]:
    """Score answers to held-out prompts of every kind."""
    encoder = Encoder(tokenizer)
    scores = {}
    for kind in tasks.KINDS:
        rng = random.Random(f"held out {plan.seed} {kind}")
        score = scores[kind] = KindScore()
        for _ in range(plan.prompts_per_kind):
            conversation = tasks.held_out_conversation(rng, kind)
            prompt = collate([encoder.encode_prompt(conversation)], encoder.pad)
            result, alone = answerer.answer(prompt, plan.max_new_tokens)
            expected = conversation.turns[0].answer
            one = KindScore(
                prompts=1,
                exact=int(_text(tokenizer, result) == expected),
                tokens=len(result.token_ids),
                proposed=result.proposed,
                accepted=result.accepted,
            )
            if alone is not None:
                one.draft_exact = int(_text(tokenizer, alone) == expected)
            score.add(one)
    return scores


def _text(tokenizer: PreTrainedTokenizerFast, result: Speculation) -> str:
    return str(tokenizer.decode(list(result.token_ids), skip_special_tokens=True))


def total(scores: Iterable[KindScore]) -> KindScore:
    """Pool scores: every draft counts once, whatever its kind."""
    pooled = KindScore()
    for score in scores:
        pooled.add(score)
    return pooled

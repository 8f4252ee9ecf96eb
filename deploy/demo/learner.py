"""Learning: one model with its optimiser, and one step of the pair on a shared batch.

Owns the losses, the schedule and the training-only head. Knows nothing of where batches come from
or of checkpoints. Both models learn from each batch: the target from the answers, the draft from
the answers and from the target's distribution, which is computed anyway. Invariant: the head
leaves no trace in the model, whose parameters and forward are the library's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn import functional

from deploy.demo import scenes
from deploy.demo.batches import IGNORED, Batch
from deploy.demo.vision_attention import use_grouped_attention

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLForConditionalGeneration

HINT_SIZES: Final = (len(scenes.COLOURS) + 1, len(scenes.SHAPES) + 1, len(scenes.PLACES))
HINT_WEIGHT: Final = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run."""

    seed: int
    steps: int
    batch: int  # conversations per step
    matrix_rate: float  # of Muon, at its peak
    other_rate: float  # of AdamW, at its peak
    warmup: int  # steps
    tokenizer_conversations: int
    prompts_per_kind: int  # held-out prompts measured at the end
    max_new_tokens: int  # of each of their answers


class Learner:
    """A model with its optimisers, their schedule and a head that exists in training alone.

    The head names colour, shape and place under each image token, from the picture's embedding.
    Without this hint the vision tower learns from a few words per picture, and the models go on
    guessing colours for most of a run. Muon for the matrices learns the text tasks in about half of
    AdamW's steps.
    """

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, plan: Plan) -> None:
        self.model = model
        use_grouped_attention(model)
        self._hints = nn.Linear(model.config.text_config.hidden_size, sum(HINT_SIZES))
        self._parameters = [*model.parameters(), *self._hints.parameters()]
        # Muon is for the matrices between hidden states: not for embeddings, biases and norms.
        layers = (model.model.visual, model.model.language_model.layers)
        matrices = [p for layer in layers for p in layer.parameters() if p.ndim == 2]
        taken = {id(parameter) for parameter in matrices}
        others = [p for p in self._parameters if id(p) not in taken]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=plan.matrix_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                others, lr=plan.other_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
            ),
        ]

        def rate(step: int) -> float:
            if step < plan.warmup:
                return (step + 1) / plan.warmup
            done = (step - plan.warmup) / max(plan.steps - plan.warmup, 1)
            return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))

        self._schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in self._optimizers
        ]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the logits that predict the answers' tokens, and the loss of the hints.

        Returns:
            [labelled tokens, vocabulary] float32 in row-major order of the labels, and a scalar.
        """
        inner = self.model.model
        positions, _ = inner.get_rope_index(
            batch.input_ids, batch.mm_token_type_ids, image_grid_thw=batch.image_grid_thw
        )
        embedded = inner.language_model.embed_tokens(batch.input_ids)  # [B, T, hidden]
        hint_loss = torch.zeros(())
        if batch.pixel_values is not None and batch.token_facts is not None:
            pictures = inner.visual(batch.pixel_values, batch.image_grid_thw).pooler_output
            is_image = batch.mm_token_type_ids.bool()[..., None]
            embedded = embedded.masked_scatter(is_image, pictures)
            guesses = self._hints(pictures).split(HINT_SIZES, dim=-1)
            for guess, fact in zip(guesses, batch.token_facts.unbind(-1), strict=True):
                hint_loss = hint_loss + functional.cross_entropy(guess, fact)
        # No attention mask: padding is on the right, where causal attention never looks.
        hidden = inner.language_model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False
        ).last_hidden_state
        logits = self.model.lm_head(hidden[:, :-1][batch.labels[:, 1:] != IGNORED])
        return logits, hint_loss

    def step(self, loss: torch.Tensor) -> None:
        """Follow a loss's gradient."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()


def train_step(target: Learner, draft: Learner, batch: Batch) -> torch.Tensor:
    """Train both models on one batch.

    Returns:
        [4] float32: answer and hint loss of the target, then of the draft.
    """
    wanted = batch.labels[:, 1:][batch.labels[:, 1:] != IGNORED]  # [labelled tokens]
    logits, hint_loss = target.forward(batch)
    loss = functional.cross_entropy(logits, wanted)
    target.step(loss + HINT_WEIGHT * hint_loss)
    draft_logits, draft_hint_loss = draft.forward(batch)
    draft_loss = functional.cross_entropy(draft_logits, wanted)
    taught = functional.kl_div(
        draft_logits.log_softmax(-1),
        logits.detach().log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )
    draft.step(0.5 * (draft_loss + taught) + HINT_WEIGHT * draft_hint_loss)
    return torch.stack([loss, hint_loss, draft_loss, draft_hint_loss]).detach()

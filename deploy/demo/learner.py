"""Learning: one model with its optimisers, and one step of the pair on a shared batch.

Owns the losses, the schedule and the training-only hint head. Knows nothing of where batches come
from, of checkpoints or of the models' generation. Both models of the pair learn from each batch:
the target from the answers, the draft from the answers and from the target's distribution, which is
computed anyway. Invariant: the hint head leaves no trace in the model, whose parameters and forward
are the library's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn import functional

from deploy.demo import scenes
from deploy.demo.batches import IGNORED, Batch
from deploy.demo.vision_attention import use_grouped_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

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

    def shortened(self, steps: int) -> Plan:
        """Give the plan of what begins so many steps later and ends with the run."""
        return replace(self, steps=self.steps - steps)


class Follower:
    """The optimisers of some modules, with their schedule.

    Muon for the matrices learns the text tasks in about half of AdamW's steps.
    """

    def __init__(self, layers: Sequence[nn.Module], all_of: nn.Module, plan: Plan) -> None:
        """Prepare to train `all_of`, with Muon for the matrices inside `layers`.

        Muon is for matrices between hidden states: not for embeddings, biases and norms.
        """
        self._parameters = list(all_of.parameters())
        matrices = [
            module.weight
            for layer in layers
            for module in layer.modules()
            if isinstance(module, nn.Linear)
        ]
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

    def step(self, loss: torch.Tensor) -> None:
        """Follow a loss's gradient."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model made of a batch."""

    # [labelled tokens, vocabulary] float32: predict the answers' tokens in the labels' order
    logits: torch.Tensor
    # scalar
    hint_loss: torch.Tensor
    # [B, T, hidden] float32: after the final norm
    hidden: torch.Tensor
    # [B, T, hidden] float32: the tokens' embeddings with the pictures in their places
    embedded: torch.Tensor
    # [3, B, T] int64
    positions: torch.Tensor


class Learner:
    """A model with its optimisers and a hint head that exists in training alone.

    The hint head names colour, shape and place under each image token, from the picture's
    embedding. Without it the vision tower learns from a few words per picture, and the models go on
    guessing colours for most of a run. Any vision-language model of Qwen's line fits: they name
    tower, text model and position index alike.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        self.model = model
        use_grouped_attention(model)
        self._hints = nn.Linear(model.config.text_config.hidden_size, sum(HINT_SIZES))
        layers = (model.model.visual, model.model.language_model.layers)
        self._follower = Follower(layers, nn.ModuleList([model, self._hints]), plan)

    def read(self, batch: Batch) -> Reading:
        """Run the model over a batch, and the hint head over its pictures."""
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
        # No attention mask: padding is on the right, where causal layers never look.
        hidden = inner.language_model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False
        ).last_hidden_state
        logits = self.model.lm_head(hidden[:, :-1][batch.labels[:, 1:] != IGNORED])
        return Reading(logits, hint_loss, hidden, embedded, positions)

    def step(self, answer_loss: torch.Tensor, hint_loss: torch.Tensor) -> None:
        """Follow the gradient of both losses."""
        self._follower.step(answer_loss + HINT_WEIGHT * hint_loss)


def wanted_tokens(batch: Batch) -> torch.Tensor:
    """Give the answers' tokens in the labels' order: [labelled tokens] int64."""
    wanted = batch.labels[:, 1:]
    return wanted[wanted != IGNORED]


def taught_loss(
    logits: torch.Tensor, wanted: torch.Tensor, teacher: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare a draft's logits with the answers and with its teacher's distribution.

    Args:
        logits: [tokens, vocabulary] float32.
        wanted: [tokens] int64.
        teacher: [tokens, vocabulary] float32, without gradient.

    Returns:
        Two scalars: the loss to follow, and the part of it that the answers make.
    """
    answer = functional.cross_entropy(logits, wanted)
    taught = functional.kl_div(
        logits.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True
    )
    return 0.5 * (answer + taught), answer.detach()


def train_pair_step(target: Learner, draft: Learner, batch: Batch) -> dict[str, torch.Tensor]:
    """Train both models on one batch, and give their losses (scalars)."""
    wanted = wanted_tokens(batch)
    reading = target.read(batch)
    loss = functional.cross_entropy(reading.logits, wanted)
    target.step(loss, reading.hint_loss)
    drafted = draft.read(batch)
    draft_loss, draft_answer = taught_loss(drafted.logits, wanted, reading.logits.detach())
    draft.step(draft_loss, drafted.hint_loss)
    return {
        "target": loss.detach(),
        "hints": reading.hint_loss.detach(),
        "draft": draft_answer,
        "draft hints": drafted.hint_loss.detach(),
    }

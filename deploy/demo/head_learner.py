"""Learning of the next-token head, beside the model that it belongs to.

Owns the head's rows, what each of them sees, and its losses. Knows nothing of where batches come
from, of checkpoints or of how drafts are verified. Invariants: the head's losses leave the model
alone (hidden states, embeddings and output matrix are read without gradient), and a row sees what
it sees in decoding: rows of true hidden states for tokens that are settled, rows of the head's own
output for drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional
from transformers import DynamicCache

from deploy.demo.batches import IGNORED, Batch
from deploy.demo.delta_net import use_short_chunks
from deploy.demo.learner import Follower, Learner, Plan, Reading, taught_loss, wanted_tokens

if TYPE_CHECKING:
    from transformers import Qwen3_5ForConditionalGeneration

    from deploy.demo.nextn import MtpHead

DEPTHS: Final = 3  # drafts in a row that the head learns to make
IDLE_SHARE: Final = 0.3  # of the run: before that the model has little to teach


def visible_rows(rows: int, depth: int) -> torch.Tensor:
    """Say what the rows of one depth see of their own and of all earlier depths.

    Row r of depth d comes after drafts at rows r - d + 2 to r, whose depths go up to d; before
    them all rows are settled, so they are rows of depth 1.

    Returns:
        [1, 1, rows, depth * rows] bool.
    """
    row = torch.arange(rows)[:, None]
    other = torch.arange(rows)[None, :]
    parts = [other <= row - depth + 1]
    parts += [other == row - depth + d for d in range(2, depth + 1)]
    return torch.cat(parts, dim=1)[None, None]


class HeadLearner:
    """A next-token head with its optimisers."""

    def __init__(self, head: MtpHead, model: Qwen3_5ForConditionalGeneration, plan: Plan) -> None:
        self.head = head
        self._model = model
        self._follower = Follower([head], head, plan)

    def learn(self, batch: Batch, reading: Reading) -> list[torch.Tensor]:
        """Train on what the model made of a batch.

        Returns:
            The answers' losses, one scalar for each depth.
        """
        wanted, teacher = wanted_tokens(batch), reading.logits.detach()
        # Row p predicts token p + 2: all labels, as no answer begins at the second token.
        labelled = batch.labels[:, 2:] != IGNORED
        matrix = self._model.lm_head.weight.detach()  # [vocabulary, hidden]
        losses, answers = [], []
        for output in self.outputs(reading):
            logits = functional.linear(output[:, :-2][labelled], matrix)
            loss, answer = taught_loss(logits, wanted, teacher)
            losses.append(loss)
            answers.append(answer)
        self._follower.step(torch.stack(losses).mean())
        return answers

    def outputs(self, reading: Reading) -> list[torch.Tensor]:
        """Run every depth over all rows, each on what the one before put out.

        Returns:
            [B, T, hidden] float32 for each depth: row p predicts token p + 2.
        """
        hidden = reading.hidden.detach()
        # The last row has no next token: it gets the first, and is labelled by nothing.
        embedded = reading.embedded.detach().roll(-1, dims=1)
        rotary = self._model.model.language_model.rotary_emb(hidden, reading.positions)
        cache = DynamicCache()
        outputs: list[torch.Tensor] = []
        for depth in range(1, DEPTHS + 1):
            if depth > 1:
                # A draft's hidden state is what the row before it has put out.
                hidden = functional.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
            mask = visible_rows(hidden.shape[1], depth)
            outputs.append(self.head(embedded, hidden, rotary, mask, cache))
        return outputs


class NextnLearner:
    """A model and its head, which learn from the same batches."""

    def __init__(self, model: Qwen3_5ForConditionalGeneration, head: MtpHead, plan: Plan) -> None:
        use_short_chunks(model)
        self._learner = Learner(model, plan)
        self._idle = int(plan.steps * IDLE_SHARE)
        self._head_learner = HeadLearner(head, model, plan.shortened(self._idle))
        self._steps = 0

    def step(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Train on one batch, and give the losses (scalars)."""
        reading = self._learner.read(batch)
        loss = functional.cross_entropy(reading.logits, wanted_tokens(batch))
        self._learner.step(loss, reading.hint_loss)
        losses = {"model": loss.detach(), "hints": reading.hint_loss.detach()}
        self._steps += 1
        if self._steps > self._idle:
            answers = self._head_learner.learn(batch, reading)
            losses |= {f"draft {i}": answer for i, answer in enumerate(answers, 1)}
        return losses

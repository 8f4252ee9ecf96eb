"""Measurement of the model with a next-token head: its decoder and its drafts.

Owns how the head's rows follow the model's, without a cache of the model and with one of the head.
Knows nothing of training, of counts or of the serving engine, with which it shares no code.
Invariants: the verifier's tokens come from one forward pass of the library over the whole sequence
(states of linear layers cannot be cut back, and these models are small), and before every draft the
head's cache holds rows of true hidden states alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from transformers import DynamicCache, Qwen3_5ForConditionalGeneration

from deploy.demo.evaluate import MAX_NEW_TOKENS, Speculation, run_rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.demo.batches import Batch
    from deploy.demo.nextn import MtpHead

NUM_DRAFT_TOKENS: Final = 3


class RerunDecoder:
    """One sequence of the model, read again from its start for every token."""

    def __init__(self, model: Qwen3_5ForConditionalGeneration) -> None:
        self.model = model
        text = model.config.text_config
        # [1, tokens, hidden]: what goes into the first layer, and what comes out of the last norm
        self.embedded = torch.empty(1, 0, text.hidden_size)
        self.hidden = torch.empty(1, 0, text.hidden_size)
        # [3, 1, tokens] int64
        self.positions = torch.empty(3, 1, 0, dtype=torch.long)

    @property
    def length(self) -> int:
        """Count the tokens read."""
        return self.embedded.shape[1]

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Look up tokens of text: [1, tokens, hidden]."""
        found: torch.Tensor = self.model.get_input_embeddings()(torch.tensor([token_ids]))
        return found

    def positions_from_end(self, count: int) -> torch.Tensor:
        """Give the positions of the next tokens of text: [3, 1, count] int64."""
        # A picture's last token has not always its largest position.
        start = int(self.positions.max()) + 1
        return torch.arange(start, start + count).expand(3, 1, -1)

    def prefill(self, batch: Batch) -> int:
        """Read a prompt, pictures included, and return the token that follows."""
        inner = self.model.model
        self.positions, _ = inner.get_rope_index(
            batch.input_ids, batch.mm_token_type_ids, image_grid_thw=batch.image_grid_thw
        )
        self.embedded = self.model.get_input_embeddings()(batch.input_ids)
        if batch.pixel_values is not None:
            pictures = inner.get_image_features(
                batch.pixel_values, batch.image_grid_thw
            ).pooler_output
            is_image = batch.mm_token_type_ids.bool()[..., None]
            self.embedded = self.embedded.masked_scatter(is_image, torch.cat(pictures))
        return self._read()[-1]

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """Read tokens and return what follows each of them."""
        self.positions = torch.cat([self.positions, self.positions_from_end(len(token_ids))], -1)
        self.embedded = torch.cat([self.embedded, self.embed(token_ids)], 1)
        return self._read()[-len(token_ids) :]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.embedded = self.embedded[:, :length]
        self.hidden = self.hidden[:, :length]
        self.positions = self.positions[..., :length]

    def _read(self) -> list[int]:
        self.hidden = self.model.model.language_model(
            inputs_embeds=self.embedded, position_ids=self.positions, use_cache=False
        ).last_hidden_state
        following: list[int] = self.model.lm_head(self.hidden)[0].argmax(-1).tolist()
        return following


class HeadProposer:
    """Drafts of the head, chained: each takes the output that made the one before."""

    def __init__(self, head: MtpHead, verifier: RerunDecoder, end: int) -> None:
        self._head = head
        self._verifier = verifier
        self._end = end
        self._cache = DynamicCache()
        self._rows = 0  # in the cache

    def propose(self, output: Sequence[int]) -> list[int]:
        """Add the rows of tokens settled since the last time, then draft behind them."""
        verifier, settled = self._verifier, self._verifier.length
        if self._rows:
            self._crop(self._rows)
        new = slice(self._rows, settled)
        # Row p holds the embedding of token p + 1; the last token is not read yet.
        embedded = torch.cat([verifier.embedded[:, 1:], verifier.embed(output[-1:])], 1)
        rows = self._run(embedded[:, new], verifier.hidden[:, new], verifier.positions[..., new])
        self._rows = settled
        drafts = [self._token(rows)]
        coming = verifier.positions_from_end(NUM_DRAFT_TOKENS)
        while len(drafts) < NUM_DRAFT_TOKENS and drafts[-1] != self._end:
            position = coming[..., len(drafts) - 1 : len(drafts)]
            rows = self._run(verifier.embed(drafts[-1:]), rows[:, -1:], position)
            drafts.append(self._token(rows))
        return drafts

    def _run(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        rotary = self._verifier.model.model.language_model.rotary_emb(hidden, positions)
        count = hidden.shape[1]
        cached = int(self._cache.get_seq_length())
        mask = torch.ones(count, cached + count, dtype=torch.bool).tril(cached)
        rows: torch.Tensor = self._head(embedded, hidden, rotary, mask[None, None], self._cache)
        return rows

    def _token(self, rows: torch.Tensor) -> int:
        return int(self._verifier.model.lm_head(rows[0, -1]).argmax())

    def _crop(self, length: int) -> None:
        surplus = int(self._cache.get_seq_length()) - length
        if surplus:
            self._cache.crop(-surplus)


@torch.inference_mode()
def speculate(
    model: Qwen3_5ForConditionalGeneration,
    head: MtpHead,
    prompt: Batch,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Speculation:
    """Decode one prompt greedily with the drafts of the head."""
    end = int(model.config.text_config.eos_token_id)
    verifier = RerunDecoder(model)
    output = [verifier.prefill(prompt)]
    return run_rounds(verifier, HeadProposer(head, verifier, end), output, end, max_new_tokens)


class NextnAnswerer:
    """Answers of a model with the drafts of its head."""

    num_draft_tokens = NUM_DRAFT_TOKENS

    def __init__(self, model: Qwen3_5ForConditionalGeneration, head: MtpHead) -> None:
        self._model, self._head = model, head
        self.modules = {"model": model, "head": head}

    def answer(self, prompt: Batch, max_new_tokens: int) -> tuple[Speculation, None]:
        """Answer with both; the head is no model of its own."""
        return speculate(self._model, self._head, prompt, max_new_tokens), None

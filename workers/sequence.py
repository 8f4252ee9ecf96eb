"""The engine's state for one request.

Owns the token list, how far K/V is valid, the drafts waiting for verification and the rule that
ends a request, token by token. Knows no blocks beyond holding its table, no tensors (the rope
table is carried, never read) and no other sequence. Mutated by the scheduler, the block manager
and the drafter, all on the engine's thread.

Invariant: K/V of the target is valid on `[0, num_computed_tokens)` and
`num_computed_tokens < num_tokens` while the sequence is alive; drafts are not part of
`token_ids`, so dropping them is always safe.

    0                prompt_len            num_computed      num_tokens
    |-- prompt ------|-- emitted ----------|-- to compute ---|~~ drafts ~~>
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from workers.contracts import FinishReason, GenerationRequest, TokenLogprob

if TYPE_CHECKING:
    from workers.batch_info import RopeTable
    from workers.sampling.grammar import GrammarState


class SequenceStatus(Enum):
    """Where a sequence is: in the queue, holding blocks, or over."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Times:
    """When a sequence got on, on the clock of `time.perf_counter`."""

    added_s: float
    # None = not yet.
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One request while the engine works on it."""

    request: GenerationRequest
    # Ids that end the request: its own and the model's end-of-sequence ids.
    stop_ids: frozenset[int]
    # Prompt plus emitted tokens at most.
    max_len: int
    rope: RopeTable | None = None
    # Where the output stands in the request's grammar; moves with every appended token.
    grammar: GrammarState | None = None
    # Whether it may carry drafts at all.
    may_draft: bool = False
    # Whether a drafter keeps K/V for this sequence, so that cached blocks must hold it too.
    needs_draft_kv: bool = False

    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    # The drafter's K/V is valid on [0, num_draft_computed_tokens).
    num_draft_computed_tokens: int = 0
    # Ids the drafter also wrote K/V for, from there on: its own drafts, valid where accepted.
    draft_kv_ids: list[int] = field(default_factory=list)
    # Waiting for verification.
    draft_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    # Models with linear attention: its own slot, and the slot that holds the state after
    # `num_computed_tokens` tokens; -1 = it begins at its first token.
    state_slot: int = -1
    state_source: int = -1
    # Chain hash of each full block so far; grows with the tokens, survives preemption.
    block_hashes: list[bytes] = field(default_factory=list)
    # Leading blocks already offered to the prefix cache.
    num_published_blocks: int = 0
    # Prompt tokens found in the prefix cache when first admitted; None before that.
    num_cached_tokens: int | None = None
    # Totals over the sequence's life on this worker.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # Steps that gave it tokens, and steps before which drafting failed.
    num_steps: int = 0
    num_fallbacks: int = 0
    # Of the prompt's tokens so far, while they are wanted and not delivered.
    prompt_logprobs: list[TokenLogprob | None] | None = None
    # Times that drafting failed because of this sequence alone.
    num_draft_failures: int = 0
    times: Times = field(default_factory=lambda: Times(time.perf_counter()))

    def __post_init__(self) -> None:
        """Start from the prompt and what an earlier worker already emitted."""
        self.token_ids = [*self.request.prompt_ids, *self.request.emitted_ids]
        # A client that has tokens has the prompt's log-probabilities too.
        if self.request.sampling.num_prompt_logprobs is not None and not self.num_emitted:
            self.prompt_logprobs = [None]
        if self.grammar is not None:
            for token_id in self.request.emitted_ids:
                self.grammar.accept(token_id)

    @property
    def request_id(self) -> str:
        """The client's handle for abort and delivery."""
        return self.request.request_id

    @property
    def modality(self) -> str:
        """What its prompt holds."""
        return self.request.modality

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt; never grows, also after a replay."""
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt plus emitted tokens."""
        return len(self.token_ids)

    @property
    def num_emitted(self) -> int:
        """Tokens emitted for the request, by all workers together."""
        return self.num_tokens - self.prompt_len

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - self.num_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose K/V the target still has to compute; 1 = a decode row."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the request is over: finished, aborted or failed."""
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> FinishReason | None:
        """Append one sampled token and say whether the request ends with it.

        The stop is tested before the length, per token, so that of a block of accepted tokens
        the first stop inside the budget wins.
        """
        self.token_ids.append(token_id)
        if token_id in self.stop_ids and self.num_emitted > self.request.sampling.min_tokens:
            return FinishReason.STOP
        if self.grammar is not None and self.grammar.accept(token_id):
            return FinishReason.STOP
        if self.num_tokens >= self.max_len:
            return FinishReason.LENGTH
        return None

    def take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Return what is wanted of the prompt's log-probabilities, once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return None if taken is None else tuple(taken)

    def reset(self) -> None:
        """Forget all K/V (preemption): the tokens stay, everything else is computed again."""
        self.num_computed_tokens = 0
        self.num_draft_computed_tokens = 0
        self.num_published_blocks = 0
        self.drop_drafts()
        self.status = SequenceStatus.WAITING

    def drop_drafts(self) -> None:
        """Forget the drafts and that K/V was written for them; always safe."""
        self.draft_ids = []
        self.draft_kv_ids = []

"""What a request's grammar allows next, token by token.

Owns the compiled grammars of one tokenizer and the state of each request in its grammar; the
parser is llguidance's. Knows no logits and no HTTP: grammars come as llguidance's text, masks go
out as bits. Invariant: asking for masks or for the legal drafts leaves a state as it was; only
`accept` moves it, by tokens that are the sequence's own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer

from workers.errors import InvalidRequest, SpecserveError

# Compiled grammars kept for the next request that brings the same.
_MAX_COMPILED = 64
_BITS = 32
# One mask must not hold a step up: a fraction of the library's own bounds, milliseconds in all.
_LIMITS = LLParserLimits(
    step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False
)


class GrammarError(SpecserveError):
    """The parser gave up on a grammar in the middle of an output."""


class GrammarState:
    """Where one output stands in its grammar."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, num_ids: int, eos_ids: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._width = -(-num_ids // _BITS)
        self._eos_ids = eos_ids
        # Drafts that were asked about last, and the masks before each and after the last: the
        # check of a draft and its verification ask the same.
        self._path: list[int] = []
        self._path_masks: list[np.ndarray] = []

    def accept(self, token_id: int) -> bool:
        """Move on by a token of the output; return whether the output ends with it."""
        if token_id in self._eos_ids:
            return True
        # An illegal token leaves the parser in an error that the next mask reports.
        self._matcher.consume_token(token_id)
        is_on_path = self._path[:1] == [token_id]
        self._path = self._path[1:] if is_on_path else []
        self._path_masks = self._path_masks[1:] if is_on_path else []
        return False

    def num_legal(self, draft_ids: Sequence[int]) -> int:
        """Return how many of the drafts may follow, up to and with one that ends the output.

        Raises:
            GrammarError: See `masks`.
        """
        self._walk(draft_ids)
        count = len(self._path)
        is_end = count < len(draft_ids) and draft_ids[count] in self._eos_ids
        return count + (is_end and _allows(self._path_masks[count], draft_ids[count]))

    def masks(self, draft_ids: Sequence[int]) -> np.ndarray:
        """Return the ids allowed before each draft and after the last, as bits.

        Args:
            draft_ids: Legal in this order. After one that ends the output, anything is allowed:
                whatever is sampled there is thrown away.

        Returns:
            Bit `i % 32` of word `i // 32` stands for id `i`.  # [k + 1, ids/32] int32

        Raises:
            GrammarError: The grammar is too expensive here, or an illegal token was accepted.
        """
        self._walk(draft_ids)
        masks = np.full((len(draft_ids) + 1, self._width), -1, dtype=np.int32)
        for place, mask in enumerate(self._path_masks[: len(masks)]):
            masks[place] = mask
        return masks

    def _walk(self, draft_ids: Sequence[int]) -> None:
        """Make the drafts the known path, up to the first that ends the output or is illegal."""
        known = 0
        while known < min(len(self._path), len(draft_ids)) and (
            self._path[known] == draft_ids[known]
        ):
            known += 1
        del self._path[known:], self._path_masks[known + 1 :]
        self._matcher.consume_tokens(self._path)
        if not self._path_masks:
            self._path_masks.append(self._mask())
        for token_id in draft_ids[known:]:
            if token_id in self._eos_ids or not _allows(self._path_masks[-1], token_id):
                break
            self._matcher.consume_token(token_id)
            self._path.append(token_id)
            self._path_masks.append(self._mask())
        # Never over an end: the parser does not count one among its tokens.
        if self._path:
            self._matcher.rollback(len(self._path))

    def _mask(self) -> np.ndarray:
        mask = np.empty((1, self._width), dtype=np.int32)
        fill_next_token_bitmask(self._matcher, mask, 0)
        if self._matcher.is_error():  # which it stays
            self._path, self._path_masks = [], []
            raise GrammarError(_first_line(self._matcher.get_error()))
        self._spell_out(mask[0])
        return mask[0]

    def _spell_out(self, mask: np.ndarray) -> None:
        """Replace an only choice that the parser itself does not take, in place.

        For text that must come, it offers the tokens that the tokenizer makes of it; where the
        text looks like an added token, that one token, which it then refuses as no text. What it
        takes are the tokens of the characters.
        """
        (words,) = np.nonzero(mask)
        if len(words) != 1 or int(mask[words[0]]).bit_count() != 1:
            return
        only = int(words[0]) * _BITS + (int(mask[words[0]]) & 0xFFFFFFFF).bit_length() - 1
        if only in self._eos_ids or self._matcher.validate_tokens([only]):
            return
        spelled = self._tokenizer.greedy_tokenize(self._matcher.compute_ff_bytes().decode())
        mask[words[0]] = 0
        mask.view(np.uint32)[spelled[0] // _BITS] |= np.uint32(1 << spelled[0] % _BITS)

    def keep_going(self, masks: np.ndarray, stop_ids: frozenset[int]) -> None:
        """Rule out stop ids, in place, in each mask that leaves something else.

        Where the grammar ends, `min_tokens` cannot be had.
        """
        longer = masks.copy()
        for stop_id in stop_ids:
            longer.view(np.uint32)[:, stop_id // _BITS] &= ~np.uint32(1 << stop_id % _BITS)
        has_more = longer.any(axis=1)
        masks[has_more] = longer[has_more]


class GrammarCompiler:
    """Compiles grammars for one tokenizer; may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """Prepare the tokenizer's tokens: about a second for large vocabularies.

        Args:
            tokenizer: The target's.
            vocab_size: Width of its logits.
            eos_ids: Ids that end an output; at least one.
        """
        self._num_ids = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        self._eos_ids = eos_ids
        self._tokenizer = LLTokenizer(
            tokenizer.to_str(), n_vocab=self._num_ids, eos_token=sorted(eos_ids)
        )
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def state(self, grammar: str) -> GrammarState:
        """Return the state of an empty output.

        Raises:
            InvalidRequest: It is no grammar, or too complex.
        """
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
            if matcher.is_error():
                reason = _first_line(matcher.get_error())
                raise InvalidRequest(f"the grammar cannot be compiled: {reason}", "grammar")
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy(), self._tokenizer, self._num_ids, self._eos_ids)


def _allows(mask: np.ndarray, token_id: int) -> bool:
    return bool(mask[token_id // _BITS] >> token_id % _BITS & 1)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]

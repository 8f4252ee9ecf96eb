"""Text pieces joined equal the decoding of all ids, however they are cut (C7, B31)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from serving.detokenizer import MAX_PENDING, MAX_UNFINISHED, REPLACEMENT, Decoder, Detokenizer
from tests.serving.doubles import make_hf_tokenizer, make_tokenizer

VOCAB = make_tokenizer().vocab_size
TEXTS = (
    "héllo wörld",
    "中文字符 你好。世界",
    "한국어 텍스트",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 done",
    "e\u0301 combining",
    "tabs\t\n ",
)


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def pieces_of(chunks: list[list[int]], decoder: Decoder | None = None) -> list[str]:
    detokenizer = Detokenizer(decoder or make_tokenizer())
    return [detokenizer.push(chunk) for chunk in chunks]


def is_finished(joined: str, full: str) -> bool:
    """Whether nothing is missing but what may be a character without its last bytes."""
    return full.startswith(joined) and not full[len(joined) :].strip(REPLACEMENT)


def byte_id(byte: int) -> int:
    """Return the token of one byte, in the notation of byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    name = chr(byte) if byte in printable else chr(256 + others.index(byte))
    token_id: int = make_hf_tokenizer().convert_tokens_to_ids(name)
    return token_id


# Bytes that are never text, lead bytes, the bytes after them, and text.
ROUGH = [byte_id(b) for b in (0xFF, 0xC3, 0xA9, 0xE4, 0xB8, 0xF0, 0x9F, 0x98, 0x80, 0x61)]


@given(
    ids=st.lists(st.integers(0, VOCAB - 1), max_size=40)
    | st.lists(st.sampled_from(ROUGH), max_size=80),
    cuts=st.lists(st.integers(0, 80)),
)
@settings(deadline=None)
def test_any_ids_in_any_chunks_give_the_full_decoding(ids: list[int], cuts: list[int]) -> None:
    """Also where no border is clean for longer than the window: no byte is lost or doubled."""
    joined = "".join(pieces_of(chunked(ids, cuts)))
    assert is_finished(joined, make_tokenizer().decode(ids))
    assert joined == "".join(pieces_of([[i] for i in ids]))


@given(text=st.text(max_size=30) | st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 99)))
@settings(deadline=None)
def test_c7_text_comes_back_whole_and_without_replacement(text: str, cuts: list[int]) -> None:
    ids = make_tokenizer().encode_prompt(text.replace("\ufffd", ""))
    pieces = pieces_of(chunked(ids, cuts))
    assert "".join(pieces) == make_tokenizer().decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte() -> None:
    ids = make_tokenizer().encode_prompt("a") + make_tokenizer().encode_prompt("é")
    detokenizer = Detokenizer(make_tokenizer())
    assert [detokenizer.push([i]) for i in ids] == ["a", *[""] * (len(ids) - 2), "é"]


def test_c7_a_character_cut_by_max_tokens_is_dropped() -> None:
    """C7: the last token may end inside a character; no U+FFFD reaches the client."""
    ids = make_tokenizer().encode_prompt("ok é")
    assert len(make_tokenizer().encode_prompt("é")) == 2
    assert "".join(pieces_of([ids[:-1]])) == "ok "


class PlainDecoder:
    """A tokenizer without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids))
        return text

    def has_text(self, token_id: int) -> bool:
        return True


def sentencepiece_like() -> Tokenizer:
    words = ["▁a", "▁b", "c", "▁", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return tokenizer


@given(data=st.data())
@settings(deadline=None)
def test_decoders_that_strip_the_first_blank_keep_the_later_ones(data: st.DataObject) -> None:
    words = st.lists(st.sampled_from(["▁a", "▁b", "c", "▁", "é", "中", "😀"]), max_size=20)
    tokenizer = sentencepiece_like()
    ids: list[int] = []
    for word in data.draw(words):
        token = tokenizer.token_to_id(word)
        names = [f"<0x{b:02X}>" for b in word.encode()]
        ids += [token] if token is not None else [tokenizer.token_to_id(n) for n in names]
    cuts = data.draw(st.lists(st.integers(0, 60)))
    pieces = pieces_of(chunked(ids, cuts), PlainDecoder(tokenizer))
    assert "".join(pieces) == tokenizer.decode(ids)


def test_skipped_tokens_in_the_middle_cost_no_text() -> None:
    tokenizer = make_tokenizer()
    special = tokenizer.image_token_id
    assert special is not None
    ids = [*tokenizer.encode_prompt("hello"), special, special, *tokenizer.encode_prompt(" world")]
    assert "".join(pieces_of([[i] for i in ids])) == "hello world"


class CountingDecoder:
    """Notes how many ids each call decodes."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.counts: list[int] = [0]

    def decode(self, ids: Sequence[int]) -> str:
        self.counts.append(len(ids))
        return self._decoder.decode(ids)

    def has_text(self, token_id: int) -> bool:
        return self._decoder.has_text(token_id)


def special_id() -> int:
    special = make_tokenizer().image_token_id
    assert special is not None
    return special


SPLIT = [byte_id(b) for b in (0xF0, 0x9F, 0x98)]
REPEATED: dict[str, list[int]] = {
    "special": [special_id()],
    "beyond the vocabulary": [VOCAB + 7],
    "no byte of text": [byte_id(0xFF)],
    "a tail without its character": [byte_id(0xA9)],
    "characters never finished": SPLIT,
    "text": make_tokenizer().encode_prompt("hello 中"),
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("begin", [[], [byte_id(0x61)], SPLIT[:1]], ids=["", "text", "cut"])
def test_the_window_is_bounded(name: str, begin: list[int]) -> None:
    """A model that repeats a token without text must not make each step decode all steps."""
    ids = [*begin, *REPEATED[name] * 100]
    decoder = CountingDecoder(make_tokenizer())
    joined = "".join(pieces_of([[i] for i in ids], decoder))
    full = make_tokenizer().decode(ids)
    assert is_finished(joined, full)
    assert len(full) - len(joined) <= MAX_UNFINISHED
    assert max(decoder.counts) <= 2 * MAX_PENDING + 1


@pytest.mark.parametrize("token", ["▁", "<0xFF>", "<0xC3>", "▁a"])
def test_the_window_is_bounded_with_byte_tokens(token: str) -> None:
    """Such decoders strip a first blank, and show one U+FFFD per byte of a run that is no text."""
    tokenizer = sentencepiece_like()
    ids = [tokenizer.token_to_id(token)] * 100
    decoder = CountingDecoder(PlainDecoder(tokenizer))
    joined, full = "".join(pieces_of([[i] for i in ids], decoder)), tokenizer.decode(ids)
    assert is_finished(joined, full)
    assert len(full) - len(joined) <= MAX_UNFINISHED
    assert max(decoder.counts) <= 2 * MAX_PENDING + 1


def test_a_token_has_text_exactly_when_decoding_looks_at_it() -> None:
    """Leaving out any other would lose text; keeping a skipped one lets the window grow."""
    tokenizer, hf = make_tokenizer(), make_hf_tokenizer()
    for token_id in range(VOCAB + 3):
        assert tokenizer.has_text(token_id) == bool(hf.decode([token_id], skip_special_tokens=True))

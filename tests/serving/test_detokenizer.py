"""Text pieces joined equal the decoding of all ids, however they are cut (C7, B31)."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from serving.detokenizer import Detokenizer
from tests.serving.doubles import make_tokenizer

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


def pieces_of(chunks: list[list[int]], decoder: object = None) -> list[str]:
    detokenizer = Detokenizer(decoder or make_tokenizer())  # type: ignore[arg-type]
    return [detokenizer.push(chunk) for chunk in chunks]


@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=40), cuts=st.lists(st.integers(0, 40)))
@settings(deadline=None)
def test_any_ids_in_any_chunks_give_the_full_decoding(ids: list[int], cuts: list[int]) -> None:
    full = make_tokenizer().decode(ids)
    assert "".join(pieces_of(chunked(ids, cuts))) == full.rstrip("\ufffd")


@given(text=st.text(max_size=30) | st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 99)))
@settings(deadline=None)
def test_text_comes_back_whole_and_without_replacement(text: str, cuts: list[int]) -> None:
    ids = make_tokenizer().encode_prompt(text.replace("\ufffd", ""))
    pieces = pieces_of(chunked(ids, cuts))
    assert "".join(pieces) == make_tokenizer().decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte() -> None:
    ids = make_tokenizer().encode_prompt("a") + make_tokenizer().encode_prompt("é")
    detokenizer = Detokenizer(make_tokenizer())
    assert [detokenizer.push([i]) for i in ids] == ["a", *[""] * (len(ids) - 2), "é"]


def test_a_character_cut_by_max_tokens_is_dropped() -> None:
    """C7: the last token may end inside a character; no U+FFFD reaches the client."""
    ids = make_tokenizer().encode_prompt("ok é")
    assert len(make_tokenizer().encode_prompt("é")) == 2
    assert "".join(pieces_of([ids[:-1]])) == "ok "


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
    pieces = pieces_of(chunked(ids, data.draw(st.lists(st.integers(0, 60)))), tokenizer)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_skipped_tokens_in_the_middle_cost_no_text() -> None:
    tokenizer = make_tokenizer()
    special = tokenizer.image_token_id
    assert special is not None
    ids = [*tokenizer.encode_prompt("hello"), special, special, *tokenizer.encode_prompt(" world")]
    assert "".join(pieces_of([[i] for i in ids])) == "hello world"

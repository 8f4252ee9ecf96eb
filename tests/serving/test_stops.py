"""Stop strings: nothing of them is sent, nothing else is lost, whatever the chunks (C8, B31)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.stops import StopScanner


def scan(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    sent = ""
    for piece in pieces:
        sent += scanner.push(piece)
        if scanner.is_hit:
            return sent, True
    return sent + scanner.flush(), False


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the stop that is complete first wins, then the longest."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@pytest.mark.parametrize(
    ("pieces", "stops", "sent", "hit"),
    [
        (["hello"], [], "hello", False),
        (["one STOP two"], ["STOP"], "one ", True),
        (["one S", "TO", "P two"], ["STOP"], "one ", True),
        (["one S", "TO", "X two"], ["STOP"], "one STOX two", False),
        (["in", "side"], ["sid"], "in", True),
        (["abab", "abc"], ["ababc"], "ab", True),
        (["a\n", "\nb"], ["\n\n", "\n\nb"], "a", True),
        (["xEND"], ["ENDING", "END"], "x", True),
        (["xEN"], ["END"], "xEN", False),
        (["STOP"], ["STOP"], "", True),
    ],
)
def test_c8_cases(pieces: list[str], stops: list[str], sent: str, hit: bool) -> None:
    assert scan(pieces, stops) == (sent, hit)


SHORT = st.text("abc", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=5), max_size=8), st.lists(SHORT, min_size=1, max_size=4))
def test_equals_scanning_by_character(pieces: list[str], stops: list[str]) -> None:
    assert scan(pieces, stops) == reference("".join(pieces), stops)


@given(st.lists(st.text("abc", max_size=5), max_size=8), st.lists(SHORT, min_size=1, max_size=4))
def test_holds_back_no_more_than_a_stop_can_need(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += scanner.push(piece)
        if scanner.is_hit:
            return
        held = seen[len(sent) :]
        assert not held or any(s.startswith(held) for s in stops)
        assert seen.startswith(sent)

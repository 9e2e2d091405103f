"""Which compiled grammars are kept: the ones used last, bounded in number and by the length of their texts."""

from __future__ import annotations

import pytest

from runtime import grammar
from runtime.grammar import Grammars
from runtime.tokenizer import ByteTokenizer


def compilations(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> list[str]:
    """Those of `texts` that were compiled when each was asked for in turn."""
    tokenizer = ByteTokenizer()
    grammars, made = Grammars(tokenizer, tokenizer.vocab_size), []
    source = grammar.source
    monkeypatch.setattr(grammar, "source", lambda kind, text: made.append(text) or source(kind, text))
    for text in texts:
        grammars.compile("regex", text)
    return made


def test_the_ones_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "CACHED", 2)
    assert compilations(monkeypatch, ["a", "b", "a", "c", "a", "b"]) == ["a", "b", "c", "b"]


def test_long_texts_leave_room_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "CACHED_CHARACTERS", 10)
    long, short = "abcdefgh", ["x", "y"]
    assert compilations(monkeypatch, [long, *short, long]) == [long, *short]
    assert compilations(monkeypatch, [long, "xyz", "xyz", long]) == [long, "xyz", long]

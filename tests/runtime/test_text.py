"""Stop strings: the same cut however the text is split, and never a part of one shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.text import StopStrings

TEXT = st.text("ab€", max_size=30)


@given(TEXT, st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5)), st.booleans())
def test_any_split_shows_the_same(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    whole, split = StopStrings(stops, include), StopStrings(stops, include)
    shown, rest = "", text
    for cut in [*cuts, len(text)]:
        shown += split.feed(rest[:cut])
        rest = rest[cut:]
        if split.hit is None:  # what is shown never has to be taken back
            assert not any(stop in shown for stop in stops)
    assert shown + split.finish() == whole.feed(text) + whole.finish()
    assert split.hit == whole.hit
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    assert (whole.hit is None) == (not ends)
    if not ends:
        assert shown == text or text.startswith(shown)


def test_a_stop_string_across_pieces_is_never_partly_shown() -> None:
    stops = StopStrings(["</end>"])
    assert [stops.feed(piece) for piece in ("one </", "e", "nd", "> two")] == ["one ", "", "", ""]
    assert stops.hit == "</end>" and stops.finish() == ""


def test_what_was_held_back_comes_out_at_the_end() -> None:
    stops = StopStrings(["\n\n"])
    assert stops.feed("line\n") + stops.finish() == "line\n"


def test_the_stop_string_is_kept_when_asked_for() -> None:
    assert StopStrings(["."], include=True).feed("one. two") == "one."


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])

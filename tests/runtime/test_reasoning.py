"""Reasoning told apart from the answer, however the text is cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.reasoning import ReasoningSplit


def split(pieces: list[str], opened: bool = False, final: bool = True) -> tuple[str, str]:
    one = ReasoningSplit(opened)
    parts = [*map(one.feed, pieces), *([one.finish()] if final else [])]
    return "".join(thought for thought, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nso it is\n</think>\n\nYes.", False, ("so it is", "Yes.")),
        ("\n<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("so\n\nit is</think>Yes.", True, ("so\n\nit is", "Yes.")),
        ("\nso</think>", True, ("so", "")),
        ("<think></think> Yes ", False, ("", "Yes ")),
        ("<think>\n\n</think>\n\nYes", False, ("", "Yes")),
        ("<think>\n  - a \r\n</think>", False, ("  - a ", "")),
        ("<think>cut", False, ("cut", "")),
        ("<think>cut\n", False, ("cut\n", "")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("<think>a</</think>b", False, ("a</", "b")),
        ("<think>a\n</\n</think>b", False, ("a\n</", "b")),
        (" Yes <think>no</think>", False, ("", " Yes <think>no</think>")),
        ("<<think>no", False, ("", "<<think>no")),
        (" <thin", False, ("", " <thin")),
        ("<thin <think>no", False, ("", "<thin <think>no")),
        (" \n", False, ("", " \n")),
        ("", False, ("", "")),
    ],
)
def test_blocks(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split([text], opened) == split(list(text), opened) == expected


def test_half_a_tag_is_held_back() -> None:
    one = ReasoningSplit()
    assert [one.feed(piece) for piece in ("<thi", "nk>a", "</", "b\n", "</think", ">", "\n", "c <")] == [
        *[("", ""), ("a", ""), ("", ""), ("</b", ""), ("", ""), ("", ""), ("", ""), ("", "c <")]
    ]


TEXT = st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", " ", "\n", "\r", "a", "b>"]), max_size=12).map(
    "".join
) | st.text(max_size=20)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXT, st.booleans(), st.lists(st.integers(0, 60), max_size=3))
def test_the_pieces_do_not_matter(text: str, opened: bool, at: list[int]) -> None:
    cuts = sorted(min(cut, len(text)) for cut in at)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, opened) == split([text], opened) == split(list(text), opened)
    one, thought, content = ReasoningSplit(opened), "", ""
    for k, char in enumerate(text, 1):
        more, rest = one.feed(char)
        thought, content = thought + more, content + rest
        assert (thought, content) == split([text[:k]], opened, final=False)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXT, st.booleans())
def test_only_the_tags_and_the_white_space_beside_them_are_lost(text: str, opened: bool) -> None:
    """Against the rules written down for a text that is whole."""
    block = text if opened else text.lstrip().removeprefix("<think>")
    if not opened and not text.lstrip().startswith("<think>"):
        assert split([text]) == ("", text)
        return
    thought, closed, content = block.partition("</think>")
    thought = thought.lstrip("\r\n")
    assert split([text], opened) == (thought.rstrip("\r\n") if closed else thought, content.lstrip())


@pytest.mark.parametrize("before", ["", "<think>", "<think>a"])
def test_endless_white_space_is_not_read_again_and_again(before: str) -> None:
    """A bound far above what linear code takes (a tenth of a second), below what a copy at each piece takes."""
    began = time.process_time()
    split([before, *"\n" * 160_000])
    assert time.process_time() - began < 2

"""Reasoning told apart from the answer, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.reasoning import ReasoningSplit


def split(pieces: list[str], opened: bool = False) -> tuple[str, str]:
    one = ReasoningSplit(opened)
    parts = [*map(one.feed, pieces), one.finish()]
    return "".join(thought for thought, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nso it is\n</think>\n\nYes.", False, ("so it is", "Yes.")),
        ("\n<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("so\n\nit is</think>Yes.", True, ("so\n\nit is", "Yes.")),
        ("<think></think> Yes ", False, ("", "Yes ")),
        ("<think>cut", False, ("cut", "")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        (" Yes <think>no</think>", False, ("", " Yes <think>no</think>")),
        (" <thin", False, ("", " <thin")),
        ("", False, ("", "")),
    ],
)
def test_blocks(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split([text], opened) == split(list(text), opened) == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", " ", "\n", "a", "b>"]), max_size=12), st.booleans()
)
def test_the_pieces_do_not_matter(parts: list[str], opened: bool) -> None:
    assert split(parts, opened) == split(["".join(parts)], opened) == split(list("".join(parts)), opened)

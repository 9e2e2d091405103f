"""What a model thinks, apart from what it answers: `<think>…</think>` at the beginning of its output, as it comes.

The text is looked at character by character up to the answer, so how it was cut cannot matter, and what is undecided
(half a tag, white space beside one) is kept as a list, so that endless white space costs no more than other text.
Knows no token.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.text import begun

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplit:
    """Two texts out of one. New lines beside the tags are dropped, and all white space before the block and the answer.

    `opened`: the prompt ends inside the block. Both methods return (reasoning, content), and raise nothing.
    """

    def __init__(self, opened: bool = False) -> None:
        self._step: Callable[[str], None] = self._thought if opened else self._start
        self._blank: list[str] = []  # undecided: dropped beside a tag, otherwise text
        self._tag = ""  # as much of one as has come
        self._bare = True  # nothing has come of the reasoning
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def feed(self, text: str) -> tuple[str, str]:
        for at, char in enumerate(text):
            if self._step == self._answer:
                self._answer(text[at:])
                break
            self._step(char)
        return self._given()

    def finish(self) -> tuple[str, str]:
        """The end of the text: what was held back."""
        if self._step == self._start:
            self._content += [*self._blank, self._tag]
        elif self._step == self._thought:
            self._think(self._tag)
            self._reasoning += [] if self._bare else self._blank
        self._blank, self._tag = [], ""
        return self._given()

    def _given(self) -> tuple[str, str]:
        given = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return given

    def _start(self, char: str) -> None:
        tag = self._tag + char
        if tag == OPEN:
            self._step, self._blank, self._tag = self._thought, [], ""
        elif OPEN.startswith(tag):
            self._tag = tag
        elif tag.isspace():
            self._blank.append(char)
        else:
            self._content += [*self._blank, tag]
            self._step, self._blank, self._tag = self._answer, [], ""

    def _thought(self, char: str) -> None:
        tag = self._tag + char
        if tag == CLOSE:
            self._step, self._blank, self._tag = self._gap, [], ""
            return
        kept = begun(tag, CLOSE)
        self._tag = tag[len(tag) - kept :]
        self._think(tag[: len(tag) - kept])

    def _think(self, text: str) -> None:
        """Reasoning, whose new lines wait for what follows them."""
        for char in text:
            if char in "\r\n":
                self._blank.append(char)
            else:
                self._reasoning += [char] if self._bare else [*self._blank, char]
                self._blank, self._bare = [], False

    def _gap(self, char: str) -> None:
        if not char.isspace():
            self._step = self._answer
            self._answer(char)

    def _answer(self, text: str) -> None:
        self._content.append(text)

"""What a model thinks, apart from what it answers: `<think>…</think>` at the beginning of its output, as it comes.

What is given out after k characters is a function of those k characters, however they were cut. Knows no token.
"""

from __future__ import annotations

from runtime.text import begun

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplit:
    """`opened`: the prompt ends inside the block. White space around the marks is dropped."""

    def __init__(self, opened: bool = False) -> None:
        self._rest = ""
        self._where = "thought" if opened else "start"
        self._bare = True  # nothing but white space has come of this part

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content)."""
        self._rest += text
        thought = content = ""
        if self._where == "start":
            self._start()
        if self._where == "thought":
            thought = self._think()
        if self._where == "answer":
            content = self._answer()
        return thought, content

    def finish(self) -> tuple[str, str]:
        """The end of the text: what was held back."""
        rest, self._rest = self._rest, ""
        if self._where == "thought":
            return rest.rstrip(), ""
        return "", rest if self._where == "start" else ""

    def _start(self) -> None:
        text = self._rest.lstrip()
        if len(text) < len(OPEN) and OPEN.startswith(text):
            return
        if text.startswith(OPEN):
            self._where, self._rest = "thought", text.removeprefix(OPEN)
        else:
            self._where, self._bare = "answer", False

    def _think(self) -> str:
        """Up to the closing mark; white space is held back, since that before the mark is dropped."""
        if self._bare:
            self._rest = self._rest.lstrip()
        if CLOSE in self._rest:
            thought, _, self._rest = self._rest.partition(CLOSE)
            self._where, self._bare = "answer", True
            return thought.rstrip()
        shown = len(self._rest[: len(self._rest) - begun(self._rest, CLOSE)].rstrip())
        thought, self._rest = self._rest[:shown], self._rest[shown:]
        self._bare = self._bare and not thought
        return thought

    def _answer(self) -> str:
        text = self._rest.lstrip() if self._bare else self._rest
        self._rest, self._bare = "", self._bare and not text
        return text

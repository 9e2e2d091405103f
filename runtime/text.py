"""Text on its way out: bytes turned into characters as tokens come, and stop strings found across pieces.

Two small machines per request, each fed once per token. What they have let through after k tokens is a function of
those k tokens alone, however they were grouped, so a resumed stream goes on exactly where the first one stood. They
work on the bytes of each token (`runtime.tokenizer` knows them), hence the cost is linear even on endless invalid
bytes, and a broken character is never shown while it may still be completed.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Utf8Stream:
    """Bytes to text; invalid bytes become U+FFFD, one for each maximal ill-formed part (Unicode 16, chapter 3.9).

    `before` is what the output follows, the end of the prompt: where that ends in the middle of a character which the
    output completes, the character is shown; nothing else of it ever is.
    """

    def __init__(self, before: bytes = b"") -> None:
        self._rest = before[codecs.utf_8_decode(before, "replace", False)[1] :]  # a character's beginning
        self._primed = bool(self._rest)

    def feed(self, piece: bytes, final: bool = False) -> str:
        if self._rest or final:
            return self._in_parts(piece, final)
        try:
            return piece.decode()  # nearly always: whole characters
        except UnicodeDecodeError:
            return self._in_parts(piece, final)

    def _in_parts(self, piece: bytes, final: bool) -> str:
        data = self._rest + piece
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        if text and self._primed:
            self._primed = False
            return text.removeprefix("\ufffd")  # the prompt's broken character, not the output's
        return text


def begun(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` without completing it."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


class StopStrings:
    """Watches one request's text for `stops`. The match that is complete first counts; of those, the longest.

    Raises `ValueError` for an empty stop string.
    """

    def __init__(self, stops: list[str], include: bool = False) -> None:
        if "" in stops:
            raise ValueError("stop: a stop string must not be empty")
        self.stops, self.include = stops, include
        self.hit: str | None = None  # the stop string that ended the text
        self._held = ""  # might be the beginning of a stop string

    def feed(self, piece: str) -> str:
        """The text that may now be shown. After a hit, nothing more comes."""
        if self.hit is not None:
            return ""
        text = self._held + piece
        matches = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:
            end, start, self.hit = min(matches)
            return text[: end if self.include else start]
        shown = len(text) - max((begun(text, stop) for stop in self.stops), default=0)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The end of the text without a hit: what was held back."""
        held, self._held = self._held, ""
        return held if self.hit is None else ""


class TextStream:
    """One request's output: tokens in, text out, ended by a stop string or by `finish`.

    `bytes_of(id)` gives a token's bytes, b"" for one that is not shown. `min_tokens`: stop strings that end among the
    first so many tokens are not looked for.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        stops: list[str],
        include_stop: bool = False,
        before: bytes = b"",
        min_tokens: int = 0,
    ) -> None:
        self._bytes_of = bytes_of
        self._utf8 = Utf8Stream(before)
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._unwatched = min_tokens - 1 if stops else 0  # tokens yet to come whose text is not searched

    @property
    def stop(self) -> str | None:
        """The stop string that was hit; nothing comes after it."""
        return self._stops.hit if self._stops else None

    def push(self, token: int) -> str:
        """What the token adds to the text. Raises nothing for any id that `bytes_of` knows."""
        text = self._utf8.feed(self._bytes_of(token))
        if self._stops is None:
            return text
        self._unwatched -= 1
        return self._show(self._stops, text)

    def finish(self) -> str:
        """The rest: a character that was never completed, text that might have begun a stop string."""
        text = self._utf8.feed(b"", final=True)
        if self._stops is None:
            return text
        return self._show(self._stops, text) + self._stops.finish()

    def _show(self, stops: StopStrings, text: str) -> str:
        return text if self._unwatched >= 0 else stops.feed(text)

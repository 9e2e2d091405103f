"""Text on its way out: stop strings found across pieces, with no part of one ever let through.

What is let through after some text is a function of that text alone, however it was cut into pieces, so a resumed
stream goes on exactly where the first one stood. Knows no tokens.
"""

from __future__ import annotations


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
        shown = len(text) - max((self._overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The end of the text without a hit: what was held back."""
        held, self._held = self._held, ""
        return held if self.hit is None else ""

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
